"""UCSC-VLAA/CRATE-alpha torch_inference/model/clipa_model.py.

A CLIP with a CRATE-alpha image tower.
"""

from torch import Tensor

from crate_interp.checkpoints.layouts.layout import (
    Fields,
    Layout,
    Shapes,
    Stack,
    image_size,
    shape_of,
)
from crate_interp.core.errors import CheckpointError

_IMAGE, _TEXT = "visual.transformer.resblocks.{l}.", "transformer.resblocks.{l}."


def _the_one_projection(weight: Tensor) -> Tensor:
    """Returns the one projection that stands in the file three times, as query, key and value.

    The JAX code that this was made from has one projection for all three.
    """
    if weight.shape[0] % 3:
        raise CheckpointError(f"has {weight.shape[0]} rows, wanted query, key and value in a row.")
    query, key, value = weight.chunk(3)
    if not (bool((query == key).all()) and bool((query == value).all())):
        raise CheckpointError(
            "holds three different projections: in CRATE-alpha query, key and value are one."
        )
    return query


def _infer(shapes: Shapes, given: Fields) -> Fields:
    d_model, channels, height, width = shape_of(shapes, "visual.conv1.weight", 4)
    text = shape_of(shapes, "token_embedding.weight")
    found = {
        "d_model": d_model,
        "inner": shape_of(shapes, _IMAGE.format(l=0) + "attn.in_proj_weight")[0] // 3,
        "d_mlp": shape_of(shapes, _IMAGE.format(l=0) + "mlp.c_fc")[1],
        "channels": channels,
        "patch_size": (height, width),
        "d_embed": shape_of(shapes, "visual.proj")[1],
        "d_vocab": text[0],
        "text_d_model": text[1],
        "n_ctx": shape_of(shapes, "positional_embedding")[0],
    }
    return found | image_size(shapes, (height, width), given, "visual.positional_embedding", 2)


CLIPA = Layout(
    family="clipa",
    markers=("visual.conv1.weight", "visual.transformer.resblocks.0.mlp.c_fc", "text_projection"),
    top={
        "visual.class_embedding": "visual.cls_token",
        "visual.positional_embedding": "visual.pos_embed",
        "visual.proj": "visual.unembed.weight",
        "visual.conv1.weight": "visual.embed.conv.weight",
        "visual.ln_post.weight": "visual.ln_final.weight",
        "visual.ln_post.bias": "visual.ln_final.bias",
        "token_embedding.weight": "text.embed.weight",
        "positional_embedding": "text.pos_embed",
        "ln_final.weight": "text.ln_final.weight",
        "ln_final.bias": "text.ln_final.bias",
        "text_projection": "text.unembed.weight",  # the code multiplies by its transpose
        "logit_scale": "logit_scale",
    },
    stacks=(
        Stack(
            {
                _IMAGE + "ln_1.weight": "visual.blocks.{l}.ln1.weight",
                _IMAGE + "ln_1.bias": "visual.blocks.{l}.ln1.bias",
                _IMAGE + "attn.in_proj_weight": "visual.blocks.{l}.attn.u_proj.weight",
                _IMAGE + "attn.out_proj.weight": "visual.blocks.{l}.attn.out_proj.weight",
                _IMAGE + "ln_2.weight": "visual.blocks.{l}.ln2.weight",
                _IMAGE + "ln_2.bias": "visual.blocks.{l}.ln2.bias",
                _IMAGE + "mlp.c_fc": "visual.blocks.{l}.mlp.D",  # a raw parameter, not a Linear
                _IMAGE + "mlp.c_proj": "visual.blocks.{l}.mlp.D1",
            }
        ),
        Stack(
            {
                _TEXT + "ln_1.weight": "text.blocks.{l}.ln1.weight",
                _TEXT + "ln_1.bias": "text.blocks.{l}.ln1.bias",
                _TEXT + "attn.in_proj_weight": "text.blocks.{l}.attn.qkv_proj.weight",
                _TEXT + "attn.in_proj_bias": "text.blocks.{l}.attn.qkv_proj.bias",
                _TEXT + "attn.out_proj.weight": "text.blocks.{l}.attn.out_proj.weight",
                _TEXT + "attn.out_proj.bias": "text.blocks.{l}.attn.out_proj.bias",
                _TEXT + "ln_2.weight": "text.blocks.{l}.ln2.weight",
                _TEXT + "ln_2.bias": "text.blocks.{l}.ln2.bias",
                _TEXT + "mlp.c_fc.weight": "text.blocks.{l}.mlp.fc_in.weight",
                _TEXT + "mlp.c_fc.bias": "text.blocks.{l}.mlp.fc_in.bias",
                _TEXT + "mlp.c_proj.weight": "text.blocks.{l}.mlp.fc_out.weight",
                _TEXT + "mlp.c_proj.bias": "text.blocks.{l}.mlp.fc_out.bias",
            },
            count="text_n_layers",
        ),
    ),
    infer=_infer,
    defaults={"tokenizer": "bert"},
    needed=("n_heads", "text_n_heads"),
    views={
        r"^visual\..*\.in_proj_weight": ((2,), _the_one_projection),
        r"^visual\.class_embedding": ((1,), lambda token: token[None, None]),
        r"^visual\.positional_embedding": ((2,), lambda table: table[None]),
        r"^visual\.proj": ((2,), lambda weight: weight.mT),
    },
    tolerant=True,  # the published files are some 75 kB larger than these keys explain
)
