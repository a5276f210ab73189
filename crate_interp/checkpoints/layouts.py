"""The published layouts: for each, the key map, the keys that tell it, and what its tensors say about the config."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from crate_interp.checkpoints.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
_LAYER = r"transformer\.layers\.(\d{1,9})\."
_JAX_LAYER = r"Transformer/encoderblock_(\d{1,9})/"
_JAX_LAYER_NAME = "Transformer/encoderblock_{l}/"
_JAX_ATTENTION = _JAX_LAYER_NAME + "MultiHeadDotProductSubspaceAttention_0/"


@dataclass(frozen=True)
class Layout:
    """One way weights are published. The tables map a source key to the parameter of HookedCrate it fills."""

    family: str
    markers: tuple[str, ...]  # a file with all of these keys has this layout
    top: dict[str, str]
    block: dict[str, str]  # {l} is the layer
    layer: str  # the layer's number in a key
    # the fields that tensors (and what is given) tell, and `inner`, the width of all heads together
    infer: Callable[[Shapes, dict[str, Any]], dict[str, Any]]
    defaults: dict[str, Any] = field(default_factory=dict)  # fields of the code that wrote it, unlike the family's
    # end of a key -> the numbers of axes it may have, and how its tensor becomes the parameter (a view, no copy)
    views: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = field(default_factory=dict)


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


def _infer_crate(shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    return _torch_sizes(shapes, "transformer.layers.0.1.fn.weight") | _crate_patches(shapes, given)


def _infer_demo(shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    plain = _infer_crate(shapes, given)
    return plain | {"d_features": plain["n_classes"], "n_classes": _shape(shapes, "head.weight")[0]}


def _infer_alpha(shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    _, channels, height, width = _shape(shapes, "conv1.weight", 4)
    patches = {"channels": channels, "patch_size": (height, width)}
    return _torch_sizes(shapes, "transformer.layers.0.1.fn.D") | patches


def _torch_sizes(shapes: Shapes, dictionary: str) -> dict[str, Any]:
    inner, d_model = _shape(shapes, "transformer.layers.0.0.fn.qkv.weight")
    n_classes, d_mlp = _shape(shapes, "mlp_head.1.weight")[0], _shape(shapes, dictionary)[1]
    return {"d_model": d_model, "inner": inner, "n_classes": n_classes, "d_mlp": d_mlp}


def _infer_jax(shapes: Shapes, given: dict[str, Any]) -> dict[str, Any]:
    """The only layout whose tensors tell the number of heads: [d_model, n_heads, d_head]; older files have two axes."""
    d_model, *heads = _shape(shapes, _JAX_ATTENTION.format(l=0) + "proj/kernel", 2, 3)
    height, width, channels, _ = _shape(shapes, "embedding/kernel", 4)
    told = {"n_heads": heads[0]} if len(heads) == 2 else {}
    return told | {
        "d_model": d_model,
        "inner": math.prod(heads),
        "n_classes": _shape(shapes, "head/kernel")[1],
        "d_mlp": _shape(shapes, _JAX_LAYER_NAME.format(l=0) + "OvercompleteISTABlock_0/D")[1],
        "channels": channels,
        "patch_size": (height, width),
    }


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

_CRATE_TOP = _TOP | {
    "to_patch_embedding.1.weight": "embed.norm_patch.weight",
    "to_patch_embedding.1.bias": "embed.norm_patch.bias",
    "to_patch_embedding.2.weight": "embed.proj.weight",
    "to_patch_embedding.2.bias": "embed.proj.bias",
    "to_patch_embedding.3.weight": "embed.norm_token.weight",
    "to_patch_embedding.3.bias": "embed.norm_token.bias",
}
_CRATE_BLOCK = _BLOCK | {
    "transformer.layers.{l}.0.fn.to_out.0.bias": "blocks.{l}.attn.out_proj.bias",
    "transformer.layers.{l}.1.fn.weight": "blocks.{l}.mlp.D",
}
_CRATE_MARKERS = ("to_patch_embedding.2.weight", "transformer.layers.0.1.fn.weight")

LAYOUTS = (
    Layout(  # Ma-Lab-Berkeley/CRATE model/crate.py
        family="crate",
        markers=_CRATE_MARKERS,
        top=_CRATE_TOP,
        block=_CRATE_BLOCK,
        layer=_LAYER,
        infer=_infer_crate,
    ),
    Layout(  # the same with the head of its ImageNet-21k demo: mlp_head makes features, head the classes
        family="crate",
        markers=(*_CRATE_MARKERS, "head.weight"),
        top=_CRATE_TOP
        | {
            "mlp_head.1.weight": "features.weight",
            "mlp_head.1.bias": "features.bias",
            "head.weight": "unembed.weight",
            "head.bias": "unembed.bias",
        },
        block=_CRATE_BLOCK,
        layer=_LAYER,
        infer=_infer_demo,
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
        layer=_LAYER,
        infer=_infer_alpha,
    ),
    Layout(  # UCSC-VLAA/CRATE-alpha models/crate.py, as main.py saves it
        family="crate-alpha",
        markers=("embedding/kernel", "encoder_norm/scale"),
        top={
            "pos_embedding": "pos_embed",
            "cls": "cls_token",
            "embedding/kernel": "embed.conv.weight",
            "embedding/bias": "embed.conv.bias",
            "encoder_norm/scale": "ln_final.weight",
            "encoder_norm/bias": "ln_final.bias",
            "head/kernel": "unembed.weight",
            "head/bias": "unembed.bias",
        },
        block={
            _JAX_LAYER_NAME + "LayerNorm_0/scale": "blocks.{l}.ln1.weight",
            _JAX_LAYER_NAME + "LayerNorm_0/bias": "blocks.{l}.ln1.bias",
            _JAX_ATTENTION + "proj/kernel": "blocks.{l}.attn.u_proj.weight",
            _JAX_ATTENTION + "out/kernel": "blocks.{l}.attn.out_proj.weight",
            _JAX_LAYER_NAME + "LayerNorm_1/scale": "blocks.{l}.ln2.weight",
            _JAX_LAYER_NAME + "LayerNorm_1/bias": "blocks.{l}.ln2.bias",
            _JAX_LAYER_NAME + "OvercompleteISTABlock_0/D": "blocks.{l}.mlp.D",
            _JAX_LAYER_NAME + "OvercompleteISTABlock_0/D1": "blocks.{l}.mlp.D1",
        },
        layer=_JAX_LAYER,
        infer=_infer_jax,
        defaults={"ln_final_eps": 1e-6},  # flax's, at the head too; the torch code has 1e-5 there
        views={
            "embedding/kernel": ((4,), lambda kernel: kernel.permute(3, 2, 0, 1)),  # [out, in, height, width]
            "/proj/kernel": ((2, 3), lambda kernel: kernel.flatten(1).mT),  # [heads * d_head, d_model]
            "/out/kernel": ((2, 3), lambda kernel: kernel.flatten(0, -2).mT),  # [d_model, heads * d_head]
            "head/kernel": ((2,), lambda kernel: kernel.mT),
        },
    ),
)


def find_layout(shapes: Shapes, family: str | None, where: str) -> Layout:
    """The layout of a file, from `family` or from its keys; CheckpointError where none fits."""
    if "unembed.weight" in shapes and "pos_embed" in shapes:
        raise CheckpointError(
            f"{where} has the names of a hooked model, which do not say its config: write model.save_pretrained(folder) "
            "and load the folder."
        )
    of_family = [layout for layout in LAYOUTS if family in (None, layout.family)]
    if not of_family:
        known = ", ".join(repr(name) for name in dict.fromkeys(layout.family for layout in LAYOUTS))
        raise CheckpointError(f"family={family!r} has no known layout: give one of {known}.")
    fitting = [layout for layout in of_family if all(key in shapes for key in layout.markers)]
    if fitting:
        return max(fitting, key=lambda layout: len(layout.markers))  # the demo's keys are CRATE's and more
    if family is not None:
        return of_family[0]  # what its keys lack is listed against the family's own code
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


def as_parameters(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors turned as the parameters want them; one with other axes stays, and its shape is refused later."""

    def turned(key: str, value: Tensor) -> Tensor:
        for end, (axes, view) in layout.views.items():
            if key.endswith(end) and value.ndim in axes:
                return view(value)
        return value

    return {key: turned(key, value) for key, value in tensors.items()}


