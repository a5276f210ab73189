"""The layouts with a convolutional stem: ToST, and CRATE, ToST with ISTA and CBT in CBSA's code.

Code: RobinWu218/ToST `tost_vision/tost.py`, QishuaiWen/CBSA `CBSA_image_classification/models.py`.
"""

import warnings
from dataclasses import replace

from crate_interp.checkpoints.layouts.images import LAYER, TOP
from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack

# a convolutional stem, whose keys count the GELUs between convolutions too; CBT has the same
MOST_CONVOLUTIONS = 6
STATISTICS = ("weight", "bias", "running_mean", "running_var")


def stem(prefix: str) -> dict[str, str]:
    """Returns the keys of a convolutional stem, and the parameter or statistic each fills."""
    keys = {}
    for place in range(MOST_CONVOLUTIONS):
        keys[f"{prefix}proj.{2 * place}.0.weight"] = f"embed.convs.{place}.weight"
        for name in STATISTICS:
            keys[f"{prefix}proj.{2 * place}.1.{name}"] = f"embed.norms.{place}.{name}"
    return keys


def stem_sizes(shapes: Shapes, prefix: str) -> Fields:
    """Returns channels and patch size: each convolution halves the image."""
    keys = [f"{prefix}proj.{2 * place}.0.weight" for place in range(MOST_CONVOLUTIONS)]
    count = next((n for n, key in enumerate(keys) if key not in shapes), len(keys))
    return {"channels": shapes.of(keys[0], 4)[1], "patch_size": (2**count, 2**count)}


def _images(shapes: Shapes, fields: Fields) -> Fields:
    """Returns channels, patch size and image size, which no tensor tells."""
    size = fields.get("image_size")
    if not size:
        warnings.warn(
            "a ToST's weights do not tell the size of its images: 224 x 224 is assumed. If it was "
            "trained at another size, give that: image_size=96 (--config image_size=96), say.",
            stacklevel=2,
        )
    return stem_sizes(shapes, "patch_embed.") | {"image_size": size or 224}


_MLP = {"norm2.*": "ln2.*", "mlp.fc1.*": "mlp.fc_in.*", "mlp.fc2.*": "mlp.fc_out.*"}
_SCALES = {"gamma1": "attn.gamma", "gamma2": "mlp.gamma", "norm1.*": "ln1.*"}

_TOST_BLOCK = {
    "attn.temp": "attn.temp",
    "attn.qkv.*": "attn.u_proj.*",
    "attn.to_out.0.*": "attn.out_proj.*",
}
TOST = Layout(
    family="tost",
    markers=("patch_embed.proj.0.0.weight", "blocks.0.attn.temp", "cls_attn_blocks.0.gamma1"),
    top=stem("patch_embed.")
    | {
        "cls_token": "cls_token",
        "pos_embeder.token_projection.*": "pos_embed.proj.*",
        "norm.*": "ln_final.*",
        "head.*": "unembed.*",
    },
    stacks=(
        Stack("blocks.{l}.", _SCALES | _MLP | _TOST_BLOCK),
        Stack(
            "cls_attn_blocks.{l}.",
            _SCALES | _MLP | {"attn.qkv.*": "attn.qkv_proj.*", "attn.proj.*": "attn.out_proj.*"},
            target="cls_blocks.{l}.",
            count="class_layers",
        ),
    ),
    sizes={
        "blocks.0.attn.qkv.weight": ("inner", "d_model"),
        "blocks.0.mlp.fc1.weight": ("d_mlp", None),
        "head.weight": ("n_classes", None),
    },
    infer=_images,
    config_names={"input_size": "image_size"},  # of the trainer's arguments
    namespace=True,
    any_size=True,
    # positions are a 1 x 1 convolution
    views={r"token_projection\.weight": ((4,), lambda weight: weight.flatten(1))},
)

_STEM, _FIRST = "to_patch_embedding.", LAYER.format(l=0)
_BLOCK = {
    "0.norm.*": "ln1.*",
    "0.fn.to_out.*": "attn.out_proj.*",
    "1.norm.*": "ln2.*",
    "1.fn.weight": "mlp.D",
}


def _sizes(codes: str) -> dict[str, tuple[str | None, ...]]:
    return {
        f"{_FIRST}0.fn.{codes}.weight": ("inner", "d_model"),
        _FIRST + "1.fn.weight": (None, "d_mlp"),
        "mlp_head.1.weight": ("n_classes", None),
    }


CRATE = Layout(
    family="crate",
    markers=(_STEM + "proj.0.0.weight", _FIRST + "0.fn.qkv.weight"),
    top=TOP | stem(_STEM),
    stacks=(
        # temp is of ToST alone
        Stack(LAYER, _BLOCK | {"0.fn.qkv.weight": "attn.u_proj.weight", "0.fn.temp": "attn.temp"}),
    ),
    sizes=_sizes("qkv"),
    positions=("pos_embedding", 3),
    infer=lambda shapes, _: stem_sizes(shapes, _STEM),
    defaults={"stem": "conv"},
)

TOST_ISTA = replace(CRATE, family="tost-ista", markers=(*CRATE.markers, _FIRST + "0.fn.temp"))

_CBT_BLOCK = _BLOCK | {
    "0.fn.proj.weight": "attn.u_proj.weight",
    "0.fn.step_x": "attn.step_x",
    "0.fn.step_rep": "attn.step_rep",
}
CBT = replace(
    CRATE,
    family="cbt",
    markers=(_STEM + "proj.0.0.weight", _FIRST + "0.fn.step_x", _FIRST + "0.fn.proj.weight"),
    sizes=_sizes("proj"),
    stacks=(Stack(LAYER, _CBT_BLOCK),),
)
