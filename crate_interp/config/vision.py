"""Configs of image classifiers and image towers, of the masked autoencoder, and of CLIP."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from crate_interp.config.base import DEFAULT, Check, Filled, choice
from crate_interp.config.families import POOLS, TOKENIZERS
from crate_interp.config.images import ImageConfig, as_tuple
from crate_interp.config.text import check_context
from crate_interp.core import checks, safe_text

_NAMES = ' of names in the order of the outputs, such as ["cat", "dog"]'
_LONGEST = 1000  # characters of a label: some labels of ImageNet-21k list a dozen synonyms


def class_names(name: str, value: object) -> tuple[str, ...]:
    """Returns a list of names as a tuple. Any script is allowed, control characters are not.

    Raises ValueError, with the field's `name`, for anything else.
    """
    for place, label in enumerate(names := as_tuple(name, value, _NAMES)):
        if not isinstance(label, str) or len(label) > _LONGEST or not safe_text.is_harmless(label):
            raise ValueError(
                f"{name} must be names, but number {place} is {checks.shown(label)}: give one "
                f"string per class, of at most {_LONGEST} characters, without control characters."
            )
    return names


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ImageConfig):
    """The config of an image classifier.

    `pool` says which token the classes are read from: the CLS token, or the mean of all tokens.
    With `n_classes=0` the model has no classifier head, and so neither `labels` nor `d_features`.
    `d_features` is the output width of a linear map between the pooled token and the classes (the
    ImageNet-21k demo model). `labels` are the names of the classes.
    """

    kind: ClassVar[str] = "vision"
    derived: ClassVar[tuple[str, ...]] = ("n_ctx", "d_vocab")
    checked: ClassVar[dict[str, Check]] = ImageConfig.checked | {
        "pool": choice(POOLS),
        "n_classes": partial(checks.count, least=0),
        "d_vocab": partial(checks.count, least=0),
        "d_features": checks.count,
        "labels": class_names,
    }

    n_classes: int = 1000
    d_features: int | None = None
    pool: str = "cls"
    labels: Sequence[str] | None = None

    def _check_kind(self) -> None:
        super()._check_kind()
        if self.n_classes == 0:  # these two describe the head
            self._set(labels=None, d_features=None)
        self._derive(n_ctx=self.n_tokens, d_vocab=self.n_classes)
        if self.labels is not None and len(self.labels) != self.n_classes:
            raise ValueError(
                f"labels has {len(self.labels)} names for n_classes={self.n_classes}: "
                "give one name per class."
            )

    @property
    def head_bias(self) -> bool:
        """Whether the map to the classes has a bias."""
        return self.facts.get("head_bias", False)


@dataclass(frozen=True, kw_only=True)
class MAEConfig(ImageConfig):
    """The config of a masked autoencoder.

    `decoder_n_layers` and `decoder_n_heads` default to the encoder's numbers. `norm_pix_loss`:
    whether the loss normalises each patch of the target.
    """

    kind: ClassVar[str] = "mae"
    derived: ClassVar[tuple[str, ...]] = ("n_ctx", "d_vocab")
    checked: ClassVar[dict[str, Check]] = ImageConfig.checked | {
        "decoder_n_layers": checks.count,
        "decoder_n_heads": checks.count,
        "norm_pix_loss": checks.flag,
    }

    decoder_n_layers: Filled[int] = DEFAULT
    decoder_n_heads: Filled[int] = DEFAULT
    norm_pix_loss: bool = False

    def _check_kind(self) -> None:
        super()._check_kind()
        self._derive(n_ctx=self.n_tokens, d_vocab=self.patch_values)
        self._set(
            decoder_n_layers=self.decoder_n_layers or self.n_layers,
            decoder_n_heads=self.decoder_n_heads or self.n_heads,
        )


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(ImageConfig):
    """The config of a CLIP; the fields that all families share describe its image tower.

    `d_embed` is the width of both towers' outputs. `text_d_model`, `text_n_layers`, `text_n_heads`,
    `n_ctx`, `d_vocab`, `tokenizer` and `prepend_bos` describe the text tower. Of all these fields,
    only `tokenizer` and `prepend_bos` are optional.
    """

    kind: ClassVar[str] = "clip"
    checked: ClassVar[dict[str, Check]] = ImageConfig.checked | {
        "d_embed": checks.count,
        "text_d_model": checks.count,
        "text_n_layers": checks.count,
        "text_n_heads": checks.count,
        "tokenizer": choice(TOKENIZERS),
        "prepend_bos": checks.flag,
    }

    tokenizer: str | None = None
    prepend_bos: bool | None = None
    d_embed: Filled[int] = DEFAULT
    text_d_model: Filled[int] = DEFAULT
    text_n_layers: Filled[int] = DEFAULT
    text_n_heads: Filled[int] = DEFAULT

    def _check_kind(self) -> None:
        super()._check_kind()
        self.check_given(
            "n_ctx", "d_vocab", "d_embed", "text_d_model", "text_n_layers", "text_n_heads"
        )
        check_context(self.n_ctx)
        self.share("text_n_heads", "text_d_model")

    @property
    def default_prepend_bos(self) -> bool:
        """Whether BOS is put before texts."""
        return bool(self.prepend_bos)
