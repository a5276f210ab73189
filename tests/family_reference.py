"""Slow forwards of ToST, CBT and CRATE-BERT on state dicts in their published layouts, by token.

Written from the papers and the notes on the code, in loops where the library has sums. Imports
torch only.
"""

import math

import torch
import torch.nn.functional as F


def norm(w, key, x, eps):
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * w[key + ".weight"] + w[key + ".bias"]


def linear(w, key, x):
    bias = w.get(key + ".bias")
    return x @ w[key + ".weight"].T + (0 if bias is None else bias)


def stem(w, prefix, x):
    place = 0
    while f"{prefix}{place}.0.weight" in w:
        if place:
            x = F.gelu(x)
        x = F.conv2d(x, w[f"{prefix}{place}.0.weight"], stride=2, padding=1)
        mean, variance, scale, shift = (
            w[f"{prefix}{place}.1.{name}"][:, None, None]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        x = (x - mean) / (variance + 1e-5).sqrt() * scale + shift
        place += 2
    return x.flatten(2).transpose(1, 2)


def tssa(codes, temp):
    """codes [batch, head, pos, p], temp [head]; returns what the heads write."""
    batch, heads, pos, width = codes.shape
    out = torch.zeros_like(codes)
    scores = torch.zeros(batch, heads, pos, dtype=codes.dtype)
    for k in range(heads):
        for j in range(width):
            column = codes[:, k, :, j]
            length = column.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
            scores[:, k] += (column / length) ** 2
        scores[:, k] *= temp[k]
    pi = torch.exp(scores) / torch.exp(scores).sum(dim=1, keepdim=True)
    for k in range(heads):
        mass = sum(pi[:, k, i] for i in range(pos)) + 1e-8
        moment = sum(pi[:, k, i, None] * codes[:, k, i] ** 2 for i in range(pos)) / mass[:, None]
        for i in range(pos):
            out[:, k, i] = -codes[:, k, i] * pi[:, k, i, None] / (1 + moment)
    return out


def causal_tssa(codes, temp, bias):
    """As tssa, each token from itself and those before it; bias [head, pos]."""
    batch, heads, pos, width = codes.shape
    out = torch.zeros_like(codes)
    pi = torch.zeros(batch, heads, pos, dtype=codes.dtype)
    for i in range(pos):
        score = torch.zeros(batch, heads, dtype=codes.dtype)
        for k in range(heads):
            before = codes[:, k, : i + 1].square().sum(dim=1).clamp_min(1e-12)
            score[:, k] = (codes[:, k, i] ** 2 / before + bias[k, i]).sum(dim=-1) * temp[k]
        pi[:, :, i] = score.softmax(dim=1)
        for k in range(heads):
            seen = pi[:, k, : i + 1, None]
            moment = (seen * codes[:, k, : i + 1] ** 2).sum(dim=1) / (seen.sum(dim=1) + 1e-8)
            out[:, k, i] = -codes[:, k, i] * pi[:, k, i, None] / (1 + moment)
    return out


def cbsa(codes, step_x, step_rep):
    """codes [batch, head, pos, p], steps [head]; returns what the heads write."""
    batch, heads, pos, width = codes.shape
    side = math.isqrt(pos)
    square = codes[:, :, :-1].reshape(batch, heads, side, side, width)
    reps = []
    for row in range(8):
        for column in range(8):
            low, high = row * side // 8, -(-(row + 1) * side // 8)
            left, right = column * side // 8, -(-(column + 1) * side // 8)
            reps.append(square[:, :, low:high, left:right].mean(dim=(2, 3)))
    rep = torch.stack(reps, dim=2)
    out = torch.zeros_like(codes)
    for k in range(heads):
        r, c = rep[:, k], codes[:, k]
        contract = torch.softmax(torch.einsum("brp,bnp->brn", r, c) / width**0.5, dim=-1)
        r = r + step_rep[k] * torch.einsum("brn,bnp->brp", contract, c)
        among = torch.softmax(torch.einsum("brp,bsp->brs", r, r) / width**0.5, dim=-1)
        out[:, k] = step_x[k] * torch.einsum("brn,brs,bsp->bnp", contract, among, r)
    return out


def _heads(x, n_heads):
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _flat(x):
    return x.transpose(1, 2).flatten(2)


def _mlp(w, prefix, x, names):
    return linear(w, prefix + names[1], F.gelu(linear(w, prefix + names[0], x)))


def _class_block(w, p, z, n_heads):
    y = norm(w, p + "norm1", z, 1e-6)
    q, k, v = (_heads(x, n_heads) for x in linear(w, p + "attn.qkv", y).chunk(3, dim=-1))
    scores = (q[:, :, :1] * k).sum(dim=-1) * q.shape[-1] ** -0.5
    cls = linear(w, p + "attn.proj", _flat(scores.softmax(dim=-1)[:, :, None] @ v))
    z = z + w[p + "gamma1"] * torch.cat([cls, y[:, 1:]], dim=1)
    y = norm(w, p + "norm2", z, 1e-6)
    cls = w[p + "gamma2"] * _mlp(w, p + "mlp.", y[:, :1], ("fc1", "fc2"))
    return torch.cat([y[:, :1] + cls, 2 * y[:, 1:]], dim=1)


def _waves(grid, dtype):
    rows, columns = grid
    table = torch.zeros(rows, columns, 64, dtype=dtype)
    for row in range(rows):
        for column in range(columns):
            for i in range(32):
                divisor = 10000 ** (2 * (i // 2) / 32)
                turn = math.sin if i % 2 == 0 else math.cos
                y, x = (row + 1) / (rows + 1e-6), (column + 1) / (columns + 1e-6)
                table[row, column, i] = turn(2 * math.pi * y / divisor)
                table[row, column, 32 + i] = turn(2 * math.pi * x / divisor)
    return table.flatten(0, 1)


def tost(w, images, n_heads):
    z = stem(w, "patch_embed.proj.", images)
    side = math.isqrt(z.shape[1])
    kernel = w["pos_embeder.token_projection.weight"][:, :, 0, 0]
    z = z + _waves((side, side), z.dtype) @ kernel.T + w["pos_embeder.token_projection.bias"]
    layer = 0
    while f"blocks.{layer}.gamma1" in w:
        p = f"blocks.{layer}."
        codes = _heads(linear(w, p + "attn.qkv", norm(w, p + "norm1", z, 1e-6)), n_heads)
        heads = tssa(codes, w[p + "attn.temp"][:, 0])
        z = z + w[p + "gamma1"] * linear(w, p + "attn.to_out.0", _flat(heads))
        y = norm(w, p + "norm2", z, 1e-6)
        z = z + w[p + "gamma2"] * _mlp(w, p + "mlp.", y, ("fc1", "fc2"))
        layer += 1
    z = torch.cat([w["cls_token"].expand(len(z), -1, -1), z], dim=1)
    layer = 0
    while f"cls_attn_blocks.{layer}.gamma1" in w:
        z = _class_block(w, f"cls_attn_blocks.{layer}.", z, n_heads)
        layer += 1
    return linear(w, "head", norm(w, "norm", z, 1e-6)[:, 0])


def tost_lm(w, tokens, n_heads):
    w = {key.removeprefix("_orig_mod.").removeprefix("transformer."): x for key, x in w.items()}
    z = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    layer = 0
    while f"h.{layer}.gamma1" in w:
        p = f"h.{layer}."
        codes = _heads(linear(w, p + "attn.c_attn", norm(w, p + "ln_1", z, 1e-5)), n_heads)
        bias = w[p + "attn.denom_bias"][:, : tokens.shape[1], 0]
        heads = causal_tssa(codes, w[p + "attn.temp"][:, 0], bias)
        z = z + w[p + "gamma1"] * linear(w, p + "attn.c_proj", _flat(heads))
        y = norm(w, p + "ln_2", z, 1e-5)
        z = z + w[p + "gamma2"] * _mlp(w, p + "mlp.", y, ("c_fc", "c_proj"))
        layer += 1
    return norm(w, "ln_f", z, 1e-5) @ w["wte.weight"].T


def cbsa_file(w, images, n_heads):
    """The three models of CBSA's models.py: CRATE, ToST-ISTA or CBT, as the keys say."""
    w = {key.removeprefix("module."): value for key, value in w.items()}
    z = stem(w, "to_patch_embedding.proj.", images)
    z = torch.cat([w["cls_token"].expand(len(z), -1, -1), z], dim=1) + w["pos_embedding"]
    z = _ista_layers(w, z, n_heads)
    return linear(w, "mlp_head.1", norm(w, "mlp_head.0", z[:, 0], 1e-5))


def _ista_layers(w, z, n_heads, cut=0):
    """cut: 1 at the keys that CRATE-BERT's published code cuts out after the softmax."""
    layer = 0
    while f"transformer.layers.{layer}.0.norm.weight" in w:
        p = f"transformer.layers.{layer}."
        x = norm(w, p + "0.norm", z, 1e-5)
        a = p + "0.fn."
        name = "proj" if a + "proj.weight" in w else "qkv"
        codes = _heads(linear(w, a + name, x), n_heads)
        if a + "step_x" in w:
            heads = cbsa(codes, w[a + "step_x"][:, 0, 0], w[a + "step_rep"][:, 0, 0])
        elif a + "temp" in w:
            heads = tssa(codes, w[a + "temp"][:, 0])
        else:
            shares = torch.softmax(codes @ codes.mT / codes.shape[-1] ** 0.5, dim=-1)
            heads = (shares * (1 - cut)) @ codes
        out = a + "to_out.0" if a + "to_out.0.weight" in w else a + "to_out"
        z = z + linear(w, out, _flat(heads))
        y, d = norm(w, p + "1.norm", z, 1e-5), w[p + "1.fn.weight"]
        z = F.relu(y + 0.1 * (y - y @ d.T) @ d - 0.1 * 0.1)
        layer += 1
    return z


def bert(w, tokens, segments, n_heads, cut):
    """Logits of every token, and of the next sentence."""
    table, e = w["transformer.embed.tok_embed.weight"], "transformer.embed."
    z = table[tokens] + w[e + "pos_embed.weight"][: tokens.shape[1]]
    z = norm(w, e + "norm", z + w[e + "seg_embed.weight"][segments], 1e-5)
    z = _ista_layers(w, z, n_heads, cut)
    y, named = linear(w, "linear", z), {"y.weight": w["norm.gamma"], "y.bias": w["norm.beta"]}
    y = norm(named, "y", y * (1 + torch.erf(y / math.sqrt(2))) / 2, 1e-12)
    follows = linear(w, "classifier", torch.tanh(linear(w, "fc", z[:, 0])))
    return y @ table.T + w["decoder_bias"], follows
