"""Items: one sample as people hold it, such as (picture, label); batches are made of these."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from crate_interp.core.pictures import SUFFIXES, Undecodable, header, quoted, upright_size
from crate_interp.core.safe_text import plain
from crate_interp.data.samples import Preprocess
from crate_interp.data.tables import MASK_COLUMNS

IMAGE_KEYS = ("image", "images", "pixel_values", "img")
TOKEN_KEYS = ("input_ids", "tokens")
TEXT_KEYS = ("text", "texts")
LABEL_KEYS = ("label", "labels", "target", "targets", "y")
_PARTS = {"an image": IMAGE_KEYS, "tokens": TOKEN_KEYS, "a text": TEXT_KEYS}
# the image of one sample
Value = Tensor | np.ndarray | Image.Image | Path | str


@dataclass(frozen=True)
class Item:
    """A sample, or a batch of samples: the value, and its label and mask if there are any.

    value: a picture (PIL image or path), an array of an image, tokens or a text; in a batch, a
    sequence of these or an array with one axis more. group: the number of the text that a window of
    tokens is of.
    """

    value: Any
    label: Any = None
    mask: Any = None
    group: int | None = None


def is_array(value: object) -> TypeGuard[Tensor | np.ndarray]:
    """Tells whether a value is a torch tensor or a numpy array."""
    return isinstance(value, (Tensor, np.ndarray))


def is_picture(value: object) -> bool:
    """Tells whether a value is a PIL image or a path, also one that is a string."""
    return isinstance(value, (Image.Image, Path, str))


def item_of(thing: object, where: str) -> Item:
    """Returns the parts of an item or a batch: of (value, label), (value, mask) or a dictionary.

    where: its place, for errors. Raises ValueError for a dictionary without a value, and for a
    tuple of another length.
    """
    if isinstance(thing, Item):
        return thing
    if isinstance(thing, Mapping):
        names = [key for keys in _PARTS.values() for key in keys if key in thing]
        if not names:
            wanted = "; ".join(f"{what} as {' or '.join(keys)}" for what, keys in _PARTS.items())
            raise ValueError(
                f"{where} is a dictionary with the keys {', '.join(plain(key) for key in thing)}. "
                f"Name {wanted}."
            )
        value = thing[names[0]]
        label = next((thing[key] for key in LABEL_KEYS if thing.get(key) is not None), None)
        mask = next((thing[key] for key in MASK_COLUMNS if thing.get(key) is not None), None)
        as_mask = mask is None and _is_mask(label, value)
        return Item(value, None, label) if as_mask else Item(value, label, mask)
    if not isinstance(thing, (tuple, list)) or is_tokens(thing):
        return Item(thing)
    if len(thing) == 1:
        return Item(thing[0])
    pictures = (Tensor, np.ndarray, Image.Image, Path, str, list, tuple)
    if len(thing) != 2 or not isinstance(thing[0], pictures):
        kinds = ", ".join(type(part).__name__ for part in thing[:4])
        raise ValueError(
            f"{where} is a {type(thing).__name__} of {len(thing)} ({kinds}). Give (image, label), "
            '(image, mask) or a dictionary such as {"image": ..., "label": ...}.'
        )
    value, second = thing
    return Item(value, mask=second) if _is_mask(second, value) else Item(value, second)


def is_tokens(thing: object) -> bool:
    """Tells whether a value is a list of token ids."""
    return isinstance(thing, list) and all(type(one) is int for one in thing)


def _is_mask(second: Any, value: Any) -> bool:
    """Tells whether the second of a pair is a mask: a picture, or an array of height and width."""
    if isinstance(second, Image.Image):
        return True
    if isinstance(second, (list, tuple)):
        return bool(second) and isinstance(second[0], Image.Image)
    return is_array(second) and second.ndim >= 2 and not (is_array(value) and value.ndim <= 2)


def separated_batch(batch: Item, tokens: bool, number: int) -> Iterator[Item]:
    """Yields the samples of a batch, or the one sample that it is.

    number: that of its first sample. Raises ValueError for too few labels or masks.
    """
    value, axes = batch.value, 2 if tokens else 4
    several = value.ndim == axes if is_array(value) else isinstance(value, (list, tuple))
    if not several or (tokens and is_tokens(value)):
        yield batch
        return
    empty = [None] * len(value)
    labels, masks = (empty if part is None else part for part in (batch.label, batch.mask))
    for name, part in (("labels", labels), ("masks", masks)):
        if len(part) != len(value):
            raise ValueError(
                f"a batch after {number} samples has {len(value)} samples and {len(part)} {name}."
            )
    for one, label, mask in zip(value, labels, masks, strict=True):
        yield Item(one, label, mask)


def label_of(label: object, where: str) -> Any:
    """Returns a label as an int or a str, or None.

    Raises ValueError for anything else, such as one-hot vectors and fractions.
    """
    value: Any = label
    if (is_array(label) and value.ndim == 0) or isinstance(label, np.generic):
        value = value.item()
    if value is None or isinstance(value, str):
        return value
    if type(value) in (int, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    shape = f"shape {list(value.shape)}" if is_array(value) else repr(value)[:50]
    raise ValueError(
        f"the label of {where} is a {type(value).__name__} ({shape}). Give the number or the name "
        "of one class."
    )


def known_labels(labels: list[Any]) -> list[Any] | None:
    """Returns the labels of samples, or None if no sample has one."""
    return None if all(label is None for label in labels) else labels


def upright_array(array: Tensor | np.ndarray, where: str) -> Tensor:
    """Returns an image, or a batch of them, with channels before height and width.

    Only uint8 arrays can have channels last, 1 or 3 of them; one without channels is grey.
    """
    image = torch.as_tensor(array)
    if image.dtype == torch.uint8 and image.ndim == 2:
        return image[None]
    last_is_channels = image.ndim in (3, 4) and image.shape[-1] in (1, 3)
    if image.dtype == torch.uint8 and last_is_channels and image.shape[-3] not in (1, 3):
        return image.movedim(-1, -3)
    if image.ndim not in (3, 4):
        raise ValueError(
            f"{where} has shape {list(image.shape)}. Give images [channels, height, width], or "
            "uint8 arrays [height, width, channels]."
        )
    return image


def images_of(items: Sequence[Item], start: int, preprocess: Preprocess) -> Tensor:
    """Returns the preprocessed images of items; the first item has the number start."""
    values: list[Any] = [
        upright_array(item.value, f"sample {number}") if is_array(item.value) else item.value
        for number, item in enumerate(items, start)
    ]
    for number, value in enumerate(values, start):
        if not is_array(value) and not is_picture(value):
            raise ValueError(
                f"sample {number} is of type {type(value).__name__}. Give a PIL image, a path or "
                "an array."
            )
        if isinstance(value, str) and not (value.lower().endswith(SUFFIXES) or exists(value)):
            raise ValueError(
                f"sample {number} is the text {plain(value, 50)!r}, but this model reads images. "
                "Give PIL images, or paths of picture files."
            )
    if not any(is_array(value) for value in values):
        return preprocess(values)
    images = [image_of(value, number, preprocess) for number, value in enumerate(values, start)]
    sizes = {tuple(image.shape[2:]) for image in images}
    if len(sizes) > 1:
        shown = ", ".join(f"{height} x {width}" for height, width in sorted(sizes)[:4])
        raise ValueError(
            f"the images from sample {start} on differ in size ({shown}): give batch_size=1."
        )
    return torch.cat(images)


def image_of(value: Value, number: int, preprocess: Preprocess) -> Tensor:
    """Returns the preprocessed image of a sample `[1, channels, height, width]`.

    Raises ValueError, naming the sample, for what `preprocess` refuses.
    """
    alone: Any = value[None] if is_array(value) else [value]
    try:
        return preprocess(alone)
    except Undecodable:
        raise
    except ValueError as error:
        raise ValueError(f"sample {number}: {error}") from error


def size_of(value: Value, number: int) -> tuple[int, int]:
    """Returns the (width, height) of a sample's image when it is upright."""
    what = f"the image of sample {number}"
    if isinstance(value, (Tensor, np.ndarray)):
        height, width = upright_array(value, what).shape[-2:]
        return width, height
    if isinstance(value, (str, Path)):
        return header(Path(value), what)[1]
    return upright_size(value, what)


