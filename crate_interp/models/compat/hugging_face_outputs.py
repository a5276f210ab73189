"""Inputs and outputs of models in the form that Hugging Face's libraries expect."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.models.text.losses import check_label_range

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput, ImageClassifierOutput


def one_of(input: object, input_ids: Tensor | None) -> Any:
    """Returns the model's input; raises ValueError unless exactly one argument is given.

    input_ids: token ids, under Hugging Face's name; text is not allowed there.
    """
    if (input is None) == (input_ids is None):
        raise ValueError(
            "give the model one input: tokens or text as the first argument, or token ids as "
            "input_ids=."
        )
    if input_ids is not None and not isinstance(input_ids, Tensor):
        raise ValueError(
            f"input_ids is {type(input_ids).__name__}: give a tensor of token ids, or give text as "
            "the first argument."
        )
    return input if input_ids is None else input_ids


def causal_output(
    logits: Float[Tensor, "batch pos d_vocab"], loss: Float[Tensor, "..."] | None
) -> "CausalLMOutput":
    """Returns a transformers `CausalLMOutput`, with the loss if there is one."""
    from transformers.modeling_outputs import CausalLMOutput  # slow to import

    fields: Any = {"logits": logits} if loss is None else {"loss": loss, "logits": logits}
    return CausalLMOutput(**fields)


def image_output(
    logits: Float[Tensor, "batch n_classes"], labels: Tensor | Sequence[Any] | None
) -> "ImageClassifierOutput":
    """Returns a transformers `ImageClassifierOutput`; without labels it has no loss.

    The loss is the mean cross-entropy in nats. labels: class indices `[batch]`, -100 for images
    without a label. Raises ValueError for labels of a wrong shape, and for classes that the model
    does not have.
    """
    from transformers.modeling_outputs import ImageClassifierOutput  # slow to import

    if labels is None:
        return ImageClassifierOutput(logits=logits)  # pyright: ignore[reportArgumentType]
    wanted = _class_labels(labels, logits)
    loss: Any = F.cross_entropy(logits, wanted)
    return ImageClassifierOutput(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]


def _class_labels(labels: Any, logits: Float[Tensor, "batch n"]) -> Int[Tensor, "batch"]:
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"labels are a {type(labels).__name__}: give a tensor of class numbers, such as "
            "torch.tensor([model.cfg.labels.index(name) for name in names])."
        )
    whole = not labels.is_floating_point() and labels.dtype != torch.bool
    if not whole or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}: give one class index for "
            f"each image, [{logits.shape[0]}]."
        )
    check_label_range(labels, logits.shape[1], "classes")
    return labels.to(logits.device, torch.long)
