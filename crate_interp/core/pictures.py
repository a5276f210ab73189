"""Opens picture files with Pillow, within limits, and makes the errors for refused files.

The allowed formats are named, because Pillow recognises a file by its first bytes and would start
Ghostscript for any EPS file, whatever it is called. Size and format are checked before pixels are
decoded.
"""

import errno
import re
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError

from crate_interp.core import checks, file_reading
from crate_interp.core.safe_text import plain

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
MOST_BYTES = 2**30  # size of one file
# limit for one JPEG file: each scan takes libjpeg through all pixels, but may be only 75 bytes
MOST_SCANS = 100
_LOADED_AS = (*FORMATS, "MPO")  # MPO is Pillow's name for a JPEG file of several pictures
_TURNS = {  # EXIF orientation -> the operation that turns the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
# system errors that are about the file; others, such as EIO, are about the machine
_OF_THE_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_SCAN = b"\xff\xda"
# a JPEG marker, except the markers that occur inside compressed data
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_WHERE_EXIF_IS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")


class Undecodable(ValueError):
    """A picture cannot be decoded; with skip_bad its sample is left out."""


@dataclass(frozen=True)
class Later:
    """A picture that `make` decodes only when it is needed, to save memory.

    what: the picture's name in errors.
    """

    make: Callable[[], Image.Image]
    what: str


Picture = Image.Image | str | Path | Later


def quoted(name: str | Path) -> str:
    """Returns the name of a file in quotation marks, safe to show."""
    return f"'{plain(name, 1000)}'"


def check_file(path: Path, what: str) -> None:
    """Raises Undecodable, naming `what`, unless a path leads to a file that can be read.

    Folders, pipes, sockets and devices are refused before they are opened, and so are empty
    files and files above 1 GiB. Links are followed.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _unread(what, error, f"{getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise Undecodable(f"cannot read {what}: it is {kind}, not a file.")
    if not found.st_size:
        raise Undecodable(f"cannot read {what}: the file is empty.")
    if found.st_size > MOST_BYTES:
        raise Undecodable(
            f"cannot read {what}: it has {found.st_size:,} bytes; at most {MOST_BYTES:,} are "
            "allowed."
        )


def loaded(image: Picture, kind: str = "image") -> tuple[Image.Image, str]:
    """Returns an upright picture with its pixels in memory, and its name in errors.

    The picture is turned by its EXIF orientation, even if it is a PIL image.
    Raises Undecodable, a ValueError, if the picture cannot be read, if its format is not in
    FORMATS, or if it has more than 50,000,000 pixels. Raises ValueError if `image` is neither a
    picture nor a path.
    """
    what = "an image" if kind == "image" else f"a {kind}"
    if isinstance(image, Later):
        return image.make(), image.what
    if isinstance(image, Image.Image):
        _check_opened(image, what)
        return _upright(image, what), what
    if not isinstance(image, (str, Path)):
        raise ValueError(
            f"cannot read {what} from {type(image).__name__}: "
            "give PIL images, paths or one uint8 array [n, channels, height, width]"
            + (', such as data[:]["image"].' if hasattr(image, "features") else ".")
        )
    what = f"the {kind} {quoted(image)}"
    check_file(Path(image), what)
    try:
        data = file_reading.read(Path(image))
    except Exception as error:  # such as a file that may not be read
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
    if isinstance(file, Path):
        check_file(file, what)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise Undecodable(
            f"cannot read {what}: it is not a picture in one of the formats {', '.join(FORMATS)}, "
            "or its first bytes are damaged."
        ) from None
    except Exception as error:  # each decoder of Pillow raises its own errors
        raise _unread(what, error) from None
    try:
        _check_opened(image, what)
    except ValueError:
        image.close()
        raise
    return image


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


def check_depth(mode: str, what: str) -> None:
    """Raises Undecodable, naming `what`, if a picture has more than 8 bits per channel.

    Such files do not say which value is white.
    """
    if mode in (*SIXTEEN_BITS, "F"):
        raise Undecodable(
            f"{what} has mode {mode!r} (more than 8 bits): scale its values to 0 to 255, and save "
            "it in mode L or RGB."
        )


def check_image(path: Path, bits: int = 8) -> tuple[int, int]:
    """Returns the upright (width, height) of a picture that a model's `preprocess` can take.

    Only its first bytes are read. bits: 16 leaves it to `preprocess` to refuse 16-bit pictures.
    Raises Undecodable for other files.
    """
    what = f"the image {quoted(path)}"
    mode, size = header(path, what)
    if bits == 8 or mode not in SIXTEEN_BITS:
        check_depth(mode, what)
    return size


def _check_opened(image: Image.Image, what: str) -> None:
    """Raises Undecodable for a picture that must not be decoded."""
    if image.format is not None and image.format not in _LOADED_AS:
        raise Undecodable(
            f"{what} was opened from a file of format {plain(image.format)}, but only "
            f"{', '.join(FORMATS)} are decoded: if you trust the file, give image.convert('RGB')."
        )
    _check_pixels(what, image.height, image.width)
    tags: Any = getattr(image, "tag_v2", {})
    try:  # a tile of a TIFF file is decoded as a whole, however small the picture is
        tile = [int(tags.get(side, 1)) for side in (322, 323)]
    except Exception as error:  # Pillow parses a tag when it is first read
        raise Undecodable(f"cannot read {what}: {plain(error)}") from None
    _check_pixels(f"a tile of {what}", *tile)


def _unread(what: str, error: Exception, reason: object = None) -> ValueError:
    """Returns the error to raise: Undecodable for a bad file, ValueError if the machine failed."""
    failed = isinstance(error, MemoryError) or getattr(error, "errno", None) not in _OF_THE_FILE
    kind = ValueError if failed else Undecodable
    return kind(f"cannot read {what}: {plain(reason or error)}")


def _check_pixels(what: str, height: int, width: int) -> None:
    try:
        checks.pixels(what, height, width)
    except ValueError as error:
        raise Undecodable(str(error)) from None


def _upright(image: Image.Image, what: str) -> Image.Image:
    """Returns a picture with its pixels in memory, turned by its EXIF orientation."""
    try:
        orientation = _orientation(image)
        _check_scans(image)
        image.load()
        if image.format == "TIFF":  # Pillow has already turned it and dropped the orientation
            orientation = _orientation(image)
        if orientation not in _TURNS:
            return image
        turned = image.transpose(_TURNS[orientation])
    except Exception as error:  # each decoder of Pillow raises its own errors
        raise _unread(what, error) from None
    turned.info = {name: kept for name, kept in image.info.items() if name not in _WHERE_EXIF_IS}
    return turned


def _check_scans(image: Image.Image) -> None:
    """Raises ValueError for a JPEG file with too many scans, before they are decoded."""
    file: Any = getattr(image, "fp", None)
    if file is None or image.format not in ("JPEG", "MPO"):
        return
    file.seek(0)
    data = file.read()
    # Usually this count suffices. If it is high, true scans are distinguished from chance bytes.
    if data.count(_SCAN) <= MOST_SCANS:
        return
    place, scans = 2, 0
    while marker := _MARKER.search(data, place):
        place, scans = marker.end(), scans + (marker[0] == _SCAN)
        if scans > MOST_SCANS:
            raise ValueError(f"a JPEG file of more than {MOST_SCANS} scans")
        if marker[0] == b"\xff\xd9":  # end of the image; what follows is not decoded
            return
        place += int.from_bytes(data[place : place + 2], "big")  # the length of the segment


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or 1 (upright) if there is none or it cannot be read."""
    try:
        # a PNG's own getexif decodes all pixels
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception:  # EXIF data is often damaged in files whose pixels are sound
        return 1
    return value if isinstance(value, int) else 1
