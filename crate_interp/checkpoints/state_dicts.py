"""Finds the weights of one model in what trainers save, and names the tensors it leaves out.

Trainers put words of their own around the published names: the name of a wrapper inside a key, a
prefix before all keys of a model, a key under which the state dict lies. The keys that identify a
layout tell where a model's weights are, so none of these words has to be known in advance.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from crate_interp.checkpoints.layouts import LAYOUTS
from crate_interp.checkpoints.renaming import Rename, renamed
from crate_interp.core.errors import CheckpointError

# words that torch.compile, activation checkpointing, FSDP and DataParallel put into keys
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
_PARALLEL = "module"  # only at the start of a key
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|swa|avg|averaged?)(?:$|[._])")
_LOSS = re.compile(r"criterion|criteria|loss|loss_\w+|\w+_loss|\w+_criterion")
# where trainers put a state dict; only `rename` needs these, since it may not know other keys
_USUAL = (
    "state_dict",
    "model",
    "module",
    "net",
    "network",
    "model_state_dict",
    "weights",
    "params",
)
_TIED, _UNTIED = "blocks.0.attn.u_proj.weight", "blocks.0.attn.qkv_proj.weight"
WEIGHTS_TO_TAKE = ("ema",)
ANCHORS = (_TIED, _UNTIED)  # names that only hooked models use
_AUTOENCODER = ("W_enc", "W_dec")
_MOST_SETS, _SHOWN = 16, 8


class LeftOutWarning(UserWarning):
    """Names the tensors of a source that are no part of the loaded model."""


@dataclass(frozen=True)
class Choice:
    """What the caller of ci.load says about the weights in a source.

    rename: a function from a key to the published key, or None. weights: "ema" for averaged
    weights, else None. family: the model's family, if it is known.
    """

    rename: Rename | None = None
    weights: str | None = None
    family: str | None = None


PLAIN = Choice()
# how many batches a batch norm has seen; no forward reads it
_STEPS_OF_NORM = ".num_batches_tracked"


@dataclass(frozen=True)
class Found:
    """The weights of one model by their published names, and notes on what was left out."""

    tensors: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Set:
    """Keys of one mapping that make a model: those that begin with `prefix`.

    container: the key under which the mapping lies, or "". own: the first words of the layout's
    keys.
    """

    container: str
    prefix: str
    tensors: dict[str, Any]
    own: frozenset[str]

    @property
    def title(self) -> str:
        """The place of the weights, for notes and errors."""
        return ".".join(filter(None, (self.container, self.prefix.rstrip("./")))) or "the top level"

    @property
    def averaged(self) -> bool:
        """Whether the place is named as averaged weights are."""
        return bool(_AVERAGED.search(self.title.lower()))


def find_weights(
    loaded: object, where: str, kind: type | tuple[type, ...] = torch.Tensor, choice: Choice = PLAIN
) -> Found:
    """Returns the weights in a state dict, in a training dict that holds one, or in a module.

    loaded: anything that a torch file can hold. where: the source's name in errors. kind: the class
    of its tensors. If nothing fits a layout, the largest mapping is returned as it is, for a later
    error. Raises CheckpointError if there are no tensors, or several sets of weights with nothing
    to choose between them.
    """
    if isinstance(loaded, torch.nn.Module):
        loaded = loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{where} holds a {type(loaded).__name__}; expected a state dict of names and tensors."
        )
    held = _mappings(loaded, where, kind, choice)
    sets = [one for place, tensors in held.items() for one in _sets(place, tensors, choice.family)]
    if not sets:
        largest = max(held.values(), key=len)
        floating = {key: value for key, value in largest.items() if not _is_integer(value)}
        return Found(floating or largest)
    chosen, notes = _chosen(sets, where, choice)
    tensors, left_out = _inside(chosen, sets)
    return Found(tensors, (*notes, *left_out))


def _mappings(
    loaded: Mapping[Any, Any], where: str, kind: type | tuple[type, ...], choice: Choice
) -> dict[str, dict[str, Any]]:
    """Returns the named tensors at the top level ("") and in each mapping one level down.

    Wrappers' words are removed from the names, and `rename` is applied.
    """
    parts = {"": loaded}
    parts |= {
        key: value
        for key, value in loaded.items()
        if isinstance(key, str) and isinstance(value, Mapping)
    }
    held = {}
    for place, part in {id(part): (place, part) for place, part in parts.items()}.values():
        # each mapping once, since a file may name one mapping many times
        named = {
            key: value
            for key, value in part.items()
            if isinstance(key, str) and isinstance(value, kind)
        }
        if named:
            held[place] = named
    if not held:
        odd = [(key, value) for key, value in loaded.items() if not isinstance(value, Mapping)]
        if not odd:
            raise CheckpointError(
                f"{where} holds no tensors, neither at its top nor one level down: give the state "
                "dict itself."
            )
        raise CheckpointError(
            f"{where} is not a state dict: {odd[0][0]!r} is a {type(odd[0][1]).__name__}, "
            "not a tensor."
        )
    if choice.rename is not None:
        usual = [place for place in held if place in _USUAL or _AVERAGED.search(place)]
        held = {place: held[place] for place in usual or held}
    held = {place: _unwrapped(named, where) for place, named in held.items()}
    held = {place: renamed(named, choice.rename) for place, named in held.items()}
    if not any(held.values()):
        raise CheckpointError(f"rename leaves out every tensor of {where}.")
    return held


def _unwrapped(tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the tensors by their names without the words of wrappers."""
    key_of: dict[str, str] = {}
    for key in tensors:
        words = [word for word in key.split(".") if word not in _WRAPPERS]
        while len(words) > 1 and words[0] == _PARALLEL:
            words.pop(0)
        name = ".".join(words) or key
        if name in key_of:
            raise CheckpointError(
                f"{where} holds {name} twice, as {key_of[name]} and {key}: give the state dict of "
                "one model."
            )
        key_of[name] = key
    return {name: tensors[key] for name, key in key_of.items()}


