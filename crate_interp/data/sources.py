"""Opens `data`: sources named by a string, open_data for images, open_text for text."""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from crate_interp.core import checks, pictures
from crate_interp.core.errors import ShortTextError
from crate_interp.core.safe_text import plain
from crate_interp.data import coco, cutouts, images, loaders, named_data, streams, voc
from crate_interp.data.groups import Numbered
from crate_interp.data.item_samples import (
    is_item_data,
    is_pair,
    item_samples,
    labelled,
    pair_samples,
    read_item,
    taken_apart,
    token_items,
)
from crate_interp.data.items import holds_ids, is_array
from crate_interp.data.samples import Preprocess, Samples, first
from crate_interp.data.tables import (
    Table,
    check_not_several,
    checked,
    table_samples,
    text_column,
)


@dataclass(frozen=True)
class Source:
    """A source of data that "SCHEME:WHERE" names.

    form: the text to type. images: returns the samples of WHERE; takes WHERE and two functions,
    which turn pictures and masks into tensors (if the second is None, masks are left out). masks:
    whether the data can have masks. table: opens WHERE as a datasets.Dataset, for sources that can
    hold text.
    """

    form: str
    images: Callable[..., Samples]
    masks: bool = True
    table: Callable[[str], Table] | None = None


SOURCES = (
    Source("embedded:NAME", named_data.embedded_samples, table=named_data.embedded),
    Source("imagefolder:DIR", images.folder_samples, masks=False),
    Source("cutouts:DIR", cutouts.cutout_samples),
    Source("voc:DIR", voc.voc_samples),
    Source("coco:ANNOTATIONS.json", coco.coco_samples),
    Source("hf:owner/name:split", named_data.hub_samples, table=named_data.from_hub),
)


def table_named(data: object) -> Table | None:
    """Returns the table that data is, or that a string such as "embedded:NAME" names, or None."""
    if isinstance(data, str) and not os.path.exists(data):
        source, where = source_of(data, IMAGES)
        return None if source.table is None else source.table(where)
    return data if isinstance(data, Table) else None


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


IMAGES = (
    "images [n, channels, height, width] as uint8 or preprocessed floats, (images, labels), "
    '{"image": ..., "label": ...}, a torch Dataset or DataLoader, a list of PIL images or paths, a '
    f"datasets.Dataset, a folder, {forms()}"
)
_IDS = "input_ids"
TEXTS = (
    "token ids [n, pos], (tokens, labels), a list of texts, a torch Dataset of either, a "
    f"datasets.Dataset with a text column, a text file, {forms(text=True)}"
)


def source_of(data: str, kinds: str, text: bool = False) -> tuple[Source, str]:
    """Returns the source that a string names, and the text after its scheme.

    Raises ValueError, which suggests `kinds`, if no source has this scheme, or if no text follows
    it.
    """
    scheme, _, where = data.partition(":")
    for source in SOURCES:
        if source.form.partition(":")[0] == scheme and where and (source.table or not text):
            return source, where
        if source.form.partition(":")[0] == scheme and text:
            raise ValueError(
                f"{source.form} holds images, but this model reads text: give {kinds}."
            )
    if os.sep in scheme:
        name = pictures.quoted(data)
        what = f"{name} is a folder, but this model reads text"  # images take a folder before
        what = what if os.path.isdir(data) else f"there is no file or folder {name}"
        raise ValueError(f"{what}: give {kinds}.")
    near = checks.did_you_mean(scheme, [source.form.partition(":")[0] for source in SOURCES])
    hint = f" {near}" if where and near else ""
    hint = f" Did you mean 'embedded:{data}'?" if data in named_data.EMBEDDED else hint
    hint = " To give the text itself, write a list: data=[text]." if text and not hint else hint
    raise ValueError(f"cannot take data from {data!r}: give {kinds}.{hint}")


