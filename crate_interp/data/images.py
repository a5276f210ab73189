"""Images without masks: tensors, and folders of pictures."""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from os.path import expanduser, isdir
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from crate_interp.core.checks import did_you_mean
from crate_interp.core.pictures import SUFFIXES, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.folder_listing import Listing, first_folders
from crate_interp.data.items import image_of, upright_array
from crate_interp.data.picture_contents import Files
from crate_interp.data.samples import Preprocess, Samples
from crate_interp.measures.checks import all_finite

# usual names of folders that are parts of a data set, best for measuring first
SPLITS = ("val", "valid", "validation", "test", "dev", "train")


def tensor_samples(
    images: Tensor | np.ndarray, preprocess: Preprocess, limit: int | None
) -> Samples:
    """Returns the images of a tensor or array `[n, channels, height, width]`.

    A uint8 one may be `[n, height, width, channels]` with 1 or 3 channels.

    Floats count as preprocessed; uint8 images (0 to 255) are preprocessed when they are read. The
    fingerprint is that of the entire tensor. Raises ValueError for other shapes and dtypes, and for
    NaN, Inf and pixels of 0 to 255 among the floats of the first `limit` images.
    """
    images = torch.as_tensor(images)
    images = upright_array(images, "data") if images.ndim == 4 else images
    if images.ndim != 4:
        raise ValueError(
            f"data has shape {list(images.shape)}, but this model reads images: give [n, channels, "
            "height, width]."
        )
    if not (images.is_floating_point() or images.dtype == torch.uint8):
        raise ValueError(f"data is {images.dtype}: give preprocessed floats, or uint8 (0 to 255).")
    images = images.detach()
    if images.is_floating_point():
        used = images[:limit]
        bad = [index for index, image in enumerate(used) if not all_finite(image)]
        if bad:
            raise ValueError(
                f"data holds NaN or Inf in {len(bad)} of {len(used)} images, "
                f"the first at index {bad[0]}."
            )
        for number, image in enumerate(used):
            image_of(image, number, preprocess)
    digest = hashlib.sha256(f"{images.dtype} {list(images.shape)}".encode())
    for part in images.split(256):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    read = lambda start, stop: preprocess(images[start:stop])  # noqa: E731
    return Samples(
        n=len(images), labels=None, fingerprint=f"tensor:sha256:{digest.hexdigest()}", read=read
    )


def folder_samples(
    where: str,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None = None,
    kept: Path | None = None,
) -> Samples:
    """Returns the pictures under a folder. There are no masks.

    If every picture is in a sub-folder, the sub-folders are the labels, and the pictures of each
    label are spread evenly over the samples (`spread`), so that the first samples represent all.
    Otherwise there are no labels, and pictures are ordered by name.

    Pictures are the files whose names end in .png, .jpg, .webp and the like (SUFFIXES in
    crate_interp/core/pictures.py); other files, and names that begin with a dot, are skipped. A
    warning counts the skipped files of other picture formats, such as .heic. Pictures are turned
    upright by their EXIF orientation. kept: a file that `Listing.keep` wrote; if it lists this
    folder, the folder is not listed again.

    Raises ValueError if there is no such folder, if it has no pictures, or if its sub-folders are
    splits, such as train and val, instead of labels. A picture is opened when its sample is read.
    This raises ValueError if the picture cannot be decoded, or if its file has vanished or changed
    its size since the folder was listed.
    """
    folder = Path(expanduser(where))
    if not isdir(folder):
        beside = [path.name for path in folder.parent.glob("*/")] if isdir(folder.parent) else []
        near = did_you_mean(plain(folder.name, 100), [plain(name, 100) for name in beside])
        words = f"{quoted(folder)} is not a folder: give imagefolder:DIR with a folder. {near}"
        raise ValueError(words.rstrip())
    listing = (Listing.kept(kept, folder) if kept else None) or Listing.of(folder)
    unread = ", ".join(f"{count:,} {suffix}" for suffix, count in listing.unread.most_common())
    advice = f"Formats that are not read: {unread}. Save these files as PNG or JPEG."
    if not listing.names:
        raise ValueError(
            f"{quoted(folder)} has no images: no file ends in {', '.join(SUFFIXES)}."
            + (f" {advice}" if unread else "")
        )
    labels = first_folders(listing.names)
    _check_no_splits(folder, labels)
    if unread:
        warnings.warn(f"files in {quoted(folder)} are left out. {advice}", stacklevel=2)
    order = np.arange(len(listing.names)) if labels is None else spread(labels)

    def named(start: int, stop: int) -> Iterable[tuple[int, str]]:
        return enumerate((listing.names[place] for place in order[start:stop]), start)

    return Samples(
        n=len(listing.names),
        labels=None if labels is None else [labels[number] for number in order],
        fingerprint=f"imagefolder:{'' if labels is None else 'spread:'}{listing.fingerprint}",
        read=lambda start, stop: preprocess(listing.paths(order[start:stop].tolist())),
        name_of=lambda number: plain(listing.names[order[number]], 1000),
        listing=listing,
        files=Files(folder, named),
    )


def _check_no_splits(folder: Path, labels: Sequence[str] | None) -> None:
    """Raises ValueError, which says what to type, if all labels are names of splits."""
    found = sorted(set(labels or ()))
    if not found or any(name.lower() not in SPLITS for name in found):
        return
    first = min(found, key=lambda name: SPLITS.index(name.lower()))
    holds = "a split" if len(found) == 1 else "splits"
    raise ValueError(
        f"{quoted(folder)} holds {holds} ({', '.join(found)}), not folders of labels. Give one "
        f'split: "imagefolder:{plain(folder / first, 1000)}".'
    )


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
