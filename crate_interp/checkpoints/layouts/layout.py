"""Defines what a published layout is, and how it turns tensors into a config and parameters."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crate_interp.config.families import FAMILIES, STEPS_WITH_ETA
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError, MissingSettingError

Fields = dict[str, Any]
View = tuple[tuple[int, ...], Callable[[Tensor], Tensor]]
PER_HEAD = ("attn.temp", "attn.step_x")  # parameters of a layer with a row for each head
_COMPARED = 300  # keys that are compared with a name


class Shapes(dict[str, tuple[int, ...]]):
    """The shapes of the tensors in a file, by their keys."""

    def of(self, key: str, *axes: int) -> tuple[int, ...]:
        """Returns the shape of a tensor.

        axes: the allowed numbers of axes (default: two).

        Raises CheckpointError for a missing key, a wrong number of axes, and an empty tensor.
        """
        if key not in self:
            numbers = re.findall(r"\d+", key)  # another layer's key says nothing
            near = nearest(key, [one for one in self if re.findall(r"\d+", one) == numbers])
            said = f"the nearest is {near or 'among ' + ', '.join(list(self)[:4])}"
            raise CheckpointError(f"the key {key} is missing; {said}. {renaming(near, key)}")
        shape, wanted = self[key], axes or (2,)
        if len(shape) not in wanted or 0 in shape:
            count = " or ".join(map(str, wanted))
            raise CheckpointError(f"{key} has shape {shape}; expected {count} axes, none empty.")
        return shape


def nearest(name: str, keys: Iterable[str]) -> str:
    """Returns the key that is most like a name, or "" if none is like it."""
    close = difflib.get_close_matches(name, list(keys)[:_COMPARED], n=1, cutoff=0.75)
    return close[0] if close else ""


def renaming(near: str, name: str) -> str:
    """Returns the advice to rename a key, with the words that differ if one part does."""
    here, wanted = near.split("."), name.split(".")
    parts = [(a, b) for a, b in zip(here, wanted, strict=False) if a != b]
    alike = len(parts) == 1 and len(here) == len(wanted)
    pattern, replacement = parts[0] if alike else ("PATTERN", "REPLACEMENT")
    return f"If only names differ, give rename='s/{pattern}/{replacement}/'."


def expanded(keys: Mapping[str, str], source: str = "", target: str = "") -> dict[str, str]:
    """Returns the map with each pair "a.*": "b.*" replaced by two pairs, for weight and bias.

    source, target: the prefixes to put before the keys and before the parameters.
    """
    return {
        source + key.replace("*", end): target + parameter.replace("*", end)
        for key, parameter in keys.items()
        for end in (("weight", "bias") if key.endswith(".*") else ("",))
    }


@dataclass(frozen=True)
class Stack:
    """The layers of one tower.

    source, target: the prefixes of the keys and of the parameters, with {l} for the layer's number.
    keys: maps a source key to the parameter that it fills, both without these prefixes; "norm.*"
    stands for weight and bias. count: the field of the config that has the number of layers.
    """

    source: str
    keys: dict[str, str]
    target: str = "blocks.{l}."
    count: str = "n_layers"

    def depth(self, keys: Iterable[str]) -> int:
        """Returns how many layers some keys name, at least 1."""
        before, after = self.source.split("{l}")
        pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after[0]))
        return len({match[1] for key in keys if (match := pattern.match(key))}) or 1

    def of_layer(self, layer: int) -> dict[str, str]:
        """Returns every source key of a layer and the parameter that it fills."""
        return expanded(self.keys, self.source.format(l=layer), self.target.format(l=layer))


@dataclass(frozen=True)
class Layout:
    """One way in which weights are published.

    `top` and `stacks` map a source key to the parameter of our model that it fills; "norm.*" stands
    for weight and bias.
    """

    family: str
    markers: tuple[str, ...]  # keys that identify the layout of a file
    top: dict[str, str]
    stacks: tuple[Stack, ...]
    # a key -> the fields that its axes tell, None for an axis that tells none. "3 inner": the axis
    # is three times as long. inner: the width of all heads together; height, width: of a patch
    sizes: dict[str, tuple[str | None, ...]]
    # the key of the positions, whose number tells the size of the images, and its number of axes
    positions: tuple[str, int] | None = None
    # returns fields that follow in another way from shapes and given fields
    infer: Callable[[Shapes, Fields], Fields] | None = None
    # The next three are about the config in the file or next to it. config_names: the name of a
    # field in this config -> our name. config_switches: fields that have our name, and are read
    # only if they are bools. followed: a field -> the only value that our model supports.
    config_names: dict[str, str] = field(default_factory=dict)
    config_switches: tuple[str, ...] = ()
    followed: dict[str, Any] = field(default_factory=dict)
    # fields where the code that wrote the file differs from the defaults of the family
    defaults: Fields = field(default_factory=dict)
    needed: tuple[str, ...] = ("n_heads",)  # fields that cannot be inferred from shapes
    # pattern of a key's end -> the numbers of axes that a tensor may have to be turned, and a
    # function that returns the parameter as a view of the tensor (no copy)
    views: dict[str, View] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # patterns of keys that the published code saves but never reads
    copies: dict[str, str] = field(default_factory=dict)  # key -> the key whose tensor it repeats
    # keys that may be missing -> the number that then fills them
    optional: dict[str, float] = field(default_factory=dict)
    tolerant: bool = False  # unknown small keys are left out with a warning
    namespace: bool = False  # the argparse.Namespace of the trainer is the file's config
    any_size: bool = False  # no tensor depends on the size of the images

    @property
    def first_words(self) -> set[str]:
        """The first word of each key, which is the name of a module or a parameter."""
        keys = [*self.top, *(stack.source for stack in self.stacks), *self.copies, *self.optional]
        return {re.findall(r"\w+", key)[0] for key in (*keys, *self.unused)}

    def source_of(self, parameter: str, layer: int) -> str:
        """Returns the key that fills a parameter of a block, or "" if the layout has none."""
        target = f"blocks.{layer}.{parameter}"
        for stack in self.stacks:
            for key, name in stack.of_layer(layer).items():
                if name.removeprefix("visual.") == target:
                    return key
        return ""

    def translate(self, config: Fields) -> Fields:
        """Returns the fields, by our names, of the config in a file or next to it."""
        for name, value in self.followed.items():
            if config.get(name, value) != value:
                said = f"its config.json says {name}={config[name]!r}"
                raise CheckpointError(f"{said}; published models have {value!r} only.")
        names = self.config_names.items()
        named = {ours: config[theirs] for theirs, ours in names if theirs in config}
        switches = [name for name in self.config_switches if isinstance(config.get(name), bool)]
        return named | {name: config[name] for name in switches}

    def key_map(self, counts: Fields) -> dict[str, str]:
        """Returns every source key of the layout and the parameter that it fills.

        counts: the numbers of layers, by the names of their fields.
        """
        keys = expanded(self.top)
        for stack in self.stacks:
            for layer in range(counts[stack.count]):
                keys |= stack.of_layer(layer)
        return keys

    def as_parameters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors as views that have the shapes of the parameters.

        Keys that are never read, and copies that repeat their original, are left out. A tensor with
        an unexpected number of axes stays as it is; its shape is refused later. Raises
        CheckpointError for a copy that differs from its original.
        """
        kept = {}
        for key, value in tensors.items():
            if any(re.fullmatch(pattern, key) for pattern in self.unused):
                continue
            original = self.copies.get(key)
            if original in tensors:
                if not torch.equal(value, tensors[original]):
                    raise CheckpointError(f"{key} differs from {original}; both must be equal.")
                continue
            for end, (axes, view) in self.views.items():
                if value.ndim in axes and re.search(end + "$", key):
                    value = view(value)
                    break
            kept[key] = value
        return kept

    def infer_config(self, shapes: Shapes, fields: Fields, where: str) -> Fields:
        """Returns the fields that follow from the shapes of the tensors and the fields given.

        Raises one CheckpointError for all settings that shapes cannot reveal and that were not
        given; CheckpointError, too, if a given field contradicts the shapes.
        """
        found: Fields = {stack.count: stack.depth(shapes) for stack in self.stacks}
        for key in (self.source_of(name, 0) for name in PER_HEAD):
            if key in shapes:
                found["n_heads"] = shapes.of(key, 2, 3)[0]
        codes, lacking = self.source_of("attn.u_proj.weight", 0), list[MissingSettingError]()
        rows = (*shapes.get(codes, ()), 0)[0]  # d_head for each head
        counts = [str(count) for count in range(1, rows + 1) if rows % count == 0]
        counts[16:] = ["\u2026"] * (len(counts) > 16)
        fitting = f"n_heads divides {rows}, so it is one of {', '.join(counts)}"
        for name in self.needed:
            # codes with three axes have one for the heads
            told = name == "n_heads" and len(shapes.get(codes, ())) == 3
            if not told and (fields | found).get(name) is None:
                why = fitting if rows and name == "n_heads" else ""
                lacking.append(MissingSettingError(name, f"{name}=N", why))
        found |= self._sizes(shapes, fields | found)
        for tell in (self.infer, self._grid, self._check_variant):
            try:
                found |= tell(shapes, fields | found) if tell else {}
            except MissingSettingError as error:
                lacking.append(error)
        if lacking:
            names = ", ".join(one.name for one in lacking)
            advice = f"Give ci.load(..., {', '.join(one.example for one in lacking)})"
            why = "; ".join(one.why for one in lacking if one.why)
            raise CheckpointError(
                f"{where} looks like family {self.family!r}, but {names} cannot be inferred: no "
                f"tensor's shape tells. {advice}{why and f': {why}'}."
                + " Add ci.load(..., eta=N, lambd=N) if they are not the published ones."
                * (FAMILIES[self.family]["sparse_step"] in STEPS_WITH_ETA)
            )
        inner, n_heads = found.pop("inner"), found.get("n_heads", fields.get("n_heads"))
        if inner % n_heads:
            where = codes or "the projections"
            raise CheckpointError(f"n_heads={n_heads} does not divide the {inner} rows of {where}.")
        found["d_head"] = inner // n_heads
        for name, value in found.items():
            if name in fields and fields[name] not in (None, value):
                said = f"{name}={fields[name]!r} contradicts the tensors"
                raise CheckpointError(f"{said}, which make it {value!r}.")
        return found

    def _sizes(self, shapes: Shapes, fields: Fields) -> Fields:
        """Returns the fields that the axes of tensors tell, `inner` among them."""
        found: Fields = {}
        for key, axes in self.sizes.items():
            if {"n_classes", "d_features"} & set(axes):
                if fields.get("n_classes") == 0:  # the head is left out
                    found["n_classes"] = 0
                    continue
                if key not in shapes:
                    raise CheckpointError(
                        f"the key {key} is missing, the map to the classes. If the file has none, "
                        "give head=False; give rename= for a key of another name."
                    )
            for name, size in zip(axes, shapes.of(key, len(axes)), strict=True):
                if name is not None:
                    times, _, name = name.rpartition(" ")
                    found[name] = size // int(times or 1)
        if "height" in found:
            found["patch_size"] = (found.pop("height"), found.pop("width"))
        return found

    def _grid(self, shapes: Shapes, fields: Any) -> Fields:
        """Returns the image size of the fields, or a square one from the number of positions.

        A given crop with the right number of patches is the image size, too. Otherwise a square is
        a guess, and `grid_guessed` is True unless there is only one patch. Raises
        MissingSettingError if the patches make no square, CheckpointError if a given size has
        another number of patches. Returns {} for a layout without positions, and while the size of
        patches is missing.
        """
        if self.positions is None:
            return {}
        patches, patch = shapes.of(*self.positions)[-2] - 1, fields.get("patch_size")
        told, side = fields.get("image_size") or fields.get("crop"), math.isqrt(patches)
        if not patch and (told or side * side == patches):
            return {}
        if told:
            height, width = checks.size("image_size", told)
            whole = not (height % patch[0] or width % patch[1])
            if whole and (height // patch[0]) * (width // patch[1]) == patches:
                return {"image_size": (height, width)}
        if "image_size" in fields:
            raise CheckpointError(
                f"image_size={fields['image_size']!r} with patches of {patch} "
                f"contradicts {self.positions[0]}, which has {patches} patches."
            )
        if side * side != patches or not patches:
            rows = next((n for n in range(side, 0, -1) if patches % n == 0), 1)
            size = f"({patch[0] * rows}, {patch[1] * (patches // rows)})" if patch else "(h, w)"
            why = f"{patches} patches make no square grid"
            raise MissingSettingError("image_size", f"image_size={size}", why)
        return {"image_size": (side * patch[0], side * patch[1]), "grid_guessed": side > 1}

    def _check_variant(self, shapes: Shapes, fields: Fields) -> Fields:
        """Raises MissingSettingError if the file has no output matrix, so not the usual variant."""
        if self.family not in ("crate", "crate-alpha") or "variant" in fields:
            return {}
        outputs = [self.source_of("attn.out_proj.weight", n) for n in range(fields["n_layers"])]
        n_heads, whole = fields.get("n_heads"), fields["inner"] == fields["d_model"]
        if not shapes.keys() & {*outputs} and not (n_heads == 1 and whole):
            why = f"without an output matrix ({outputs[0]}) variant is one of c, n, t, identity"
            why += " (with n_heads=1 leave it out)" if whole and n_heads is None else ""
            raise MissingSettingError("variant", "variant='c'", why)
        return {}
