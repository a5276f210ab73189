"""What Hugging Face's libraries give a model and take from it."""

from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutput


def one_of(input: object, input_ids: Tensor | None) -> Any:
    """Returns what the model is to read; raises ValueError unless exactly one of the two is given.

    input_ids: tokens under the name that Hugging Face's libraries use, which go with no text.
    """
    if (input is None) == (input_ids is None):
        raise ValueError("give the model tokens or text, or token ids as input_ids=: one of them.")
    if input_ids is not None and not isinstance(input_ids, Tensor):
        raise ValueError(
            f"input_ids is a tensor of token ids, got {type(input_ids).__name__}: give text as the "
            "first argument."
        )
    return input if input_ids is None else input_ids


def causal_output(
    logits: Float[Tensor, "batch pos d_vocab"], loss: Float[Tensor, "..."] | None
) -> "CausalLMOutput":
    """Returns a transformers `CausalLMOutput`; without labels it has no loss."""
    from transformers.modeling_outputs import CausalLMOutput  # heavy, and for those who train

    fields: Any = {"logits": logits} if loss is None else {"loss": loss, "logits": logits}
    return CausalLMOutput(**fields)
