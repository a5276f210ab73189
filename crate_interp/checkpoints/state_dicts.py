"""Finds the weights of one model in what trainers save, and names the tensors it leaves out.

Trainers put words of their own around the published names: the name of a wrapper inside a key, a
prefix before all keys of a model, a key under which the state dict lies. The keys that identify a
layout tell where a model's weights are, so none of these words has to be known in advance.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from crate_interp.checkpoints.layouts import LAYOUTS
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError

# words that torch.compile, activation checkpointing, FSDP and DataParallel put into keys
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
_PARALLEL = "module"  # only at the start of a key
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|swa|avg|averaged?)(?:$|[._])")
_LOSS = re.compile(r"criterion|criteria|loss|loss_\w+|\w+_loss|\w+_criterion")
# where trainers put a state dict; only `rename` needs these, since it may not know other keys
_USUAL = "state_dict model module net network model_state_dict weights params".split()
_TIED, _UNTIED = "blocks.0.attn.u_proj.weight", "blocks.0.attn.qkv_proj.weight"
ANCHORS = (_TIED, _UNTIED)  # names that only hooked models use
WEIGHTS_TO_TAKE = ("ema",)
_AUTOENCODER = ("W_enc", "W_dec")
_STEPS_OF_NORM = ".num_batches_tracked"  # how many batches a batch norm has seen; never read
_SHOWN = 8
# s/PATTERN/REPLACEMENT/ or with g, in which a backslash keeps a sign from ending a part
_SED = re.compile(r"s([^\w\\\s])((?:\\.|(?!\1).)+)\1((?:\\.|(?!\1).)*)\1(g?)")
_FORM = "such as 's/^net\\.//' or 's/encoder/transformer/g'"
Rename = Callable[[str], str | None]
Tensors = dict[str, Any]


class LeftOutWarning(UserWarning):
    """Names the tensors of a source that the loaded model does not contain."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Keys of one mapping that make a model: those that begin with `prefix`.

    place: the key under which the mapping lies, or "". words: the first words of the layout's keys.
    """

    place: str
    prefix: str
    tensors: dict[str, Any]
    words: set[str]

    @property
    def title(self) -> str:
        """The place of the weights, for notes and errors."""
        return ".".join(filter(None, (self.place, self.prefix.rstrip("./")))) or "the top level"

    @property
    def averaged(self) -> bool:
        """Whether the place is named as averaged weights are."""
        return bool(_AVERAGED.search(self.title.lower()))


def rename_function(rename: Rename | str | None) -> Rename | None:
    """Returns `rename` as a function from a key to its published name, or None for None.

    rename: such a function, or a text s/PATTERN/REPLACEMENT/ as in sed: PATTERN is a regular
    expression of Python, a g at the end replaces all matches instead of the first, and any other
    sign may take the place of the slash. A key of which nothing remains is left out. Raises
    CheckpointError for anything else.
    """
    if rename is None or callable(rename):
        return rename
    parts = _SED.fullmatch(str(rename))
    try:
        sign, pattern, replacement, every = [] if parts is None else parts.groups()
        pattern, replacement = (x.replace("\\" + sign, sign) for x in (pattern, replacement))
        compiled, count = re.compile(pattern), 0 if every else 1
        compiled.sub(replacement, "")  # raises for a group that the pattern lacks
    except (ValueError, re.error, IndexError) as error:
        raise CheckpointError(
            f"rename={checks.quote(rename)}: write s/PATTERN/REPLACEMENT/, {_FORM}, or give a "
            f"function from a key to the published key ({error})."
        ) from None
    return lambda key: compiled.sub(replacement, key, count=count) or None


def find_weights(
    loaded: object,
    where: str,
    *,
    rename: Rename | None = None,
    weights: str | None = None,
    family: str | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the weights of one model by their published names, and notes on what is left out.

    loaded: a state dict, a training dict that holds one, or a module. where: the source's name in
    errors. rename: a function from a key to the published key. weights: "ema" for averaged weights.
    family: the model's family, if it is known. If nothing fits a layout, the largest mapping is
    returned as it is, for a later error. Raises CheckpointError if there are no tensors, or several
    sets of weights with nothing to choose between them.
    """
    if isinstance(loaded, torch.nn.Module):
        loaded = loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{where} holds a {type(loaded).__name__}; expected a state dict.")
    mappings = _mappings(loaded, where, rename)
    candidates = [one for item in mappings.items() for one in _candidates(*item, family)]
    if not candidates:
        largest = max(mappings.values(), key=len)
        floating = {key: value for key, value in largest.items() if not _is_integer(value)}
        return floating or largest, ()
    averaged = [one for one in candidates if one.averaged]
    plain = [one for one in candidates if not one.averaged]
    if weights == "ema" and not averaged:
        raise CheckpointError(f"{where} holds no averaged weights: leave out weights='ema'.")
    rivals = averaged if weights == "ema" or not plain else plain
    if rename is not None and len(rivals) > 1:  # what `rename` made a published name
        rivals = [one for one in rivals if not one.prefix] or rivals
    if len(rivals) > 1:
        raise CheckpointError(
            f"{where} holds weights under {_titles(rivals)}: pass one of them as a state dict, or "
            "choose one by its prefix, rename='s/^PREFIX//'."
        )
    tensors, notes = _separated(rivals[0], candidates)
    if weights != "ema" and averaged:
        said = "left out (weights='ema' takes them)" if plain else "taken: the file has no others"
        notes.insert(0, f"the averaged weights under {_titles(averaged)} are {said}")
    return tensors, tuple(notes)


