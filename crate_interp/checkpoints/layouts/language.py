"""The layouts of language models: CRATE-LM and its baseline, nanochat's, ToST, CRATE-BERT.

The model_args in a file of CRATE-LM or ToST give the fields that its shapes do not reveal. Code:
crate-lm/crate-lm, modularflow/nanochat-crate-a `nanochat/crate.py`, RobinWu218/ToST `tost_lang`.
"""

from dataclasses import replace

from crate_interp.checkpoints.layouts.images import ISTA_BLOCK, LAYER
from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack
from crate_interp.core.errors import CheckpointError

_LAYER, _FIRST = "transformer.h.{l}.", "transformer.h.0."
_TOP = {"transformer.wte.weight": "embed.weight", "transformer.wpe.weight": "pos_embed"}
_CRATE_BLOCK = {
    "prenorm_1.*": "ln1.*",
    "attn.c_attn.weight": "attn.u_proj.weight",
    "attn.c_proj.*": "attn.out_proj.*",
    "prenorm_2.*": "ln2.*",
    "ista.weight": "mlp.D",
}
_GPT_BLOCK = {
    "ln_1.*": "ln1.*",
    "attn.c_attn.*": "attn.qkv_proj.*",
    "attn.c_proj.*": "attn.out_proj.*",
    "ln_2.*": "ln2.*",
    "mlp.c_fc.*": "mlp.fc_in.*",
    "mlp.c_proj.*": "mlp.fc_out.*",
}


_TABLES: dict[str, tuple[str | None, ...]] = {
    "transformer.wte.weight": ("d_vocab", "d_model"),
    "transformer.wpe.weight": ("n_ctx", None),
}


OVERCOMPLETE = Layout(  # crate_overcomplete.py
    family="crate-lm",
    markers=("transformer.wpe.weight", "transformer.h.0.ista.weight", "transformer.ln_f.weight"),
    top=_TOP | {"transformer.ln_f.*": "ln_final.*"},
    stacks=(Stack(_LAYER, _CRATE_BLOCK),),
    sizes=_TABLES
    | {_FIRST + "attn.c_attn.weight": ("inner", None), _FIRST + "ista.weight": ("d_mlp", None)},
    config_names={
        "n_layer": "n_layers", "n_head": "n_heads", "n_embd": "d_model", "block_size": "n_ctx",
        "vocab_size": "d_vocab",
    },
    defaults={"tokenizer": "gpt2"},
    views={r"ista\.weight": ((2,), lambda weight: weight.mT)},  # ours is [d_model, d_mlp]
    unused=(r"transformer\.h\.\d+\.attn\.bias",),  # buffers of the causal mask
    copies={"lm_head.weight": "transformer.wte.weight"},
)  # fmt: skip

VANILLA = replace(  # crate.py: a square dictionary, no final norm
    OVERCOMPLETE,
    markers=("transformer.wpe.weight", "transformer.h.0.ista.weight"),
    top=_TOP,
    defaults={"tokenizer": "gpt2", "sparse_step": "ista"},
    views={},
)

GPT = replace(  # gpt.py; with bias=False it has no bias
    VANILLA,
    family="gpt-baseline",
    markers=("transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"),
    top=OVERCOMPLETE.top,
    stacks=(Stack(_LAYER, _GPT_BLOCK),),
    sizes=_TABLES
    # all heads' queries, keys and values are one map
    | {_FIRST + "attn.c_attn.weight": ("3 inner", None)}
    | {_FIRST + "mlp.c_fc.weight": ("d_mlp", None)},
    infer=lambda shapes, _: {"bias": _FIRST + "ln_1.bias" in shapes},
    config_switches=("bias",),  # the CRATE classes ignore this switch
    defaults={"tokenizer": "gpt2"},
)


def _vocabulary(shapes: Shapes, fields: Fields) -> Fields:
    rows = shapes.of("transformer.wte.weight")[0]
    d_vocab = fields.get("d_vocab") or rows
    if -(-d_vocab // 64) * 64 != rows:
        raise CheckpointError(
            f"d_vocab={d_vocab} contradicts transformer.wte.weight, which has {rows} rows: with "
            f"this d_vocab it would have {-(-d_vocab // 64) * 64} (the next multiple of 64)."
        )
    return {"d_vocab": d_vocab}


_NANOCHAT_BLOCK = {
    "mssa.qkv.weight": "attn.u_proj.weight",
    "mssa.c_proj.weight": "attn.out_proj.weight",
    "odl.D_enc.weight": "mlp.D",
    "odl.D_dec.weight": "mlp.D1",
    "odl.threshold": "mlp.threshold",
}
NANOCHAT = Layout(
    family="nanochat-crate",
    markers=("transformer.wte.weight", "lm_head.weight", "transformer.h.0.odl.D_enc.weight"),
    top={
        "transformer.wte.weight": "embed.weight",
        "lm_head.weight": "unembed.weight",
        "resid_lambdas": "resid_lambdas",
        "x0_lambdas": "x0_lambdas",
    },
    stacks=(Stack(_LAYER, _NANOCHAT_BLOCK),),
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

_TOST_BLOCK = _GPT_BLOCK | {  # one map makes the codes
    "attn.c_attn.*": "attn.u_proj.*",
    "gamma1": "attn.gamma",
    "gamma2": "mlp.gamma",
    "attn.temp": "attn.temp",
    "attn.denom_bias": "attn.denom_bias",
}
TOST = replace(  # model_TSSA.py
    GPT,
    family="tost-lm",
    markers=("transformer.wpe.weight", _FIRST + "attn.temp", _FIRST + "attn.denom_bias"),
    stacks=(Stack(_LAYER, _TOST_BLOCK),),
    sizes=GPT.sizes | {"transformer.h.0.attn.c_attn.weight": ("inner", None)},
    followed={"TSSA": True},
)

_EMBED = "transformer.embed."
BERT = Layout(  # model_steps_N.pt
    family="crate-bert",
    markers=(_EMBED + "tok_embed.weight", _EMBED + "seg_embed.weight", "decoder_bias"),
    top={
        _EMBED + "tok_embed.weight": "embed.weight",
        _EMBED + "pos_embed.weight": "pos_embed",
        _EMBED + "seg_embed.weight": "segment_embed",
        _EMBED + "norm.*": "ln_embed.*",
        "linear.*": "ln_final.dense.*",
        "norm.gamma": "ln_final.weight",
        "norm.beta": "ln_final.bias",
        "decoder_bias": "unembed.bias",
        "fc.*": "next_sentence.0.*",
        "classifier.*": "next_sentence.2.*",
    },
    stacks=(Stack(LAYER, ISTA_BLOCK),),
    sizes={
        _EMBED + "tok_embed.weight": ("d_vocab", "d_model"),
        _EMBED + "pos_embed.weight": ("n_ctx", None),
        "transformer.layers.0.0.fn.qkv.weight": ("inner", None),
    },
    defaults={"tokenizer": "bert"},
    copies={"decoder.weight": _EMBED + "tok_embed.weight"},
)
