"""Folders of pictures as samples: their order, sizes, labels and fingerprint."""

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from crate_interp.core.checks import did_you_mean
from crate_interp.core.files import digest_of_bytes
from crate_interp.core.folders import listed
from crate_interp.core.pictures import SUFFIXES, UNREAD_SUFFIXES, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.items import Item, Items, item_samples
from crate_interp.data.samples import Files, ImageReading, Samples
from crate_interp.results.result_files import META

# usual names of folders that are parts of a data set, best for measuring first
SPLITS = ("val", "valid", "validation", "test", "dev", "train")


def path_and_option(text: str) -> tuple[Path, str | None]:
    """Splits a text at its last colon into a path and an option.

    The option is None if the text has no colon, or if the whole text is an existing path.
    """
    text = expanduser(text)  # Path.expanduser raises for an unknown user
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or os.path.exists(text) else (Path(before), after)


def names_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[str]:
    """Returns, in order, the names of the files under a folder that end in one of `suffixes`.

    A name is the path below the folder, written with /; names are in order part by part. Files and
    folders whose names begin with a dot are left out, and so are the files of a result that was
    saved under the folder. Links are followed wherever they lead, because the user unpacked the
    folder; a folder that links reach again is read once.
    """
    names: list[str] = []
    results: set[str] = set()
    places: set[tuple[int, int]] = set()  # the folders so far, by inode
    for place, folders, files in os.walk(folder, followlinks=True):
        inode = os.stat(place).st_dev, os.stat(place).st_ino
        seen = inode in places  # its pictures would count twice
        folders[:] = sorted(name for name in folders if not (seen or name.startswith(".")))
        if seen:
            continue
        places.add(inode)
        below = "" if Path(place) == folder else f"{Path(place).relative_to(folder).as_posix()}/"
        if META in files:
            results.update(below + name for name in listed(Path(place) / META))
        read = (name for name in files if os.path.splitext(name)[1].lower() in suffixes)
        names += [below + name for name in read if not name.startswith(".")]
    return sorted(set(names) - results, key=lambda name: name.split("/"))


def size_of(path: Path) -> int:
    """Returns the size of a file, or -1 if it cannot be read, such as that of a broken link."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def names_and_sizes(names: Iterable[str], sizes: Iterable[int]) -> str:
    """Returns a fingerprint of files, made of their names and sizes; no content is read."""
    lines = (
        os.fsencode(name).replace(b"\n", b"\0") + f" {size}".encode()  # names hold no zero byte
        for name, size in zip(names, sizes, strict=True)
    )
    return "names-and-sizes:" + digest_of_bytes(b"\n".join(lines))


def first_folders(names: Iterable[str]) -> list[str] | None:
    """Returns the first folder of every name as labels, or None if a file is in no folder.

    Labels are written into tables and files, so characters that would harm them become escapes.
    """
    pairs = [name.partition("/")[:2] for name in names]
    known = {folder: plain(folder, 1000) for folder in {folder for folder, _ in pairs}}
    return [known[folder] for folder, _ in pairs] if all(slash for _, slash in pairs) else None


def folder_samples(where: str | Path, how: ImageReading) -> Samples:
    """Returns the pictures under a folder. There are no masks.

    If every picture is in a sub-folder, the sub-folders are the labels, and the pictures of each
    label are spread evenly over the samples (`spread`), so that the first samples represent all.
    Otherwise there are no labels, and pictures are ordered by name.

    Pictures are the files whose names end in .png, .jpg, .webp and the like (SUFFIXES in
    crate_interp/core/pictures.py); other files, and names that begin with a dot, are skipped. A
    warning counts the skipped files of other picture formats, such as .heic. Pictures are turned
    upright by their EXIF orientation.

    Raises ValueError if there is no such folder, if it has no pictures, or if its sub-folders are
    splits, such as train and val, instead of labels. A picture is opened when its sample is read.
    This raises ValueError if the picture cannot be decoded.
    """
    folder = Path(expanduser(where))
    if not isdir(folder):
        near = did_you_mean(folder.name, [path.name for path in folder.parent.glob("*/")])
        words = f"{quoted(folder)} is not a folder: give imagefolder:DIR with a folder. "
        raise ValueError((words + plain(near, 1000)).rstrip())
    every = names_under(folder, SUFFIXES + UNREAD_SUFFIXES)
    names = [name for name in every if name.lower().endswith(SUFFIXES)]
    kinds = Counter(os.path.splitext(name)[1].lower() for name in every).most_common()
    unread = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds if suffix not in SUFFIXES)
    advice = f" Formats that are not read: {unread}. Save these files as PNG or JPEG."
    if not names:
        words = f"{quoted(folder)} has no images: no file ends in {', '.join(SUFFIXES)}."
        raise ValueError(words + advice if unread else words)
    labels = first_folders(names)
    splits = sorted(set(labels or ()))
    if splits and all(name.lower() in SPLITS for name in splits):
        best = min(splits, key=lambda name: SPLITS.index(name.lower()))
        given = f"{quoted(folder)} holds splits ({', '.join(splits)}), not folders of labels"
        raise ValueError(f'{given}. Give one split: "imagefolder:{plain(folder / best, 1000)}".')
    if unread:
        warnings.warn(f"files in {quoted(folder)} are left out.{advice}", stacklevel=2)
    sizes = [size_of(folder / name) for name in names]
    print_ = f"imagefolder:{'' if labels is None else 'spread:'}{names_and_sizes(names, sizes)}"
    if labels is not None:
        order = spread(labels)
        names, labels = ([one[place] for place in order] for one in (names, labels))
    read = lambda start, stop: [Item(folder / name) for name in names[start:stop]]  # noqa: E731
    return file_samples(read, folder, names, how, print_, labels=labels)


def file_samples(
    items: Items | list[Item],
    folder: Path,
    names: list[str],
    how: ImageReading,
    fingerprint: str,
    mask_names: list[str] | None = None,
    **options: Any,
) -> Samples:
    """Returns picture files as samples. Each file is read when its sample is read.

    names, mask_names: those of the files of images and masks below the folder. options: see
    `item_samples`.
    """
    masks = None if mask_names is None else partial(_numbered, mask_names)
    files = Files(folder, partial(_numbered, names), masks)
    options |= {"files": files, "name_of": lambda number: plain(names[number], 1000)}
    return item_samples(items, range(len(names)), fingerprint, how, **options)


def _numbered(names: list[str], start: int, stop: int) -> Iterator[tuple[int, str]]:
    return enumerate(names[start:stop], start)


def spread(labels: Sequence[str]) -> Int[np.ndarray, "sample"]:
    """Returns an order in which the samples of each label are spread evenly.

    Sample i (from 0) of the n samples of a label is placed at (i + 1/2) / n. If samples of two
    labels have the same place, the label that occurs first in the data goes first. So every part of
    the order has about the same shares of labels as the whole.
    """
    known: dict[str, int] = {}
    codes = np.array([known.setdefault(label, len(known)) for label in labels])
    counts = np.bincount(codes)
    by_label = np.argsort(codes, kind="stable")
    rank = np.empty(len(codes), dtype=np.int64)
    rank[by_label] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.lexsort((codes, (rank + 0.5) / counts[codes]))