def _titles(group: list[_Candidate]) -> str:
    return " and ".join(repr(one.title) for one in group[:4])


def _mappings(loaded: Mapping[Any, Any], where: str, rename: Rename | None) -> dict[str, Tensors]:
    """Returns the tensors, by published names, of the top level ("") and each mapping below it."""
    parts = {id(loaded): ("", loaded)}
    for key, value in loaded.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            parts[id(value)] = (key, value)  # a file may name one mapping many times
    mappings = {}
    for place, part in parts.values():
        keys = [key for key in part if isinstance(key, str) and isinstance(part[key], torch.Tensor)]
        if keys:
            mappings[place] = {key: part[key] for key in keys}
    if not mappings:
        raise CheckpointError(f"{where} holds no tensors: give the state dict itself.")
    if rename is not None:
        usual = [place for place in mappings if place in _USUAL or _AVERAGED.search(place)]
        mappings = {place: mappings[place] for place in usual or mappings}
    named = {place: _named(part, where, rename) for place, part in mappings.items()}
    if not any(named.values()):
        raise CheckpointError(f"rename leaves out every tensor of {where}.")
    return named


def _named(tensors: dict[str, Any], where: str, rename: Rename | None) -> dict[str, Any]:
    """Returns tensors by their names without the words of wrappers, and then renamed."""
    key_of: dict[str, str] = {}
    for key in tensors:
        words = [word for word in key.split(".") if word not in _WRAPPERS]
        while len(words) > 1 and words[0] == _PARALLEL:
            words.pop(0)
        name: Any = ".".join(words) or key
        if rename is not None:
            name = rename(name)
            if name is None:
                continue
        if name in key_of:
            raise CheckpointError(
                f"{where}: {key_of[name]!r} and {key!r} get the same name, {name!r}: give the "
                "state dict of one model."
            )
        key_of[name] = key
    return {name: tensors[key] for name, key in key_of.items()}


def _candidates(place: str, tensors: dict[str, Any], family: str | None) -> list[_Candidate]:
    """Returns the sets of weights in a mapping: one for each prefix before a layout's keys."""
    known = [(one.markers, one.first_words) for one in LAYOUTS if family in (None, one.family)]
    if family in (None, "sae"):
        known.append((_AUTOENCODER, set(_AUTOENCODER)))
    words: dict[str, set[str]] = {}
    for markers, first_words in known:
        for key in (key for key in tensors if key.endswith(markers[0])):
            prefix = key.removesuffix(markers[0])
            if prefix[-1:] in ("", ".", "/") and all(prefix + name in tensors for name in markers):
                words.setdefault(prefix, set()).update(first_words)
    pairs = ((key, anchor) for key in tensors for anchor in ANCHORS)
    hooked = [key.removesuffix(name) for key, name in pairs if f".{key}".endswith(f".{name}")]
    for prefix in [prefix for prefix in hooked if prefix.endswith("visual.")]:
        whole = prefix.removesuffix("visual.")
        if f"{whole}text." in hooked:  # the two towers of a CLIP are one model
            hooked.remove(f"{whole}text.")
            hooked[hooked.index(prefix)] = whole if family in (None, "clipa") else prefix
    for prefix in hooked:
        words.setdefault(prefix, set())
    return [_Candidate(place, prefix, tensors, names) for prefix, names in words.items()]


def _separated(chosen: _Candidate, candidates: list[_Candidate]) -> tuple[Tensors, list[str]]:
    """Returns the chosen tensors by their published names, and notes on the rest of the mapping.

    An integer tensor or a loss in a module of the model is not left out: the model refuses it.
    """
    neighbours = [one for one in candidates if one.tensors is chosen.tensors]
    prefixes = sorted((one.prefix for one in neighbours), key=len, reverse=True)
    # another note names the weights of the other kind
    silent = {one.prefix for one in neighbours if one.averaged != chosen.averaged}
    inside: dict[str, Any] = {}
    outside = []
    for key, value in chosen.tensors.items():
        if key.endswith(_STEPS_OF_NORM) and _is_integer(value):
            continue
        prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
        if prefix == chosen.prefix:
            inside[key.removeprefix(chosen.prefix)] = value
        elif prefix not in silent:
            outside.append(key)
    first_word = {key: re.split("[./]", key)[0] for key in inside}
    losses = [key for key in inside if _LOSS.fullmatch(first_word[key])]
    words = chosen.words | {first_word[key] for key in inside if not _is_integer(inside[key])}
    counters = [key for key in inside if first_word[key] not in words and key not in losses]
    titles = {
        "tensors outside the model": outside,
        "integer tensors that are not weights": counters,
        "tensors of a loss": losses,
    }
    notes = [
        f"{title} are left out: {', '.join(keys[:_SHOWN])}"
        + (f" and {len(keys) - _SHOWN} more" if keys[_SHOWN:] else "")
        for title, keys in titles.items()
        if keys
    ]
    return {key: inside[key] for key in inside if key not in {*counters, *losses}}, notes


def _is_integer(value: Any) -> bool:
    return not (value.dtype.is_floating_point or value.dtype.is_complex)
