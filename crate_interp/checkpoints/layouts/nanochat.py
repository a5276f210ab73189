"""modularflow/nanochat-crate-a nanochat/crate.py: safetensors with a config.json beside it."""

from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack, shape_of
from crate_interp.core.errors import CheckpointError

_H = "transformer.h.{l}."
# switches of config.json, and the only value of each that our model follows
_FOLLOWED = {"odl_use_residual": True, "odl_use_relu": True, "sparse_block_type": "odl"}


def _translate(config: Fields) -> Fields:
    for name, value in _FOLLOWED.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"its config.json says {name}={config[name]!r}: no published model has that, "
                f"only {value!r} can be loaded."
            )
    names = {
        "n_layer": "n_layers", "n_head": "n_heads", "n_embd": "d_model", "sequence_len": "n_ctx",
        "vocab_size": "d_vocab", "window_pattern": "window_pattern",
    }  # fmt: skip
    return {ours: config[theirs] for theirs, ours in names.items() if theirs in config}


def _infer(shapes: Shapes, given: Fields) -> Fields:
    rows, d_model = shape_of(shapes, "transformer.wte.weight")
    d_vocab = given.get("d_vocab") or rows
    if -(-d_vocab // 64) * 64 != rows:
        raise CheckpointError(
            f"d_vocab={d_vocab} contradicts transformer.wte.weight: with it there would be "
            f"{-(-d_vocab // 64) * 64} rows (a multiple of 64), there are {rows}."
        )
    first = _H.format(l=0)
    inner = shape_of(shapes, first + "mssa.qkv.weight")[0]
    d_mlp = shape_of(shapes, first + "odl.D_enc.weight")[0]
    return {"d_vocab": d_vocab, "d_model": d_model, "inner": inner, "d_mlp": d_mlp}


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
            {
                _H + "mssa.qkv.weight": "blocks.{l}.attn.u_proj.weight",
                _H + "mssa.c_proj.weight": "blocks.{l}.attn.out_proj.weight",
                _H + "odl.D_enc.weight": "blocks.{l}.mlp.D",
                _H + "odl.D_dec.weight": "blocks.{l}.mlp.D1",
                _H + "odl.threshold": "blocks.{l}.mlp.threshold",
            }
        ),
    ),
    infer=_infer,
    translate=_translate,
    defaults={"tokenizer": "file"},
    needed=("n_heads", "n_ctx"),
    optional={"resid_lambdas": 1.0, "x0_lambdas": 0.0},  # older code has neither
    views={r"D_enc\.weight": ((2,), lambda weight: weight.mT)},  # ours is [d_model, d_mlp]
)
