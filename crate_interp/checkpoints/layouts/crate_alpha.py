"""UCSC-VLAA/CRATE-alpha: what the torch classifier and the JAX training save.

The torch classifier has an ablation with CRATE's ISTA step.
"""

import math

from crate_interp.checkpoints.layouts.crate import BLOCK, TOP, torch_sizes
from crate_interp.checkpoints.layouts.layout import (
    Fields,
    Layout,
    Shapes,
    Stack,
    image_size,
    shape_of,
)
from crate_interp.core.errors import CheckpointError

_LAYER = "Transformer/encoderblock_{l}/"
_ATTENTION = _LAYER + "MultiHeadDotProductSubspaceAttention_0/"
_TOP = TOP | {"conv1.weight": "embed.conv.weight", "conv1.bias": "embed.conv.bias"}
_DICTIONARY = {"transformer.layers.{l}.1.fn.D": "blocks.{l}.mlp.D"}


def _infer(shapes: Shapes, given: Fields) -> Fields:
    _, channels, height, width = shape_of(shapes, "conv1.weight", 4)
    size = image_size(shapes, (height, width), given, "pos_embedding")
    patches = {"channels": channels, "patch_size": (height, width)}
    return torch_sizes(shapes, "transformer.layers.0.1.fn.D") | patches | size


def _infer_jax(shapes: Shapes, given: Fields) -> Fields:
    """Returns the fields of a JAX file.

    Projections are [d_model, n_heads, d_head], so that the number of heads is known. Those of
    older files have two axes.
    """
    d_model, *heads = shape_of(shapes, _ATTENTION.format(l=0) + "proj/kernel", 2, 3)
    height, width, channels, _ = shape_of(shapes, "embedding/kernel", 4)
    n_heads = {"n_heads": heads[0]} if len(heads) == 2 else {}
    wanted = {"proj/kernel": (d_model, *heads), "out/kernel": (*heads, d_model)}
    # compared here, because the axis of the heads is folded away before shapes are compared
    for key, shape in shapes.items():
        end = "/".join(key.split("/")[-2:])
        if len(heads) == 2 and end in wanted and shape != wanted[end]:
            raise CheckpointError(
                f"{key} has shape {shape}, the first layer makes it {wanted[end]}."
            )
    return (
        n_heads
        | {
            "d_model": d_model,
            "inner": math.prod(heads),
            "n_classes": shape_of(shapes, "head/kernel")[1],
            "d_mlp": shape_of(shapes, _LAYER.format(l=0) + "OvercompleteISTABlock_0/D")[1],
            "channels": channels,
            "patch_size": (height, width),
        }
        | image_size(shapes, (height, width), given, "pos_embedding")
    )


TORCH = Layout(  # torch_inference/model/crate_alpha.py
    family="crate-alpha",
    markers=("conv1.weight", "transformer.layers.0.1.fn.D", "transformer.layers.0.1.fn.D1"),
    top=_TOP,
    stacks=(Stack(BLOCK | _DICTIONARY | {"transformer.layers.{l}.1.fn.D1": "blocks.{l}.mlp.D1"}),),
    infer=_infer,
)

VANILLA = Layout(  # the same class with IsOvercompleteISTABlock=False; the file has not been seen
    family="crate-alpha",
    markers=("conv1.weight", "transformer.layers.0.1.fn.D"),
    top=_TOP,
    stacks=(Stack(BLOCK | _DICTIONARY),),
    infer=_infer,
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
            {
                _LAYER + "LayerNorm_0/scale": "blocks.{l}.ln1.weight",
                _LAYER + "LayerNorm_0/bias": "blocks.{l}.ln1.bias",
                _ATTENTION + "proj/kernel": "blocks.{l}.attn.u_proj.weight",
                _ATTENTION + "out/kernel": "blocks.{l}.attn.out_proj.weight",
                _LAYER + "LayerNorm_1/scale": "blocks.{l}.ln2.weight",
                _LAYER + "LayerNorm_1/bias": "blocks.{l}.ln2.bias",
                _LAYER + "OvercompleteISTABlock_0/D": "blocks.{l}.mlp.D",
                _LAYER + "OvercompleteISTABlock_0/D1": "blocks.{l}.mlp.D1",
            }
        ),
    ),
    infer=_infer_jax,
    defaults={"ln_final_eps": 1e-6},  # flax's, at the head too; the torch code has 1e-5 there
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