def source_of(layout: Layout, parameter: str, layer: int) -> str:
    """The key that fills a parameter of a block."""
    key = next(key for key, target in layout.block.items() if target == "blocks.{l}." + parameter)
    return key.format(l=layer)


def infer_config(layout: Layout, shapes: Shapes, given: dict[str, Any], where: str) -> dict[str, Any]:
    """The config fields that the tensors (with `given`, whose sizes are checked) determine; CheckpointError where both disagree."""
    depth = 1 + max((int(match[1]) for key in shapes if (match := re.match(layout.layer, key))), default=0)
    check_depth(shapes, layout.layer, depth)
    codes = source_of(layout, "attn.u_proj.weight", 0)
    if "n_heads" not in given and len(shapes.get(codes, ())) != 3:  # three axes have one for the heads
        raise CheckpointError(
            f"n_heads cannot be inferred from {where}: heads are slices of one matrix. Give it: ci.load(..., n_heads=6)."
        )
    found = {"n_layers": depth, **layout.infer(shapes, given)}
    inner, n_heads = found.pop("inner"), found.get("n_heads", given.get("n_heads"))
    if inner % n_heads:
        raise CheckpointError(f"n_heads={n_heads} does not divide the {inner} rows of {codes}.")
    found["d_head"] = inner // n_heads
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


def _shape(shapes: Shapes, key: str, *axes: int) -> tuple[int, ...]:
    """The shape of a tensor that has one of these numbers of axes; two where none is named."""
    if key not in shapes:
        raise CheckpointError(f"the key {key} is missing; the file's keys begin {', '.join(list(shapes)[:4])}.")
    if len(shapes[key]) not in (axes or (2,)):
        raise CheckpointError(f"{key} has shape {shapes[key]}, wanted {' or '.join(map(str, axes or (2,)))} axes.")
    return shapes[key]
