"""Turns text into tokens and back, with methods under TransformerLens' names."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from crate_interp.config import CrateConfig
from crate_interp.core import checks
from crate_interp.core.errors import NoTokenizerError, ShortTextError, TextError
from crate_interp.core.safe_text import plain
from crate_interp.models.layers.context import Past, after_past, check_side, mask_from_pads, padded
from crate_interp.models.runtimes import readable
from crate_interp.models.text import tokenizer as tokenizers
from crate_interp.models.text.tokenizer import separator, token_name

# attributes of a model: its tokenizer, once read or set, and the function that reads it
_HELD = "_tokenizer_held"
TOKENIZER_STATE = (_HELD, "fetch_tokenizer")


class TextMixin:
    """Turns text into tokens and back. The model must have `cfg`, and may have a tokenizer.

    prepend_bos: whether the separator token comes first; None follows the training (True for
    nanochat-crate and crate-tiny-lm, False for CRATE-LM and its baseline). A text of CRATE-BERT
    with [CLS] before it has [SEP] after it, as in its training. Text never becomes a
    special token: "<|endoftext|>" in a text becomes a few ordinary tokens, with a warning. To put
    the special token there, give token ids.
    """

    cfg: CrateConfig
    unit: str = "windows"
    cuts_texts = True  # whether a text is cut to n_ctx tokens
    # set by ci.load; called when the tokenizer is first needed
    fetch_tokenizer: Callable[[], Any] | None = None

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer, a `PreTrainedTokenizerFast`; None if the model has none.

        The tokenizer is read, or fetched from the Hub, at its first use; if this fails,
        CheckpointError is raised. `model.tokenizer = ...` sets another tokenizer: a Hugging Face
        tokenizer, or any object with `encode`, `decode` and `bos`. Unlike Hugging Face's default,
        names of special tokens in a text are ordinary text; `tokenizer(text,
        split_special_tokens=False)` turns them into special tokens.
        """
        try:
            return self._find_tokenizer()
        except NoTokenizerError:
            return None

    @tokenizer.setter
    def tokenizer(self, tokenizer: object) -> None:
        self.__dict__[_HELD] = tokenizer

    def _find_tokenizer(self) -> Any:
        if _HELD not in self.__dict__ and self.fetch_tokenizer is not None:
            self.__dict__[_HELD] = self.fetch_tokenizer()
        return self.__dict__.get(_HELD)

    def _tokenizer(self) -> Any:
        """Returns the tokenizer; raises ValueError, with the reason, if there is none."""
        held = self._find_tokenizer()
        if held is None:
            last = self.cfg.d_vocab - 1
            raise TextError(
                f"the model has no tokenizer: give token ids, 0 to {last}, or load the model with "
                "its tokenizer, such as ci.load(..., tokenizer='gpt2') for CRATE-LM."
            )
        return held

    @property
    def tokenizer_prepends_bos(self) -> bool:
        """Whether `tokenizer(text)` begins with the separator, as with BERT's tokenizer.

        `to_tokens` follows `prepend_bos`, whatever the tokenizer does.
        """
        tokenizer = self._tokenizer()
        ids = tokenizer.encode("")
        return bool(ids) and ids[0] == separator(tokenizer)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Returns token ids `[batch, pos]` of one text or several.

        Shorter texts are padded on the `padding_side`; None means the tokenizer's side. Token ids
        do not show which tokens are padding: give the model the texts themselves, or an attention
        mask. truncate: whether a text is cut to n_ctx tokens, with a warning. move_to_device:
        whether the ids go to the model's device. Raises ValueError for an empty text without a
        separator, and if padding is needed but the tokenizer has no padding token.
        """
        tokens, _ = self._rows(input, prepend_bos, padding_side, truncate)
        return tokens.to(self.cfg.device) if move_to_device else tokens

    def _rows(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"] | None]:
        """Returns the token ids of texts, and which tokens are real (None if all are)."""
        check_side(padding_side)
        texts = [input] if isinstance(input, str) else list(input)
        if not texts:
            raise ValueError("there is no text: the list is empty.")
        rows = [self._encode(one, prepend_bos) for one in texts]
        longest, n_ctx = max(map(len, rows)), self.cfg.n_ctx
        if truncate and self.cuts_texts and longest > n_ctx:
            warnings.warn(
                f"a text has {longest} tokens and is cut to n_ctx={n_ctx}, the most that the "
                "model takes. To read a whole text, cut it into parts with ci.data.open_text.",
                stacklevel=3,
            )
            end = self._end(prepend_bos)  # stays
            rows = [row[: n_ctx - len(end)] + end if len(row) > n_ctx else row for row in rows]
        if len({len(row) for row in rows}) == 1:
            return torch.tensor(rows, dtype=torch.long), None
        side: Any = padding_side or getattr(self._tokenizer(), "padding_side", "right")
        return padded(rows, self._pad(), side)

    def _pad(self) -> int:
        """Returns the id of the padding token; raises ValueError if there is none."""
        tokenizer = self._tokenizer()
        pad = tokenizer.pad_token_id if tokenizers.is_hugging_face(tokenizer) else tokenizer.bos
        if pad is None:
            raise ValueError("the tokenizer has no pad_token: set model.tokenizer.pad_token.")
        return pad

    def windows(self, texts: Iterable[str]) -> Int[Tensor, "window n_ctx"]:
        """Joins texts by the separator token, and returns them as windows of n_ctx tokens.

        The last window is dropped if it is short. If the model was trained with the separator
        before each window (`cfg.prepend_bos`), a window is the separator followed by n_ctx - 1
        tokens. CRATE-BERT has [SEP] between texts, and none at the end of a window that is cut.
        There is no padding. Raises ValueError if the texts do not fill one window, and for
        several texts with a tokenizer that has no separator.
        """
        return stacked(self.window_rows(texts), self.cfg.n_ctx).to(self.cfg.device)

    def window_rows(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yields the rows of `windows` one by one, as the texts are read."""
        bos = separator(self._tokenizer())
        between = next(iter(self._end(True)), bos)
        ids = (self._encode(text, prepend_bos=False) if text else [] for text in texts)
        return rows_of(ids, self.cfg.n_ctx, between, bos if self.cfg.prepend_bos else None)

    def _encode(self, text: Any, prepend_bos: bool | None) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"cannot turn {type(text).__name__} into tokens: give text.")
        tokenizer = self._tokenizer()
        wanted = self.cfg.prepend_bos if prepend_bos is None else prepend_bos
        first = separator(tokenizer) if wanted else None
        if wanted and first is None:
            raise ValueError("the tokenizer has no separator token: give prepend_bos=False.")
        for name in tokenizers.spelled_specials(tokenizer, text):
            warnings.warn(
                f"a text holds {plain(name)!r}, which becomes ordinary tokens: give token ids to "
                "have the special token.",
                stacklevel=4,
            )
        ids = ([] if first is None else [first]) + tokenizers.encode(tokenizer, text)
        if not ids:
            raise ValueError("the text is empty: it has no tokens.")
        return ids + self._end(prepend_bos)

    def _end(self, prepend_bos: bool | None) -> list[int]:
        """Returns what ends a text that the separator begins: [SEP] in CRATE-BERT."""
        if self.cfg.causal or not getattr(self.cfg, "segments", 0):
            return []
        wanted = self.cfg.prepend_bos if prepend_bos is None else prepend_bos
        last = getattr(self._tokenizer(), "sep_token_id", None)
        return [last] if wanted and last is not None else []

    def _read(
        self,
        input: Any,
        prepend_bos: bool | None,
        padding_side: str | None,
        mask: Tensor | None,
        past: Past | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns token ids and their attention mask, made from the padding if `mask` is None."""
        check_side(padding_side)
        if isinstance(input, Tensor):
            small = input.dtype in (torch.uint8, torch.int16, torch.int32)
            tokens, real = input.long() if small else input, None
            tokens = tokens[None] if tokens.ndim == 1 else tokens
            if mask is None and padding_side is not None:
                wanted = self.cfg.prepend_bos if prepend_bos is None else prepend_bos
                first = separator(self._tokenizer()) if wanted else None
                real = mask_from_pads(tokens, self._pad(), padding_side, first)
        elif is_text(input):
            tokens, real = self._rows(input, prepend_bos, padding_side)
            tokens = tokens.to(self.cfg.device)
        else:
            raise ValueError(f"the input is {type(input).__name__}: give token ids or text.")
        if mask is None and real is not None:
            mask = after_past(real, past)
        return tokens, mask

    def to_string(
        self,
        tokens: int | np.integer | Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]],
    ) -> str | list[str]:
        """Returns the text of token ids: a string for one row, a list for several."""
        rows = _nested(tokens)
        if rows and isinstance(rows[0], list):
            return [tokenizers.decode(self._tokenizer(), row) for row in rows]
        return tokenizers.decode(self._tokenizer(), rows)

    def to_str_tokens(
        self,
        input: str | Tensor | np.ndarray | Sequence[str] | Sequence[Tensor] | Sequence[int],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> Any:
        """Returns each token as text; for several texts or rows, one list per text or row.

        If a character is made of several tokens, their bytes are named, such as <E6>, so that
        tokens differ. TransformerLens, and `to_string(tokens[:, None])` of a row of token ids, show
        a replacement mark for all of these tokens. Texts of a list are handled one by one and never
        padded.
        """
        if isinstance(input, (list, tuple)) and not all(isinstance(one, int) for one in input):
            parts: Any = input
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in parts]
        if isinstance(input, str):
            ids = self.to_tokens(input, prepend_bos, padding_side)[0].tolist()
        else:
            ids = _nested(input)
        if ids and isinstance(ids[0], list):
            named = [self.to_str_tokens(row) for row in ids]
            return named[0] if len(named) == 1 else named
        return [token_name(self._tokenizer(), index) for index in ids]

    def to_single_str_token(self, int_token: int) -> str:
        """Returns the text of one token; `to_str_tokens` says how parts of a character show."""
        return token_name(self._tokenizer(), int(int_token))

    def to_single_token(self, string: str) -> int:
        """Returns the id of a text that is one token; raises ValueError for more tokens."""
        ids = self._encode(string, prepend_bos=False)
        if len(ids) != 1:
            raise TextError(
                f"{string!r} is {len(ids)} tokens, {self.to_str_tokens(string, False)}: give a "
                "text that is one token."
            )
        return ids[0]

    def get_token_position(
        self,
        single_token: str | int | Tensor,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Returns the position of a token in a text, or in a row of token ids.

        mode: which position to return if the token occurs several times, "first" or "last". Raises
        ValueError if the token does not occur, and for more than one row.
        """
        checks.one_of("mode", mode, ("first", "last"))
        text = isinstance(input, str)
        ids = _nested(self.to_tokens(input, prepend_bos, padding_side) if text else input)
        if ids and isinstance(ids[0], list):
            if len(ids) != 1:
                raise TextError(f"input has {len(ids)} rows of tokens: give one row.")
            ids = ids[0]
        named = isinstance(single_token, str)
        wanted = self.to_single_token(single_token) if named else int(single_token)
        if wanted not in ids:
            raise TextError(f"token {single_token!r} does not occur in the {len(ids)} tokens.")
        return ids.index(wanted) if mode == "first" else len(ids) - 1 - ids[::-1].index(wanted)


def is_text(value: object) -> bool:
    """Tells whether a value is a text, or a list of texts."""
    listed = isinstance(value, (list, tuple))
    return isinstance(value, str) or (listed and all(isinstance(one, str) for one in value))


def _nested(tokens: Any) -> list[Any]:
    """Returns token ids as a list of ints, or a list of such lists for a batch."""
    if isinstance(tokens, (Tensor, np.ndarray)):
        tokens = tokens.tolist()
    if isinstance(tokens, (list, tuple)):
        return [_nested(one) if isinstance(one, (list, tuple)) else int(one) for one in tokens]
    return [int(tokens)]


def check_tokens(tokens: Tensor, cfg: CrateConfig, count: int) -> None:
    """Checks a batch of token ids.

    count: the number of tokens, including earlier tokens that the model has already read. Raises
    ValueError for a wrong dtype or shape, if `count` exceeds n_ctx, and for ids that are not in the
    vocabulary. While a model is traced, the ids cannot be read, so a bad id reaches torch
    unchecked.
    """
    check_ids(tokens, cfg.d_vocab, count, cfg.n_ctx)


def check_ids(tokens: Tensor, d_vocab: int, count: int, n_ctx: int | None) -> None:
    """Checks as `check_tokens` does, without a config; n_ctx=None means no limit."""
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.ndim != 2:
        kind = f"{tokens.dtype} of shape {list(tokens.shape)}"
        raise ValueError(f"tokens are {kind}: give whole numbers [batch, pos].")
    if 0 in tokens.shape:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: there are no tokens.")
    if n_ctx is not None and count > n_ctx:
        raise ValueError(f"there are {count} tokens; the model takes at most n_ctx={n_ctx}.")
    if not readable(tokens):
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= d_vocab:
        last = d_vocab - 1
        raise ValueError(f"tokens range from {low} to {high}; the vocabulary from 0 to {last}.")


def rows_of(
    texts: Iterable[list[int]],
    n_ctx: int,
    between: int | None,
    first: int | None = None,
    advice: str = "give longer texts, or a list of texts, each of which is then a sample.",
) -> Iterator[list[int]]:
    """Yields windows of n_ctx tokens, as the token ids of the texts are read.

    between: the separator. first: a token that begins each window. advice: the end of the error
    message if no window is full. The last window is dropped if it is short. Raises ValueError for a
    second text if there is no separator, and if no window is full.
    """
    begin = [] if first is None else [first]
    length = n_ctx - len(begin)
    waiting: list[int] = []
    short = True  # until a window is full
    for place, ids in enumerate(texts):
        if place and between is None:
            raise ValueError("the tokenizer has no separator: give one text, or token ids.")
        waiting += ([between] if place and between is not None else []) + ids
        starts = range(0, len(waiting) - length + 1, length)
        for start in starts:
            yield begin + waiting[start : start + length]
        if starts:
            short, waiting = False, waiting[starts[-1] + length :]
    if short:
        raise ShortTextError(f"{len(waiting)} tokens do not fill a window of {n_ctx}: {advice}")


def stacked(rows: Iterable[list[int]], n_ctx: int) -> Int[Tensor, "window n_ctx"]:
    """Returns rows as one int64 tensor, without a second copy in memory."""
    joined = array("q")
    for row in rows:
        joined.extend(row)
    return torch.frombuffer(joined, dtype=torch.int64).view(-1, n_ctx)
