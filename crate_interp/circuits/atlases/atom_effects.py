"""First-order effects of atoms: how the loss changes if a code is 0, estimated from gradients."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.losses import next_token_loss
from crate_interp.questions.batches import Chunk
from crate_interp.questions.experiment import Tables
from crate_interp.stats.contrasts import MOST_GROUPS, columns_of_sums
from crate_interp.sweeps.atom_statistics import CODE

LOSSES = {  # kind -> the name of the loss on pages
    "labels": "the cross-entropy with the true class",
    "answers": "the cross-entropy with the class that the unchanged model answers",
    "tokens": "the cross-entropy of the next token, mean over the window",
}
_LOGITS = 2**25  # the most logits in one forward of a piece of a batch: 128 MB
_STREAM = 2**20  # the most numbers in the stream of images whose graph is kept: 1 GB in 12 layers


@dataclass(frozen=True)
class Loss:
    """The loss, a number for each sample, in nats. Effects are changes of this loss.

    kind: a key of LOSSES. classes: for kind "labels" only, the class of each sample; the first
    class belongs to sample number `start`.
    """

    kind: str
    classes: Tensor | None = None
    start: int = 0

    def wanted(self, logits: Tensor, inputs: Tensor, numbers: Sequence[int]) -> Int[Tensor, "..."]:
        """Returns the right answers to some samples: classes `[batch]` or tokens `[batch, pos]`.

        logits: the unchanged model's. numbers: the samples' numbers in the whole data set.
        """
        if self.kind == "tokens":
            return inputs
        if self.classes is None:
            return logits.detach().argmax(dim=-1)
        return self.classes[torch.as_tensor(numbers) - self.start].to(logits.device)


def check_logits(model: HookedModel, what: str) -> None:
    """Raises ValueError if a model has no answers, which `what` needs."""
    if model.cfg.kind not in ("vision", "text") or not model.has_logits:
        raise ValueError(
            f"this {type(model).__name__} of family {model.cfg.family!r} has no logits, which "
            f"{what} needs: give a classifier of images or a language model."
        )


def loss_on(model: HookedModel, samples: Samples) -> Loss:
    """Returns the loss for a data set. It uses labels if every label is a class of the model.

    Labels with names (folders, or a ClassLabel column) are matched by name. If the model's classes
    have no names, a ClassLabel column is matched by number, provided that it has as many classes as
    the model. Folders are never matched by number, because the numbers that they had in the
    training are unknown. Labels that are numbers without names are matched by number. If a label
    has no match, the loss is that of the model's answers.

    Raises ValueError for windows of one token: they have no next token.
    """
    if model.cfg.kind == "text":
        pos = samples.lengths or samples.read(samples.start, samples.start + 1).shape[1:]
        if min(pos) < 2:
            raise ValueError(
                "the windows have one token, and the loss needs a next token: give windows of at "
                "least two tokens."
            )
        return Loss("tokens")
    net: Any = model
    labels, names, count = samples.labels, model.cfg.labels, net.W_U.shape[1]
    if not labels or None in labels:
        return Loss("answers")
    if samples.names is not None and not isinstance(labels[0], str):
        if names is None and len(samples.names) != count:
            return Loss("answers")
        if names is not None:
            labels = [samples.names[label] for label in labels]
    if all(isinstance(label, str) for label in labels):
        # two classes of ImageNet are called crane: such a name does not identify a class
        once = Counter(names or ())
        numbers = {name: n for n, name in enumerate(names or ()) if once[name] == 1}
        classes = [numbers.get(label, -1) for label in labels]
    else:
        classes = [int(label) if isinstance(label, (int, np.integer)) else -1 for label in labels]
    if not all(0 <= one < count for one in classes):
        return Loss("answers")
    return Loss("labels", torch.tensor(classes), samples.start)


def losses(logits: Tensor, wanted: Int[Tensor, "..."]) -> Float[Tensor, "batch"]:
    """Returns the loss of each sample, in nats; for a window, the mean over its tokens."""
    logits = logits.float() if logits.element_size() < 4 else logits
    if logits.ndim == 3:
        return next_token_loss(logits, wanted, per_token=True).mean(dim=1)
    return F.cross_entropy(logits, wanted, reduction="none")


def at_once(model: Any, inputs: Tensor) -> int:
    """Returns how many of the inputs one forward may take, so that its gradients fit in memory."""
    if model.cfg.kind != "text":
        patches = inputs[0, 0].numel() // math.prod(model.cfg.patch_size)
        return max(1, _STREAM // (patches * model.cfg.d_model))
    return max(1, _LOGITS // (inputs.shape[1] * model.W_U.shape[1]))


def loss_effects(
    model: HookedModel, inputs: Tensor, numbers: Sequence[int], loss: Loss
) -> tuple[Float[Tensor, "batch layer atom"], Float[Tensor, "batch"]]:
    """Returns the first-order effect of each atom on each sample's loss, and this loss.

    The effect of atom j is `sum_t (0 - z_tj) d loss / d z_tj` in nats, where z_tj is the atom's
    code at token t. This is the derivative of the loss in the direction that takes the code to 0.
    One forward and one backward give the effects of all atoms of all layers. An atom whose code is
    0 has no effect.
    """
    effects, values = [], []
    size = at_once(model, inputs)
    for piece, own in zip(inputs.split(size), torch.as_tensor(numbers).split(size), strict=True):
        with torch.enable_grad():
            codes, logits = codes_and_logits(model, piece)
            value = losses(logits, loss.wanted(logits, piece, own.tolist()))
            gradients = torch.autograd.grad(value.sum(), codes)
        effects.append(-sums_over_tokens(codes, gradients))
        values.append(value.detach().double().cpu())
    return torch.cat(effects), torch.cat(values)


def codes_and_logits(
    model: HookedModel, inputs: Tensor, point: str = CODE, streams: list[Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Returns the code of each layer `[batch, pos, atom]`, with a gradient, and the logits.

    point: another point of the layers whose activations are returned in place of codes. streams: a
    list to which the stream before each layer is added.
    """
    codes: list[Tensor] = []

    def keep(code: Tensor, hook: Any) -> Tensor:
        # the first code is a leaf, so neither weights nor earlier values need a gradient
        codes.append(code if code.requires_grad and codes else code.detach().requires_grad_())
        return codes[-1]

    layers = range(model.cfg.n_layers)
    hooks: list[Any] = [(full_name(point, layer), keep) for layer in layers]
    if streams is not None:

        def note(stream: Tensor, hook: Any) -> None:
            streams.append(stream.detach())

        hooks += [(full_name("hook_resid_pre", layer), note) for layer in layers]
    return codes, model.run_with_hooks(inputs, fwd_hooks=hooks)


