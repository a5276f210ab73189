"""Opens `data`: the table of its forms, open_data for images, open_text for text."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from crate_interp.core import checks, pictures, safe_text
from crate_interp.data import folder_listing, items, object_masks, streams, tables, texts
from crate_interp.data.samples import ImageReading, Preprocess, Samples, first


@dataclass(frozen=True)
class Source:
    """A source of data that "SCHEME:WHERE" names.

    form: the text to type. images: returns the images of WHERE as samples. table: opens WHERE as a
    datasets.Dataset, for sources that can hold text. masks: whether the data can have masks.
    """

    form: str
    images: Callable[[str, ImageReading], Samples]
    table: Callable[[str], tables.Table] | None = None
    masks: bool = True


SOURCES = {
    "embedded": Source("embedded:NAME", tables.embedded_samples, tables.embedded),
    "imagefolder": Source("imagefolder:DIR", folder_listing.folder_samples, masks=False),
    "cutouts": Source("cutouts:DIR", object_masks.cutout_samples),
    "voc": Source("voc:DIR", object_masks.voc_samples),
    "coco": Source("coco:ANNOTATIONS.json", object_masks.coco_samples),
    "hf": Source("hf:owner/name:split", tables.hub_samples, tables.from_hub),
}


def forms(*, masks: bool = False, text: bool = False) -> str:
    """Returns the forms of all sources as text for an error: '"embedded:NAME", ... or "hf:..."'.

    masks: only sources that can have masks. text: only sources that can hold text.
    """
    fitting = [one for one in SOURCES.values() if one.masks >= masks and (one.table or not text)]
    *names, last = (f'"{source.form}"' for source in fitting)
    return f"{', '.join(names)} or {last}"


def _named_text(data: str, how: texts.TextReading) -> Samples:
    source, where = _source_of(data, "text")
    assert source.table is not None
    samples = texts.table_of_text(source.table(where), how)
    return replace(samples, fingerprint=f"{safe_text.plain(data, 200)}:{samples.fingerprint}")


def _named_images(data: str, how: ImageReading) -> Samples:
    source, where = _source_of(data, "images")
    return source.images(where, how)


def _one_picture(data: Any, how: ImageReading) -> Samples:
    return texts.sequence_samples([data], how)


def _is_file(data: object) -> bool:
    return isinstance(data, (str, Path)) and os.path.isfile(data)


def _is_folder(data: object) -> bool:
    return isinstance(data, Path) or (isinstance(data, str) and os.path.isdir(data))


# Data has the first form that fits: how to tell, and what makes samples of its images, or of its
# text.
FORMS: tuple[tuple[Callable[[Any], bool], Any, Any], ...] = (
    (items.is_array, texts.tensor_samples, texts.token_samples),
    (_is_file, _one_picture, texts.file_of_text),
    (_is_folder, folder_listing.folder_samples, None),
    (lambda data: isinstance(data, str), _named_images, _named_text),
    (lambda data: isinstance(data, Image.Image), _one_picture, None),
    (streams.is_stream, lambda data, how: streams.image_stream(data, how).first_samples(), None),
    (tables.is_table, tables.table_samples, texts.table_of_text),
    (texts.is_pair, texts.pair_samples, texts.pair_of_text),
    (texts.is_sequence, texts.sequence_samples, texts.text_sequence),
)
_WORDS = {  # what to give, for errors
    "images": "images [n, channels, height, width] as uint8 or preprocessed floats, a picture file,"
    ' a folder, a datasets.Dataset, (images, labels), {"image": ..., "label": ...}, a torch Dataset'
    " or DataLoader, a list of PIL images or paths, ",
    "text": "token ids [n, pos], a text file, a datasets.Dataset with a text column, (tokens, "
    "labels), a list of texts, a torch Dataset of either, ",
}


def _samples_of(data: Any, kind: str, how: ImageReading | texts.TextReading) -> Samples:
    """Returns the first samples of data, by the first form that fits."""
    checks.limit(how.limit)
    if streams.is_loader(data):
        data = streams.samples_of_loader(data, tokens=kind == "text")
    if isinstance(data, Mapping) and data and hasattr(data, "column_names"):  # a DatasetDict
        splits = " or ".join(f'data["{safe_text.plain(name, 200)}"]' for name in data)
        raise ValueError(f"the data is a {type(data).__name__}: give one split, {splits}.")
    if isinstance(data, Samples):
        return first(data, how.limit)
    pairs = ((images, text) for fits, images, text in FORMS if fits(data))
    opens = next(pairs, (None, None))[kind == "text"]
    if opens is None:
        what = pictures.quoted(data) if isinstance(data, (str, Path)) else type(data).__name__
        words = _WORDS[kind] + forms(text=kind == "text")
        raise ValueError(f"cannot take {kind} from {what}: give {words}.")
    return first(opens(data, how), how.limit)


def table_named(data: object) -> tables.Table | None:
    """Returns the table that data is, or that a string such as "embedded:NAME" names, or None."""
    if isinstance(data, str) and not os.path.exists(data):
        source, where = _source_of(data, "images")
        return None if source.table is None else source.table(where)
    return data if tables.is_table(data) else None


def _source_of(data: str, kind: str) -> tuple[Source, str]:
    """Returns the source that a string names, and the text after its scheme.

    Raises ValueError if no source has this scheme, if it has no "images" or no "text" as `kind`
    says, or if no text follows the scheme.
    """
    scheme, _, where = data.partition(":")
    source = SOURCES.get(scheme)
    if source and where and (source.table or kind == "images"):
        return source, where
    said = "there is no file or folder" if os.sep in scheme else f"cannot take {kind} from"
    otherwise = "To give the text itself, write a list: data=[text]." if kind == "text" else ""
    known = [*SOURCES, *(f"embedded:{name}" for name in tables.EMBEDDED)]
    hint = checks.did_you_mean(scheme if where else data, known, otherwise)
    words = _WORDS[kind] + forms(text=kind == "text")
    raise ValueError(f"{said} {pictures.quoted(data)}: give {words}. {hint}".rstrip())


def open_data(
    data: object,
    preprocess: Preprocess,
    limit: int | None = None,
    preprocess_masks: Preprocess | None = None,
    *,
    skip_bad: bool = False,
) -> Samples:
    """Opens images, and returns the first `limit` of them as samples.

    `data` is one of these:

    - a tensor or array `[n, channels, height, width]`, of floats (taken as preprocessed) or of
      uint8; (images, labels) or {"image": ..., "label": ...};
    - a map-style torch Dataset or a list, whose items are pictures (PIL images, paths or arrays),
      (picture, label), (picture, mask) or dictionaries of these; a DataLoader, of whose map-style
      dataset each sample is read once, in order; another iterable of batches, which is read once;
    - a datasets.Dataset (its first image column and its label column); the first `limit` rows of a
      datasets.IterableDataset are kept in memory, undecoded;
    - "embedded:fashion"; "imagefolder:DIR" or a folder (labels are the sub-folders, spread evenly);
      a PIL image, or the path of a picture; "hf:owner/name:split", which datasets fetches from the
      Hub;
    - with masks too: (picture, mask); a datasets.Dataset with a mask column (tables.py);
      "embedded:pictures"; and those of object_masks.py: "voc:DIR" or "voc:DIR:SPLIT";
      "coco:ANNOTATIONS.json" or "coco:ANNOTATIONS.json:IMAGEDIR"; "cutouts:DIR" or
      "cutouts:DIR:SEED", objects with alpha;
    - a Samples, which is only cut to the limit.

    Only regular files of limited size are opened, and pictures are turned upright
    (crate_interp/core/pictures.py).

    Args:
        data: As above.
        preprocess: Turns pictures and uint8 images into floats.
        limit: How many of the first images to take. Default: all.
        preprocess_masks: Turns masks into class maps. Default: masks are left out.
        skip_bad: Do not raise for a first image that cannot be read; it is left out later.

    Raises:
        ValueError: Before any work starts, for anything else, for data without images, for a first
            image that cannot be read (without skip_bad), for NaN or Inf in a float tensor, and for
            a stream without a limit.
    """
    samples = _samples_of(data, "images", ImageReading(preprocess, preprocess_masks, limit))
    if isinstance(data, Samples):
        return samples
    if samples.n == 0:
        raise ValueError("the data is empty: there is no image in it.")
    try:
        # so that a broken first image raises now instead of under a progress bar
        samples.read(0, 1)
    except pictures.Undecodable:
        if not skip_bad:
            raise
    return samples


def open_text(
    data: object,
    windows: Callable[[Iterable[str]], Tensor | Iterator[list[int]]],
    limit: int | None = None,
    encode: Callable[[str], Tensor] | None = None,
) -> Samples:
    """Returns the first `limit` samples, each a window of tokens.

    A list, a Dataset or a file of texts that fill no window when they are joined is taken text by
    text instead: each text is a sample, of as many tokens as `encode` gives, `[1, pos]`.

    Args:
        data: Token ids `[n, pos]` (whole numbers), (tokens, labels) or {"input_ids": ..., "label":
            ...}, with a label for each sample, or for each token (crate-bert), -100 where none is
            masked; a list, or a map-style torch Dataset, of token ids of one length; a list or a
            Dataset of strings; a datasets.Dataset (its column input_ids, of one length, or its
            first text column); the path of a text file; "embedded:held-out-text",
            "embedded:repeats" (tokens, for crate-tiny-induction) or "hf:owner/name:split". Data
            that is already a Samples is only cut to the limit.
        windows: `model.windows`, which turns texts into token ids `[n, pos]`, or
            `model.window_rows`, which yields them row by row, so that each window's group
            (`Samples.groups`) is its text. Windows have no labels.
        limit: How many of the first windows or texts to take. Default: all.
        encode: Turns a text into token ids `[1, pos]`.

    Raises:
        ValueError: For anything else, for data without tokens, and for texts shorter than one
            window.
    """
    return _samples_of(data, "text", texts.TextReading(windows, limit, encode))
