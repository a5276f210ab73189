"""The configs of black boxes behind a TransformerLens bridge."""

from dataclasses import dataclass
from typing import ClassVar

from crate_interp.config.base import Check, choice
from crate_interp.config.families import SUBSPACES
from crate_interp.config.text import TextConfig
from crate_interp.config.types import DEFAULT, Filled
from crate_interp.config.vision import VisionConfig
from crate_interp.core import checks

_CHECKED: dict[str, Check] = {
    "architecture": checks.one_line,
    "subspaces": choice(SUBSPACES),
    "value_heads": checks.count,
    "rms_norm": checks.flag,
}


@dataclass(frozen=True, kw_only=True)
class BridgedImageConfig(VisionConfig):
    """The config of a network of images behind a bridge (crate_interp/bridge/bridge_to_hooked.py).

    `architecture` is the name of its class. `subspaces` says which of its maps stand in for U,
    which is a choice: "value", "key" or "query". `value_heads`: how many heads its keys and values
    have; None: as many as its queries. `special_tokens`: how many tokens come before the patches,
    CLS first. `rms_norm`: whether its norms are RMS norms. `n_classes` is the width of its output.
    """

    checked: ClassVar[dict[str, Check]] = (
        VisionConfig.checked | _CHECKED | {"special_tokens": checks.count}
    )

    eta: float = 0.0
    architecture: str | None = None
    subspaces: str = "value"
    value_heads: Filled[int] = DEFAULT
    special_tokens: int = 1
    rms_norm: bool = False

    def _check_kind(self) -> None:
        super()._check_kind()
        self._set(value_heads=self.value_heads or self.n_heads)

    @property
    def n_special(self) -> int:
        """How many tokens come before the patches."""
        return self.special_tokens

    @property
    def normalization_type(self) -> str:
        """The kind of norm: "LN" or "RMS"."""
        return "RMS" if self.rms_norm else "LN"

    @property
    def n_key_value_heads(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of heads of keys and values where it is another than of queries, or None."""
        return None if self.value_heads == self.n_heads else self.value_heads


@dataclass(frozen=True, kw_only=True)
class BridgedTextConfig(TextConfig):
    """The config of a causal language model behind a bridge; fields as in BridgedImageConfig.

    `rotations`: whether positions are rotations of queries and keys.
    """

    checked: ClassVar[dict[str, Check]] = TextConfig.checked | _CHECKED | {"rotations": checks.flag}

    eta: float = 0.0
    architecture: str | None = None
    subspaces: str = "value"
    value_heads: Filled[int] = DEFAULT
    rms_norm: bool = False
    rotations: bool = False

    def _check_kind(self) -> None:
        super()._check_kind()
        self._set(value_heads=self.value_heads or self.n_heads)

    @property
    def normalization_type(self) -> str:
        """The kind of norm: "LN" or "RMS"."""
        return "RMS" if self.rms_norm else "LN"

    @property
    def n_key_value_heads(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of heads of keys and values where it is another than of queries, or None."""
        return None if self.value_heads == self.n_heads else self.value_heads

    @property
    def positional_embedding_type(self) -> str:
        """How positions enter: "rotary" turns queries and keys, "standard" adds to the stream."""
        return "rotary" if self.rotations else "standard"
