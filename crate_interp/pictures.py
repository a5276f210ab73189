"""Files of pictures, opened by Pillow, and what errors say of those that cannot be read."""

from pathlib import Path

from PIL import Image


def loaded(image: Image.Image | str | Path, kind: str = "image") -> tuple[Image.Image, str]:
    """Returns a picture whose pixels are in memory, and what errors call it.

    Raises ValueError if it cannot be read, or is neither a picture nor a path.
    """
    what = "an image" if kind == "image" else f"a {kind}"
    if not isinstance(image, (Image.Image, str, Path)):
        raise ValueError(
            f"cannot read {what} from {type(image).__name__}: "
            "give PIL images, paths or uint8 arrays."
        )
    what = what if isinstance(image, Image.Image) else f"the {kind} {str(image)!r}"
    try:
        if isinstance(image, Image.Image):
            image.load()  # Image.open has read no more than the header
            return image, what
        with Image.open(image) as opened:
            opened.load()
            return opened, what
    except Exception as error:  # every decoder of Pillow has its own
        raise ValueError(f"cannot read {what}: {error}") from None


def header(path: Path) -> tuple[str, tuple[int, int]]:
    """Returns the mode and (width, height) of a picture. Only its first bytes are read.

    Raises ValueError for a file that is no picture.
    """
    try:
        with Image.open(path) as image:
            return image.mode, image.size
    except Exception as error:  # every decoder of Pillow has its own
        raise ValueError(f"cannot read the image {str(path)!r}: {error}") from None


def check_depth(mode: str, what: str) -> None:
    """Raises ValueError, calling the picture `what`, if it has more than 8 bits per channel.

    Such files do not say which number is white.
    """
    if mode.startswith("I;16") or mode in ("I", "F"):
        raise ValueError(
            f"{what} has mode {mode!r} (more than 8 bits): convert it to 8-bit L or RGB first."
        )


def check_image(path: Path) -> tuple[int, int]:
    """Returns (width, height) of a picture that a model's `preprocess` can take.

    Raises ValueError for other files, which their first bytes give away.
    """
    mode, size = header(path)
    check_depth(mode, f"the image {str(path)!r}")
    return size
