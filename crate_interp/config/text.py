"""Configs of language models and of text towers."""

from dataclasses import dataclass
from typing import ClassVar

from crate_interp.config.base import DEFAULT, CrateConfig, Filled
from crate_interp.config.vision import VisionConfig


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


@dataclass(frozen=True, kw_only=True)
class BridgedConfig(CrateConfig):
    """The config of any network behind a bridge (crate_interp/bridge/bridge_to_hooked.py).

    `architecture` is the name of the network's class. The network has no U; `subspaces` chooses the
    map that is measured in place of U: "value", "key" or "query". `value_heads`: how many heads the
    keys and values have; None means as many as the queries. `rms_norm`: whether the norms are RMS
    norms.
    """

    eta: float = 0.0
    architecture: str | None = None
    subspaces: str = "value"
    value_heads: Filled[int] = DEFAULT
    rms_norm: bool = False

    def _check_kind(self) -> None:
        super()._check_kind()
        self._set(value_heads=self.value_heads or self.n_heads)

    @property
    def normalization_type(self) -> str:
        """The kind of norm: "LN" or "RMS"."""
        return "RMS" if self.rms_norm else "LN"

    @property
    def n_key_value_heads(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of key and value heads, or None if it is the number of query heads."""
        return None if self.value_heads == self.n_heads else self.value_heads


@dataclass(frozen=True, kw_only=True)
class BridgedImageConfig(BridgedConfig, VisionConfig):
    """The config of an image network behind a bridge.

    `special_tokens`: how many tokens come before the patches, CLS first. `n_classes` is the width
    of the network's output.
    """

    special_tokens: int = 1

    @property
    def n_special(self) -> int:
        """How many tokens come before the patches."""
        return self.special_tokens


@dataclass(frozen=True, kw_only=True)
class BridgedTextConfig(BridgedConfig, TextConfig):
    """The config of a causal language model behind a bridge.

    `rotations`: whether positions enter as rotations of queries and keys.
    """

    rotations: bool = False

    @property
    def positional_embedding_type(self) -> str:
        """How positions enter: "rotary" turns queries and keys, "standard" adds to the stream."""
        return "rotary" if self.rotations else "standard"