def _sets(place: str, tensors: dict[str, Any], family: str | None) -> Iterator[_Set]:
    """Yields the sets of weights in a mapping: one for each prefix before the keys of a layout."""
    own: dict[str, set[str]] = {}
    layouts = [one for one in LAYOUTS if family in (None, one.family)]
    known = [(one.markers, one) for one in layouts]
    known += [(_AUTOENCODER, None)] if family in (None, "sae") else []
    first = tuple({markers[0] for markers, _ in known})
    for key in (key for key in tensors if key.endswith(first)):
        for markers, layout in known:
            prefix = key.removesuffix(markers[0])
            starts = key.endswith(markers[0]) and (not prefix or prefix[-1] in "./")
            if starts and all(prefix + marker in tensors for marker in markers):
                own.setdefault(prefix, set()).update(layout.first_words if layout else markers)
    for prefix in _hooked(tensors, family):
        own.setdefault(prefix, set())
    for prefix, words in own.items():
        yield _Set(place, prefix, tensors, frozenset(words))


def _hooked(names: Iterable[str], family: str | None) -> list[str]:
    """Returns the prefixes of hooked models; both towers of a CLIP count as one model."""
    found = [
        key.removesuffix(anchor)
        for key in names
        if key.endswith(ANCHORS)
        for anchor in ANCHORS
        if f".{key}".endswith(f".{anchor}")
    ]
    found = list(dict.fromkeys(found))
    held = set(found)
    for prefix in found:
        whole = prefix.removesuffix("visual.")
        towers = {f"{whole}visual.", f"{whole}text."}
        if prefix.endswith("visual.") and towers <= held:
            held -= towers
            held |= {whole if family in (None, "clipa") else prefix}
    return [prefix for prefix in (*found, *(held - set(found))) if prefix in held]


