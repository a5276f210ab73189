"""modularflow/nanochat-crate-a nanochat/crate.py: safetensors with a config.json next to it."""

from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack
from crate_interp.core.errors import CheckpointError


def _vocabulary(shapes: Shapes, given: Fields) -> Fields:
    rows = shapes.of("transformer.wte.weight")[0]
    d_vocab = given.get("d_vocab") or rows
    if -(-d_vocab // 64) * 64 != rows:
        raise CheckpointError(
            f"d_vocab={d_vocab} contradicts transformer.wte.weight, which has {rows} rows: with "
            f"this d_vocab it would have {-(-d_vocab // 64) * 64} (the next multiple of 64)."
        )
    return {"d_vocab": d_vocab}


NANOCHAT = Layout(
    family="nanochat-crate",
    markers=("transformer.wte.weight", "lm_head.weight", "transformer.h.0.odl.D_enc.weight"),
    top={
        "transformer.wte.weight": "embed.weight",
        "lm_head.weight": "unembed.weight",
        "resid_lambdas": "resid_lambdas",
        "x0_lambdas": "x0_lambdas",
    },
    stacks=(
        Stack(
            "transformer.h.{l}.",
            {
                "mssa.qkv.weight": "attn.u_proj.weight",
                "mssa.c_proj.weight": "attn.out_proj.weight",
                "odl.D_enc.weight": "mlp.D",
                "odl.D_dec.weight": "mlp.D1",
                "odl.threshold": "mlp.threshold",
            },
        ),
    ),
    sizes={
        "transformer.wte.weight": (None, "d_model"),
        "transformer.h.0.mssa.qkv.weight": ("inner", None),
        "transformer.h.0.odl.D_enc.weight": ("d_mlp", None),
    },
    infer=_vocabulary,
    config_names={
        "n_layer": "n_layers", "n_head": "n_heads", "n_embd": "d_model", "sequence_len": "n_ctx",
        "vocab_size": "d_vocab", "window_pattern": "window_pattern",
    },
    followed={"odl_use_residual": True, "odl_use_relu": True, "sparse_block_type": "odl"},
    defaults={"tokenizer": "file"},
    needed=("n_heads", "n_ctx"),
    optional={"resid_lambdas": 1.0, "x0_lambdas": 0.0},  # older code has neither
    views={r"D_enc\.weight": ((2,), lambda weight: weight.mT)},  # ours is [d_model, d_mlp]
)  # fmt: skip
