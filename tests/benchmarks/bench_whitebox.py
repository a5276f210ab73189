"""The white-box family: hooked over plain forwards, and a sweep of ToST over forwards.

The word `small`: fewer layers and tokens, and no time limits.
"""

import functools
import sys

import torch
import torch.nn.functional as F
from timing import least, settle, verdict

import crate_interp as ci

MEMBERS = ("crate", "tost-ista", "cbt", "tost", "aot")


def member(family, side, layers=4, d_model=192, batch=2):
    """Returns a random member for images of side x side patches of 4, and the images."""
    torch.manual_seed(0)
    size = dict(d_model=d_model, n_layers=layers, n_heads=4, image_size=4 * side, patch_size=4)
    cfg = ci.CrateConfig(family=family, stem="linear", n_classes=10, **size)
    return ci.HookedCrate(cfg).eval(), torch.randn(batch, 3, 4 * side, 4 * side)


def plain(model, images):
    """The same forward by functions of torch, without modules for hooks."""
    patches, cfg = model.embed(images), model.cfg
    if cfg.class_layers:
        z = patches + model.pos_embed(cfg.grid)
    else:
        z = torch.cat([model.cls_token.expand(len(patches), -1, -1), patches], 1) + model.pos_embed
    for block in model.blocks:
        z = z + _attention(block.attn, _norm(block.ln1, z))
        if cfg.attn_only:
            continue
        y = _norm(block.ln2, z)
        z = z + _mlp(block.mlp, y) if cfg.has_mlp else _ista(block.mlp, y)
    if not cfg.class_layers:
        return model.unembed(_norm(model.ln_final, z)[:, 0])
    z = torch.cat([model.cls_token.expand(len(z), -1, -1), z], 1)
    for block in model.cls_blocks:
        y, attn = _norm(block.ln1, z), block.attn
        q, k, v = attn.qkv_proj(y).unflatten(-1, (3, cfg.n_heads, cfg.d_head)).unbind(2)
        shares = q[:, :1].transpose(1, 2) @ k.permute(0, 2, 3, 1) * cfg.d_head**-0.5
        cls = (shares.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)
        cls = attn.gamma * attn.out_proj(cls)
        y = _norm(block.ln2, z + torch.cat([cls, attn.gamma * y[:, 1:]], 1))
        z = y + torch.cat([_mlp(block.mlp, y[:, :1]), y[:, 1:]], 1)
    return model.unembed(_norm(model.ln_final, z)[:, 0])


def _norm(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _mlp(mlp, y):
    return mlp.gamma * mlp.fc_out(F.gelu(mlp.fc_in(y)))


def _ista(mlp, y):
    gram, corr = F.linear(F.linear(y, mlp.D), mlp.D.T), F.linear(y, mlp.D.T)
    return F.relu(y - mlp.eta * (gram - corr) - mlp.eta * mlp.lambd)


def _attention(attn, x):
    cfg = attn.cfg
    u = attn.u_proj(x).unflatten(-1, (cfg.n_heads, cfg.d_head)).transpose(1, 2)
    kind = cfg.facts["attention"]
    if kind == "mssa":
        heads = (u @ u.mT * cfg.d_head**-0.5).softmax(-1) @ u
    elif kind == "tssa":
        pi = (F.normalize(u, dim=-2).square().sum(-1) * attn.temp).softmax(1)
        moment = (pi / (pi.sum(-1, keepdim=True) + 1e-8))[:, :, None] @ u.square()
        heads = -(u * pi[..., None]) / (1 + moment)
    else:
        side = int(u.shape[2] ** 0.5)
        square = u.transpose(1, 2)[:, :-1].flatten(2).mT.unflatten(-1, (side, side))
        rep = F.adaptive_avg_pool2d(square, 8).flatten(2).mT
        rep = rep.unflatten(-1, (cfg.n_heads, cfg.d_head)).transpose(1, 2)
        contract = (rep @ u.mT * cfg.d_head**-0.5).softmax(-1)
        rep = rep + attn.step_rep * (contract @ u)
        among = (rep @ rep.mT * cfg.d_head**-0.5).softmax(-1)
        heads = attn.step_x * (contract.mT @ (among @ rep))
    flat = heads.transpose(1, 2).flatten(2)
    if attn.out_proj is None:
        return F.linear(flat, attn.u_proj.weight.T)
    out = attn.out_proj(flat)
    return out if attn.gamma is None else attn.gamma * out


def hooked_over_plain(small):
    good = True
    for family in MEMBERS:
        size = (8, 2) if small else (16, 6, 384, 4)
        model, images = member(family, *size)
        by_functions = functools.partial(plain, model, images)
        with torch.no_grad():
            torch.testing.assert_close(by_functions(), model(images), atol=1e-4, rtol=1e-4)
            if small:
                continue
            jobs = {"plain": by_functions, "hooked": lambda m=model, x=images: m(x)}
            times = least(jobs | {"again": by_functions}, seconds=20)
        noise, ratio = times["again"] / times["plain"], times["hooked"] / times["plain"]
        milliseconds = f"plain {times['plain'] * 1e3:.1f} ms, noise {noise:.3f}"
        print(f"{family}, width 384, 6 layers, 256 patches, batch 4: {milliseconds}")
        good &= verdict("  hooked over plain", ratio, 1.05)
    return good


def sweeps(small):
    """A sweep of ToST at 1,024 tokens over as many forwards."""
    side = 8 if small else 32
    model, images = member("tost", side)

    def forwards():
        with torch.no_grad():
            model(images)

    jobs = {
        "forward": forwards,
        "sweep": lambda: ci.sweep(model, images, controls=0, batch_size=2, progress=False),
    }
    times = least(jobs, seconds=1 if small else 40)
    ratio = times["sweep"] / times["forward"]
    if small:
        print(f"sweep of tost over forwards: {ratio:.2f}")
        return True
    return verdict(f"sweep of tost at {side**2} tokens over forwards", ratio, 2.5)


def main(small=False):
    settle()
    return hooked_over_plain(small) & sweeps(small)


if __name__ == "__main__":
    sys.exit(0 if main("small" in sys.argv[1:]) else 1)
