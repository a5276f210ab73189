"""Fields and checks that the configs of image models share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from crate_interp.config.base import Check, CrateConfig, SideOrSize, Size, choice
from crate_interp.config.families import INTERPOLATIONS, TRANSPARENCIES
from crate_interp.core import checks


def side_or_size(name: str, value: object) -> int | tuple[int, int]:
    """Returns the length of a side as an int, or a size as (height, width).

    Raises ValueError, with the field's `name`, for anything else.
    """
    return (
        checks.size(name, value) if isinstance(value, (list, tuple)) else checks.count(name, value)
    )


def as_tuple(name: str, value: Any, such: str = "") -> tuple[Any, ...]:
    """Returns a list or another sequence as a tuple.

    Raises ValueError, with the field's `name` and an example (`such`), for a string and for
    anything that is not a sequence.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}={checks.shown(value)}: give a list{such}, or None.")
    return tuple(value)


def bits(name: str, value: object) -> int:
    """Returns 8 or 16. Raises ValueError, with the field's `name`, for any other value."""
    if not checks.is_int(value) or value not in (8, 16):
        raise ValueError(
            f"{name}={checks.shown(value)}: give 8, or 16 to allow 16-bit grey pictures too."
        )
    return int(value)


def per_channel(name: str, value: object) -> tuple[Any, ...]:
    """Returns one number per channel as a tuple; a single number means a grey model."""
    if checks.is_number(value):
        return (value,)
    return as_tuple(
        name,
        value,
        " with a number for each channel, such as [0.5, 0.5, 0.5] or, for a grey model, [0.5]",
    )


@dataclass(frozen=True, kw_only=True)
class ImageConfig(CrateConfig):
    """A config of a model that sees images.

    `image_size` and `patch_size` take an int or (h, w) and are stored as (h, w). `resize`, `crop`,
    `interpolation`, `transparency`, `bits`, `mean` and `std` say what `model.preprocess` does:
    `resize` is the length of the shorter side, or (h, w). `transparency` is "drop" (the colours of
    transparent pixels are used, as PIL's convert("RGB") does) or "white" (the picture is laid on
    white). `bits` is 8, or 16 to allow 16-bit grey pictures too. With `interpolate_pos` the model
    also accepts images of other sizes. `grid_guessed`: whether image_size is a guess, a square with
    the right number of patches. Raises ValueError for sizes above 50,000,000 pixels or 65,536
    patches, and for `interpolate_pos` with a guess.
    """

    checked: ClassVar[dict[str, Check]] = CrateConfig.checked | {
        "interpolation": choice(INTERPOLATIONS),
        "transparency": choice(TRANSPARENCIES),
        "bits": bits,
        "interpolate_pos": checks.flag,
        "grid_guessed": checks.flag,
        "channels": checks.count,
        "image_size": checks.size,
        "patch_size": checks.size,
        "resize": side_or_size,
        "crop": side_or_size,
        "mean": per_channel,
        "std": per_channel,
    }

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
            raise ValueError(
                f"interpolate_pos=True needs the grid of the training, but image_size="
                f"{self.image_size} is a guess from the number of patches: give image_size."
            )
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
        for name in ("image_size", "patch_size", "resize", "crop"):
            if getattr(self, name) is not None:
                checks.pixels(name, *checks.size(name, getattr(self, name)))
        checks.patches("image_size", self.image_size, self.patch_size)
        if height % patch_h or width % patch_w:
            nearest = (
                height // patch_h * patch_h or patch_h,
                width // patch_w * patch_w or patch_w,
            )
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of "
                f"patch_size={self.patch_size} on both sides: "
                f"give an image_size such as {nearest}."
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither.")
        for name, above in (("mean", ""), ("std", ", above 0")):
            value = getattr(self, name)
            if value is not None and len(value) != self.channels:
                alike = list(value) * self.channels if len(value) == 1 else None
                raise ValueError(
                    f"{name}={checks.shown(value)}: give one number per channel "
                    f"({self.channels})" + (f", such as {name}={alike}." if alike else ".")
                )
            if value is not None and not all(
                checks.is_number(x) and (x > 0 or not above) for x in value
            ):
                raise ValueError(f"{name}={checks.shown(value)}: give finite numbers{above}.")
        if self.mean is not None and max(self.mean) > 1:
            scaled = [round(value / 255, 4) for value in self.mean]
            raise ValueError(
                f"mean={checks.shown(self.mean)}: pixels are scaled to the range 0 to 1. "
                "If mean and std are for pixels from 0 to 255, divide both by 255: "
                f"mean={scaled}."
            )

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
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}={getattr(self, name)} contradicts the other fields, "
                    f"which make it {value}. Leave {name} out."
                )
        self._set(**values)

    @property
    def conv_bias(self) -> bool:
        """Whether the convolution that embeds the patches has a bias."""
        return self.facts.get("conv_bias", False)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across, (h, w)."""
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
        return height // patch_h, width // patch_w

    @property
    def known_grid(self) -> tuple[int, int]:
        """The grid, for what depends on where patches lie; ValueError if it is a guess."""
        if self.grid_guessed:
            rows, columns = self.grid
            raise ValueError(
                f"the places of {rows * columns} patches are a guess, {rows} x {columns}, and maps "
                f"need them: load the model with image_size={self.image_size} if that is right, or "
                "with the height and width of its images."
            )
        return self.grid

    @property
    def n_special(self) -> int:
        """The number of tokens before the patches: CLS, and possibly more in a bridged network.

        ToST's layers see no CLS token: it comes in with the layers of class attention.
        """
        return 0 if getattr(self, "class_layers", 0) else 1

    @property
    def fourier(self) -> bool:
        """Whether positions are computed from waves, so that any image size works."""
        return self.facts.get("fourier", False)

    @property
    def n_tokens(self) -> int:
        """The number of tokens of an image in the stream, including CLS if it is there."""
        return self.grid[0] * self.grid[1] + self.n_special

    @property
    def patch_values(self) -> int:
        """The number of values in one patch."""
        return self.patch_size[0] * self.patch_size[1] * self.channels
