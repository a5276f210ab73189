"""Configs of language models and of text towers."""

from dataclasses import dataclass
from typing import ClassVar

from crate_interp.config.base import CrateConfig


@dataclass(frozen=True, kw_only=True)
class TextConfig(CrateConfig):
    """The config of a language model, which needs `n_ctx` and `d_vocab`.

    `bias` (gpt-baseline): whether linear maps and LayerNorms have a bias. `window`,
    `window_pattern`, `softcap` and `rotary_base` belong to nanochat-crate. `tokenizer`: "gpt2",
    "bert", or "file" for a tokenizer saved next to the weights; `prepend_bos`: whether the
    tokenizer's separator is put before texts. `d_embed` is the width of a text tower's output.
    """

    kind: ClassVar[str] = "text"
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
