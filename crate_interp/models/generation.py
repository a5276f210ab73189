"""Generation: a language model continues text or tokens."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from crate_interp import checks
from crate_interp.bars import tqdm
from crate_interp.models.context import Past
from crate_interp.models.text import TextMixin


class GenerateMixin(TextMixin):
    """`generate`, on a causal model."""

    @torch.no_grad()
    def generate(
        self,
        input: str | Tensor,
        max_new_tokens: int = 20,
        *,
        do_sample: bool = False,
        temperature: int | float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        prepend_bos: bool | None = None,
        progress: bool = False,
    ) -> Any:
        """Returns the input with `max_new_tokens` more: a string for a string, ids for ids.

        The ids are `[batch, pos + new]`; the string is without the separator that was put before
        it. Tokens are chosen greedily, or with `do_sample` drawn from softmax(logits / temperature)
        among the `top_k` likeliest. Keys and values of earlier tokens are kept; past n_ctx the last
        n_ctx tokens are read anew at each step, as nanoGPT does. Hooks on the model act. Different
        from TransformerLens: greedy is the default, and there is no stop token.
        """
        _check_generation(max_new_tokens, temperature, top_k)
        tokens, _ = self._read(input, prepend_bos, None, None, None)
        past, n_ctx = Past(), self.cfg.n_ctx
        for _ in tqdm(range(max_new_tokens), desc="generate", unit="token", disable=not progress):
            fits = tokens.shape[1] <= n_ctx
            model: Any = self
            logits = (
                model(tokens[:, past.length :], past=past) if fits else model(tokens[:, -n_ctx:])
            )
            tokens = torch.cat(
                [tokens, _choose(logits[:, -1], do_sample, temperature, top_k, generator)], dim=1
            )
        if not isinstance(input, str):
            return tokens
        put = self.cfg.prepend_bos if prepend_bos is None else prepend_bos
        return self.to_string(tokens[0, int(bool(put)) :])


def _check_generation(max_new_tokens: int, temperature: int | float, top_k: int | None) -> None:
    checks.count("max_new_tokens", max_new_tokens, least=0)
    if not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature!r}: give a number above 0; greedy is do_sample=False."
        )
    if top_k is not None and (not checks.is_int(top_k) or top_k < 1):
        raise ValueError(f"top_k={top_k!r}: give a whole number of at least 1, or None.")


def _choose(
    logits: Tensor,
    do_sample: bool,
    temperature: int | float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Int[Tensor, "batch one"]:
    if not do_sample:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
