"""The layouts of CRATE's and CRATE-alpha's image models: classifiers, the autoencoder, CLIP.

Code: Ma-Lab-Berkeley/CRATE `model/crate.py` and `model/crate_ae`, UCSC-VLAA/CRATE-alpha
`torch_inference/model/crate_alpha.py` and `clipa_model.py`, and its JAX training `models/crate.py`.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack
from crate_interp.core.errors import CheckpointError, MissingSettingError

# the layouts of CRATE-alpha use these keys too
LAYER = "transformer.layers.{l}."
BLOCK = {
    "0.norm.*": "ln1.*",
    "0.fn.qkv.weight": "attn.u_proj.weight",
    "0.fn.to_out.0.weight": "attn.out_proj.weight",
    "1.norm.*": "ln2.*",
}
ISTA_BLOCK = BLOCK | {"0.fn.to_out.0.bias": "attn.out_proj.bias", "1.fn.weight": "mlp.D"}
# sizes that the files of all torch classifiers, CRATE and CRATE-alpha, reveal
SIZES: dict[str, tuple[str | None, ...]] = {
    "transformer.layers.0.0.fn.qkv.weight": ("inner", "d_model"),
    "mlp_head.1.weight": ("n_classes", None),
}
TOP = {
    "pos_embedding": "pos_embed",
    "cls_token": "cls_token",
    "mlp_head.0.*": "ln_final.*",
    "mlp_head.1.*": "unembed.*",
}


def _patches(shapes: Shapes, fields: Fields) -> Fields:
    """Returns channels and patch size.

    CRATE flattens patches, so the file reveals only the product height * width * channels.
    """
    values = shapes.of("to_patch_embedding.2.weight")[1]
    channels = fields.get("channels", 3)
    if "patch_size" in fields:
        height, width = fields["patch_size"]
        if height * width * channels != values:
            raise CheckpointError(
                f"patch_size={fields['patch_size']!r} with channels={channels} contradicts "
                f"to_patch_embedding.2.weight, whose patches have {values} values."
            )
        return {"channels": channels, "patch_size": (height, width)}
    side = math.isqrt(values // channels)
    if side * side * channels != values:
        why = f"patches have {values} values, which is not a square times channels={channels}"
        grey = math.isqrt(values) ** 2 == values
        raise MissingSettingError("patch_size", "channels=1" if grey else "patch_size=(h, w)", why)
    return {"channels": channels, "patch_size": (side, side)}


CRATE = Layout(
    family="crate",
    markers=("to_patch_embedding.2.weight", "transformer.layers.0.1.fn.weight"),
    top=TOP
    | {
        "to_patch_embedding.1.*": "embed.norm_patch.*",
        "to_patch_embedding.2.*": "embed.proj.*",
        "to_patch_embedding.3.*": "embed.norm_token.*",
    },
    stacks=(Stack(LAYER, ISTA_BLOCK),),
    sizes=SIZES | {"transformer.layers.0.1.fn.weight": (None, "d_mlp")},
    positions=("pos_embedding", 3),
    infer=_patches,
)

DEMO_21K = replace(  # mlp_head makes features, and head makes the logits of the classes
    CRATE,
    markers=(*CRATE.markers, "head.weight"),
    top=CRATE.top | {"mlp_head.1.*": "features.*", "head.*": "unembed.*"},
    sizes=CRATE.sizes
    | {"mlp_head.1.weight": ("d_features", None), "head.weight": ("n_classes", None)},
)


_JAX_LAYER, _JAX_FIRST = "Transformer/encoderblock_{l}/", "Transformer/encoderblock_0/"
_ATTENTION = "MultiHeadDotProductSubspaceAttention_0/"
_ALPHA_TOP = TOP | {"conv1.*": "embed.conv.*"}
_DICTIONARY = {"1.fn.D": "mlp.D"}
_ALPHA_SIZES = SIZES | {
    "transformer.layers.0.1.fn.D": (None, "d_mlp"),
    "conv1.weight": (None, "channels", "height", "width"),
}


def _heads(shapes: Shapes, fields: Fields) -> Fields:
    """Returns the sizes that the projection of a JAX file reveals.

    A projection is [d_model, n_heads, d_head], which reveals the number of heads. In older files a
    projection has two axes, and does not reveal the number of heads.
    """
    d_model, *heads = shapes.of(_JAX_FIRST + _ATTENTION + "proj/kernel", 2, 3)
    n_heads = {"n_heads": heads[0]} if len(heads) == 2 else {}
    return {"d_model": d_model, "inner": math.prod(heads)} | n_heads


ALPHA = Layout(  # torch_inference/model/crate_alpha.py
    family="crate-alpha",
    markers=("conv1.weight", "transformer.layers.0.1.fn.D", "transformer.layers.0.1.fn.D1"),
    top=_ALPHA_TOP,
    stacks=(Stack(LAYER, BLOCK | _DICTIONARY | {"1.fn.D1": "mlp.D1"}),),
    sizes=_ALPHA_SIZES,
    positions=("pos_embedding", 3),
)

ALPHA_VANILLA = replace(  # with IsOvercompleteISTABlock=False; no file has been seen
    ALPHA,
    markers=("conv1.weight", "transformer.layers.0.1.fn.D"),
    stacks=(Stack(LAYER, BLOCK | _DICTIONARY),),
    defaults={"sparse_step": "ista", "ln_eps": 1e-5},
)

_JAX_BLOCK = {
    "LayerNorm_0/scale": "ln1.weight",
    "LayerNorm_0/bias": "ln1.bias",
    _ATTENTION + "proj/kernel": "attn.u_proj.weight",
    _ATTENTION + "out/kernel": "attn.out_proj.weight",
    "LayerNorm_1/scale": "ln2.weight",
    "LayerNorm_1/bias": "ln2.bias",
    "OvercompleteISTABlock_0/D": "mlp.D",
    "OvercompleteISTABlock_0/D1": "mlp.D1",
}
ALPHA_JAX = Layout(  # models/crate.py, as main.py saves it
    family="crate-alpha",
    markers=("embedding/kernel", "encoder_norm/scale"),
    top={
        "pos_embedding": "pos_embed",
        "cls": "cls_token",
        "embedding/kernel": "embed.conv.weight",
        "embedding/bias": "embed.conv.bias",
        "encoder_norm/scale": "ln_final.weight",
        "encoder_norm/bias": "ln_final.bias",
        "head/kernel": "unembed.weight",
        "head/bias": "unembed.bias",
    },
    stacks=(Stack(_JAX_LAYER, _JAX_BLOCK),),
    sizes={
        "head/kernel": (None, "n_classes"),
        _JAX_FIRST + "OvercompleteISTABlock_0/D": (None, "d_mlp"),
        "embedding/kernel": ("height", "width", "channels", None),
    },
    positions=("pos_embedding", 3),
    infer=_heads,
    # the JAX code has flax's epsilon in the norm before the head too; the torch code has 1e-5
    defaults={"ln_final_eps": 1e-6},
    views={
        # [out, in, height, width]
        "embedding/kernel": ((4,), lambda kernel: kernel.permute(3, 2, 0, 1)),
        # [heads * d_head, d_model]
        "/proj/kernel": ((2, 3), lambda kernel: kernel.flatten(1).mT),
        # [d_model, heads * d_head]
        "/out/kernel": ((2, 3), lambda kernel: kernel.flatten(0, -2).mT),
        "head/kernel": ((2,), lambda kernel: kernel.mT),
    },
)

_DECODER_BLOCK = {
    "0.norm.*": "ln1.*",
    "0.fn.weight": "D",
    "1.norm.*": "ln2.*",
    "1.fn.qkv.weight": "attn.u_proj.weight",
    "1.fn.to_out.0.*": "attn.out_proj.*",
}
MAE = Layout(
    family="crate-mae",
    markers=("mask_token", "decoder_pos_embed", "blocks.0.layers.0.0.fn.qkv.weight"),
    top={
        "cls_token": "cls_token",
        "mask_token": "mask_token",
        "decoder_pos_embed": "pos_embed",  # the encoder reads this table, not the key pos_embed
        "patch_embed.proj.*": "embed.conv.*",
        "norm.*": "ln_final.*",
        "decoder_norm.*": "decoder_norm.*",
        "decoder_pred.*": "decoder_pred.*",
    },
    stacks=(
        Stack("blocks.{l}.layers.0.", ISTA_BLOCK),
        Stack(
            "decoder_blocks.{l}.layers.0.",
            _DECODER_BLOCK,
            "decoder_blocks.{l}.",
            "decoder_n_layers",
        ),
    ),
    sizes={
        "blocks.0.layers.0.0.fn.qkv.weight": ("inner", "d_model"),
        "blocks.0.layers.0.1.fn.weight": (None, "d_mlp"),
        "patch_embed.proj.weight": (None, "channels", "height", "width"),
    },
    positions=("decoder_pos_embed", 3),
    config_switches=("norm_pix_loss",),  # read if the file holds the trainer's command line
    unused=("pos_embed", r"decoder_embed\.(weight|bias)"),
    namespace=True,
)


def _the_one_projection(weight: Tensor) -> Tensor:
    """Returns the projection that the file holds three times, as query, key and value.

    The file was made from JAX code with a single projection for query, key and value.
    """
    query, *others = weight.chunk(3)
    if not all(torch.equal(query, other) for other in others):
        raise CheckpointError(
            "in_proj_weight: query, key and value differ, and a CRATE-CLIP has one projection."
        )
    return query


_VISUAL_BLOCK = {
    "ln_1.*": "ln1.*",
    "attn.in_proj_weight": "attn.u_proj.weight",
    "attn.out_proj.weight": "attn.out_proj.weight",
    "ln_2.*": "ln2.*",
    "mlp.c_fc": "mlp.D",  # a raw parameter, not a Linear
    "mlp.c_proj": "mlp.D1",
}
_TEXT_BLOCK = {
    "ln_1.*": "ln1.*",
    "attn.in_proj_weight": "attn.qkv_proj.weight",
    "attn.in_proj_bias": "attn.qkv_proj.bias",
    "attn.out_proj.*": "attn.out_proj.*",
    "ln_2.*": "ln2.*",
    "mlp.c_fc.*": "mlp.fc_in.*",
    "mlp.c_proj.*": "mlp.fc_out.*",
}
CLIPA = Layout(
    family="clipa",
    markers=("visual.conv1.weight", "visual.transformer.resblocks.0.mlp.c_fc", "text_projection"),
    top={
        "visual.class_embedding": "visual.cls_token",
        "visual.positional_embedding": "visual.pos_embed",
        "visual.proj": "visual.unembed.weight",
        "visual.conv1.weight": "visual.embed.conv.weight",
        "visual.ln_post.*": "visual.ln_final.*",
        "token_embedding.weight": "text.embed.weight",
        "positional_embedding": "text.pos_embed",
        "ln_final.*": "text.ln_final.*",
        "text_projection": "text.unembed.weight",  # the published code uses text_projection.T
        "logit_scale": "logit_scale",
    },
    stacks=(
        Stack("visual.transformer.resblocks.{l}.", _VISUAL_BLOCK, "visual.blocks.{l}."),
        Stack("transformer.resblocks.{l}.", _TEXT_BLOCK, "text.blocks.{l}.", "text_n_layers"),
    ),
    sizes={
        "token_embedding.weight": ("d_vocab", "text_d_model"),
        "visual.conv1.weight": ("d_model", "channels", "height", "width"),
        "visual.transformer.resblocks.0.attn.in_proj_weight": ("3 inner", None),
        "visual.transformer.resblocks.0.mlp.c_fc": (None, "d_mlp"),
        "visual.proj": (None, "d_embed"),
        "positional_embedding": ("n_ctx", None),
    },
    positions=("visual.positional_embedding", 2),
    defaults={"tokenizer": "bert"},
    needed=("n_heads", "text_n_heads"),
    views={
        r"^visual\..*\.in_proj_weight": ((2,), _the_one_projection),
        r"^visual\.class_embedding": ((1,), lambda token: token[None, None]),
        r"^visual\.positional_embedding": ((2,), lambda table: table[None]),
        r"^visual\.proj": ((2,), lambda weight: weight.mT),
    },
    tolerant=True,  # the published files are about 75 kB larger than these keys explain
)
