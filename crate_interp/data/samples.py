"""Samples: the form that every kind of data takes, how they are read, and their groups."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Shaped, UInt8
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.files import Content, Stamp, digest, noted, read, stamp_of, stays_inside
from crate_interp.core.pictures import Picture, Undecodable, quoted
from crate_interp.results.sample_ranges import CONTENTS, total

Key = tuple[int, bool, str]  # sample, whether the file is read for its mask, name of the file
Notes = dict[Key, Content]
Reads = Callable[[int, int], Tensor]
Names = Callable[[int, int], Iterable[tuple[int, str]]]
COLUMNS = ["sample", "mask", "file", "sha256", *Stamp._fields]


def inside(folder: Path, name: str, where: Path) -> Path:
    """Returns the path of the file `name` in a folder.

    Links in the folder are the user's own and are followed. where: the path of the list that
    contains the name, for the error. Raises ValueError if the name leads out of the folder.
    """
    if not stays_inside(name):
        raise ValueError(f"{quoted(where)} names {quoted(name)}, not inside {quoted(folder)}.")
    return folder / name


@dataclass(frozen=True)
class Files:
    """The files that samples are read from, for data whose fingerprint leaves out their content.

    images(start, stop) and masks(start, stop) yield (sample, name) for each file from which the
    pictures, or the masks, of these samples are made. A name is the path below the folder, written
    with /.
    """

    folder: Path
    images: Names
    masks: Names | None = None

    def changed(self, table: pd.DataFrame) -> list[str]:
        """Returns the names of the files in a chunk's notes that hold something else now.

        Only files with another size or another time are read. A file that is gone does not count as
        changed, because nothing else can have been read in its place.
        """
        changed: dict[str, None] = {}
        for file, sha256, *stamp in table[COLUMNS[2:]].itertuples(index=False):
            name = os.fsdecode(file)
            path = inside(self.folder, name, self.folder)
            try:
                if stamp_of(os.stat(path)) != tuple(stamp) and digest(path)[7:] != sha256.hex():
                    changed[name] = None
            except FileNotFoundError:
                continue
            except OSError:  # such as a folder in its place
                changed[name] = None
        return list(changed)


def noting(samples: "Samples", notes: Notes) -> "Samples":
    """Returns samples that add to `notes` what their files hold, whenever they are read.

    Reading raises ValueError for a file that holds something else than in `notes`.
    """
    files = samples.files
    if files is None:
        return samples
    images = partial(_noted, samples.read, files.folder, files.images, False, notes)
    masks = samples.masks
    if masks and files.masks:
        masks = partial(_noted, masks, files.folder, files.masks, True, notes)
    return replace(samples, read=images, masks=masks)


def _noted(
    reads: Reads, folder: Path, names: Names, mask: bool, notes: Notes, start: int, stop: int
) -> Tensor:
    paths = {(number, mask, name): str(folder / name) for number, name in names(start, stop)}
    with noted() as found:
        try:
            answer = reads(start, stop)
            for path in set(paths.values()) - found.keys():  # a caller's own function opened them
                read(path)
        finally:  # a file that was read but could not be decoded is noted too
            add(notes, {key: found[path] for key, path in paths.items() if path in found})
    return answer


def add(notes: Notes, notes_of_part: Notes) -> None:
    """Adds notes to `notes`. Raises ValueError for a file that has two contents."""
    for key, content in notes_of_part.items():
        if notes.setdefault(key, content).sha256 != content.sha256:
            raise _changed_meanwhile(key[2])


def table_of(notes: Notes) -> pd.DataFrame:
    """Returns notes as a table, in the order of the samples."""
    rows = [
        (number, mask, os.fsencode(name), content.sha256, *content.stamp)
        for (number, mask, name), content in sorted(notes.items(), key=lambda item: item[0])
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def check_agree(tables: Iterable[pd.DataFrame]) -> None:
    """Raises ValueError if a file that was read twice in a run held two contents.

    tables: the notes of each pass.
    """
    digests: dict[bytes, bytes] = {}
    for table in tables:
        for file, sha256 in zip(table["file"], table["sha256"], strict=True):
            if digests.setdefault(file, sha256) != sha256:
                raise _changed_meanwhile(os.fsdecode(file))


def contents(table: pd.DataFrame, start: int, stop: int, count: int) -> dict[str, str]:
    """Returns digests of the files of the samples from `start` to `stop` - 1, by `CONTENTS`.

    They are sums of one digest for each file, so those of two parts add up to that of the whole. A
    digest is left out unless notes of at least `count` samples are there.
    """
    found: dict[str, str] = {}
    own: Any = table[(table["sample"] >= start) & (table["sample"] < stop)]
    own = own.drop_duplicates(["sample", "mask", "file"])
    for name, mask in zip(CONTENTS, (False, True), strict=True):
        rows = own[own["mask"] == mask]
        if len(rows) and rows["sample"].nunique() >= count:
            lines = rows["file"] + b"\0" + rows["sha256"]
            found[name] = total(hashlib.sha256(line).hexdigest() for line in lines)
    return found


def _changed_meanwhile(name: str) -> ValueError:
    return ValueError(
        f"{quoted(name)}: the content has changed since this run first read it. Leave the files "
        "unchanged, and start over with resume=False (--restart) or another folder."
    )


Pictures = Sequence[Picture] | Tensor | np.ndarray
# a function that turns pictures, or an array of uint8 images, into a batch, such as
# `model.preprocess` and `model.preprocess_masks`
Preprocess = Callable[[Pictures], Tensor]


@dataclass(frozen=True)
class ImageReading:
    """How images are read: the functions that turn pictures, and masks, into tensors.

    masks: None leaves masks out. limit: how many samples are wanted, or None for all.
    """

    pictures: Preprocess
    masks: Preprocess | None = None
    limit: int | None = None


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
    samples have files. files: the files whose
    content the fingerprint leaves out, which a run notes as it reads them. lengths: how many tokens
    each sample of the whole data set has, if they differ; `read` then takes samples of one length.
    groups: a number for each of the n samples, or None. Samples with the same number, such as the
    windows of one document, are not independent: intervals resample groups. answers: of text, the
    right token at each place of each sample of the whole data set `[of, pos]`, -100 for none.
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
    files: Files | None = None
    lengths: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    answers: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.of:
            object.__setattr__(self, "of", self.n)
        count = 0 if self.names is None else len(self.names)
        for number, label in enumerate(self.labels or () if count else (), self.start):
            if checks.is_int(label) and not 0 <= label < count:
                words = f"the label of sample {number} is {label}, but the data names {count}"
                raise ValueError(f"{words} classes: give 0 to {count - 1}, or None.")

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        whole = "" if self.n == self.of else f", number {self.start} on, of {self.of:,}"
        kinds = f", labels of {len(set(map(str, self.labels)))} kinds" if self.labels else ""
        masks = ", masks" if self.masks else ""
        return f"Samples: {self.n:,} samples{whole}{kinds}{masks}, {self.fingerprint[:60]}"


def part(samples: Samples, start: int, stop: int) -> Samples:
    """Returns the samples from number `start` up to, not including, `stop` of the whole data set.

    The part keeps the fingerprint of the whole.

    Args:
        samples: The samples of a data set.
        start: The number of the first.
        stop: The number after the last.

    Raises:
        ValueError: Unless start and stop are whole numbers, start < stop, and `samples` has all
            samples between them.
    """
    begin, end = samples.start, samples.start + samples.n
    if not (checks.is_int(start) and checks.is_int(stop) and begin <= start < stop <= end):
        wanted = f"{begin} <= start < stop <= {end}"
        raise ValueError(f"start={start!r}, stop={stop!r}: give whole numbers with {wanted}.")
    chosen = slice(start - begin, stop - begin)
    labels = None if samples.labels is None else samples.labels[chosen]
    groups = None if samples.groups is None else samples.groups[chosen]
    more = {"n": int(stop - start), "start": int(start)}
    return dataclasses.replace(samples, labels=labels, groups=groups, **more)


def first(samples: Samples, limit: int | None) -> Samples:
    """Returns the first `limit` of the samples, or all of them if limit is None.

    The first samples of a whole data set count as a whole data set again. The fingerprint does not
    change.
    """
    if limit is None or limit >= samples.n:
        return samples
    few = part(samples, samples.start, samples.start + int(limit))
    return dataclasses.replace(few, of=few.n) if samples.n == samples.of else few


@dataclass(frozen=True)
class Batch:
    """Contiguous samples from number `start` on, with their masks if masks are read."""

    inputs: Tensor
    start: int
    masks: Tensor | None = None

    @property
    def last(self) -> int:
        """Returns the number of the last sample."""
        return self.start + len(self.inputs) - 1


@dataclass(frozen=True)
class Found:
    """The runs of samples that were decoded, and the samples that cannot be decoded.

    bad: the number of each sample that cannot be decoded -> the reason. notes: what the files held,
    if a worker has read them.
    """

    runs: list[Batch]
    bad: dict[int, str]
    notes: Notes = field(default_factory=dict)


def read_runs(samples: Samples, start: int, stop: int, masks: bool = False) -> Found:
    """Reads the samples from `start` up to, not including, `stop`.

    Samples that cannot be decoded divide the others into contiguous runs, and so do changes of the
    number of tokens. masks: whether to read masks; a sample whose mask cannot be decoded is bad
    too. Raises ValueError if a sample can be decoded but not used.
    """
    lengths = samples.lengths
    inner = range(start + 1, stop) if lengths else ()
    changes = [number for number in inner if lengths and lengths[number] != lengths[number - 1]]
    try:
        pairs = pairwise([start, *changes, stop])
        return Found([_run(samples, *pair, masks) for pair in pairs], {})
    except Undecodable:
        bad = bad_ones(samples, start, stop, masks)
    ends = [start - 1, *sorted(bad), stop]
    runs = [(one + 1, other) for one, other in pairwise(ends) if one + 1 < other]
    return Found([_run(samples, *pair, masks) for pair in runs], bad)


def bad_ones(samples: Samples, start: int, stop: int, masks: bool) -> dict[int, str]:
    """Returns the numbers of samples that cannot be decoded, each with the reason."""
    bad: dict[int, str] = {}
    for number in range(start, stop):
        try:
            _run(samples, number, number + 1, masks)
        except Undecodable as error:
            bad[number] = str(error)
    return bad


def _run(samples: Samples, start: int, stop: int, masks: bool) -> Batch:
    inputs = samples.read(start, stop)
    return Batch(inputs, start, samples.masks(start, stop) if masks and samples.masks else None)


def grouped(samples: Samples, groups: object, table: object = None) -> Samples:
    """Returns samples with the groups that a user gives.

    groups: a list with the group of each sample, a number or a text; or the name of a column of
    the datasets.Dataset `table`, whose windows have the group of the text that they are of.

    Raises ValueError for a column that is not there, for too few groups, and for other values.
    """
    if isinstance(groups, str):
        checks.one_of("groups", groups, getattr(table, "column_names", None) or [])
        whole: Any = table
        rows = list(whole.with_format(None)[groups])
        texts = samples.groups or range(samples.start, samples.start + samples.n)
        groups = [rows[number] for number in texts]
    return dataclasses.replace(samples, groups=group_numbers(groups, samples.n))


def group_numbers(groups: object, n: int) -> tuple[int, ...]:
    """Returns a number for the group of each of n samples, from 0 in order of appearance.

    Raises ValueError for fewer than n groups, and for any that is neither a number nor a text.
    """
    groups = getattr(groups, "tolist", lambda: groups)()
    if not isinstance(groups, Sequence) or len(groups) < n:
        shown = checks.quote(groups)
        raise ValueError(f"groups={shown}: give one entry for each of the {n} samples.")
    if not all(isinstance(name, (str, int)) for name in groups[:n]):
        raise ValueError(f"groups={checks.quote(groups)}: give numbers or texts.")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups[:n]))}
    return tuple(numbers[name] for name in groups[:n])
