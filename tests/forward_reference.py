"""A second, slow forward on state dicts in their published layouts, written from the papers.

Imports torch only.
"""

import torch
import torch.nn.functional as F


def forward(
    weights: dict, images: torch.Tensor, family: str, n_heads: int, patch: tuple, **cfg
) -> torch.Tensor:
    """Returns the logits of a state dict in the layout of CRATE or CRATE-alpha.

    cfg: variant, pool, eta, lambd.
    """
    eta, lambd, pool = cfg.get("eta", 0.1), cfg.get("lambd", 0.1), cfg.get("pool", "cls")
    w, eps = weights, 1e-5 if family == "crate" else 1e-6
    d = w["cls_token"].shape[-1]
    tokens = _crate_tokens(w, images, patch) if family == "crate" else _alpha_tokens(w, images)
    z = torch.cat([w["cls_token"].expand(len(images), -1, -1), tokens], dim=1) + w["pos_embedding"]
    layer = 0
    while f"transformer.layers.{layer}.0.norm.weight" in w:
        p = f"transformer.layers.{layer}."
        x = F.layer_norm(z, (d,), w[p + "0.norm.weight"], w[p + "0.norm.bias"], eps)
        mid = z + _mssa(w, p + "0.fn.", x, n_heads, cfg.get("variant", "crate"))
        y = F.layer_norm(mid, (d,), w[p + "1.norm.weight"], w[p + "1.norm.bias"], eps)
        z = (
            _ista(w[p + "1.fn.weight"], y, eta, lambd)
            if family == "crate"
            else mid + _odl(w, p + "1.fn.", y, eta, lambd)
        )
        layer += 1
    pooled = z[:, 0] if pool == "cls" else z.mean(dim=1)
    pooled = F.layer_norm(pooled, (d,), w["mlp_head.0.weight"], w["mlp_head.0.bias"], 1e-5)
    return F.linear(pooled, w["mlp_head.1.weight"], w["mlp_head.1.bias"])


def _crate_tokens(w, images, patch):
    b, c, height, width = images.shape
    p1, p2 = patch
    x = images.reshape(b, c, height // p1, p1, width // p2, p2).permute(0, 2, 4, 3, 5, 1)
    x = x.reshape(b, (height // p1) * (width // p2), p1 * p2 * c)
    x = F.layer_norm(
        x, x.shape[-1:], w["to_patch_embedding.1.weight"], w["to_patch_embedding.1.bias"]
    )
    x = F.linear(x, w["to_patch_embedding.2.weight"], w["to_patch_embedding.2.bias"])
    return F.layer_norm(
        x, x.shape[-1:], w["to_patch_embedding.3.weight"], w["to_patch_embedding.3.bias"]
    )


def _alpha_tokens(w, images):
    kernel = w["conv1.weight"]
    return (
        F.conv2d(images, kernel, w["conv1.bias"], stride=kernel.shape[2:])
        .flatten(2)
        .transpose(1, 2)
    )


def _mssa(w, p, x, n_heads, variant):
    weight = w[p + "qkv.weight"]
    codes = F.linear(x, weight).unflatten(-1, (n_heads, -1)).transpose(1, 2)
    pattern = (codes @ codes.transpose(-1, -2) * codes.shape[-1] ** -0.5).softmax(dim=-1)
    heads = (pattern @ codes).transpose(1, 2).flatten(2)
    if variant == "c":
        return F.linear(heads, weight.T)
    if variant == "n":
        return F.linear(heads, -weight.T)
    if variant == "t":
        return F.linear(heads, weight)
    if p + "to_out.0.weight" not in w:
        return heads
    return F.linear(heads, w[p + "to_out.0.weight"], w.get(p + "to_out.0.bias"))


def _ista(dictionary, y, eta, lambd):
    recon = F.linear(y, dictionary)
    gram, corr = F.linear(recon, dictionary.T), F.linear(y, dictionary.T)
    return F.relu(y + (eta * (corr - gram) - eta * lambd))


def _odl(w, p, y, eta, lambd):
    dictionary, decoder = w[p + "D"], w[p + "D1"]
    code = F.relu(eta * (y @ dictionary) - eta * lambd)
    code = F.relu(code - eta * ((code @ dictionary.T - y) @ dictionary) - eta * lambd)
    return code @ decoder.T


def published_layout(model) -> dict:
    """Returns the state dict of a HookedCrate under its published names.

    The tables are written out, not imported.
    """
    renamed = {
        "embed.norm_patch": "to_patch_embedding.1",
        "embed.proj": "to_patch_embedding.2",
        "embed.norm_token": "to_patch_embedding.3",
        "embed.conv": "conv1",
        "ln_final": "mlp_head.0",
        "unembed": "mlp_head.1",
        "ln1": "0.norm",
        "attn.u_proj": "0.fn.qkv",
        "attn.out_proj": "0.fn.to_out.0",
        "ln2": "1.norm",
    }
    if model.cfg.d_features:  # the ImageNet-21k demo
        renamed |= {"features": "mlp_head.1", "unembed": "head"}
    out = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        prefix = ""
        if stem.startswith("blocks."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"transformer.layers.{layer}."
        if stem == "mlp":
            key = "1.fn." + ("weight" if model.cfg.family == "crate" else leaf)
        else:
            key = (
                f"{renamed.get(stem, stem)}.{leaf}"
                if stem
                else {"pos_embed": "pos_embedding"}.get(leaf, leaf)
            )
        out[prefix + key] = value
    return out