def open_data(
    data: object,
    preprocess: Preprocess,
    limit: int | None = None,
    preprocess_masks: Preprocess | None = None,
    *,
    skip_bad: bool = False,
    kept: Path | None = None,
) -> Samples:
    """Opens images, and returns the first `limit` of them as samples.

    data: a float tensor or array (taken as preprocessed) or a uint8 one
    `[n, channels, height, width]`; (images, labels) or {"image": ..., "label": ...}; a map-style
    torch Dataset or a list, whose items are pictures (PIL images, paths or arrays), (picture,
    label), (picture, mask) or dictionaries of these; a DataLoader, of whose map-style dataset each
    sample is read once, in order; another iterable of batches, which is read once; a
    datasets.Dataset (its first image column and its label column);
    "embedded:fashion"; "imagefolder:DIR" or a folder (labels are the sub-folders, spread evenly);
    a PIL image, or the path of a picture; "hf:owner/name:split", which datasets fetches from the
    Hub. Data that is already a Samples is only cut to the limit. `preprocess` turns pictures and
    uint8 images into floats.

    Some data has masks too: (picture, mask); a datasets.Dataset with a mask column (tables.py);
    "embedded:pictures"; "voc:DIR" or "voc:DIR:SPLIT" (data/voc.py); "coco:ANNOTATIONS.json" or
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
    if loaders.is_loader(data):
        data = loaders.samples_of_loader(data)
    check_not_several(data)
    if isinstance(data, Samples):
        return first(data, limit)
    samples = _images(data, preprocess, preprocess_masks, limit, kept)
    if samples.n == 0:
        raise ValueError("the data is empty: there is no image in it.")
    try:
        # so that a broken first image raises now instead of under a progress bar
        samples.read(0, 1)
    except pictures.Undecodable:
        if not skip_bad:
            raise
    return first(samples, limit)


def _images(
    data: Any,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None,
    limit: int | None,
    kept: Path | None,
) -> Samples:
    """Returns the samples of data for `open_data`, whose arguments these are."""
    functions = preprocess, preprocess_masks
    if isinstance(data, (str, Path)) and os.path.isfile(data):
        data = [data]
    elif isinstance(data, Path) or (isinstance(data, str) and os.path.isdir(data)):
        data = f"imagefolder:{data}"
    if isinstance(data, str):
        source, where = source_of(data, IMAGES)
        more = (kept,) if source.images is images.folder_samples else ()
        return source.images(where, *functions, *more)
    if is_array(data):
        return images.tensor_samples(data, preprocess, limit)
    if isinstance(data, Image.Image):
        data = [data]
    if streams.is_stream(data):
        return streams.image_stream(data, preprocess, limit, preprocess_masks).kept()
    if isinstance(data, Table):
        return table_samples(data, *functions)
    if is_pair(data):
        return pair_samples(data, *functions, limit)
    if is_item_data(data):
        return item_samples(data, *functions, limit)
    raise ValueError(f"cannot take images from {type(data).__name__}: give {IMAGES}.")


def open_text(
    data: object,
    windows: Callable[[Iterable[str]], Tensor | Iterator[list[int]]],
    limit: int | None = None,
    encode: Callable[[str], Tensor] | None = None,
) -> Samples:
    """Returns the first `limit` samples, each a window of tokens.

    A list, a Dataset or a file of texts that fill no window when they are joined is taken text by
    text instead: each text is a sample, of as many tokens as `encode` gives, `[1, pos]`.

    data: token ids `[n, pos]` (whole numbers), (tokens, labels) or {"input_ids": ..., "label":
    ...}; a list, or a map-style torch Dataset, of token ids of one length; a list or a Dataset of
    strings; a datasets.Dataset (its column input_ids, of one length, or its first text column); the
    path of a text file; "embedded:held-out-text", "embedded:repeats" (tokens, for
    crate-tiny-induction) or "hf:owner/name:split". `windows`: `model.windows`, which
    turns texts into token ids `[n, pos]`, or `model.window_rows`, which yields their rows and so
    shows of which text a window is, its group (`Samples.groups`). Windows have no labels. Data that
    is already a Samples is only cut to the limit.

    Raises ValueError for anything else, for data without tokens, and for texts shorter than one
    window.
    """
    checks.limit(limit)
    if loaders.is_loader(data):
        data = loaders.samples_of_loader(data, tokens=True)
    check_not_several(data)
    if isinstance(data, Samples):
        return first(data, limit)
    if isinstance(data, Path) or (isinstance(data, str) and os.path.isfile(data)):
        data = [_text_of(Path(data))]
    labels, given = None, cast(Any, data)
    if isinstance(given, Table):
        return first(_table_samples(given, windows), limit)
    if isinstance(given, str):
        source, where = source_of(given, TEXTS, text=True)
        assert source.table is not None
        samples = open_text(source.table(where), windows, limit)
        return replace(samples, fingerprint=f"{plain(given, 200)}:{samples.fingerprint}")
    if is_pair(given):
        whole = taken_apart(given)
        given, labels = whole.value, whole.label
    if is_item_data(given) and len(given) and not isinstance(read_item(given, 0).value, str):
        given, found = token_items(given, limit)
        labels = labels if found is None else found
    if is_array(given):
        return labelled(first(_token_samples(torch.as_tensor(given)), limit), labels)
    if not is_item_data(given):
        raise ValueError(f"cannot take text from {type(given).__name__}: give {TEXTS}.")
    items = (read_item(given, number).value for number in range(len(given)))
    texts = list(checked(items))  # before work starts
    if not texts:
        raise ValueError("the data is empty: there is no text in it.")
    try:
        return first(_window_samples(windows, texts), limit)
    except ShortTextError:
        if encode is None:
            raise
    return first(_text_samples([encode(text)[0].cpu() for text in texts]), limit)


def _table_samples(table: Any, windows: Callable[[Iterable[str]], Any]) -> Samples:
    """Returns the token ids of a table, or the windows of its first text column.

    Raises ValueError for a table without a length, and for ids in rows of several lengths.
    """
    if streams.is_stream(table):
        raise ValueError(
            "the dataset is a stream, whose windows of tokens are made while it is read: give it "
            "to ci.sweep or ci.atoms, or give a map-style datasets.Dataset here."
        )
    if _IDS not in (table.column_names or ()):
        return _window_samples(windows, checked(table[text_column(table)]))
    rows = [list(row) for row in table[_IDS]]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"the column {_IDS} has rows of {lengths[0]} to {lengths[-1]} tokens: give rows of one "
            "length, since there is no padding."
        )
    return _token_samples(torch.tensor(rows))


def _text_of(path: Path) -> str:
    """Returns the text of a file; raises ValueError for a file that is not one in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{pictures.quoted(path)} is not a text file in UTF-8: {plain(error)}."
        ) from None


