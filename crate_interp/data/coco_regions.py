"""The region of one COCO annotation as pixels: polygons, or run lengths, plain or compressed.

Everything is checked before it is drawn: pycocotools takes all memory for a polygon with NaN,
and shows whatever lies in memory for runs that are too short.
"""

from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Bool

from crate_interp import checks

# polygons [x, y, x, y, ...], or run lengths {"size": [height, width], "counts": ...}
Segmentation = list[list[int | float]] | dict[str, Any]


def region(segmentation: Segmentation, size: tuple[int, int]) -> Bool[np.ndarray, "height width"]:
    """Returns the pixels of a segmentation; size is (height, width).

    The segmentation must have passed `check_region`.
    """
    if isinstance(segmentation, dict):
        runs = _runs(segmentation["counts"])
    else:
        from pycocotools import mask

        polygons: Any = [polygon for polygon in segmentation if len(polygon) >= 6]
        if not polygons:
            return np.zeros(size, bool)
        merged: Any = mask.merge(mask.frPyObjects(polygons, *size))
        runs = _runs(merged["counts"].decode("ascii"))
    # outside and inside by turns, column by column
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(size[::-1]).T


def check_region(segmentation: Segmentation, size: tuple[int, int], what: str) -> None:
    """Raises ValueError for a segmentation that cannot be drawn in an image of this size.

    size is (height, width); `what` is how the error calls the annotation. Polygons of fewer
    than three points have no area and are left out.
    """
    try:
        if isinstance(segmentation, dict):
            _check_runs(segmentation, size)
        elif isinstance(segmentation, list):
            for polygon in segmentation:
                _check_polygon(polygon, size)
        else:
            raise ValueError(
                f"it is {type(segmentation).__name__}, not a list of polygons or run lengths"
            )
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"the segmentation of {what} cannot be drawn: {error}.") from None


def _check_polygon(polygon: Any, size: tuple[int, int]) -> None:
    points = np.asarray(polygon, dtype=np.float64)
    if points.ndim != 1 or len(points) % 2:
        raise ValueError(
            f"a polygon is a list x, y, x, y, ..., not one of shape {list(points.shape)}"
        )
    for axis, side in (("x", size[1]), ("y", size[0])):
        values = points["xy".index(axis) :: 2]
        if not ((values >= -side) & (values <= 2 * side)).all():  # NaN is neither
            raise ValueError(
                f"a polygon has {axis} far outside the image, which is {size[0]} x {size[1]}"
            )


def _check_runs(segmentation: dict[str, Any], size: tuple[int, int]) -> None:
    if list(segmentation["size"]) != list(size):
        raise ValueError(f"its size is {segmentation['size']}, the image is {size[0]} x {size[1]}")
    runs = _runs(segmentation["counts"])
    if any(run < 0 for run in runs) or sum(runs) != size[0] * size[1]:
        raise ValueError(
            f"its run lengths do not fill the {size[0]} x {size[1]} pixels of the image"
        )


def _runs(counts: Any) -> list[int]:
    """Returns run lengths, plain or compressed.

    Compressed ones have 5 bits in each character. From the fourth on they are differences to
    the last but one.
    """
    if isinstance(counts, list):
        if not all(checks.is_int(run) for run in counts):
            raise ValueError("its run lengths are not all whole numbers")
        return counts
    if not isinstance(counts, str):
        raise ValueError(f"its counts are {type(counts).__name__}, not a list or a string")
    numbers, value, shift = [], 0, 0
    for bits in (ord(character) - 48 for character in counts):
        if not 0 <= bits < 64:
            raise ValueError("its counts hold characters that are none of a compressed run length")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:  # the last character of a number; its fifth bit is the sign
            numbers.append(value - (1 << shift) if bits & 16 else value)
            value, shift = 0, 0
    # the first three are plain; then odd and even places are sums of their own
    odd = list(accumulate(numbers[1::2]))
    even = numbers[:1] + list(accumulate(numbers[2::2]))
    return [(odd if place % 2 else even)[place // 2] for place in range(len(numbers))]
