"""The answer to one input without a head, without an atom, and without a patch."""

import math
from itertools import groupby
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.graphs.question import one_sample
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel

ATOMS = 40  # how many of the largest atoms of all layers are switched off
OF_ANSWER = 8  # and in each layer how many of those at the token that answers
_BATCH = 64  # copies of the input in one forward


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
    parts = [("head", n, h) for n in range(len(net.blocks)) for h in range(net.cfg.n_heads)]
    parts += [("atom", *place) for place in sorted(_largest_atoms(net, given))]
    if net.cfg.kind != "text":
        sides = zip(given.shape[2:], net.cfg.patch_size, strict=True)
        count = math.prod(side // patch for side, patch in sides)
        parts += [("patch", -1, number) for number in range(count)]
    found = [shares[None]]
    for (kind, layer), group in groupby(parts, lambda part: part[:2]):
        numbers = [number for _, _, number in group]
        for start in range(0, len(numbers), _BATCH):
            some = numbers[start : start + _BATCH]
            found.append(_answers(_without(net, given, kind, layer, some)))
    every = torch.cat(found).cpu()
    best = every.max(dim=-1)
    table = pd.DataFrame([("nothing", -1, -1), *parts], columns=["kind", "layer", "number"])
    table["probability"] = every[:, int(shares.argmax())].double().numpy()
    answers = {"answer": best.indices.numpy(), "answer_probability": best.values.double().numpy()}
    return table.assign(**answers)


def _answers(logits: Tensor) -> Float[Tensor, "copy answer"]:
    """Returns the probabilities of classes, or of the token after the last one."""
    logits = logits[:, -1] if logits.ndim == 3 else logits
    return logits.float().softmax(dim=-1)


def _without(net: Any, given: Tensor, kind: str, layer: int, numbers: list[int]) -> Tensor:
    """Returns the logits of copies of the input, each without one head, atom or patch."""
    copies = given.repeat(len(numbers), *[1] * (given.ndim - 1))
    if kind == "patch":
        height, width = net.cfg.patch_size
        columns = given.shape[3] // width
        for copy, place in enumerate(numbers):
            y, x = place // columns * height, place % columns * width
            copies[copy, :, y : y + height, x : x + width] = given[0].mean((1, 2))[:, None, None]
        return net(copies)

    def off(value: Tensor, hook: object) -> Tensor:
        # of one input, hook_z is [pos, head, d_head] and hook_post [pos, atom]
        value = value.clone()
        for copy, number in enumerate(numbers):
            value[copy, :, number] = 0
        return value

    point = "attn.hook_z" if kind == "head" else "mlp.hook_post"
    return net.run_with_hooks(copies, fwd_hooks=[(full_name(point, layer), off)])


def _largest_atoms(net: Any, given: Tensor) -> set[tuple[int, int]]:
    """Returns layer and number of the largest atoms; none where attention is the layer."""
    if net.cfg.attn_only:
        return set()
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
    return chosen | {(layer, atom) for _, layer, atom in sorted(shares, reverse=True)[:ATOMS]}
