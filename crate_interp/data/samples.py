"""Samples: the form that every kind of data takes."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.pictures import Picture
from crate_interp.core.safe_text import plain
from crate_interp.data.folder_listing import Listing
from crate_interp.data.picture_contents import Files

Pictures = Sequence[Picture] | Tensor | np.ndarray
# a function that turns pictures, or an array of uint8 images, into a batch, such as
# `model.preprocess` and `model.preprocess_masks`
Preprocess = Callable[[Pictures], Tensor]


@dataclass(frozen=True, repr=False)
class Samples:
    """n samples in a fixed order: a whole data set, or a contiguous part of one.

    `read(start, stop)` gives preprocessed floats `[batch, channels, height, width]` or token ids
    `[batch, pos]`. `masks(start, stop)` gives the class of every pixel after the same resize and
    crop: 0 is background, 1 to 254 are classes, 255 is ignored. `masks` is None if the data has no
    masks. Both functions take numbers of samples in the whole data set, from `start` to
    `start + n`, even if these samples are only a part of it.

    labels: one label for each of the n samples, or None. names: the names of numeric labels, if the
    data gives them. fingerprint: a digest of order and content (tensors, embedded data), of names
    and sizes (folders), or the fingerprint of `datasets`; a part has the fingerprint of the whole.
    start: the number that the first of the n samples has in the whole data set. of: how many
    samples the whole data set has; 0 means n. name_of: returns the file name of a sample, if
    samples have files. listing: the listed files, if the data is a folder. files: the files whose
    content the fingerprint leaves out, which a run notes as it reads them. lengths: how many tokens
    each sample of the whole data set has, if they differ; `read` then takes samples of one length.
    groups: a number for each of the n samples, or None. Samples with the same number, such as the
    windows of one document, are not independent: intervals resample groups.
    """

    n: int
    labels: list[Any] | None
    fingerprint: str
    read: Callable[[int, int], Shaped[Tensor, "batch ..."]]
    masks: Callable[[int, int], UInt8[Tensor, "batch height width"]] | None = None
    names: tuple[str, ...] | None = None
    start: int = 0
    of: int = 0
    name_of: Callable[[int], str] | None = None
    listing: Listing | None = None
    files: Files | None = None
    lengths: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.of:
            object.__setattr__(self, "of", self.n)
        count = 0 if self.names is None else len(self.names)
        for number, label in enumerate(self.labels or () if count else (), self.start):
            if checks.is_int(label) and not 0 <= label < count:
                raise ValueError(
                    f"the label of sample {number} is {label}, but the data names {count} classes: "
                    f"give numbers from 0 to {count - 1}, or None for a sample without a label."
                )

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        kinds = (
            "" if self.labels is None else f", labels of {len(set(map(str, self.labels)))} kinds"
        )
        masks = "" if self.masks is None else ", masks"
        whole = "" if self.n == self.of else f", number {self.start} on, of {self.of:,}"
        return f"Samples: {self.n:,} samples{whole}{kinds}{masks}, {self.fingerprint[:60]}"


def part(samples: Samples, start: int, stop: int) -> Samples:
    """Returns the samples from number `start` up to, not including, `stop` of the whole data set.

    The part keeps the fingerprint of the whole. Raises ValueError unless start and stop are whole
    numbers, start < stop, and `samples` has all samples between them.
    """
    if not isinstance(samples, Samples):
        raise ValueError(f"part takes samples of ci.data.open_data, got {type(samples).__name__}.")
    begin, end = samples.start, samples.start + samples.n
    whole = checks.is_int(start) and checks.is_int(stop)
    if not whole or not begin <= start < stop <= end:
        raise ValueError(
            f"start={start!r}, stop={stop!r}: give whole numbers with "
            f"{begin} <= start < stop <= {end}."
        )
    labels, groups = (
        None if one is None else one[start - begin : stop - begin]
        for one in (samples.labels, samples.groups)
    )
    return dataclasses.replace(
        samples, n=int(stop - start), labels=labels, groups=groups, start=int(start)
    )


def first(samples: Samples, limit: int | None) -> Samples:
    """Returns the first `limit` of the samples, or all of them if limit is None.

    The first samples of a whole data set count as a whole data set again. The fingerprint does not
    change.
    """
    if limit is None or limit >= samples.n:
        return samples
    few = part(samples, samples.start, samples.start + int(limit))
    return dataclasses.replace(few, of=few.n) if samples.n == samples.of else few


def picture_samples(
    pictures: Sequence[Path],
    fingerprint: str,
    preprocess: Preprocess,
    masks: Callable[[int, int], Tensor] | None,
    files: Files,
) -> Samples:
    """Returns picture files as samples. Each file is read when its sample is read."""
    read = lambda start, stop: preprocess(pictures[start:stop])  # noqa: E731
    name_of = lambda number: plain(pictures[number].name, 1000)  # noqa: E731
    return Samples(len(pictures), None, fingerprint, read, masks, name_of=name_of, files=files)
