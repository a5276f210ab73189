"""Configs of language models and of text towers."""

from dataclasses import dataclass
from typing import ClassVar

from crate_interp.config.base import Check, CrateConfig, choice
from crate_interp.config.families import TOKENIZERS
from crate_interp.core import checks

_MOST_AT_ONCE = 4096  # tokens


def check_context(n_ctx: int) -> None:
    """Raises ValueError if a text tower, which sees its whole context at once, has too many tokens.

    The memory for its attention patterns grows with the square of the number of tokens. Published
    towers have at most 77.
    """
    if n_ctx > _MOST_AT_ONCE:
        raise ValueError(
            f"n_ctx={n_ctx}: a text tower sees its whole context at once, so it takes at "
            f"most {_MOST_AT_ONCE} tokens. Give a smaller n_ctx."
        )


def window_letters(name: str, value: object) -> str:
    """Returns a pattern of the letters S (short) and L (long).

    Raises ValueError, with the field's `name`, for anything else.
    """
    if not isinstance(value, str) or not 0 < len(value) < 1000 or set(value) - set("SL"):
        raise ValueError(f"{name}={checks.shown(value)}: give letters S (short) and L (long).")
    return value


@dataclass(frozen=True, kw_only=True)
class TextConfig(CrateConfig):
    """The config of a language model, which needs `n_ctx` and `d_vocab`.

    `bias` (gpt-baseline): whether linear maps and LayerNorms have a bias. `window`,
    `window_pattern`, `softcap` and `rotary_base` belong to nanochat-crate. `tokenizer`: "gpt2",
    "bert", or "file" for a tokenizer saved next to the weights; `prepend_bos`: whether the
    tokenizer's separator is put before texts. `d_embed` is the width of a text tower's output.
    """

    kind: ClassVar[str] = "text"
    checked: ClassVar[dict[str, Check]] = CrateConfig.checked | {
        "bias": checks.flag,
        "window": checks.flag,
        "window_pattern": window_letters,
        "softcap": checks.positive,
        "rotary_base": checks.positive,
        "tokenizer": choice(TOKENIZERS),
        "prepend_bos": checks.flag,
        "d_embed": checks.count,
    }

    bias: bool = False
    window: bool = False
    window_pattern: str = "L"
    softcap: float | None = None
    rotary_base: float = 10000.0
    tokenizer: str | None = None
    prepend_bos: bool | None = None
    d_embed: int | None = None

    def _check_kind(self) -> None:
        self.check_given("n_ctx", "d_vocab")
        if self.family == "clipa-text":
            check_context(self.n_ctx)
        if self.rotary and self.d_head % 2:
            raise ValueError(f"d_head={self.d_head}: rotary positions need an even d_head.")

    @property
    def output_bias(self) -> bool:
        """Whether the output map of attention has a bias."""
        bias = self.facts["output_bias"]
        return self.bias if bias is None else bias

    @property
    def default_prepend_bos(self) -> bool:
        """Whether BOS is put before texts."""
        return bool(self.prepend_bos)
