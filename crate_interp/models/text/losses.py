"""The loss of a language model: each token's cross-entropy given the tokens before it."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.core import checks
from crate_interp.models.runtimes import readable

IGNORED = -100  # the label of a token that losses ignore, as in torch and transformers


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    per_token: bool = False,
    real: Bool[Tensor, "batch pos"] | None = None,
    labels: Int[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "..."]:
    """Returns the cross-entropy in nats of each token given the tokens before it.

    Returns the mean `[]`, or with `per_token` one loss per prediction `[batch, pos - 1]`. real:
    which tokens are not padding; a prediction counts if the token that predicts and the predicted
    token are both real. labels: token ids to predict instead of `tokens`; -100 means no
    prediction. With `per_token`, the loss of a prediction that does not count is 0. Raises
    ValueError if no prediction counts.
    """
    if tokens.shape[1] < 2:
        raise ValueError("the loss needs at least two tokens: the first predicts the second.")
    wanted = (tokens if labels is None else labels)[:, 1:]
    if real is None and labels is None:
        losses = _losses(logits[:, :-1], wanted)
        return losses if per_token else losses.mean()
    real = None if real is None else real[:, :-1] & real[:, 1:]
    return token_loss(logits[:, :-1], wanted, per_token, real)


def _losses(
    logits: Float[Tensor, "batch pos d_vocab"], labels: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos"]:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    ).unflatten(0, labels.shape)


def token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    labels: Int[Tensor, "batch pos"],
    per_token: bool = False,
    real: Bool[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "..."]:
    """Returns the cross-entropy in nats of the label at each place, as `next_token_loss` does.

    A label of -100, and a place that is not real, does not count.
    """
    counted = labels != IGNORED if real is None else real & (labels != IGNORED)
    losses, n = _losses(logits, labels).masked_fill(~counted, 0.0), counted.sum()
    if per_token:
        return losses
    if readable(n) and not bool(n):
        raise ValueError("the loss counts no token: all are padding, or have the label -100.")
    return losses.sum() / n


def check_labels(
    labels: Any, shape: tuple[int, ...], count: int, what: str, device: torch.device
) -> Int[Tensor, "..."]:
    """Returns labels, which are numbers from 0 to `count` - 1, or -100, on a device.

    what: what the numbers stand for, in errors. Raises ValueError for labels that are not a tensor
    of whole numbers of this shape, and for a number out of range.
    """
    if isinstance(labels, Tensor) and labels.shape == shape[1:] and shape[0] == 1:
        labels = labels[None]
    tensor = isinstance(labels, Tensor)
    whole = tensor and not labels.is_floating_point() and labels.dtype != torch.bool
    if not whole or labels.shape != shape:
        raise ValueError(
            f"labels={checks.quote(labels)}: give a tensor of whole numbers of shape "
            f"{list(shape)}, {what} or -100, not shifted."
        )
    numbers = labels[labels != IGNORED] if readable(labels) else labels[:0]
    if bool(((numbers < 0) | (numbers >= count)).any()):
        raise ValueError(f"labels are {what} from 0 to {count - 1}, or -100 for a label to ignore.")
    return labels.to(device, torch.long)
