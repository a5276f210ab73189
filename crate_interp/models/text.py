"""Text in and out of a language model: TransformerLens' names for tokens, and generation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from crate_interp import checks
from crate_interp.bars import tqdm
from crate_interp.config import CrateConfig
from crate_interp.models.context import Past
from crate_interp.models.tokenizer import Tokenizer


class TextMixin:
    """Text to tokens and back, under TransformerLens' names; a model has `cfg` and `tokenizer`."""

    cfg: CrateConfig
    unit: str = "windows"
    tokenizer: Any = None  # a Tokenizer, or anything with its encode, decode and bos
    fetch_tokenizer: Callable[[], Tokenizer] | None = None  # of ci.load, for the first text

    def to_tokens(
        self, text: str | Sequence[str], prepend_bos: bool | None = None
    ) -> Int[Tensor, "batch pos"]:
        """Returns token ids `[batch, pos]` of one text or several of equal length.

        prepend_bos: whether the separator token comes first; None is as the model was trained
        (nanochat-crate and crate-tiny-lm yes, CRATE-LM and its baseline no). Different from
        TransformerLens: texts of different lengths raise ValueError, since no published CRATE was
        trained with padding.
        """
        texts = [text] if isinstance(text, str) else list(text)
        if not texts:
            raise ValueError("there is no text: the list is empty.")
        rows = [self._encode(one, prepend_bos) for one in texts]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"the texts have {', '.join(str(len(row)) for row in rows[:8])} tokens: no CRATE "
                "was trained with padding. Give texts of equal length, or one at a time."
            )
        return torch.tensor(rows, dtype=torch.long, device=self.cfg.device)

    def windows(self, texts: list[str]) -> Int[Tensor, "window n_ctx"]:
        """Returns texts, joined by the separator token, in windows of n_ctx tokens.

        The last window is dropped if it is short. If the model was trained with the separator
        before each window (`cfg.prepend_bos`) a window is the separator and n_ctx - 1 tokens. There
        is no padding. Raises ValueError if the texts do not fill one window, and for several texts
        if the tokenizer has no separator.
        """
        n_ctx, bos = self.cfg.n_ctx, self._tokenizer().bos
        if len(texts) > 1 and bos is None:
            raise ValueError(
                "the tokenizer has no separator to join texts with: give one string, or token ids."
            )
        joined: list[int] = []
        for place, text in enumerate(texts):
            ids = self._encode(text, prepend_bos=False) if text else []
            joined += ([bos] if place and bos is not None else []) + ids
        first = [bos] if self.cfg.prepend_bos and bos is not None else []
        length = n_ctx - len(first)
        starts = range(0, len(joined) - length + 1, length)
        if not len(starts):
            raise ValueError(
                f"the texts have {len(joined)} tokens, a window has {n_ctx}: give longer texts."
            )
        rows = [first + joined[start : start + length] for start in starts]
        return torch.tensor(rows, dtype=torch.long, device=self.cfg.device)

    def _encode(self, text: Any, prepend_bos: bool | None) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(
                f"cannot make tokens of {type(text).__name__}: give a string or a list of strings."
            )
        tokenizer = self._tokenizer()
        wanted = self.cfg.prepend_bos if prepend_bos is None else prepend_bos
        if wanted and tokenizer.bos is None:
            raise ValueError("prepend_bos=True: this model's tokenizer has no separator token.")
        ids = ([tokenizer.bos] if wanted and tokenizer.bos is not None else []) + tokenizer.encode(
            text
        )
        if not ids:
            raise ValueError("the text is empty: there is no token in it.")
        return ids

    def _tokenizer(self) -> Any:
        if self.tokenizer is None and self.fetch_tokenizer is not None:
            self.tokenizer = self.fetch_tokenizer()
        if self.tokenizer is None:
            raise ValueError(
                "the model has no tokenizer: give token ids, or load it with one: ci.load(..., "
                "tokenizer='gpt2') (CRATE-LM and its baseline were trained with that of GPT-2)."
            )
        return self.tokenizer

    def _as_tokens(self, tokens: Any, prepend_bos: bool | None) -> Tensor:
        if isinstance(tokens, Tensor):
            whole = tokens.dtype in (torch.uint8, torch.int16, torch.int32)
            return (
                (tokens.long() if whole else tokens)[None]
                if tokens.ndim == 1
                else tokens.long()
                if whole
                else tokens
            )
        if isinstance(tokens, str) or (
            isinstance(tokens, (list, tuple)) and all(isinstance(t, str) for t in tokens)
        ):
            return self.to_tokens(tokens, prepend_bos)
        raise ValueError(
            f"the model takes a tensor of token ids or text, got {type(tokens).__name__}."
        )

    def to_string(
        self, tokens: int | Tensor | Sequence[int] | Sequence[Sequence[int]]
    ) -> str | list[str]:
        """Returns the text of token ids: a string for one row, a list for several."""
        if isinstance(tokens, (list, tuple)) and tokens and isinstance(tokens[0], (list, tuple)):
            rows: Any = tokens
            return [self._tokenizer().decode(list(row)) for row in rows]
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            return [self._tokenizer().decode(row.tolist()) for row in tokens]
        ids: Any = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
        ids = [ids] if isinstance(ids, int) else ids
        return self._tokenizer().decode([int(token) for token in ids])

    def to_str_tokens(
        self, text: str | Tensor | Sequence[str] | Sequence[Tensor], prepend_bos: bool | None = None
    ) -> Any:
        """Returns each token as text, with a list per row for several rows.

        Pieces of a character that several tokens share are replacement marks.
        """
        if not isinstance(text, (str, Tensor)):
            return [self.to_str_tokens(one, prepend_bos) for one in text]
        ids = self.to_tokens(text, prepend_bos)[0] if isinstance(text, str) else text
        if ids.ndim == 2:
            return [self.to_str_tokens(row) for row in ids]
        return [self._tokenizer().decode([token]) for token in ids.flatten().tolist()]

    def to_single_str_token(self, token: int) -> str:
        """Returns the text of one token."""
        return self._tokenizer().decode([int(token)])

    def to_single_token(self, text: str) -> int:
        """Returns the id of a text that is one token; raises ValueError for a text of several."""
        ids = self._encode(text, prepend_bos=False)
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens, {self.to_str_tokens(text, False)}: give one."
            )
        return ids[0]


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
        tokens = self._as_tokens(input, prepend_bos)
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