def _window_samples(windows: Callable[[Iterable[str]], Any], texts: Iterable[str]) -> Samples:
    """Returns the windows of texts as samples, grouped by text if they come row by row."""
    numbered = Numbered(texts)
    rows = windows(numbered)
    if isinstance(rows, Tensor):
        return _token_samples(rows)
    joined, groups = array("q"), []
    for row in rows:
        joined.extend(row)
        groups.append(numbered.number)
    tokens = torch.frombuffer(joined, dtype=torch.int64).view(len(groups), -1)
    several = len(set(groups)) < len(groups)  # of some text
    return replace(_token_samples(tokens), groups=tuple(groups) if several else None)


def _text_samples(rows: list[Tensor]) -> Samples:
    """Returns rows of token ids, which may differ in length, as samples."""
    lengths = tuple(map(len, rows))
    if len(set(lengths)) == 1:
        return _token_samples(torch.stack(rows))
    whole = _token_samples(torch.cat(rows)[None])
    digest = hashlib.sha256(f"{whole.fingerprint} {lengths}".encode()).hexdigest()

    def read(start: int, stop: int) -> Tensor:
        if len(set(lengths[start:stop])) > 1:
            raise ValueError(f"samples {start} to {stop - 1} have different numbers of tokens.")
        return torch.stack(rows[start:stop])

    return Samples(len(rows), None, f"texts:sha256:{digest}", read, lengths=lengths)


def _token_samples(tokens: Tensor) -> Samples:
    if tokens.ndim != 2 or not holds_ids(tokens):
        raise ValueError(
            f"data is {tokens.dtype} of shape {list(tokens.shape)}, but this model reads text: "
            "give token ids, whole numbers [n, pos], or a list of texts."
        )
    if 0 in tokens.shape:
        raise ValueError(f"the data is empty: tokens have shape {list(tokens.shape)}.")
    tokens = tokens.long()
    digest = hashlib.sha256(f"tokens {list(tokens.shape)}".encode())
    digest.update(tokens.cpu().contiguous().numpy().data)
    read = lambda start, stop: tokens[start:stop]  # noqa: E731
    return Samples(len(tokens), None, f"tokens:sha256:{digest.hexdigest()}", read)
