"""UCSC-VLAA/CRATE-alpha: the formats of the torch classifier and of the JAX training.

A third layout is for an ablation of the torch classifier with CRATE's ISTA step.
"""

import math

from crate_interp.checkpoints.layouts.crate import BLOCK, LAYER, SIZES, TOP
from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack
from crate_interp.core.errors import CheckpointError

_JAX_LAYER, _JAX_FIRST = "Transformer/encoderblock_{l}/", "Transformer/encoderblock_0/"
_ATTENTION = "MultiHeadDotProductSubspaceAttention_0/"
_TOP = TOP | {"conv1.*": "embed.conv.*"}
_DICTIONARY = {"1.fn.D": "mlp.D"}


_SIZES = SIZES | {
    "transformer.layers.0.1.fn.D": (None, "d_mlp"),
    "conv1.weight": (None, "channels", "height", "width"),
}


def _heads(shapes: Shapes, given: Fields) -> Fields:
    """Returns the sizes that the projection of a JAX file reveals.

    A projection is [d_model, n_heads, d_head], which reveals the number of heads. In older files a
    projection has two axes, and does not reveal the number of heads.
    """
    d_model, *heads = shapes.of(_JAX_FIRST + _ATTENTION + "proj/kernel", 2, 3)
    wanted = {"proj/kernel": (d_model, *heads), "out/kernel": (*heads, d_model)}
    # checked here, because the axis of the heads is removed before all shapes are checked
    for key, shape in shapes.items():
        end = "/".join(key.split("/")[-2:])
        if len(heads) == 2 and end in wanted and shape != wanted[end]:
            raise CheckpointError(
                f"{key} has shape {shape}; expected {wanted[end]}, as in the first layer."
            )
    n_heads = {"n_heads": heads[0]} if len(heads) == 2 else {}
    return {"d_model": d_model, "inner": math.prod(heads)} | n_heads


TORCH = Layout(  # torch_inference/model/crate_alpha.py
    family="crate-alpha",
    markers=("conv1.weight", "transformer.layers.0.1.fn.D", "transformer.layers.0.1.fn.D1"),
    top=_TOP,
    stacks=(Stack(LAYER, BLOCK | _DICTIONARY | {"1.fn.D1": "mlp.D1"}),),
    sizes=_SIZES,
    positions=("pos_embedding", 3),
)

VANILLA = Layout(  # the same class with IsOvercompleteISTABlock=False; the file has not been seen
    family="crate-alpha",
    markers=("conv1.weight", "transformer.layers.0.1.fn.D"),
    top=_TOP,
    stacks=(Stack(LAYER, BLOCK | _DICTIONARY),),
    sizes=_SIZES,
    positions=("pos_embedding", 3),
    defaults={"sparse_step": "ista", "ln_eps": 1e-5},
)

JAX = Layout(  # models/crate.py, as main.py saves it
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
    stacks=(
        Stack(
            _JAX_LAYER,
            {
                "LayerNorm_0/scale": "ln1.weight",
                "LayerNorm_0/bias": "ln1.bias",
                _ATTENTION + "proj/kernel": "attn.u_proj.weight",
                _ATTENTION + "out/kernel": "attn.out_proj.weight",
                "LayerNorm_1/scale": "ln2.weight",
                "LayerNorm_1/bias": "ln2.bias",
                "OvercompleteISTABlock_0/D": "mlp.D",
                "OvercompleteISTABlock_0/D1": "mlp.D1",
            },
        ),
    ),
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
