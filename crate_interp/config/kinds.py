"""The kinds of configs: for image models, language models, and networks behind a bridge."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from crate_interp.config.base import DEFAULT, CrateConfig, Filled, SideOrSize, Size, fact


@dataclass(frozen=True, kw_only=True)
class ImageConfig(CrateConfig):
    """A config of a model that sees images.

    `image_size` and `patch_size` take an int or (h, w) and are stored as (h, w). `resize`, `crop`,
    `interpolation`, `transparency`, `bits`, `mean` and `std` say what `model.preprocess` does:
    `resize` is the length of the shorter side, or (h, w). `transparency` is "drop" (the colours of
    transparent pixels are used, as PIL's convert("RGB") does) or "white" (the picture is laid on
    white). `bits` is 8, or 16 to allow 16-bit grey pictures too. With `interpolate_pos` the model
    also accepts images of other sizes. `grid_guessed`: whether image_size is a guess, a square with
    the right number of patches. Raises ValueError for `interpolate_pos` with a guess.
    """

    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)
    channels: int = 3
    interpolate_pos: bool = False
    resize: SideOrSize | None = None
    crop: SideOrSize | None = None
    interpolation: str = "bilinear"
    transparency: str = "drop"
    bits: int = 8
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    grid_guessed: bool = field(default=False, compare=False)

    def _check_kind(self) -> None:
        if self.grid_guessed and self.interpolate_pos:
            raise ValueError("interpolate_pos=True needs a grid that is known: give image_size.")
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
        if height % patch_h or width % patch_w:
            sizes = f"image_size={self.image_size}, patch_size={self.patch_size}"
            raise ValueError(f"{sizes}: an image's sides must be multiples of the patch's sides.")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither.")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) != self.channels:
                raise ValueError(f"{name}={value}: give one for each of {self.channels} channels.")
        if self.mean is not None and max(self.mean) > 1:
            raise ValueError(f"mean={self.mean}: pixels are from 0 to 1; divide both by 255.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values, with `grid_guessed` only if it is True."""
        values = super().to_dict()
        if not self.grid_guessed:
            del values["grid_guessed"]
        return values

    def _derive(self, **values: int) -> None:
        """Writes fields that are computed from other fields.

        Raises ValueError if such a field was given with another value.
        """
        for name, value in values.items():
            if (given := getattr(self, name)) not in (None, value):
                raise ValueError(f"{name}={given} contradicts other fields, which give {value}.")
        self._set(**values)

    conv_bias = fact("conv_bias", "Whether the convolution that embeds the patches has a bias.")
    fourier = fact("fourier", "Whether positions are computed from waves, for any image size.")

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across, (h, w)."""
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
        return height // patch_h, width // patch_w

    @property
    def known_grid(self) -> tuple[int, int]:
        """The grid, for what depends on where patches lie; ValueError if it is a guess."""
        if self.grid_guessed:
            raise ValueError(
                f"maps need the places of the patches, and a grid of {self.grid} is a guess: load "
                f"the model with image_size={self.image_size} if that is right."
            )
        return self.grid

    @property
    def n_special(self) -> int:
        """The number of tokens before the patches: CLS, and possibly more in a bridged network.

        ToST's layers see no CLS token: it comes in with the layers of class attention.
        """
        return 0 if getattr(self, "class_layers", 0) else 1

    @property
    def n_tokens(self) -> int:
        """The number of tokens of an image in the stream, including CLS if it is there."""
        return self.grid[0] * self.grid[1] + self.n_special

    @property
    def patch_values(self) -> int:
        """The number of values in one patch."""
        return self.patch_size[0] * self.patch_size[1] * self.channels


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
    labels: Sequence[str] | None = field(default=None, repr=False)  # there may be 1,000

    def _check_kind(self) -> None:
        self._set(stem=self.stem or "linear", class_layers=self.class_layers or 0)
        super()._check_kind()
        if self.stem == "conv":
            if "conv_bias" in self.facts:
                raise ValueError(f"stem='conv': family {self.family!r} has a convolution already.")
            side = self.patch_size[0]
            if self.patch_size != (side, side) or side < 2 or side & (side - 1):
                sizes = "2, 4, 8 or 16"
                raise ValueError(f"patch_size={self.patch_size} with stem='conv': give {sizes}.")
            if self.d_model % (side // 2):
                words = f"stem='conv' needs a multiple of {side // 2}"
                raise ValueError(f"d_model={self.d_model}: {words}.")
        if self.class_layers and not self.facts.get("class_layers"):
            raise ValueError(f"class_layers={self.class_layers}: only family 'tost' has them.")
        if self.facts["attention"] == "cbsa" and self.grid[0] != self.grid[1]:
            raise ValueError(f"image_size={self.image_size}: CBSA needs a square of patches.")
        if self.n_classes == 0:  # these two describe the head
            self._set(labels=None, d_features=None)
        self._derive(n_ctx=self.n_tokens, d_vocab=self.n_classes)
        if self.labels is not None and len(self.labels) != self.n_classes:
            raise ValueError(
                f"labels: {len(self.labels)} names for {self.n_classes} classes. Give all in order."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values; `stem` and `class_layers` if unusual."""
        values, facts = super().to_dict(), self.facts
        usual = {"stem": facts.get("stem", "linear"), "class_layers": facts.get("class_layers", 0)}
        return {name: one for name, one in values.items() if one != usual.get(name, ...)}

    head_bias = fact("head_bias", "Whether the map to the classes has a bias.")


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
        self._set(decoder_n_layers=self.decoder_n_layers or self.n_layers)
        self._set(decoder_n_heads=self.decoder_n_heads or self.n_heads)


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
        self.check_given("n_ctx", "d_vocab", "d_embed")
        self.check_given("text_d_model", "text_n_layers", "text_n_heads")
        self.share("text_n_heads", "text_d_model")


