"""The choice of the next token: the likeliest, or a random one after penalties and cut-offs."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.core import checks


@dataclass(frozen=True)
class Sampling:
    """The options of `generate` for choosing tokens; names and rules are TransformerLens'.

    Raises ValueError for numbers out of range, and if both top_k and top_p are given.
    """

    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    temperature: float = 1.0
    freq_penalty: float = 0.0
    repetition_penalty: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name, value, least, words in (
            ("temperature", self.temperature, 0, "a number of at least 0; 0 takes the likeliest"),
            ("freq_penalty", self.freq_penalty, 0, "a number of at least 0"),
            ("repetition_penalty", self.repetition_penalty, 1e-6, "a number above 0; 1 is neutral"),
        ):
            if not checks.is_number(value) or value < least:
                raise ValueError(f"{name}={checks.shown(value)}: give {words}.")
        if self.top_k is not None and (not checks.is_int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k={checks.shown(self.top_k)}: give a whole number > 0, or None.")
        if self.top_p is not None and (not checks.is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={checks.shown(self.top_p)}: give a share in (0, 1], or None.")
        if self.top_k is not None and self.top_p is not None:
            raise ValueError(
                "top_k and top_p were both given: give only one, because both limit the choice."
            )

    def choose(
        self,
        logits: Float[Tensor, "batch d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        real: Bool[Tensor, "batch pos"] | None,
    ) -> Int[Tensor, "batch"]:
        """Returns the next token of each row.

        tokens: all tokens so far, for the penalties; real: which of these tokens are not padding.
        """
        penalties = self.repetition_penalty != 1 or self.freq_penalty > 0
        counts = None
        if penalties:  # for each row, how often each token occurs; padding does not count
            ones = torch.ones_like(tokens).float() if real is None else real.float()
            counts = torch.zeros_like(logits, dtype=torch.float32).scatter_add_(1, tokens, ones)
        if counts is not None and self.repetition_penalty != 1:
            weaker = torch.where(
                logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty
            )
            logits = torch.where(counts > 0, weaker, logits)
        if not self.do_sample or self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if counts is not None:
            logits = logits - self.freq_penalty * counts
        chances = self._cut(logits).softmax(dim=-1)
        return torch.multinomial(chances, 1, replacement=True, generator=self.generator)[:, 0]

    def _cut(self, logits: Float[Tensor, "batch d_vocab"]) -> Float[Tensor, "batch d_vocab"]:
        """Returns the logits, with -inf for tokens that must not be drawn."""
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            return logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is None:
            return logits
        ordered, places = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        before[:, 0] = 0.0  # the likeliest token always stays
        out = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, before > self.top_p)
        return logits.masked_fill(out, -torch.inf)
