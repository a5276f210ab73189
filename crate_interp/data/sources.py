"""Opens `data`: sources named by a string, open_data for images, open_text for text."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from crate_interp.core import checks, pictures
from crate_interp.data import coco, cutouts, images, named_data, streams, voc
from crate_interp.data.samples import Preprocess, Samples, first
from crate_interp.data.tables import Table, checked, table_samples, texts_of


@dataclass(frozen=True)
class Source:
    """A source of data that "SCHEME:WHERE" names.

    form: the text to type. images: returns the samples of WHERE; takes WHERE and two functions,
    which turn pictures and masks into tensors (if the second is None, masks are left out). masks:
    whether the data can have masks. table: opens WHERE as a datasets.Dataset, for sources that can
    hold text. listed: whether files are listed, so that `images` also takes the file of a listing.
    """

    form: str
    images: Callable[..., Samples]
    masks: bool = True
    table: Callable[[str], Table] | None = None
    listed: bool = False


SOURCES = (
    Source("embedded:NAME", named_data.embedded_samples, table=named_data.embedded),
    Source("imagefolder:DIR", images.folder_samples, masks=False, listed=True),
    Source("cutouts:DIR", cutouts.cutout_samples),
    Source("voc:DIR", voc.voc_samples),
    Source("coco:ANNOTATIONS.json", coco.coco_samples),
    Source("hf:owner/name:split", named_data.hub_samples, table=named_data.from_hub),
)


def forms(*, masks: bool = False, text: bool = False) -> str:
    """Returns the forms of all sources as text for an error: '"embedded:NAME", ... or "hf:..."'.

    masks: only sources that can have masks. text: only sources that can hold text.
    """
    shown = [
        f'"{source.form}"'
        for source in SOURCES
        if (source.masks or not masks) and (source.table or not text)
    ]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def source_of(data: str, kinds: str, text: bool = False) -> tuple[Source, str]:
    """Returns the source that a string names, and the text after its scheme.

    Raises ValueError, which suggests `kinds`, if no source has this scheme, or if no text follows
    it.
    """
    scheme, _, where = data.partition(":")
    for source in SOURCES:
        if source.form.partition(":")[0] == scheme and where and (source.table or not text):
            return source, where
    near = checks.did_you_mean(scheme, [source.form.partition(":")[0] for source in SOURCES])
    meant = "imagefolder" if os.path.isdir(data) and not text else ""
    meant = "embedded" if data in named_data.EMBEDDED else meant
    hint = f" {near}" if where and near else ""
    hint = f" Did you mean '{meant}:{data}'?" if meant else hint
    raise ValueError(f"cannot take data from {data!r}: give {kinds}.{hint}")


def open_data(
    data: str | Tensor | np.ndarray | Table | Samples,
    preprocess: Preprocess,
    limit: int | None = None,
    preprocess_masks: Preprocess | None = None,
    *,
    skip_bad: bool = False,
    kept: Path | None = None,
) -> Samples:
    """Opens images, and returns the first `limit` of them as samples.

    data: a float tensor or array (taken as preprocessed) or a uint8 one
    `[n, channels, height, width]`; a datasets.Dataset (its first image column and its label
    column); "embedded:fashion"; "imagefolder:DIR" (labels are the sub-folders, spread evenly);
    "hf:owner/name:split", which datasets fetches from the Hub. Data that is already a Samples is
    only cut to the limit. `preprocess` turns pictures and uint8 images into floats.

    Some data has masks too: a datasets.Dataset with a mask column (crate_interp/data/tables.py);
    "embedded:cutouts"; "voc:DIR" or "voc:DIR:SPLIT" (data/voc.py); "coco:ANNOTATIONS.json" or
    "coco:ANNOTATIONS.json:IMAGEDIR" (data/coco.py); "cutouts:DIR" or "cutouts:DIR:SEED",
    objects with alpha (data/cutouts.py). `preprocess_masks` turns masks into class maps; if it is
    None, masks are left out.

    The first `limit` rows of a datasets.IterableDataset are kept in memory, undecoded. kept: a file
    with the listing of a folder, which is used instead of listing the folder again.

    Only regular files of limited size are opened, and pictures are turned upright
    (crate_interp/core/pictures.py).

    Raises ValueError, before any work starts, for anything else, for data without images, for a
    first image that cannot be read (unless skip_bad leaves it out later), for NaN or Inf in a float
    tensor, and for a stream without a limit.
    """
    checks.limit(limit)
    kinds = f"a float or uint8 tensor [n, channels, h, w], a datasets.Dataset, {forms()}"
    if isinstance(data, Samples):
        return first(data, limit)
    if isinstance(data, str):
        source, where = source_of(data, kinds)
        options = {"kept": kept} if source.listed else {}
        samples = source.images(where, preprocess, preprocess_masks, **options)
    elif isinstance(data, (Tensor, np.ndarray)):
        samples = images.tensor_samples(torch.as_tensor(data), preprocess, limit)
    elif streams.is_stream(data):
        samples = streams.image_stream(data, preprocess, limit, preprocess_masks).kept()
    elif isinstance(data, Table):
        samples = table_samples(data, preprocess, preprocess_masks)
    else:
        raise ValueError(f"cannot take data from {type(data).__name__}: give {kinds}.")
    if samples.n == 0:
        raise ValueError("the data is empty: there is no image in it.")
    try:
        # so that a broken first image raises now instead of under a progress bar
        samples.read(0, 1)
    except pictures.Undecodable:
        if not skip_bad:
            raise
    return first(samples, limit)


def open_text(
    data: str | Sequence[str] | Tensor | np.ndarray | Table | Samples,
    windows: Callable[[Iterable[str]], Tensor],
    limit: int | None = None,
) -> Samples:
    """Returns the first `limit` samples, each a window of tokens. There are no labels.

    data: token ids `[n, pos]` (whole numbers), a list of strings, a datasets.Dataset (its first
    text column), "embedded:held-out-text" or "hf:owner/name:split". `windows` turns texts into
    token ids `[n, pos]`. Data that is already a Samples is only cut to the limit.

    Raises ValueError for anything else, for data without tokens, and for texts shorter than one
    window.
    """
    checks.limit(limit)
    kinds = (
        "whole numbers [n, pos], a list of strings, a datasets.Dataset with a text column, "
        f"{forms(text=True)}"
    )
    if isinstance(data, Samples):
        return first(data, limit)
    if isinstance(data, (Tensor, np.ndarray)):
        return first(_token_samples(torch.as_tensor(data)), limit)
    if isinstance(data, str):
        source, where = source_of(data, kinds, text=True)
        assert source.table is not None
        texts = texts_of(source.table(where))
    elif streams.is_stream(data):
        raise ValueError(
            "the dataset is a stream, whose windows of tokens are made while it is read: give it "
            "to ci.sweep or ci.atoms, or give a map-style datasets.Dataset here."
        )
    elif isinstance(data, Table):
        texts = texts_of(data)
    elif isinstance(data, (list, tuple)):
        texts = data
        for _ in checked(texts):  # reads all texts, before work starts
            pass
    else:
        raise ValueError(f"cannot take text from {type(data).__name__}: give {kinds}.")
    if not len(texts):
        raise ValueError("the data is empty: there is no text in it.")
    return first(_token_samples(windows(checked(texts))), limit)


def _token_samples(tokens: Tensor) -> Samples:
    odd = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.ndim != 2 or odd:
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {list(tokens.shape)}: give whole numbers [n, pos]."
        )
    if 0 in tokens.shape:
        raise ValueError(f"the data is empty: tokens have shape {list(tokens.shape)}.")
    tokens = tokens.long()
    digest = hashlib.sha256(f"tokens {list(tokens.shape)}".encode())
    digest.update(tokens.cpu().contiguous().numpy().data)
    read = lambda start, stop: tokens[start:stop]  # noqa: E731
    return Samples(len(tokens), None, f"tokens:sha256:{digest.hexdigest()}", read)
