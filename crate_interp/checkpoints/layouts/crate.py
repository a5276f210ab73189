"""Ma-Lab-Berkeley/CRATE model/crate.py: the classifier.

A second layout is for the classifier in the ImageNet-21k demo, which has another head.
"""

import math

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
TOP = {
    "pos_embedding": "pos_embed",
    "cls_token": "cls_token",
    "mlp_head.0.*": "ln_final.*",
    "mlp_head.1.*": "unembed.*",
}


def torch_sizes(shapes: Shapes, given: Fields, dictionary: str) -> Fields:
    """Returns the sizes that the files of both torch classifiers, CRATE and CRATE-alpha, reveal."""
    inner, d_model = shapes.of("transformer.layers.0.0.fn.qkv.weight")
    n_classes = shapes.classes("mlp_head.1.weight", 0, given)
    d_mlp = shapes.of(dictionary)[1]
    return {"d_model": d_model, "inner": inner, "n_classes": n_classes, "d_mlp": d_mlp}


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


def _infer(shapes: Shapes, given: Fields) -> Fields:
    patches = _patches(shapes, given)
    size = shapes.image_size(patches["patch_size"], given, "pos_embedding")
    sizes = torch_sizes(shapes, given, "transformer.layers.0.1.fn.weight")
    return sizes | patches | size


def _infer_demo(shapes: Shapes, given: Fields) -> Fields:
    plain = _infer(shapes, given)
    if plain["n_classes"] == 0:  # the head is left out, and its features with it
        return plain
    return plain | {"d_features": plain["n_classes"], "n_classes": shapes.of("head.weight")[0]}


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
    infer=_infer,
)

DEMO_21K = Layout(  # mlp_head makes features, and head makes the logits of the classes
    family="crate",
    markers=(*CRATE.markers, "head.weight"),
    top=CRATE.top | {"mlp_head.1.*": "features.*", "head.*": "unembed.*"},
    stacks=CRATE.stacks,
    infer=_infer_demo,
)