def _chosen(sets: list[_Set], where: str, choice: Choice) -> tuple[_Set, list[str]]:
    """Returns the only set of weights of the wanted standing, and notes on averaged weights.

    Raises CheckpointError if there is no such set, or if there are several.
    """
    averaged = [one for one in sets if one.averaged]
    plain = [one for one in sets if not one.averaged]
    if choice.weights == "ema" and not averaged:
        raise CheckpointError(f"{where} holds no averaged weights: leave out weights='ema'.")
    wanted = averaged if choice.weights == "ema" or not plain else plain
    if choice.rename is not None and len(wanted) > 1:  # what `rename` made a published name
        wanted = [one for one in wanted if not one.prefix] or wanted
    if len(wanted) > 1 or len(sets) > _MOST_SETS:
        raise CheckpointError(_several(wanted if len(wanted) > 1 else sets, where))
    if choice.weights == "ema" or not averaged:
        return wanted[0], []
    titles = " and ".join(repr(one.title) for one in averaged)
    if not plain:
        return wanted[0], [f"the weights, under {titles}, are averaged ones; there are no others"]
    return wanted[0], [
        f"the plain weights are taken, and the averaged ones under {titles} are left out "
        "(weights='ema' takes them)"
    ]


def _several(wanted: list[_Set], where: str) -> str:
    titles = " and ".join(repr(one.title) for one in wanted[:4])
    one = next((one for one in wanted if one.prefix), wanted[0])
    if len({one.container for one in wanted}) > 1:
        way = "pass one of them, as a state dict."
    else:
        pattern = re.escape(one.prefix).replace("/", "\\/")
        way = f"choose one, such as ci.load(..., rename='s/^{pattern}//') for {one.title!r}."
    return f"{where} holds weights under {titles}: {way}"


def _inside(chosen: _Set, sets: list[_Set]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tensors of the chosen set by their published names, and notes on the rest."""
    beside = [one for one in sets if one.tensors is chosen.tensors]
    # the caller knows of these, or another note names them
    told = {one.prefix for one in beside if one.averaged != chosen.averaged}
    prefixes = sorted((one.prefix for one in beside), key=len, reverse=True)
    inside: dict[str, Any] = {}
    outside = []
    for key, value in chosen.tensors.items():
        if key.endswith(_STEPS_OF_NORM) and _is_integer(value):
            continue
        prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        if prefix == chosen.prefix:
            inside[key.removeprefix(chosen.prefix)] = value
        elif prefix not in told:
            outside.append(key)
    counters, losses = _foreign(inside, chosen.own)
    place = chosen.prefix.rstrip("./")
    notes = [
        f"{title} left out: {', '.join(keys[:_SHOWN])}"
        + (f" and {len(keys) - _SHOWN} more" if keys[_SHOWN:] else "")
        for title, keys in (
            (f"tensors outside the model {place!r} are" if place else "other tensors are", outside),
            ("integer tensors that are no weights are", counters),
            ("tensors of a loss are", losses),
        )
        if keys
    ]
    return {key: inside[key] for key in inside if key not in {*counters, *losses}}, notes


def _foreign(inside: Mapping[str, Any], own: frozenset[str]) -> tuple[list[str], list[str]]:
    """Returns the keys of integer tensors, and those of a loss, that cannot belong to the model.

    own: the first words of the layout's keys. An unknown key of a module of the model is not
    returned, since it would change the module's output.
    """
    words = own | {_word(key) for key, value in inside.items() if not _is_integer(value)}
    losses = [key for key in inside if _LOSS.fullmatch(_word(key))]
    counters = [
        key
        for key, value in inside.items()
        if _is_integer(value) and _word(key) not in words and key not in losses
    ]
    return counters, losses


def _word(key: str) -> str:
    return key.split(".")[0].split("/")[0]


def _is_integer(value: Any) -> bool:
    if isinstance(value.dtype, str):  # as a header of safetensors names it
        return value.dtype.startswith(("I", "U", "BOOL"))
    return not (value.dtype.is_floating_point or value.dtype.is_complex)
