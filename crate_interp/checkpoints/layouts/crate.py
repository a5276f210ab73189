"""Ma-Lab-Berkeley/CRATE model/crate.py: the classifier.

A second layout is for the classifier in the ImageNet-21k demo, which has another head.
"""

import math
from dataclasses import replace

from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, Stack, most_square
from crate_interp.core.errors import CheckpointError

# the layouts of CRATE-alpha use these keys too
LAYER = "transformer.layers.{l}."
BLOCK = {
    "0.norm.*": "ln1.*",
    "0.fn.qkv.weight": "attn.u_proj.weight",
    "0.fn.to_out.0.weight": "attn.out_proj.weight",
    "1.norm.*": "ln2.*",
}
# sizes that the files of all torch classifiers, CRATE and CRATE-alpha, reveal
SIZES: dict[str, tuple[str | None, ...]] = {
    "transformer.layers.0.0.fn.qkv.weight": ("inner", "d_model"),
    "mlp_head.1.weight": ("n_classes", None),
}
TOP = {
    "pos_embedding": "pos_embed",
    "cls_token": "cls_token",
    "mlp_head.0.*": "ln_final.*",
    "mlp_head.1.*": "unembed.*",
}


def _patches(shapes: Shapes, given: Fields) -> Fields:
    """Returns channels and patch size.

    CRATE flattens patches, so the file reveals only the product height * width * channels.
    """
    values = shapes.of("to_patch_embedding.2.weight")[1]
    channels = given.get("channels", 3)
    if "patch_size" in given:
        height, width = given["patch_size"]
        if height * width * channels != values:
            fits = values % (height * width) == 0
            raise CheckpointError(
                f"patch_size={given['patch_size']!r} with channels={channels} contradicts "
                f"to_patch_embedding.2.weight: its patches have {values} values, "
                f"not {height * width * channels}."
                + (f" Give channels={values // (height * width)}." if fits else "")
            )
        return {"channels": channels, "patch_size": (height, width)}
    side = math.isqrt(values // channels)
    if side * side * channels != values:
        fitting = 1 if values % channels else channels
        rows, columns = most_square(values // fitting)
        size = "" if rows == columns else f", patch_size=({rows}, {columns})"
        kind = "grey" if fitting == 1 else f"of {fitting} channels"
        raise CheckpointError(
            f"patch_size cannot be inferred: patches have {values} values, which is not a square "
            f"times channels={channels}. Give ci.load(..., channels={fitting}{size}), if images "
            f"are {kind} and patches are {rows} x {columns}."
        )
    return {"channels": channels, "patch_size": (side, side)}


CRATE = Layout(
    family="crate",
    markers=("to_patch_embedding.2.weight", "transformer.layers.0.1.fn.weight"),
    top=TOP
    | {
        "to_patch_embedding.1.*": "embed.norm_patch.*",
        "to_patch_embedding.2.*": "embed.proj.*",
        "to_patch_embedding.3.*": "embed.norm_token.*",
    },
    stacks=(
        Stack(LAYER, BLOCK | {"0.fn.to_out.0.bias": "attn.out_proj.bias", "1.fn.weight": "mlp.D"}),
    ),
    sizes=SIZES | {"transformer.layers.0.1.fn.weight": (None, "d_mlp")},
    positions=("pos_embedding", 3),
    infer=_patches,
)

DEMO_21K = replace(  # mlp_head makes features, and head makes the logits of the classes
    CRATE,
    markers=(*CRATE.markers, "head.weight"),
    top=CRATE.top | {"mlp_head.1.*": "features.*", "head.*": "unembed.*"},
    sizes=CRATE.sizes
    | {"mlp_head.1.weight": ("d_features", None), "head.weight": ("n_classes", None)},
)
