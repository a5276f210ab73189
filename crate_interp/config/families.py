"""How the families of CRATE differ, as data: properties, defaults and choices."""

from typing import NotRequired, TypedDict

VARIANTS = ("crate", "c", "n", "t", "fix", "identity")
WITH_VARIANTS = ("crate", "crate-alpha", "aot")  # the families that may have another than "crate"
POOLS = ("cls", "mean")
STEMS = ("linear", "conv")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
TRANSPARENCIES = ("drop", "white")
TOKENIZERS = ("gpt2", "bert", "file")
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
    bridged: NotRequired[bool]  # whether its models are other networks than CRATE, behind a bridge


FAMILIES: dict[str, Facts] = {
    "crate": {  # Ma-Lab-Berkeley/CRATE model/crate.py
        "kind": "vision", "sparse_step": "ista", "d_mlp_ratio": 1, "residual": False,
        "attention": "mssa", "output_bias": True, "head_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1,
    },
    "crate-alpha": {  # UCSC-VLAA/CRATE-alpha torch_inference/model/crate_alpha.py
        "kind": "vision", "sparse_step": "odl", "d_mlp_ratio": 4, "residual": True,
        "attention": "mssa", "output_bias": False, "conv_bias": True, "head_bias": True,
        "norm": "LN", "ln_eps": 1e-6, "ln_final_eps": 1e-5, "lambd": 0.1,
    },
    "crate-mae": {  # Ma-Lab-Berkeley/CRATE model/crate_ae
        "kind": "mae", "sparse_step": "ista", "d_mlp_ratio": 1, "residual": False,
        "attention": "mssa", "output_bias": True, "conv_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-6, "lambd": 0.5,
    },
    "crate-lm": {  # crate-lm/crate-lm crate_overcomplete.py; crate.py with sparse_step="ista"
        "kind": "text", "sparse_step": "tied-odl", "d_mlp_ratio": 4, "residual": False,
        "attention": "mssa", "output_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1, "causal": True, "prepend_bos": False,
    },
    "gpt-baseline": {  # crate-lm/crate-lm gpt.py
        "kind": "text", "sparse_step": "mlp-relu", "d_mlp_ratio": 4, "residual": True,
        "attention": "self", "output_bias": None, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1, "causal": True, "prepend_bos": False,
    },
    "nanochat-crate": {  # modularflow/nanochat-crate-a nanochat/crate.py
        "kind": "text", "sparse_step": "threshold", "d_mlp_ratio": 4, "residual": True,
        "attention": "mssa", "output_bias": False, "norm": "RMS",
        "ln_eps": 2.0**-23, "ln_final_eps": 2.0**-23, "lambd": 0.1, "causal": True,
        "prepend_bos": True, "softcap": 15.0,
    },
    "clipa": {  # UCSC-VLAA/CRATE-alpha torch_inference/model/clipa_model.py: both towers
        "kind": "clip", "sparse_step": "odl", "d_mlp_ratio": 4, "residual": True,
        "attention": "mssa", "output_bias": False, "norm": "LN",
        "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.1, "prepend_bos": True,
    },
    "clipa-visual": {  # the image tower of clipa
        "kind": "vision", "sparse_step": "odl", "d_mlp_ratio": 4, "residual": True,
        "attention": "mssa", "output_bias": False, "conv_bias": False, "head_bias": False,
        "norm": "LN", "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.1,
    },
    "clipa-text": {  # the text tower of clipa: a plain transformer
        "kind": "text", "sparse_step": "mlp-gelu", "d_mlp_ratio": 4, "residual": True,
        "attention": "self", "output_bias": None, "norm": "LN",
        "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.1, "causal": False, "prepend_bos": True,
    },
    "tost": {  # RobinWu218/ToST tost_vision/tost.py
        "kind": "vision", "sparse_step": "mlp-gelu-exact", "d_mlp_ratio": 4, "residual": True,
        "attention": "tssa", "output_bias": True, "code_bias": True, "layer_scale": True,
        "class_layers": 2, "fourier": True, "stem": "conv", "head_bias": True, "norm": "LN",
        "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.0,
    },
    "tost-lm": {  # RobinWu218/ToST tost_lang/model_TSSA.py
        "kind": "text", "sparse_step": "mlp-gelu-exact", "d_mlp_ratio": 4, "residual": True,
        "attention": "tssa", "output_bias": None, "code_bias": None, "layer_scale": True,
        "norm": "LN", "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.0, "causal": True,
        "prepend_bos": False,
    },
    "cbt": {  # QishuaiWen/CBSA CBSA_image_classification/models.py
        "kind": "vision", "sparse_step": "ista", "d_mlp_ratio": 1, "residual": False,
        "attention": "cbsa", "output_bias": True, "stem": "conv", "head_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1,
    },
    "tost-ista": {  # the same file: ToST's attention, then ISTA
        "kind": "vision", "sparse_step": "ista", "d_mlp_ratio": 1, "residual": False,
        "attention": "tssa", "output_bias": True, "stem": "conv", "head_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1,
    },
    "aot": {  # arXiv 2506.03790, attention only; no code is public
        "kind": "vision", "sparse_step": "none", "d_mlp_ratio": 1, "residual": True,
        "attention": "mssa", "variant": "c", "output_bias": True, "head_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.0,
    },
    "vit": {  # any image network behind a bridge: crate_interp/bridge/bridge_to_hooked.py
        "kind": "vision", "sparse_step": "mlp", "d_mlp_ratio": 4, "residual": True,
        "attention": "self", "output_bias": True, "norm": "LN",
        "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.0, "bridged": True,
    },
    "gpt": {  # any causal language model behind a bridge
        "kind": "text", "sparse_step": "mlp", "d_mlp_ratio": 4, "residual": True,
        "attention": "self", "output_bias": True, "norm": "LN",
        "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.0, "causal": True, "bridged": True,
    },
}  # fmt: skip

# Steps whose dictionary is square and whose code replaces the stream.
SQUARE_STEPS = ("ista",)
STEPS_WITH_ETA = ("ista", "odl", "tied-odl")  # eta and lambd are numbers in the code of these steps

# The sparse steps that a family may have besides its default, because its authors published both.
OTHER_STEPS = {"crate-alpha": ("ista",), "crate-lm": ("ista",)}

# The fields of all kinds of configs, in the order of config.json.
FIELD_ORDER = (
    "family", "d_model", "n_layers", "n_heads", "variant", "output_matrix", "sparse_step",
    "image_size", "patch_size", "channels", "n_classes", "d_features", "d_head", "d_mlp", "eta",
    "lambd", "ln_eps", "ln_final_eps", "n_ctx", "d_vocab", "bias", "window", "window_pattern",
    "softcap", "rotary_base", "tokenizer", "prepend_bos", "decoder_n_layers", "decoder_n_heads",
    "norm_pix_loss", "d_embed", "text_d_model", "text_n_layers", "text_n_heads", "pool", "stem",
    "class_layers",
    "interpolate_pos", "resize", "crop", "interpolation", "transparency", "bits", "mean", "std",
    "labels", "model_name", "architecture", "subspaces", "value_heads", "special_tokens",
    "rms_norm", "rotations", "grid_guessed", "assumed",
)  # fmt: skip
# Settings that no tensor of a file can contradict: a wrong one gives other numbers and no error.
UNTESTABLE = (
    "eta", "lambd", "ln_eps", "ln_final_eps", "variant", "pool", "window", "mean", "std", "resize",
    "crop",
)  # fmt: skip
