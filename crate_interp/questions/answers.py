"""What answers are compared with: true classes, the model's own answers, next or masked tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.core import checks
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.losses import IGNORED, check_labels, token_loss

LOSSES = {  # kind -> the name of the loss on pages
    "labels": "the cross-entropy with the true class",
    "answers": "the cross-entropy with the class that the unchanged model answers",
    "tokens": "the cross-entropy of the next token, mean over the window",
    "masked": "the cross-entropy of the masked tokens, mean over those of a window",
}


@dataclass(frozen=True)
class Loss:
    """The loss, a number for each sample, in nats. Effects are changes of this loss.

    kind: a key of LOSSES. classes: for kind "labels", the class of each sample, and for kind
    "masked" the right tokens `[n, pos]`; the first belongs to sample number `start`.
    """

    kind: str
    classes: Tensor | None = None
    start: int = 0

    def right_answers(
        self, logits: Tensor, inputs: Tensor, numbers: Sequence[int]
    ) -> Int[Tensor, "..."]:
        """Returns the right answers to some samples: classes `[batch]` or tokens `[batch, place]`.

        Places are the first positions of a text; -100 is no answer. logits: the unchanged model's.
        numbers: the samples' numbers in the whole data set.
        """
        if self.kind == "tokens":
            return inputs[:, 1:]
        if self.classes is None:
            return logits.detach().argmax(dim=-1)
        return self.classes[torch.as_tensor(numbers) - self.start].to(logits.device)


def check_logits(model: HookedModel, what: str) -> None:
    """Raises ValueError if a model has no answers, which `what` needs."""
    tower = model.cfg.family in ("clipa-visual", "clipa-text")
    if model.cfg.kind not in ("vision", "text") or tower or not model.has_logits:
        raise ValueError(f"this {type(model).__name__} has no logits, which {what} needs.")


def loss_on(model: HookedModel, samples: Samples) -> Loss:
    """Returns the loss for a data set. It uses labels if every label is a class of the model.

    Labels with names (folders, or a ClassLabel column) are matched by name. If the model's classes
    have no names, a ClassLabel column is matched by number, provided that it has as many classes as
    the model. Folders are never matched by number, because the numbers that they had in the
    training are unknown. Labels that are numbers without names are matched by number. If a label
    has no match, the loss is that of the model's answers.

    Raises ValueError for windows of one token: they have no next token. A text that is read both
    ways needs the right tokens of masked places, `(tokens, labels)`, and only that text takes them.
    """
    if model.cfg.kind != "text" or model.cfg.causal:
        if samples.answers is not None:
            raise ValueError("a causal model is scored on its next tokens: give tokens alone.")
    elif samples.answers is None or bool((samples.answers == IGNORED).all(dim=1).any()):
        raise ValueError(
            "a text that is read both ways is scored on masked tokens: give (tokens, labels), both "
            "[n, pos], with [MASK] in tokens, its true token in labels, and -100 elsewhere."
        )
    else:
        count, given = model.cfg.d_vocab, samples.answers
        check_labels(given, given.shape, count, "token ids", given.device)
        return Loss("masked", given)
    if model.cfg.kind == "text":
        pos = samples.lengths or samples.read(samples.start, samples.start + 1).shape[1:]
        if min(pos) < 2:
            raise ValueError("the windows have one token, and the loss needs two: give more.")
        return Loss("tokens")
    labels, names, count = samples.labels, model.cfg.labels, model.W_U.shape[1]
    if not labels or None in labels:
        return Loss("answers")
    if samples.names is not None and not isinstance(labels[0], str):
        if names is None and len(samples.names) != count:
            return Loss("answers")
        labels = labels if names is None else [samples.names[label] for label in labels]
    # two classes of ImageNet are called crane: such a name does not identify a class
    once = {name for name, times in Counter(names or ()).items() if times == 1}
    numbers = {name: n for n, name in enumerate(names or ()) if name in once}
    classes = [int(one) if checks.is_int(one) else numbers.get(one, -1) for one in labels]
    if not all(0 <= one < count for one in classes):
        return Loss("answers")
    return Loss("labels", torch.tensor(classes), samples.start)


def true_loss(model: HookedModel, samples: Samples, labels: Sequence[Any] | None = None) -> Loss:
    """Returns the loss with true classes or next tokens. labels: replace the samples' labels.

    Raises ValueError if labels are missing, fewer than the samples, or not classes of the model,
    and for labels given to a language model.
    """
    if labels is not None:
        if model.unit == "windows":
            raise ValueError("a language model is scored on its next tokens: give no labels.")
        given = getattr(labels, "tolist", lambda: list(labels))()
        if len(given) < samples.n:
            raise ValueError(f"{len(given)} labels for {samples.n} samples: give one for each.")
        samples = replace(samples, labels=given[: samples.n], names=None)
    loss = loss_on(model, samples)
    if loss.kind != "answers":
        return loss
    given, count = samples.labels, model.W_U.shape[1]
    what = "labels are missing"
    if given and None not in given:
        if samples.names is not None and isinstance(given[0], int):
            given = [samples.names[label] for label in given]
        known = [*(model.cfg.labels or ()), *range(count)]
        wrong = next((place for place, one in enumerate(given) if known.count(one) != 1), 0)
        what = f"the label {checks.quote(given[wrong])} of sample {samples.start + wrong}"
        what += " is not one class of the model"
    raise ValueError(
        f"loss and accuracy need the true class of each image: {what}: give labels that are "
        f"{checks.quote(model.cfg.labels or range(count))}, or load the model with labels=[...], "
        f"{count} class names in the order of its outputs."
    )


def losses(logits: Tensor, answers: Int[Tensor, "..."]) -> Float[Tensor, "batch"]:
    """Returns the loss of each sample, in nats; for a window, the mean over its tokens."""
    logits = logits.float() if logits.element_size() < 4 else logits
    if logits.ndim == 3:
        each = token_loss(logits[:, : answers.shape[1]], answers, per_token=True)
        return each.sum(dim=1) / (answers != IGNORED).sum(dim=1)
    return F.cross_entropy(logits, answers, reduction="none")


def hits(logits: Tensor, answers: Int[Tensor, "..."]) -> Float[Tensor, "batch"]:
    """Returns 1 for a right answer, else 0; for a window, the share of right tokens."""
    if logits.ndim == 3:
        right = logits[:, : answers.shape[1]].argmax(dim=-1) == answers
        return right.double().sum(dim=-1) / (answers != IGNORED).sum(dim=-1)
    return (logits.argmax(dim=-1) == answers).double()
