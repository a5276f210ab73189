"""The config of image classifiers, and of an image tower."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from crate_interp import checks
from crate_interp.config.base import Check, choice
from crate_interp.config.families import POOLS
from crate_interp.config.images import ImageConfig, as_tuple


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ImageConfig):
    """The config of an image classifier.

    `pool` says what the classes are read from: the CLS token, or the mean of all tokens.
    `d_features` is the width of a linear map between the pooled token and the classes (the
    ImageNet-21k demo model). `labels` are the names of the classes.
    """

    kind: ClassVar[str] = "vision"
    derived: ClassVar[tuple[str, ...]] = ("n_ctx", "d_vocab")
    checked: ClassVar[dict[str, Check]] = ImageConfig.checked | {
        "pool": choice(POOLS),
        "n_classes": checks.count,
        "d_features": checks.count,
        "labels": as_tuple,
    }

    n_classes: int = 1000
    d_features: int | None = None
    pool: str = "cls"
    labels: Sequence[str] | None = None

    def _check_kind(self) -> None:
        super()._check_kind()
        self._derive(n_ctx=self.n_tokens, d_vocab=self.n_classes)
        if self.labels is None:
            return
        if not all(isinstance(name, str) for name in self.labels):
            raise ValueError("labels are names: give strings, one per class.")
        if len(self.labels) != self.n_classes:
            raise ValueError(
                f"labels has {len(self.labels)} names for n_classes={self.n_classes}: "
                "give one per class."
            )

    @property
    def head_bias(self) -> bool:
        """Whether the map to the classes has a bias."""
        return self.facts.get("head_bias", False)
