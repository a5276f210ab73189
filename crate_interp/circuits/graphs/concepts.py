"""What a token can be: its class, its place, its object, its word. Candidates for atoms' names."""

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from crate_interp.models.hooked import HookedModel

_COMMON = 40  # tokens that are common enough to be a candidate
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
_OBJECT = 0.5  # a patch is on the object if its mask covers this share
# what a token of a text is made of -> its test
_SETS = {
    "a quotation mark": lambda word: any(sign in word for sign in "\"'“”‘’«»"),
    "punctuation": lambda word: bool(word.strip()) and not any(s.isalnum() for s in word),
    "a digit": lambda word: any(sign.isdigit() for sign in word),
    "a capital letter": lambda word: word.strip()[:1].isupper(),
    "the start of a word": lambda word: word[:1] == " " and word.strip()[:1].isalpha(),
    "the inside of a word": lambda word: word[:1] in string.ascii_lowercase,
    "a new line": lambda word: "\n" in word,
}


@dataclass(frozen=True)
class Concepts:
    """Candidates: the name and kind of each, and where it is present.

    present: `[concept, sample, pos]` for tokens, or `[concept, sample]` for whole samples.
    """

    names: list[str]
    kinds: list[str]
    present: Bool[Tensor, "concept sample *pos"]

    def part(self, kind: str, of_kind: bool) -> "Concepts":
        """Returns the candidates of a kind, or all others."""
        places = [place for place, one in enumerate(self.kinds) if (one == kind) == of_kind]
        names, kinds = ([column[place] for place in places] for column in (self.names, self.kinds))
        return Concepts(names, kinds, self.present[places])


def special_tokens(model: HookedModel) -> int | None:
    """Returns how many tokens come before the patches of an image; None for a text."""
    net: Any = model
    return None if model.cfg.kind == "text" else 0 if net.cfg.class_layers else net.cfg.n_special


def of_samples(labels: Sequence[Any] | None, names: Sequence[str] | None, count: int) -> Concepts:
    """Returns the classes of whole samples, from the labels of the data."""
    if not labels or None in labels:
        return Concepts([], [], torch.zeros(0, count, dtype=torch.bool))
    kinds = sorted(set(labels), key=str)
    called = [
        str(names[kind]) if names is not None and isinstance(kind, int) else str(kind)
        for kind in kinds
    ]
    present = torch.tensor([[label == kind for label in labels] for kind in kinds])
    return Concepts([f"class {name}" for name in called], ["class"] * len(kinds), present)


def of_patches(
    model: HookedModel, count: int, pos: int, masks: UInt8[Tensor, "sample height width"] | None
) -> Concepts:
    """Returns places in the image, CLS, and patches on an object, for images of one size."""
    net: Any = model
    special = special_tokens(model) or 0
    rows, columns = net.cfg.grid
    names, kinds, present = [], [], []
    if special:
        names.append("CLS")
        present.append((torch.arange(pos) < special).expand(count, -1))
    patch = torch.arange(pos) - special
    for i, row in enumerate(_ROWS):
        for j, column in enumerate(_COLUMNS):
            here = (patch // columns * 3 // rows == i) & (patch % columns * 3 // columns == j)
            names.append(f"patches at the {row} {column}" if i != j or i != 1 else "the middle")
            present.append((here & (patch >= 0)).expand(count, -1))
    kinds = ["position"] * len(names)
    if masks is not None:
        shown = ((masks > 0) & (masks < 255)).float()[:, None]
        cover = F.adaptive_avg_pool2d(shown, (rows, columns)).flatten(1) >= _OBJECT
        names.append("patches on the object")
        kinds.append("mask")
        present.append(F.pad(cover, (special, 0)))
    return Concepts(names, kinds, torch.stack(present))


def of_tokens(tokens: Int[Tensor, "sample pos"], words: Sequence[str]) -> Concepts:
    """Returns common tokens, the tokens after them, sets of tokens, and the first ones."""
    common = [token for token, _ in Counter(tokens.flatten().tolist()).most_common(_COMMON)]
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    names, kinds, present = [], [], []
    for words_of, kind, found in (("{}", "token", tokens), ("after {}", "token", before)):
        names += [words_of.format(repr(words[token])) for token in common]
        kinds += [kind] * len(common)
        present += [found == token for token in common]
    # without a tokenizer words are numbers, whose digits say nothing
    sets = {} if all(word.isdigit() for word in words) else _SETS
    for name, test in sets.items():
        known = torch.tensor([bool(test(word)) for word in words])
        for words_of, found in (("{}", tokens), ("after {}", before)):
            names.append(words_of.format(name))
            kinds.append("token set")
            present.append(known[found.clamp_min(0)] & (found >= 0))
    pos = torch.arange(tokens.shape[1]).expand_as(tokens)
    names += ["the first token", "the first eight tokens"]
    kinds += ["position"] * 2
    present += [pos == 0, pos < 8]
    return Concepts(names, kinds, torch.stack(present))
