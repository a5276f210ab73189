"""The loss of a language model: each token's cross-entropy given the tokens before it."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.models.compat.torch_compile import readable

IGNORED = -100  # the label of a token that losses ignore, as in torch and transformers


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    per_token: bool = False,
    real: Bool[Tensor, "batch pos"] | None = None,
    labels: Int[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "..."]:
    """Returns the cross-entropy in nats of each token given those before it.

    It is the mean `[]`, or `[batch, pos - 1]` with `per_token`. real: which tokens are not padding;
    a prediction counts if its own token and the predicted one are both real. labels: predicted in
    place of the tokens, -100 for no prediction. With `per_token`, a prediction that is not counted
    is 0. Raises ValueError if no prediction counts.
    """
    if tokens.shape[1] < 2:
        raise ValueError("the loss needs at least two tokens: the first predicts the second.")
    wanted = (tokens if labels is None else labels)[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=IGNORED
    ).unflatten(0, wanted.shape)
    if real is None and labels is None:
        return losses if per_token else losses.mean()
    counted = wanted != IGNORED
    if real is not None:
        counted = counted & real[:, :-1] & real[:, 1:]
    losses, n = losses.masked_fill(~counted, 0.0), counted.sum()
    if per_token:
        return losses
    if readable(n) and not bool(n):
        raise ValueError("the loss counts no tokens: all are padding, or labelled -100.")
    return losses.sum() / n


def check_labels(labels: Tensor, tokens: Tensor, d_vocab: int) -> Int[Tensor, "batch pos"]:
    """Returns labels, which are token ids or -100, on the device of the tokens.

    Raises ValueError if their shape or dtype is not that of the tokens, and for other numbers.
    """
    if labels.ndim == 1:
        labels = labels[None]
    if labels.shape != tokens.shape or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}: give a token id, or -100, "
            f"for each of the tokens {list(tokens.shape)}. The model shifts them."
        )
    check_label_range(labels, d_vocab, "vocabulary")
    return labels.to(tokens.device, torch.long)


def check_label_range(labels: Int[Tensor, "..."], count: int, what: str) -> None:
    """Raises ValueError for a label beyond the `count` entries of `what`."""
    given = labels[labels != IGNORED] if readable(labels) else labels[:0]
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= count):
        raise ValueError(
            f"labels go from {int(given.min())} to {int(given.max())}, the {what} from 0 to "
            f"{count - 1}: only -100 is ignored."
        )