def mask_picture(item: Item, number: int) -> Image.Image | Path | str:
    """Returns the mask of an item as a picture; raises ValueError unless it is [height, width]."""
    mask = item.mask
    if mask is None:
        raise Undecodable(f"sample {number} has no mask, but other samples do.")
    if is_picture(mask):
        return mask
    array = torch.as_tensor(mask)
    array = array[0] if array.ndim == 3 and len(array) == 1 else array
    whole = not array.is_floating_point() and not array.is_complex()
    if array.ndim != 2 or not whole or array.min() < 0 or array.max() > 255:
        raise ValueError(
            f"the mask of sample {number} is {array.dtype} of shape {list(array.shape)}. Give the "
            "class of each pixel, whole numbers from 0 to 255, [height, width]."
        )
    return Image.fromarray(array.to(torch.uint8).cpu().numpy())


def holds_ids(tokens: Tensor) -> bool:
    """Tells whether a tensor has the dtype of token ids: whole numbers, not bools."""
    odd = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    return not odd


def tokens_of(value: object, where: str) -> Tensor:
    """Returns the token ids of one sample; raises ValueError unless they are whole numbers."""
    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where} is of type {type(value).__name__}, but this model reads text. Give token ids "
            "or a text."
        ) from error
    if tokens.ndim != 1 or not holds_ids(tokens):
        raise ValueError(
            f"{where} is {tokens.dtype} of shape {list(tokens.shape)}. Give token ids, whole "
            "numbers [pos]."
        )
    return tokens.long()


def digest_of(item: Item) -> bytes:
    """Returns a digest of an item's content: pixels, or the bytes of files, label and mask."""
    digest = hashlib.sha256(repr(item.label).encode())
    for value in (item.value, item.mask):
        if isinstance(value, Image.Image):
            digest.update(f"picture {value.mode} {value.size}".encode())
            digest.update(value.tobytes())
        elif isinstance(value, Path) or (isinstance(value, str) and Path(value).is_file()):
            digest.update(b"file")
            try:
                digest.update(hashlib.sha256(Path(value).read_bytes()).digest())
            except OSError:  # reading the sample says why
                digest.update(quoted(value).encode())
        elif is_array(value):
            array = torch.as_tensor(value).detach().cpu().contiguous()
            digest.update(f"array {array.dtype} {list(array.shape)}".encode())
            digest.update(array.view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode("utf-8", "surrogatepass"))
    return digest.digest()
