"""What sets the families of CRATE apart: data. Imports nothing."""

from typing import Any

# kind: which forward. sparse_step: what follows attention (crate_interp/models/sparsify.py, baseline.py); d_mlp_ratio:
# width of its code over d_model. residual: whether the stream is added to it. tied: query, key and value are one code.
# output_bias: of attention. conv_bias, head_bias: of the patch embedding and of the map to classes, where it has them.
FAMILIES: dict[str, dict[str, Any]] = {
    "crate": {  # Ma-Lab-Berkeley/CRATE model/crate.py
        "kind": "vision", "sparse_step": "ista", "d_mlp_ratio": 1, "residual": False, "tied": True, "output_bias": True,
        "head_bias": True, "norm": "LN", "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1,
    },
    "crate-alpha": {  # UCSC-VLAA/CRATE-alpha torch_inference/model/crate_alpha.py
        "kind": "vision", "sparse_step": "odl", "d_mlp_ratio": 4, "residual": True, "tied": True, "output_bias": False,
        "conv_bias": True, "head_bias": True, "norm": "LN", "ln_eps": 1e-6, "ln_final_eps": 1e-5, "lambd": 0.1,
    },
    "crate-mae": {  # Ma-Lab-Berkeley/CRATE model/crate_ae
        "kind": "mae", "sparse_step": "ista", "d_mlp_ratio": 1, "residual": False, "tied": True, "output_bias": True,
        "conv_bias": True, "norm": "LN", "ln_eps": 1e-5, "ln_final_eps": 1e-6, "lambd": 0.5,
    },
    "crate-lm": {  # crate-lm/crate-lm crate_overcomplete.py; crate.py with sparse_step="ista"
        "kind": "text", "sparse_step": "tied-odl", "d_mlp_ratio": 4, "residual": False, "tied": True, "output_bias": True,
        "norm": "LN", "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1, "causal": True, "prepend_bos": False,
    },
    "gpt-baseline": {  # crate-lm/crate-lm gpt.py
        "kind": "text", "sparse_step": "mlp-relu", "d_mlp_ratio": 4, "residual": True, "tied": False, "output_bias": None,
        "norm": "LN", "ln_eps": 1e-5, "ln_final_eps": 1e-5, "lambd": 0.1, "causal": True, "prepend_bos": False,
    },
    "nanochat-crate": {  # modularflow/nanochat-crate-a nanochat/crate.py
        "kind": "text", "sparse_step": "threshold", "d_mlp_ratio": 4, "residual": True, "tied": True, "output_bias": False,
        "norm": "RMS", "ln_eps": 2.0**-23, "ln_final_eps": 2.0**-23, "lambd": 0.1, "causal": True, "prepend_bos": True,
        "softcap": 15.0,
    },
    "clipa": {  # UCSC-VLAA/CRATE-alpha torch_inference/model/clipa_model.py, as a whole
        "kind": "clip", "sparse_step": "odl", "d_mlp_ratio": 4, "residual": True, "tied": True, "output_bias": False,
        "norm": "LN", "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.1, "prepend_bos": True,
    },
    "clipa-visual": {  # its image tower
        "kind": "vision", "sparse_step": "odl", "d_mlp_ratio": 4, "residual": True, "tied": True, "output_bias": False,
        "conv_bias": False, "head_bias": False, "norm": "LN", "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.1,
    },
    "clipa-text": {  # its text tower: a plain transformer
        "kind": "text", "sparse_step": "mlp-gelu", "d_mlp_ratio": 4, "residual": True, "tied": False, "output_bias": None,
        "norm": "LN", "ln_eps": 1e-6, "ln_final_eps": 1e-6, "lambd": 0.1, "causal": False, "prepend_bos": True,
    },
}  # fmt: skip

# The sparse steps a family may have beside its own, because its authors published models of both.
OTHER_STEPS = {"crate-alpha": ("ista",), "crate-lm": ("ista",)}

# The fields of CrateConfig that only models of some kinds have.
_IMAGES = (
    "image_size",
    "patch_size",
    "channels",
    "interpolate_pos",
    "resize",
    "crop",
    "interpolation",
    "mean",
    "std",
)
FIELDS_OF = {
    "vision": (*_IMAGES, "n_classes", "d_features", "pool", "labels"),
    "mae": (*_IMAGES, "decoder_n_layers", "decoder_n_heads", "norm_pix_loss"),
    "text": (
        "bias",
        "window",
        "window_pattern",
        "softcap",
        "rotary_base",
        "tokenizer",
        "prepend_bos",
        "d_embed",
    ),
    "clip": (
        *_IMAGES,
        "d_embed",
        "text_d_model",
        "text_n_layers",
        "text_n_heads",
        "tokenizer",
        "prepend_bos",
    ),
}
