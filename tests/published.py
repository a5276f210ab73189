"""Random weights in every published layout, in prime sizes.

The names are written out, not taken from the tables under test.
"""

import torch

GIVEN = {
    "crate-mae": dict(n_heads=5, decoder_n_heads=3, image_size=(6, 20), lambd=0.3, eta=0.2),
    "crate-lm": dict(n_heads=5, eta=0.3, lambd=0.05),
    "crate-lm-vanilla": dict(n_heads=7),
    "gpt-baseline": dict(n_heads=5),
    "nanochat-crate": dict(n_heads=5, n_ctx=13, d_vocab=47, window=True, window_pattern="SL"),
    "clipa": dict(n_heads=5, text_n_heads=11, image_size=(6, 20)),
}
SIZES = {"crate-mae": dict(d=30), "nanochat-crate": dict(p=6), "crate-lm-vanilla": dict(h=7, p=5)}


def _under(prefix, **shapes):
    return {f"{prefix}{name.replace('__', '.')}": shape for name, shape in shapes.items()}


def _mae(n_layers, d, h, p, m):
    values, count = 2 * 5 * 3, 12
    keys = _under(
        "", cls_token=(1, 1, d), pos_embed=(1, count + 1, d), mask_token=(1, 1, d),
        decoder_pos_embed=(1, count + 1, d), patch_embed__proj__weight=(d, 3, 2, 5),
        patch_embed__proj__bias=(d,), norm__weight=(d,), norm__bias=(d,),
        decoder_embed__weight=(d, d), decoder_embed__bias=(d,), decoder_norm__weight=(d,),
        decoder_norm__bias=(d,), decoder_pred__weight=(values, d), decoder_pred__bias=(values,),
    )  # fmt: skip
    norm = dict(norm__weight=(d,), norm__bias=(d,))
    attention = dict(fn__qkv__weight=(d, d), fn__to_out__0__weight=(d, d), fn__to_out__0__bias=(d,))
    for layer in range(n_layers):
        keys |= _under(f"blocks.{layer}.layers.0.0.", **norm, **attention)
        keys |= _under(f"blocks.{layer}.layers.0.1.", **norm, fn__weight=(d, d))
    for layer in range(n_layers + 1):
        keys |= _under(f"decoder_blocks.{layer}.layers.0.0.", **norm, fn__weight=(d, d))
        keys |= _under(f"decoder_blocks.{layer}.layers.0.1.", **norm, **attention)
    return keys


def _vanilla_lm(n_layers, d, h, p, m):
    keys = _under("transformer.", wte__weight=(47, d), wpe__weight=(13, d)) | {
        "lm_head.weight": (47, d)
    }
    for layer in range(n_layers):
        keys |= _under(
            f"transformer.h.{layer}.", prenorm_1__weight=(d,), prenorm_1__bias=(d,),
            attn__c_attn__weight=(h * p, d), attn__c_proj__weight=(d, h * p),
            attn__c_proj__bias=(d,), prenorm_2__weight=(d,), prenorm_2__bias=(d,),
            ista__weight=(d, d), attn__bias=(1, 1, 13, 13),
        )  # fmt: skip
    return keys


def _lm(n_layers, d, h, p, m):
    keys = _vanilla_lm(n_layers, d, h, p, m) | _under(
        "transformer.", ln_f__weight=(d,), ln_f__bias=(d,)
    )
    return keys | {f"transformer.h.{layer}.ista.weight": (m, d) for layer in range(n_layers)}


def _gpt(n_layers, d, h, p, m):
    keys = _under(
        "transformer.", wte__weight=(47, d), wpe__weight=(13, d), ln_f__weight=(d,), ln_f__bias=(d,)
    )
    keys |= {"lm_head.weight": (47, d)}
    for layer in range(n_layers):
        weights = dict(
            ln_1=(d,),
            attn__c_attn=(3 * h * p, d),
            attn__c_proj=(d, h * p),
            ln_2=(d,),
            mlp__c_fc=(m, d),
            mlp__c_proj=(d, m),
        )
        keys |= _under(
            f"transformer.h.{layer}.",
            **{f"{name}__weight": shape for name, shape in weights.items()},
        )
        keys |= _under(
            f"transformer.h.{layer}.",
            **{f"{name}__bias": shape[:1] for name, shape in weights.items()},
        )
    return keys


def _chat(n_layers, d, h, p, m):
    keys = {"transformer.wte.weight": (64, d), "lm_head.weight": (64, d)}
    for layer in range(n_layers):
        keys |= _under(
            f"transformer.h.{layer}.", mssa__qkv__weight=(h * p, d),
            mssa__c_proj__weight=(d, h * p), odl__D_enc__weight=(m, d), odl__D_dec__weight=(d, m),
            odl__threshold=(m,),
        )  # fmt: skip
    return keys


def _clip(n_layers, d, h, p, m):
    t, e = 22, 17
    keys = _under(
        "", positional_embedding=(13, t), text_projection=(e, t), logit_scale=(),
        token_embedding__weight=(47, t), ln_final__weight=(t,), ln_final__bias=(t,),
        visual__class_embedding=(d,), visual__positional_embedding=(13, d), visual__proj=(d, e),
        visual__conv1__weight=(d, 3, 2, 5), visual__ln_post__weight=(d,),
        visual__ln_post__bias=(d,),
    )  # fmt: skip

    def norms(width):
        return {f"ln_{n}__{leaf}": (width,) for n in (1, 2) for leaf in ("weight", "bias")}

    for layer in range(n_layers):
        keys |= _under(
            f"visual.transformer.resblocks.{layer}.", attn__in_proj_weight=(3 * h * p, d),
            attn__out_proj__weight=(d, h * p), mlp__c_fc=(d, m), mlp__c_proj=(d, m), **norms(d),
        )  # fmt: skip
    for layer in range(n_layers + 1):
        keys |= _under(
            f"transformer.resblocks.{layer}.", attn__in_proj_weight=(3 * t, t),
            attn__in_proj_bias=(3 * t,), attn__out_proj__weight=(t, t), attn__out_proj__bias=(t,),
            mlp__c_fc__weight=(4 * t, t), mlp__c_fc__bias=(4 * t,), mlp__c_proj__weight=(t, 4 * t),
            mlp__c_proj__bias=(t,), **norms(t),
        )  # fmt: skip
    return keys


_SHAPES = {
    "crate-mae": _mae, "crate-lm": _lm, "crate-lm-vanilla": _vanilla_lm, "gpt-baseline": _gpt,
    "nanochat-crate": _chat, "clipa": _clip,
}  # fmt: skip


def published(case, n_layers=2, d=31, h=5, p=7, m=53):
    """Returns the weights of a small model of a family, under their published names."""
    generator = torch.Generator().manual_seed(5)
    shapes = _SHAPES[case](n_layers, d, h, p, m)
    weights = {key: 0.2 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    if case.startswith(("crate-lm", "gpt")):
        # the published models tie them
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    if case == "clipa":  # and have one projection for query, key and value
        for key in [
            key for key in weights if key.startswith("visual") and key.endswith("in_proj_weight")
        ]:
            weights[key] = weights[key].chunk(3)[0].repeat(3, 1)
    return weights
