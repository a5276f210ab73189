"""The published layouts: for each, the key map, the keys that tell it, and what its tensors say about the config."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from crate_interp.checkpoints.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
_LAYER = r"transformer\.layers\.(\d{1,9})\."


@dataclass(frozen=True)
class Layout:
    """One way weights are published. The tables map a source key to the parameter of HookedCrate it fills."""

    family: str
    markers: tuple[str, ...]  # a file with all of these keys has this layout
    top: dict[str, str]
    block: dict[str, str]  # {l} is the layer
    infer_patches: Callable[[Shapes, dict[str, Any]], dict[str, Any]]


def _crate_patches(shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    """CRATE flattens patches: only height * width * channels is in the file."""
    values = _shape(shapes, "to_patch_embedding.2.weight")[1]
    channels = given.get("channels", 3)
    if "patch_size" in given:
        height, width = given["patch_size"]
        if height * width * channels != values:
            raise CheckpointError(
                f"patch_size={given['patch_size']!r} with channels={channels} contradicts to_patch_embedding.2.weight: "
                f"its patches have {values} values, not {height * width * channels}."
            )
        return {"channels": channels, "patch_size": (height, width)}
    side = math.isqrt(values // channels)
    if side * side * channels != values:
        raise CheckpointError(
            f"patch_size cannot be inferred: patches have {values} values, which is no square times channels={channels}. "
            "Give it: ci.load(..., patch_size=(8, 4)), or channels=1 for grey images."
        )
    return {"channels": channels, "patch_size": (side, side)}


def _alpha_patches(shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    _, channels, height, width = _shape(shapes, "conv1.weight", 4)
    return {"channels": channels, "patch_size": (height, width)}


_BLOCK = {
    "transformer.layers.{l}.0.norm.weight": "blocks.{l}.ln1.weight",
    "transformer.layers.{l}.0.norm.bias": "blocks.{l}.ln1.bias",
    "transformer.layers.{l}.0.fn.qkv.weight": "blocks.{l}.attn.u_proj.weight",
    "transformer.layers.{l}.0.fn.to_out.0.weight": "blocks.{l}.attn.out_proj.weight",
    "transformer.layers.{l}.1.norm.weight": "blocks.{l}.ln2.weight",
    "transformer.layers.{l}.1.norm.bias": "blocks.{l}.ln2.bias",
}
_TOP = {
    "pos_embedding": "pos_embed",
    "cls_token": "cls_token",
    "mlp_head.0.weight": "ln_final.weight",
    "mlp_head.0.bias": "ln_final.bias",
    "mlp_head.1.weight": "unembed.weight",
    "mlp_head.1.bias": "unembed.bias",
}

LAYOUTS = (
    Layout(  # Ma-Lab-Berkeley/CRATE model/crate.py
        family="crate",
        markers=("to_patch_embedding.2.weight", "transformer.layers.0.1.fn.weight"),
        top=_TOP
        | {
            "to_patch_embedding.1.weight": "embed.norm_patch.weight",
            "to_patch_embedding.1.bias": "embed.norm_patch.bias",
            "to_patch_embedding.2.weight": "embed.proj.weight",
            "to_patch_embedding.2.bias": "embed.proj.bias",
            "to_patch_embedding.3.weight": "embed.norm_token.weight",
            "to_patch_embedding.3.bias": "embed.norm_token.bias",
        },
        block=_BLOCK
        | {
            "transformer.layers.{l}.0.fn.to_out.0.bias": "blocks.{l}.attn.out_proj.bias",
            "transformer.layers.{l}.1.fn.weight": "blocks.{l}.mlp.D",
        },
        infer_patches=_crate_patches,
    ),
    Layout(  # UCSC-VLAA/CRATE-alpha torch_inference/model/crate_alpha.py
        family="crate-alpha",
        markers=("conv1.weight", "transformer.layers.0.1.fn.D"),
        top=_TOP | {"conv1.weight": "embed.conv.weight", "conv1.bias": "embed.conv.bias"},
        block=_BLOCK
        | {
            "transformer.layers.{l}.1.fn.D": "blocks.{l}.mlp.D",
            "transformer.layers.{l}.1.fn.D1": "blocks.{l}.mlp.D1",
        },
        infer_patches=_alpha_patches,
    ),
)


def find_layout(shapes: Shapes, family: str | None, where: str) -> Layout:
    """The layout of a file, from `family` or from its keys; CheckpointError where none fits."""
    if "unembed.weight" in shapes and "pos_embed" in shapes:
        raise CheckpointError(
            f"{where} has the names of a hooked model, which do not say its config: write model.save_pretrained(folder) "
            "and load the folder."
        )
    if family is not None:
        for layout in LAYOUTS:
            if layout.family == family:
                return layout
        known = ", ".join(repr(layout.family) for layout in LAYOUTS)
        raise CheckpointError(f"family={family!r} has no known layout: give one of {known}.")
    fitting = [layout for layout in LAYOUTS if all(key in shapes for key in layout.markers)]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(f"{layout.family} has {' and '.join(layout.markers)}" for layout in LAYOUTS)
    some = ", ".join(list(shapes)[:4])
    raise CheckpointError(f"{where} has no published layout: its {len(shapes)} keys begin {some}; {known}.")


def key_map(layout: Layout, n_layers: int) -> dict[str, str]:
    """Every source key of the layout and the parameter it fills."""
    layers = {
        source.format(l=layer): target.format(l=layer)
        for layer in range(n_layers)
        for source, target in layout.block.items()
    }
    return layout.top | layers


def check_depth(keys: Iterable[str], pattern: str, n_layers: int) -> None:
    """A file of a kilobyte can claim a million layers, which would be built one by one before any key is compared."""
    held = len({match[1] for key in keys if (match := re.match(pattern, key))})
    if n_layers > held + 100:
        raise CheckpointError(f"{n_layers} layers are claimed, and there are tensors of {held}.")


def infer_config(layout: Layout, shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    """The config fields that the tensors (with `given`, whose sizes are checked) determine; CheckpointError where both disagree."""
    depth = 1 + max((int(match[1]) for key in shapes if (match := re.match(_LAYER, key))), default=0)
    check_depth(shapes, _LAYER, depth)
    codes = "transformer.layers.0.0.fn.qkv.weight"
    inner, d_model = _shape(shapes, codes)
    found: dict[str, Any] = {
        "d_model": d_model,
        "n_layers": depth,
        "n_classes": _shape(shapes, "mlp_head.1.weight")[0],
        "d_mlp": _shape(shapes, "transformer.layers.0.1.fn." + ("weight" if layout.family == "crate" else "D"))[1],
    }
    if inner % given["n_heads"]:
        raise CheckpointError(f"n_heads={given['n_heads']} does not divide the {inner} rows of {codes}.")
    found["d_head"] = inner // given["n_heads"]
    found |= layout.infer_patches(shapes, given)
    found |= _image_size(shapes, found["patch_size"], given)
    for name, value in found.items():
        if name in given and given[name] not in (None, value):
            raise CheckpointError(f"{name}={given[name]!r} contradicts the tensors, which make it {value!r}.")
    return found


def _image_size(shapes: Shapes, patch: tuple[int, int], given: dict[str, Any]) -> dict[str, Any]:
    patches = _shape(shapes, "pos_embedding", 3)[1] - 1
    if "image_size" in given:
        height, width = given["image_size"]
        if height % patch[0] or width % patch[1] or (height // patch[0]) * (width // patch[1]) != patches:
            raise CheckpointError(
                f"image_size={given['image_size']!r} with patches of {patch} contradicts pos_embedding, "
                f"which has {patches} patches."
            )
        return {"image_size": (height, width)}
    side = math.isqrt(patches)
    if side * side != patches:
        raise CheckpointError(
            f"image_size cannot be inferred: {patches} patches make no square grid. "
            f"Give it: ci.load(..., image_size=({patch[0]}, {patch[1] * patches})) or another (h, w) with {patches} patches."
        )
    return {"image_size": (side * patch[0], side * patch[1])}


def _shape(shapes: Shapes, key: str, ndim: int = 2) -> tuple[int, ...]:
    if key not in shapes:
        raise CheckpointError(f"the key {key} is missing; the file's keys begin {', '.join(list(shapes)[:4])}.")
    if len(shapes[key]) != ndim:
        raise CheckpointError(f"{key} has shape {shapes[key]}, wanted {ndim} axes.")
    return shapes[key]
