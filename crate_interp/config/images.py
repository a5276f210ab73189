"""Fields and checks that the configs of image models share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crate_interp.config.base import CrateConfig, SideOrSize, Size
from crate_interp.core import checks


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
            raise ValueError(
                f"interpolate_pos=True needs the grid of the training, but image_size="
                f"{self.image_size} is a guess from the number of patches: give image_size."
            )
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
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
