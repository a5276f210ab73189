"""UCSC-VLAA/CRATE-alpha torch_inference/model/clipa_model.py.

The model is a CLIP with a CRATE-alpha image tower.
"""

from torch import Tensor

from crate_interp.checkpoints.layouts.layout import Layout, Stack
from crate_interp.core.errors import CheckpointError


def _the_one_projection(weight: Tensor) -> Tensor:
    """Returns the projection that the file holds three times, as query, key and value.

    The file was made from JAX code with a single projection for query, key and value.
    """
    if weight.shape[0] % 3:
        raise CheckpointError(
            f"has {weight.shape[0]} rows; expected a multiple of 3: query, then key, then value."
        )
    query, key, value = weight.chunk(3)
    if not (bool((query == key).all()) and bool((query == value).all())):
        raise CheckpointError(
            "holds different projections for query, key and value; in CRATE-alpha they are equal."
        )
    return query


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
        Stack(
            "visual.transformer.resblocks.{l}.",
            {
                "ln_1.*": "ln1.*",
                "attn.in_proj_weight": "attn.u_proj.weight",
                "attn.out_proj.weight": "attn.out_proj.weight",
                "ln_2.*": "ln2.*",
                "mlp.c_fc": "mlp.D",  # a raw parameter, not a Linear
                "mlp.c_proj": "mlp.D1",
            },
            target="visual.blocks.{l}.",
        ),
        Stack(
            "transformer.resblocks.{l}.",
            {
                "ln_1.*": "ln1.*",
                "attn.in_proj_weight": "attn.qkv_proj.weight",
                "attn.in_proj_bias": "attn.qkv_proj.bias",
                "attn.out_proj.*": "attn.out_proj.*",
                "ln_2.*": "ln2.*",
                "mlp.c_fc.*": "mlp.fc_in.*",
                "mlp.c_proj.*": "mlp.fc_out.*",
            },
            target="text.blocks.{l}.",
            count="text_n_layers",
        ),
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
