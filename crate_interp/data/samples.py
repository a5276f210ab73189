"""Samples: what every kind of data becomes."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from jaxtyping import Shaped, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """n samples in a fixed order. `read(start, stop)` gives preprocessed floats `[batch, channels, h, w]` or token ids `[batch, pos]`.

    `masks(start, stop)` gives the class of every pixel after the same resize and crop: 0 background, 1 to 254 classes,
    255 not to be judged. None where the data has no masks. names: what the labels' numbers are called, where the data says.
    """

    n: int
    labels: list[Any] | None
    fingerprint: str  # of the order and content (tensors, embedded), of names and sizes (folders), or datasets' own
    read: Callable[[int, int], Shaped[Tensor, "batch ..."]]
    masks: Callable[[int, int], UInt8[Tensor, "batch height width"]] | None = None
    names: tuple[str, ...] | None = None
    start: int = 0
    of: int | None = None


def picture_samples(
    pictures: Sequence[Path],
    fingerprint: str,
    preprocess: Callable[[Any], Tensor],
    masks: Callable[[int, int], Tensor] | None,
    labels: list[Any] | None = None,
) -> Samples:
    """Files of pictures as samples, read as they are asked for."""
    return Samples(
        len(pictures),
        labels,
        fingerprint,
        lambda start, stop: preprocess(pictures[start:stop]),
        masks,
    )


def check_limit(limit: Any) -> None:
    """ValueError for what is neither None nor a number of samples."""
    if limit is not None and (not isinstance(limit, Integral) or limit < 1):
        raise ValueError(
            f"limit={limit!r}: give a whole number of at least 1, or None for all samples."
        )


def first(samples: Samples, limit: int | None) -> Samples:
    """The first `limit` of the samples; the fingerprint stays that of the whole data."""
    n = samples.n if limit is None else min(limit, samples.n)
    labels = None if samples.labels is None else samples.labels[:n]
    return dataclasses.replace(samples, n=n, labels=labels)


def part(samples: Samples, start: int, stop: int) -> Samples:
    """Returns the samples with the numbers start to stop - 1 in the whole data set."""
    begin = samples.start
    labels = None if samples.labels is None else samples.labels[start - begin : stop - begin]
    whole = samples.of or samples.n
    return dataclasses.replace(samples, n=stop - start, labels=labels, start=start, of=whole)
