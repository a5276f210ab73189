"""When generation ends: at a stop token, at a stop string, or when a criterion says so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.core import checks, errors
from crate_interp.models.text.tokenizer import is_hugging_face

if TYPE_CHECKING:
    from transformers import StoppingCriteria

    from crate_interp.models.text.text_and_tokens import TextMixin


@dataclass(frozen=True)
class Stops:
    """The tokens that end a row, the token that fills an ended row, and further criteria."""

    ends: tuple[int, ...] = ()
    filler: int = 0
    criteria: Callable[..., Tensor] | None = None  # a transformers StoppingCriteriaList

    @property
    def active(self) -> bool:
        """Tells whether a row can end before the last step."""
        return bool(self.ends) or self.criteria is not None

    def ended(
        self,
        chosen: Int[Tensor, "batch"],
        tokens: Int[Tensor, "batch pos"],
        logits: Float[Tensor, "batch d_vocab"],
    ) -> Bool[Tensor, "batch"]:
        """Returns which rows end now. chosen: each row's newest token, which `tokens` includes."""
        ended = torch.isin(chosen, torch.tensor(self.ends, dtype=torch.long, device=chosen.device))
        if self.criteria is None:
            return ended
        also = self.criteria(tokens, logits).to(device=chosen.device, dtype=torch.bool)
        if also.shape != ended.shape:
            raise ValueError(
                f"a stopping criterion returned shape {list(also.shape)}: it must return one bool "
                f"per row, of shape {list(ended.shape)}."
            )
        return ended | also


def stops(
    model: "TextMixin",
    stop_at_eos: bool,
    eos_token_id: int | Sequence[int] | None,
    stop_strings: str | Sequence[str] | None,
    stopping_criteria: "StoppingCriteria | Sequence[StoppingCriteria] | None",
    batch: int,
) -> Stops:
    """Returns the rules by which rows end.

    Raises ValueError if stop_at_eos is set but no end token is known, for stop strings without a
    Hugging Face tokenizer, and if a row may end before the other rows but no token is known that
    can fill it up.
    """
    ends = _ends(model, eos_token_id) if stop_at_eos else ()
    criteria = _criteria(model, stop_strings, stopping_criteria)
    if ends:
        return Stops(ends, ends[0], criteria)
    if criteria is None:
        return Stops()
    tokenizer = model.tokenizer
    known = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    filler = next((index for index in known if index is not None), None)
    if filler is None and batch > 1:
        raise ValueError(
            "a row that ends before the others is filled up with a padding token, but the model "
            "has no tokenizer that names one. Give stop_at_eos=True with eos_token_id=..., or "
            "generate one row at a time."
        )
    return Stops((), filler or 0, criteria)


def _ends(model: "TextMixin", given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the tokens that end a text: the given ones, or the tokenizer's."""
    if given is None:
        try:
            given = getattr(model.tokenizer, "eos_token_id", None)
            reason = "the model has no tokenizer that names one"
        except errors.CheckpointError as error:
            reason = str(error).rstrip(".")
        if given is None:
            raise errors.TextError(
                f"stop_at_eos=True needs an eos_token_id: {reason}. Give eos_token_id=..., or "
                "stop_at_eos=False."
            )
    ends: Any = given if isinstance(given, (list, tuple)) else [given]
    if not ends or not all(checks.is_int(index) for index in ends):
        raise ValueError(f"eos_token_id={checks.shown(given)}: give a token id, or a list of ids.")
    return tuple(int(index) for index in ends)


def _criteria(model: "TextMixin", strings: Any, criteria: Any) -> Any:
    """Returns a transformers StoppingCriteriaList, or None if it would be empty."""
    strings = [strings] if isinstance(strings, str) else [one for one in strings or () if one]
    if not strings and criteria is None:
        return None
    from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

    found = StoppingCriteriaList()
    if strings:
        tokenizer = model.tokenizer
        if not is_hugging_face(tokenizer):
            raise ValueError(
                "stop_strings needs a Hugging Face tokenizer, which this model lacks: give "
                "stopping_criteria=..., which can read token ids."
            )
        found.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    if criteria is not None:
        listed = list(criteria) if isinstance(criteria, (list, tuple)) else [criteria]
        if not all(isinstance(one, StoppingCriteria) for one in listed):
            raise TypeError(
                f"stopping_criteria is {type(criteria).__name__}: give a transformers "
                "StoppingCriteria, or a list of them."
            )
        found.extend(listed)
    return found
