"""The region of one COCO annotation as run lengths, from polygons or (compressed) run lengths.

A region is checked before it is drawn. For a polygon with NaN or with a long outline, pycocotools
takes all memory; for run lengths that are too short, it returns unrelated bytes from memory.
"""

from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from crate_interp.core import checks
from crate_interp.core.safe_text import plain

# polygons [x, y, x, y, ...], or run lengths {"size": [height, width], "counts": ...}
Segmentation = list[list[int | float]] | dict[str, Any]
# largest number of run lengths, or of pixels along outlines; pycocotools needs 80 bytes for each
MOST_EDGE = 4_000_000
_LONGEST = 7  # characters of one number; its 35 bits suffice for the pixels of any picture


def runs_of(segmentation: Segmentation, size: tuple[int, int]) -> Int64[np.ndarray, "run"]:
    """Returns run lengths: numbers of pixels outside and inside in turn, column by column.

    size is (height, width). The segmentation must have passed `check_region`.
    """
    if isinstance(segmentation, dict):
        return _runs(segmentation["counts"])
    from pycocotools import mask

    polygons: Any = [polygon for polygon in segmentation if len(polygon) >= 6]
    if not polygons:
        return np.array([size[0] * size[1]])
    merged: Any = mask.merge(mask.frPyObjects(polygons, *size))
    return _compressed(merged["counts"].decode("ascii"))


def paint(pixels: UInt8[np.ndarray, "pixel"], runs: Int64[np.ndarray, "run"], value: int) -> None:
    """Writes a value into the pixels of a region, which are stored column by column."""
    ends = np.cumsum(runs)
    # strict=False, because the last run may be outside the region and so have no partner
    for start, stop in zip(ends[0::2], ends[1::2], strict=False):
        pixels[start:stop] = value


def check_region(segmentation: Segmentation, size: tuple[int, int], what: str) -> tuple[int, int]:
    """Returns an upper bound on the pixels that a segmentation covers, and its edge length.

    size is (height, width) of the image; `what`: the annotation's name in errors. Polygons of fewer
    than three points have no area and are left out.

    Raises ValueError for a segmentation that cannot be drawn in an image of this size.
    """
    try:
        if isinstance(segmentation, dict):
            return _check_runs(segmentation, size)
        if isinstance(segmentation, list):
            found = [_check_polygon(polygon, size) for polygon in segmentation]
            return sum(covered for covered, _ in found), sum(edge for _, edge in found)
        raise ValueError(f"it is {type(segmentation).__name__}, not polygons or run lengths")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"the segmentation of {what} cannot be drawn: {plain(error)}.") from None


def _check_polygon(polygon: Any, size: tuple[int, int]) -> tuple[int, int]:
    points = np.asarray(polygon, dtype=np.float64)
    if points.ndim != 1 or len(points) % 2:
        raise ValueError(f"a polygon of shape {list(points.shape)} is not a list x, y, x, y, ...")
    if not len(points):
        return 0, 0
    x, y = points[0::2], points[1::2]
    covered, closing = 1, 0.0
    for axis, values, side in (("x", x, size[1]), ("y", y, size[0])):
        low, high = float(values.min()), float(values.max())
        if not (low >= -side and high <= 2 * side):  # False for NaN
            raise ValueError(f"a polygon has {axis} far outside the {size[0]} x {size[1]} image")
        covered *= max(0, min(side, int(high) + 1) - max(0, int(low)))
        closing = max(closing, high - low)  # at least the step from the last point to the first
    steps = np.maximum(np.abs(x[1:] - x[:-1]), np.abs(y[1:] - y[:-1]))
    return covered, int(steps.sum() + closing) + len(x)


def _check_runs(segmentation: dict[str, Any], size: tuple[int, int]) -> tuple[int, int]:
    if list(segmentation["size"]) != list(size):
        raise ValueError(
            f"its size is {plain(segmentation['size'], 60)}, but the image is {size[0]} x {size[1]}"
        )
    counts = segmentation["counts"]
    if isinstance(counts, (list, str)) and len(counts) > MOST_EDGE:
        raise ValueError(f"its counts are longer than {MOST_EDGE:,}")
    runs, pixels = _runs(counts), size[0] * size[1]
    # each number is checked by itself first, because sums of huge numbers may overflow in NumPy
    if ((runs < 0) | (runs > pixels)).any() or runs.sum() != pixels:
        raise ValueError(f"its run lengths do not fill the image of {size[0]} x {size[1]} pixels")
    return int(runs[1::2].sum()), len(runs)


def _runs(counts: Any) -> Int64[np.ndarray, "run"]:
    """Returns the run lengths in counts: a list, or a string of compressed run lengths."""
    if isinstance(counts, list):
        if not all(checks.is_int(run) for run in counts):
            raise ValueError("its run lengths are not all whole numbers")
        return np.array(counts, dtype=np.int64)
    if not isinstance(counts, str):
        raise ValueError(f"its counts are {type(counts).__name__}, not a list or a string")
    return _compressed(counts)


def _compressed(counts: str) -> Int64[np.ndarray, "run"]:
    """Returns the run lengths in a string, in time and memory proportional to its length.

    Each character holds 5 bits of a number, lowest bits first, and a sixth bit that says whether
    more characters of the number follow. From the fourth number on, the difference to the number
    two places before is stored.
    """
    bits = np.frombuffer(counts.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) - 48
    if ((bits < 0) | (bits > 63)).any():
        raise ValueError("its counts hold characters that no compressed run length has")
    ends = np.flatnonzero(bits < 32)
    if not len(ends):
        return np.zeros(0, np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _LONGEST:
        raise ValueError(f"its counts hold a number of more than {_LONGEST} characters")
    bits = bits[: ends[-1] + 1]
    place = np.arange(len(bits)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((bits & 31) << (5 * place), starts)
    negative = bits[ends] & 16  # the fifth bit of a number's last character
    numbers -= np.where(negative > 0, 1 << (5 * lengths), 0)
    # the first three numbers are stored as they are, each later number as the difference to the
    # number two places before: so odd and even places are separate running sums
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers
