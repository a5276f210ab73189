"""What the files of samples held when they were read, noted for each chunk of a run.

A folder's fingerprint holds names and sizes, which are known before a file is read. The contents
are known afterwards: a run notes them, and later compares the files with its notes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor

from crate_interp.core.files import (
    Content,
    Stamp,
    digest,
    noted,
    read,
    stamp_of,
    stays_inside,
)
from crate_interp.core.pictures import quoted
from crate_interp.results.sample_ranges import CONTENTS, total

if TYPE_CHECKING:
    from crate_interp.data.samples import Samples

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
        raise ValueError(
            f"{quoted(where)} names the file {quoted(name)}, which is not inside "
            f"{quoted(folder)}: it is not read."
        )
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

        Only files with another size or another time are read. A file that is gone is no change,
        because nothing else can have been read in its place.
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


def add(notes: Notes, more: Notes) -> None:
    """Adds notes to `notes`. Raises ValueError for a file that has two contents."""
    for key, content in more.items():
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


def named(names: Sequence[str]) -> str:
    """Returns the names of the first four files as an error shows them."""
    return ", ".join(map(quoted, names[:4]))


def _changed_meanwhile(name: str) -> ValueError:
    return ValueError(
        f"{quoted(name)}: the content has changed since this run first read it. Start over with "
        "resume=False (--restart) or another folder for the result, and leave the files unchanged "
        "until the run ends."
    )
