"""The answer to one input without a head, without an atom, and without a patch."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from crate_interp.circuits.graphs.question import one_sample
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel

ATOMS = 40  # how many of the largest atoms of all layers are switched off
OF_ANSWER = 8  # and in each layer how many of those at the token that answers
COLUMNS = ["kind", "layer", "number", "probability", "answer", "answer_probability"]
_BATCH = 64  # copies of the input in one forward

Rows = Iterator[tuple[int, Float[Tensor, "answer"]]]


@torch.no_grad()
@in_full_precision
def switched_off(model: HookedModel, sample: Shaped[Tensor, "*sample"]) -> pd.DataFrame:
    """Returns the likeliest answer to one input, with each part switched off in turn.

    sample: an image `[channels, height, width]` or token ids `[pos]`, or a batch of one of them; a
    text's answer is the token after its last one. The first row, of kind "nothing", is the model
    as it is. The others have one part off: "head": the head's output z is 0 at every token; "atom":
    so is the atom's entry of the code, for the 40 atoms with the largest share of their layer's
    codes over all tokens, and the 8 largest of each layer at the token that answers, CLS or a
    text's last one; "patch": the patch has the mean colour of the image. Columns: kind; layer and
    number of the part (-1 if it has none); probability, of the answer of the first row; answer, the
    likeliest class or token, and answer_probability. The effects of two parts do not add up.

    `ci.viz.explore(cache, inputs, without=table)` shows them on a page.

    Raises ValueError for several samples, and if the model is training, or answers with features
    instead of logits.
    """
    if model.training or not getattr(model, "has_logits", True):
        why = "it is training: call model.eval()" if model.training else "it has no logits"
        raise ValueError(f"switched_off needs the model's answers, but {why}.")
    net, given = model, one_sample(model, sample)
    shares = _answers(net(given))[0]
    own = int(shares.argmax())
    table = [_row("nothing", -1, -1, shares, own)]
    for layer in range(len(net.blocks)):
        # of one input, hook_z is [pos, head, d_head] and hook_post [pos, atom]
        heads = _zeroed(net, given, f"blocks.{layer}.attn.hook_z", list(range(net.cfg.n_heads)))
        table += [_row("head", layer, head, each, own) for head, each in heads]
    for layer, atoms in _largest_atoms(net, given).items():
        found = _zeroed(net, given, f"blocks.{layer}.mlp.hook_post", atoms)
        table += [_row("atom", layer, atom, each, own) for atom, each in found]
    if net.cfg.kind != "text":
        table += [_row("patch", -1, number, each, own) for number, each in _patches(net, given)]
    return pd.DataFrame(table, columns=pd.Index(COLUMNS))


def _row(kind: str, layer: int, number: int, shares: Tensor, own: int) -> tuple[Any, ...]:
    best = int(shares.argmax())
    return kind, layer, number, shares[own].item(), best, shares[best].item()


def _answers(logits: Tensor) -> Float[Tensor, "copy answer"]:
    """Returns the probabilities of classes, or of the token after the last one."""
    logits = logits[:, -1] if logits.ndim == 3 else logits
    return logits.float().softmax(dim=-1)


def _zeroed(net: Any, given: Tensor, point: str, numbers: list[int]) -> Rows:
    """Yields each number and the answer without it: its entry of the point's second axis is 0."""

    def off(value: Tensor, hook: object, *, part: list[int]) -> Tensor:
        value = value.clone()
        for copy, number in enumerate(part):
            value[copy, :, number] = 0
        return value

    for start in range(0, len(numbers), _BATCH):
        part = numbers[start : start + _BATCH]
        copies = given.expand(len(part), *given.shape[1:])
        answers = _answers(net.run_with_hooks(copies, fwd_hooks=[(point, partial(off, part=part))]))
        yield from zip(part, answers, strict=True)


def _largest_atoms(net: Any, given: Tensor) -> dict[int, list[int]]:
    """Returns the numbers of the largest atoms by layer; none where attention is the layer."""
    if net.cfg.attn_only:
        return {}
    _, cache = net.run_with_cache(given, names_filter=lambda name: name.endswith("mlp.hook_post"))
    answers = [-1] if net.cfg.kind == "text" else [0] if net.cfg.n_special else []
    shares: list[tuple[float, int, int]] = []
    chosen: set[tuple[int, int]] = set()
    for layer in range(len(net.blocks)):
        code = cache[f"blocks.{layer}.mlp.hook_post"][0].float().abs()  # [pos, atom]
        size = code.sum(dim=0)
        size = (size / size.sum().clamp(min=1e-30)).tolist()
        shares += [(share, layer, atom) for atom, share in enumerate(size)]
        for own in code[answers]:
            largest = own.topk(min(OF_ANSWER, len(own)))
            chosen |= {(layer, atom) for atom in largest.indices[largest.values > 0].tolist()}
    chosen |= {(layer, atom) for _, layer, atom in sorted(shares, reverse=True)[:ATOMS]}
    found: dict[int, list[int]] = {}
    for layer, atom in sorted(chosen):
        found.setdefault(layer, []).append(atom)
    return found


def _patches(net: Any, given: Tensor) -> Rows:
    height, width = net.cfg.patch_size
    rows, columns = (
        side // patch for side, patch in zip(given.shape[2:], (height, width), strict=True)
    )
    mean = given[0].mean(dim=(1, 2))[:, None, None]  # [channels, 1, 1]
    for start in range(0, rows * columns, _BATCH):
        places = range(start, min(start + _BATCH, rows * columns))
        copies = given.repeat(len(places), 1, 1, 1)
        for copy, place in enumerate(places):
            y, x = place // columns * height, place % columns * width
            copies[copy, :, y : y + height, x : x + width] = mean
        yield from zip(places, _answers(net(copies)), strict=True)
