"""RobinWu218/ToST: the classifier (`tost_vision/tost.py`) and the language model (`tost_lang`)."""

import warnings
from dataclasses import replace

from crate_interp.checkpoints.layouts import crate_lm
from crate_interp.checkpoints.layouts.crate import LAYER, TOP
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


def _images(shapes: Shapes, given: Fields) -> Fields:
    size = given.get("image_size") or _published_size()
    return stem_sizes(shapes, "patch_embed.") | {"image_size": size}


def _published_size() -> int:
    """Returns the side of the images of all published ToSTs, and warns that it is assumed."""
    warnings.warn(
        "a ToST's weights do not tell the size of its images: 224 x 224 is assumed. If it was "
        "trained at another size, give it, such as image_size=96 (--config image_size=96).",
        stacklevel=2,
    )
    return 224


_MLP = {"norm2.*": "ln2.*", "mlp.fc1.*": "mlp.fc_in.*", "mlp.fc2.*": "mlp.fc_out.*"}
_SCALES = {"gamma1": "attn.gamma", "gamma2": "mlp.gamma", "norm1.*": "ln1.*"}

VISION = Layout(
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
        Stack(
            "blocks.{l}.",
            _SCALES
            | _MLP
            | {
                "attn.temp": "attn.temp",
                "attn.qkv.*": "attn.u_proj.*",
                "attn.to_out.0.*": "attn.out_proj.*",
            },
        ),
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

# as in a plain transformer, but one map makes the codes
_LAYER = crate_lm.GPT_BLOCK | {"attn.c_attn": "attn.u_proj"}
_OWN = {
    "gamma1": "attn.gamma",
    "gamma2": "mlp.gamma",
    "attn.temp": "attn.temp",
    "attn.denom_bias": "attn.denom_bias",
}


LANGUAGE = replace(  # model_TSSA.py with bias=False
    crate_lm.GPT,
    family="tost-lm",
    markers=(
        "transformer.wpe.weight",
        "transformer.h.0.attn.temp",
        "transformer.h.0.attn.denom_bias",
    ),
    stacks=(
        Stack(
            "transformer.h.{l}.",
            _OWN | {f"{key}.weight": f"{name}.weight" for key, name in _LAYER.items()},
        ),
    ),
    sizes=crate_lm.GPT.sizes | {"transformer.h.0.attn.c_attn.weight": ("inner", None)},
    followed={"TSSA": True},
)

LANGUAGE_BIASED = replace(  # model_TSSA.py with bias=True
    LANGUAGE,
    markers=(*LANGUAGE.markers, "transformer.h.0.ln_1.bias"),
    top=crate_lm.OVERCOMPLETE.top,
    stacks=(
        Stack(
            "transformer.h.{l}.",
            _OWN | {f"{key}.*": f"{name}.*" for key, name in _LAYER.items()},
        ),
    ),
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
    stacks=(Stack(LAYER, _BLOCK | {"0.fn.qkv.weight": "attn.u_proj.weight"}),),
    sizes=_sizes("qkv"),
    positions=("pos_embedding", 3),
    infer=lambda shapes, given: stem_sizes(shapes, _STEM),
    defaults={"stem": "conv"},
)

TOST_ISTA = replace(
    CRATE,
    family="tost-ista",
    markers=(*CRATE.markers, _FIRST + "0.fn.temp"),
    stacks=(
        Stack(
            LAYER,
            _BLOCK | {"0.fn.qkv.weight": "attn.u_proj.weight", "0.fn.temp": "attn.temp"},
        ),
    ),
)

CBT = replace(
    CRATE,
    family="cbt",
    markers=(_STEM + "proj.0.0.weight", _FIRST + "0.fn.step_x", _FIRST + "0.fn.proj.weight"),
    sizes=_sizes("proj"),
    stacks=(
        Stack(
            LAYER,
            _BLOCK
            | {
                "0.fn.proj.weight": "attn.u_proj.weight",
                "0.fn.step_x": "attn.step_x",
                "0.fn.step_rep": "attn.step_rep",
            },
        ),
    ),
)
