"""crate-lm/crate-lm: CRATE-LM overcomplete and vanilla, and the baseline that is like GPT-2.

The model_args in a file have the fields that are not in its shapes.
"""

from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack, shape_of

_H = "transformer.h.{l}."
_TOP = {"transformer.wte.weight": "embed.weight", "transformer.wpe.weight": "pos_embed"}
_FINAL = {"transformer.ln_f.weight": "ln_final.weight", "transformer.ln_f.bias": "ln_final.bias"}
_MASKS = (r"transformer\.h\.\d+\.attn\.bias",)  # buffers of the causal mask
_TIED = {"lm_head.weight": "transformer.wte.weight"}
_CRATE_BLOCK = {
    _H + "prenorm_1.weight": "blocks.{l}.ln1.weight",
    _H + "prenorm_1.bias": "blocks.{l}.ln1.bias",
    _H + "attn.c_attn.weight": "blocks.{l}.attn.u_proj.weight",
    _H + "attn.c_proj.weight": "blocks.{l}.attn.out_proj.weight",
    _H + "attn.c_proj.bias": "blocks.{l}.attn.out_proj.bias",
    _H + "prenorm_2.weight": "blocks.{l}.ln2.weight",
    _H + "prenorm_2.bias": "blocks.{l}.ln2.bias",
    _H + "ista.weight": "blocks.{l}.mlp.D",
}
_GPT_BLOCK = {
    _H + "ln_1.weight": "blocks.{l}.ln1.weight",
    _H + "attn.c_attn.weight": "blocks.{l}.attn.qkv_proj.weight",
    _H + "attn.c_proj.weight": "blocks.{l}.attn.out_proj.weight",
    _H + "ln_2.weight": "blocks.{l}.ln2.weight",
    _H + "mlp.c_fc.weight": "blocks.{l}.mlp.fc_in.weight",
    _H + "mlp.c_proj.weight": "blocks.{l}.mlp.fc_out.weight",
}


def _translate(config: Fields) -> Fields:
    names = {
        "n_layer": "n_layers",
        "n_head": "n_heads",
        "n_embd": "d_model",
        "block_size": "n_ctx",
        "vocab_size": "d_vocab",
    }
    return {ours: config[theirs] for theirs, ours in names.items() if theirs in config}


def _translate_gpt(config: Fields) -> Fields:
    bias = config.get("bias")  # the CRATE classes ignore it
    return _translate(config) | ({"bias": bias} if isinstance(bias, bool) else {})


def _tables(shapes: Shapes) -> Fields:
    d_vocab, d_model = shape_of(shapes, "transformer.wte.weight")
    n_ctx = shape_of(shapes, "transformer.wpe.weight")[0]
    return {"d_vocab": d_vocab, "d_model": d_model, "n_ctx": n_ctx}


def _infer(shapes: Shapes, given: Fields) -> Fields:
    inner = shape_of(shapes, _H.format(l=0) + "attn.c_attn.weight")[0]
    return _tables(shapes) | {
        "inner": inner,
        "d_mlp": shape_of(shapes, _H.format(l=0) + "ista.weight")[0],
    }


def _infer_gpt(shapes: Shapes, given: Fields) -> Fields:
    first = _H.format(l=0)
    return _tables(shapes) | {
        "inner": shape_of(shapes, first + "attn.c_attn.weight")[0] // 3,
        "d_mlp": shape_of(shapes, first + "mlp.c_fc.weight")[0],
        "bias": first + "ln_1.bias" in shapes,
    }


OVERCOMPLETE = Layout(  # crate_overcomplete.py
    family="crate-lm",
    markers=("transformer.wpe.weight", "transformer.h.0.ista.weight", "transformer.ln_f.weight"),
    top=_TOP | _FINAL,
    stacks=(Stack(_CRATE_BLOCK),),
    infer=_infer,
    translate=_translate,
    defaults={"tokenizer": "gpt2"},
    views={r"ista\.weight": ((2,), lambda weight: weight.mT)},  # ours is [d_model, d_mlp]
    unused=_MASKS,
    copies=_TIED,
)

VANILLA = Layout(  # crate.py: a square dictionary, no final norm
    family="crate-lm",
    markers=("transformer.wpe.weight", "transformer.h.0.ista.weight"),
    top=_TOP,
    stacks=(Stack(_CRATE_BLOCK),),
    infer=_infer,
    translate=_translate,
    defaults={"tokenizer": "gpt2", "sparse_step": "ista"},
    unused=_MASKS,
    copies=_TIED,
)

GPT = Layout(  # gpt.py with bias=False
    family="gpt-baseline",
    markers=("transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"),
    top=_TOP | {"transformer.ln_f.weight": "ln_final.weight"},
    stacks=(Stack(_GPT_BLOCK),),
    infer=_infer_gpt,
    translate=_translate_gpt,
    defaults={"tokenizer": "gpt2"},
    unused=_MASKS,
    copies=_TIED,
)

GPT_BIASED = Layout(  # gpt.py with bias=True
    family="gpt-baseline",
    markers=(*GPT.markers, "transformer.h.0.ln_1.bias"),
    top=_TOP | _FINAL,
    stacks=(
        Stack(
            _GPT_BLOCK
            | {
                key.replace("weight", "bias"): name.replace("weight", "bias")
                for key, name in _GPT_BLOCK.items()
            }
        ),
    ),
    infer=_infer_gpt,
    translate=_translate_gpt,
    defaults={"tokenizer": "gpt2"},
    unused=_MASKS,
    copies=_TIED,
)