def sums_over_tokens(
    codes: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Float[Tensor, "batch layer atom"]:
    """Returns code times gradient, summed over the tokens of each sample."""
    products = zip(codes, gradients, strict=True)
    sums = [(code.detach().double() * grad.double()).sum(dim=1) for code, grad in products]
    return torch.stack(sums, dim=1).cpu()


def effect_sums(chunk: Chunk, loss: Loss) -> Tables:
    """Returns the table "effects", a row per layer and atom: layer, atom, n, loss, total, squares.

    n: the number of samples. loss: the sum of their losses. total, squares: the sums of the
    first-order effects and of their squares. For samples with groups, also the columns of
    `stats.contrasts.columns_of_sums`.
    """
    total = squares = torch.zeros(())
    value, n, groups = 0.0, 0, SumsOfGroups(chunk.samples)
    for batch in chunk.batches():
        numbers = range(batch.start, batch.last + 1)
        effects, of_each = loss_effects(chunk.model, batch.inputs, numbers, loss)
        total, squares = total + effects.sum(dim=0), squares + effects.square().sum(dim=0)
        value, n = value + float(of_each.sum()), n + len(of_each)
        groups.add(effects, numbers)
    if not n:  # no sample of the chunk can be decoded
        return {}
    layer, atom = np.indices(total.shape).reshape(2, -1)
    sums = {"total": total.flatten().numpy(), "squares": squares.flatten().numpy()}
    table = pd.DataFrame({"layer": layer, "atom": atom, "n": n, "loss": value} | sums)
    return {"effects": table.assign(**groups.columns())}


class SumsOfGroups:
    """Sums of values by group of samples; without groups, nothing."""

    def __init__(self, samples: Samples) -> None:
        self.start, self.groups = samples.start, samples.groups
        self.totals: dict[int, Tensor] = {}
        self.counts: Counter[int] = Counter()

    def add(self, values: Float[Tensor, "batch ..."], numbers: Sequence[int]) -> None:
        """Adds the values of the samples with these numbers."""
        if self.groups is None:
            return
        for value, number in zip(values, numbers, strict=True):
            group = self.groups[number - self.start] % MOST_GROUPS
            self.totals[group] = self.totals.get(group, 0) + value.flatten().double()
            self.counts[group] += 1

    def columns(self) -> dict[str, Any]:
        """Returns the columns of `stats.contrasts.columns_of_sums`."""
        if not self.totals:
            return {}
        total = torch.stack(list(self.totals.values())).numpy()
        return columns_of_sums(total, np.array(list(self.counts.values())))
