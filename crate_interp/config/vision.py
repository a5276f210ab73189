"""Configs of image classifiers and image towers, of the masked autoencoder, and of CLIP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from crate_interp.config.base import DEFAULT, Filled
from crate_interp.config.images import ImageConfig


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ImageConfig):
    """The config of an image classifier.

    `pool` says which token the classes are read from: the CLS token, or the mean of all tokens.
    With `n_classes=0` the model has no classifier head, and so neither `labels` nor `d_features`.
    `d_features` is the output width of a linear map between the pooled token and the classes (the
    ImageNet-21k demo model). `labels` are the names of the classes. `stem` says how patches become
    tokens: "linear", by one linear map, or "conv", by 3 x 3 convolutions of stride 2 with batch
    norm; None follows the family. `class_layers` (ToST) counts the layers at the end, in which a
    CLS token reads the patches. Raises ValueError for a patch that convolutions of stride 2
    do not make, and for a grid that CBSA's square of representatives does not fit.
    """

    kind: ClassVar[str] = "vision"
    derived: ClassVar[tuple[str, ...]] = ("n_ctx", "d_vocab")
    n_classes: int = 1000
    d_features: int | None = None
    pool: str = "cls"
    stem: Filled[str] = DEFAULT
    class_layers: Filled[int] = DEFAULT
    labels: Sequence[str] | None = None

    def _check_kind(self) -> None:
        self._set(stem=self.stem or "linear", class_layers=self.class_layers or 0)
        super()._check_kind()
        if self.stem == "conv":
            self._check_stem()
        if self.class_layers and not self.facts.get("class_layers"):
            raise ValueError(
                f"class_layers={self.class_layers}: only family 'tost' has layers of class "
                "attention. Leave class_layers out."
            )
        if self.facts["attention"] == "cbsa" and self.grid[0] != self.grid[1]:
            raise ValueError(
                f"image_size={self.image_size} makes a grid of {self.grid[0]} x {self.grid[1]} "
                "patches, but CBSA lays its tokens out as a square: give a square image."
            )
        if self.n_classes == 0:  # these two describe the head
            self._set(labels=None, d_features=None)
        self._derive(n_ctx=self.n_tokens, d_vocab=self.n_classes)
        if self.labels is not None and len(self.labels) != self.n_classes:
            raise ValueError(
                f"labels has {len(self.labels)} names for n_classes={self.n_classes}: "
                "give one name per class."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values; `stem` and `class_layers` if unusual."""
        values, facts = super().to_dict(), self.facts
        usual = {"stem": facts.get("stem", "linear"), "class_layers": facts.get("class_layers", 0)}
        return {name: one for name, one in values.items() if one != usual.get(name, ...)}

    def _check_stem(self) -> None:
        if "conv_bias" in self.facts:
            raise ValueError(
                f"stem='conv': models of family {self.family!r} embed patches by one convolution. "
                "Leave stem out."
            )
        side = self.patch_size[0]
        if self.patch_size != (side, side) or side < 2 or side & (side - 1):
            raise ValueError(
                f"patch_size={self.patch_size} with stem='conv': each convolution halves the "
                "image, so patches are squares of side 2, 4, 8 or 16. Give patch_size=8, or "
                "stem='linear'."
            )
        if self.d_model % (side // 2):
            raise ValueError(
                f"d_model={self.d_model} with stem='conv' and patch_size={side}: each convolution "
                f"doubles the width, so d_model must be a multiple of {side // 2}."
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
        self.share("text_n_heads", "text_d_model")

    @property
    def default_prepend_bos(self) -> bool:
        """Whether BOS is put before texts."""
        return bool(self.prepend_bos)
