"""How the families of CRATE differ, as data: properties, defaults and choices."""

from typing import Any, NotRequired, TypedDict, cast

WITH_VARIANTS = ("crate", "crate-alpha", "aot")  # the families that may have another than "crate"
# the maps of a network behind a bridge that can be measured in place of U
SUBSPACES = ("value", "key", "query")


class Facts(TypedDict):
    """The properties that all models of one family share."""

    kind: str  # which forward pass and which class of config its models have
    sparse_step: str  # the step after attention (crate_interp/models/layers/sparse_steps.py)
    d_mlp_ratio: int  # width of the sparse code divided by d_model
    residual: bool  # whether the output of the sparse step is added to the stream
    attention: str  # "mssa", "tssa", "cbsa" or "self" (crate_interp/models/layers/)
    output_bias: bool | None  # whether attention's output map has a bias; None: cfg.bias decides
    norm: str  # "LN" or "RMS"
    ln_eps: float
    ln_final_eps: float
    lambd: float
    conv_bias: NotRequired[bool]  # whether a convolution that embeds patches has a bias
    head_bias: NotRequired[bool]  # whether a map to classes has a bias
    code_bias: NotRequired[bool | None]  # whether the map to the codes has one; None: cfg.bias
    layer_scale: NotRequired[bool]  # whether what a layer adds is scaled, feature by feature
    class_layers: NotRequired[int]  # the default of cfg.class_layers
    fourier: NotRequired[bool]  # whether positions are computed from waves, not stored
    stem: NotRequired[str]  # the default of cfg.stem
    variant: NotRequired[str]  # the default of cfg.variant
    causal: NotRequired[bool]
    prepend_bos: NotRequired[bool]
    softcap: NotRequired[float]
    segments: NotRequired[int]  # how many segments of a text have an embedding
    bridged: NotRequired[bool]  # whether its models are other networks than CRATE, behind a bridge


# what most families have, and what some families share
_COMMON: dict[str, Any] = {
    "d_mlp_ratio": 4, "residual": True, "attention": "mssa", "output_bias": True, "norm": "LN",
    "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1,
}  # fmt: skip
_CLASSES: dict[str, Any] = {"kind": "vision", "head_bias": True}
_TEXT: dict[str, Any] = {"kind": "text", "causal": True, "prepend_bos": False}
_ISTA: dict[str, Any] = {"sparse_step": "ista", "d_mlp_ratio": 1, "residual": False}
_ODL: dict[str, Any] = {
    "sparse_step": "odl", "output_bias": False, "ln_eps": 1e-6, "ln_final_eps": 1e-6,
}  # fmt: skip
_TSSA: dict[str, Any] = {
    "sparse_step": "mlp-gelu-exact", "attention": "tssa", "layer_scale": True, "lambd": 0.0,
}  # fmt: skip
_BRIDGED: dict[str, Any] = {
    "sparse_step": "mlp", "attention": "self", "lambd": 0.0, "bridged": True,
}  # fmt: skip

_OWN: dict[str, dict[str, Any]] = {
    # Ma-Lab-Berkeley/CRATE model/crate.py
    "crate": _CLASSES | _ISTA,
    # UCSC-VLAA/CRATE-alpha torch_inference/model/crate_alpha.py
    "crate-alpha": _CLASSES | _ODL | {"conv_bias": True, "ln_final_eps": 1e-5},
    # Ma-Lab-Berkeley/CRATE model/crate_ae
    "crate-mae": _ISTA | {"kind": "mae", "conv_bias": True, "ln_final_eps": 1e-6, "lambd": 0.5},
    # crate-lm/crate-lm crate_overcomplete.py; crate.py with sparse_step="ista"
    "crate-lm": _TEXT | {"sparse_step": "tied-odl", "residual": False},
    # crate-lm/crate-lm gpt.py
    "gpt-baseline": _TEXT | {"sparse_step": "mlp-relu", "attention": "self", "output_bias": None},
    # modularflow/nanochat-crate-a nanochat/crate.py
    "nanochat-crate": _TEXT | {
        "sparse_step": "threshold", "output_bias": False, "norm": "RMS", "ln_eps": 2.0**-23,
        "ln_final_eps": 2.0**-23, "prepend_bos": True, "softcap": 15.0,
    },
    # UCSC-VLAA/CRATE-alpha torch_inference/model/clipa_model.py: both towers, then each of them
    "clipa": _ODL | {"kind": "clip", "prepend_bos": True},
    "clipa-visual": _CLASSES | _ODL | {"conv_bias": False, "head_bias": False},
    "clipa-text": {
        "kind": "text", "sparse_step": "mlp-gelu", "attention": "self", "output_bias": None,
        "ln_eps": 1e-6, "ln_final_eps": 1e-6, "causal": False, "prepend_bos": True,
    },
    # RobinWu218/ToST tost_vision/tost.py
    "tost": _CLASSES | _TSSA | {
        "code_bias": True, "class_layers": 2, "fourier": True, "stem": "conv", "ln_eps": 1e-6,
        "ln_final_eps": 1e-6,
    },
    # RobinWu218/ToST tost_lang/model_TSSA.py
    "tost-lm": _TEXT | _TSSA | {"output_bias": None, "code_bias": None},
    # CRATE-BERT, a re-implementation of 2024: text that is read both ways
    "crate-bert": _TEXT | _ISTA | {
        "causal": False, "prepend_bos": True, "ln_final_eps": 1e-12, "segments": 2,
    },
    # QishuaiWen/CBSA CBSA_image_classification/models.py: CBT, and ToST's attention, then ISTA
    "cbt": _CLASSES | _ISTA | {"attention": "cbsa", "stem": "conv"},
    "tost-ista": _CLASSES | _ISTA | {"attention": "tssa", "stem": "conv"},
    # arXiv 2506.03790, attention only; no code is public
    "aot": _CLASSES | {"sparse_step": "none", "d_mlp_ratio": 1, "variant": "c", "lambd": 0.0},
    # any image network, and any causal language model, behind a bridge
    "vit": _BRIDGED | {"kind": "vision", "ln_eps": 1e-6, "ln_final_eps": 1e-6},
    "gpt": _BRIDGED | {"kind": "text", "causal": True},
}  # fmt: skip
FAMILIES = {name: cast(Facts, _COMMON | own) for name, own in _OWN.items()}


def entry_word(sparse_step: str | None) -> str:
    """Returns what an entry of a layer's code is called: a neuron of an MLP, else an atom."""
    return "neuron" if (sparse_step or "").startswith("mlp") else "atom"


# Steps whose dictionary is square and whose code replaces the stream.
SQUARE_STEPS = ("ista",)
STEPS_WITH_ETA = ("ista", "odl", "tied-odl")  # eta and lambd are numbers in the code of these steps

# The sparse steps that a family may have besides its default, because its authors published both.
OTHER_STEPS = {"crate-alpha": ("ista",), "crate-lm": ("ista",)}

# Settings that no tensor of a file can contradict: a wrong one gives other numbers and no error.
UNTESTABLE = (
    "eta", "lambd", "ln_eps", "ln_final_eps", "variant", "pool", "window", "mean", "std", "resize",
    "crop",
)  # fmt: skip