@dataclass(frozen=True, kw_only=True)
class TextConfig(CrateConfig):
    """The config of a language model, which needs `n_ctx` and `d_vocab`.

    `bias` (gpt-baseline): whether linear maps and LayerNorms have a bias. `window`,
    `window_pattern`, `softcap` and `rotary_base` belong to nanochat-crate. `tokenizer`: "gpt2",
    "bert", or "file" for a tokenizer saved next to the weights; `prepend_bos`: whether the
    tokenizer's separator is put before texts. `d_embed` is the width of a text tower's output.
    `attention_mask` (crate-bert): "meant", every token reads all real tokens; or "published", as
    the published code runs with its own data: real tokens are cut out, and padding is read. Or
    "causal", for the same network with one mask more: a token reads none after it, so the network
    answers the next token, and nothing else changes.
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
    attention_mask: str = "meant"

    def _check_kind(self) -> None:
        self.check_given("n_ctx", "d_vocab")
        if self.attention_mask != "meant" and not self.segments:
            words = f"attention_mask={self.attention_mask!r} is for family 'crate-bert'"
            raise ValueError(f"{words}: leave it out.")
        if self.rotary and self.d_head % 2:
            raise ValueError(f"d_head={self.d_head}: rotary positions need an even d_head.")

    segments = fact("segments", "How many segments of a text have an embedding.")

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a token sees only itself and the tokens before it."""
        return self.facts.get("causal", False) or self.attention_mask == "causal"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values; `attention_mask` where it has a meaning."""
        values = super().to_dict()
        if not self.segments:
            del values["attention_mask"]
        return values

    @property
    def output_bias(self) -> bool:
        """Whether the output map of attention has a bias."""
        bias = self.facts["output_bias"]
        return self.bias if bias is None else bias


@dataclass(frozen=True, kw_only=True)
class BridgedConfig(CrateConfig):
    """The config of any network behind a bridge (crate_interp/bridge/bridge_to_hooked.py).

    `architecture` is the name of the network's class. The network has no U; `subspaces` chooses the
    map that is measured in place of U: "value", "key" or "query". `value_heads`: how many heads the
    keys and values have; None means the number of query heads. `rms_norm`: whether the norms are
    RMS norms.
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
