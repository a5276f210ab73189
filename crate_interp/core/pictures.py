"""Opens picture files with Pillow, upright, and makes the errors for files that it cannot read.

The allowed formats are named, because Pillow recognises a file by its first bytes and would start
Ghostscript for any EPS file, whatever it is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from crate_interp.core import files, safe_text

# The usual formats of picture data sets. Pillow and the libraries in its wheel decode each
# format without starting a program. Only the first picture in a file is read.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm",
)  # fmt: skip
# modes of Pillow for grey pictures of 16 bits; "I" may also hold 32
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
# known picture formats that are not read
UNREAD_SUFFIXES = (
    ".heic", ".heif", ".hif", ".avif", ".jxl", ".jp2", ".j2k", ".jpf", ".jpx", ".j2c", ".svg",
    ".svgz", ".eps", ".psd", ".psb", ".xcf", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf",
    ".rw2", ".raf", ".pef", ".tga", ".ico", ".icns", ".dds", ".pcx", ".exr", ".hdr", ".fits",
    ".dcm", ".qoi", ".apng", ".mpo", ".dib",
)  # fmt: skip
_TURNED, _SIDEWAYS = range(2, 9), range(5, 9)  # EXIF orientations
# errors about the file; other errors of the system, such as EIO, are about the machine
_OF_THE_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Undecodable(ValueError):
    """A picture cannot be decoded; with skip_bad its sample is left out."""


@dataclass(frozen=True)
class Later:
    """A picture that `make` decodes only when it is needed, to save memory.

    what: the picture's name in errors. size: returns its upright (width, height) without decoding.
    """

    make: Callable[[], Image.Image]
    what: str
    size: Callable[[], tuple[int, int]]


Picture = Image.Image | str | Path | Later


def quoted(name: str | Path) -> str:
    """Returns the name of a file in quotation marks, safe to show."""
    return f"'{safe_text.plain(name, 1000)}'"


def loaded(image: Picture, kind: str = "image") -> tuple[Image.Image, str]:
    """Returns an upright picture with its pixels in memory, and its name in errors.

    The picture is turned by its EXIF orientation, even if it is a PIL image.
    Raises Undecodable, a ValueError, if the picture cannot be read, or if its format is not in
    FORMATS. Raises ValueError if `image` is neither a picture nor a path.
    """
    what = "an image" if kind == "image" else f"a {kind}"
    if isinstance(image, Later):
        return image.make(), image.what
    if isinstance(image, Image.Image):
        if image.format not in (None, *FORMATS, "MPO"):  # MPO: JPEG files of several pictures
            known = f"only {', '.join(FORMATS)} are decoded: give image.convert('RGB')"
            raise Undecodable(f"{what} is of format {safe_text.plain(image.format)}, but {known}.")
        return _upright(image, what), what
    if not isinstance(image, (str, Path)):
        kinds = f"{type(image).__name__}: give PIL images, paths or one uint8 array [n, c, h, w]"
        raise ValueError(f"cannot read {what} from {kinds}.")
    what = f"the {kind} {quoted(image)}"
    try:
        data = files.read(Path(image))
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _unread(what, error) from None
    return decoded(data, what), what


def decoded(data: bytes, what: str) -> Image.Image:
    """Returns the picture in the bytes of a file; result and errors are those of `loaded`."""
    with opened(BytesIO(data), what) as found:
        return _upright(found, what)


def opened(file: Path | BytesIO, what: str) -> Image.Image:
    """Opens a picture and reads only its header; the caller must close it.

    Raises Undecodable, naming `what`, for the same reasons as `loaded`.
    """
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        words = f"it is not a picture in {', '.join(FORMATS)}"
        raise Undecodable(f"cannot read {what}: {words}.") from None
    except Exception as error:  # each decoder of Pillow raises its own errors
        raise _unread(what, error) from None


def header(file: Path | BytesIO, what: str) -> tuple[str, tuple[int, int]]:
    """Returns the mode of a picture, and the (width, height) that it has when upright.

    Only the first bytes are read. Raises Undecodable for a file that is not a picture.
    """
    with opened(file, what) as image:
        return image.mode, upright_size(image, what)


def upright_size(image: Image.Image, what: str) -> tuple[int, int]:
    """Returns the (width, height) that a picture has when its EXIF orientation has turned it.

    Raises Undecodable, naming `what`, for a TIFF picture that cannot be decoded.
    """
    if _orientation(image) not in _SIDEWAYS:
        return image.size
    # some versions of Pillow have already turned a TIFF picture and swapped its size
    if image.format == "TIFF":
        return _upright(image, what).size
    return image.height, image.width


def _unread(what: str, error: Exception) -> ValueError:
    """Returns the error to raise: Undecodable for a bad file, ValueError if the machine failed."""
    of_system = getattr(error, "errno", None) is not None and not isinstance(error, _OF_THE_FILE)
    failed = isinstance(error, MemoryError) or of_system
    kind, words = ValueError if failed else Undecodable, getattr(error, "strerror", None)
    return kind(f"cannot read {what}: {safe_text.plain(f'{words}.' if words else error)}")


def _upright(image: Image.Image, what: str) -> Image.Image:
    """Returns a picture with its pixels in memory, turned by its EXIF orientation."""
    try:
        orientation = _orientation(image)
        image.load()
        if image.format == "TIFF":  # Pillow has already turned it and dropped the orientation
            orientation = _orientation(image)
        return ImageOps.exif_transpose(image) if orientation in _TURNED else image
    except Exception as error:  # each decoder of Pillow raises its own errors
        raise _unread(what, error) from None


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or 1 (upright) if there is none or it cannot be read."""
    try:
        # a PNG's own getexif decodes all pixels
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception:  # EXIF data is often damaged in files whose pixels are sound
        return 1
    return value if isinstance(value, int) else 1
