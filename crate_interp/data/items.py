"""Items: one sample as users give it, such as (picture, label), and what is read from it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os.path import exists
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from crate_interp.core import checks, pictures
from crate_interp.core.safe_text import plain
from crate_interp.data.samples import ImageReading, Preprocess, Samples

VALUE_KEYS = ("image", "images", "pixel_values", "img", "input_ids", "tokens", "text", "texts")
LABEL_KEYS = ("label", "labels", "target", "targets", "y")
MASK_KEYS = ("mask", "masks", "segmentation", "label_mask", "annotation", "seg")
MASK_MODES = ("1", "L", "P")
IGNORE = 255
_PICTURES = (Image.Image, Path, str, pictures.Later)
_VALUES = (Tensor, np.ndarray, list, tuple, *_PICTURES)


@dataclass(frozen=True)
class Item:
    """A sample, or a batch of samples: the value, and its label and mask if there are any.

    value: a picture (PIL image, path or `Later`), an array of an image, tokens or a text; in a
    batch, a sequence of these or an array with one axis more. group: the number of the text that a
    window of tokens is of.
    """

    value: Any
    label: Any = None
    mask: Any = None
    group: int | None = None


Items = Callable[[int, int], Sequence[Item]]  # start, stop -> the items of these samples


def is_array(value: object) -> TypeGuard[Tensor | np.ndarray]:
    """Tells whether a value is a torch tensor or a numpy array."""
    return isinstance(value, (Tensor, np.ndarray))


def item_of(thing: object, where: str) -> Item:
    """Returns the parts of an item or a batch: (value, label), (value, mask) or a dictionary.

    where: its place, for errors. Raises ValueError for a dictionary without a value, and for a
    tuple of another length.
    """
    if isinstance(thing, Item):
        return thing
    if isinstance(thing, Mapping):
        value, second, mask = (
            next((thing[key] for key in keys if thing.get(key) is not None), None)
            for keys in (VALUE_KEYS, LABEL_KEYS, MASK_KEYS)
        )
        if value is None:
            raise ValueError(
                f"{where} is a dictionary with the keys {plain(', '.join(map(str, thing)))}: name "
                f"the image, the tokens or the text {' or '.join(VALUE_KEYS)}."
            )
    elif not isinstance(thing, (tuple, list)) or is_tokens(thing):
        return Item(thing)
    elif len(thing) == 1:
        return Item(thing[0])
    elif len(thing) == 2 and isinstance(thing[0], _VALUES):
        (value, second), mask = thing, None
    else:
        given = f"{where} is a {type(thing).__name__} of {len(thing)} parts"
        raise ValueError(f'{given}: give (image, label) or {{"image": ..., "label": ...}}.')
    if mask is None and _is_mask(second, value):
        return Item(value, mask=second)
    return Item(value, second, mask)


def is_tokens(thing: object) -> bool:
    """Tells whether a value is a list of token ids."""
    return isinstance(thing, list) and all(type(one) is int for one in thing)


def _is_mask(second: Any, value: Any) -> bool:
    """Tells whether the second of a pair is a mask: a picture, or an array of height and width."""
    if isinstance(second, (list, tuple)):
        return bool(second) and isinstance(second[0], Image.Image)
    flat = is_array(value) and value.ndim <= 2
    return isinstance(second, Image.Image) or (is_array(second) and second.ndim >= 2 and not flat)


def separated_batch(batch: Item, tokens: bool, number: int) -> Iterator[Item]:
    """Yields the samples of a batch, or the one sample that it is.

    number: the number of its first sample. Raises ValueError for too few labels or masks.
    """
    value, axes = batch.value, 2 if tokens else 4
    several = value.ndim == axes if is_array(value) else isinstance(value, (list, tuple))
    if not several or (tokens and is_tokens(value)):
        yield batch
        return
    parts = (batch.label, batch.mask)
    if any(part is not None and len(part) != len(value) for part in parts):
        raise ValueError(f"a batch after {number} samples has more or fewer labels than samples.")
    for place, one in enumerate(value):
        yield Item(one, *(None if part is None else part[place] for part in parts))


def label_of(label: object, where: str) -> Any:
    """Returns a label as an int or a str, or None.

    Raises ValueError for anything else, such as one-hot vectors and fractions.
    """
    value: Any = label
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ValueError(f"the label of {where} is {checks.quote(value)}: give one number or name.")


def item_samples(
    items: Items | list[Item], numbers: range, fingerprint: str, how: ImageReading, **options: Any
) -> Samples:
    """Returns items as samples of images, numbered by `numbers`.

    items: a list, or a function that reads them. options: `masked`, whether items have masks (by
    default, whether one of the list has); `binary` of `MaskReader`; and fields of `Samples`.
    """
    if isinstance(items, list):
        every, first = items, numbers.start
        options = {"masked": any(item.mask is not None for item in every)} | options
        items = lambda start, stop: every[start - first : stop - first]  # noqa: E731
    masked, binary = options.pop("masked", False), options.pop("binary", None)
    masks = MaskReader(items, how.masks, numbers, binary) if masked and how.masks else None
    read, labels = partial(_read_images, items, how.pictures), options.pop("labels", ())
    labels = known_labels(labels)
    numbered = {"start": numbers.start, "of": numbers.stop}
    return Samples(len(numbers), labels, fingerprint, read, masks, **numbered, **options)


def known_labels(labels: Iterable[Any] | None) -> list[Any] | None:
    """Returns the labels of samples, or None if no sample has one."""
    labels = list(labels or ())
    return None if all(label is None for label in labels) else labels


def _read_images(items: Items, preprocess: Preprocess, start: int, stop: int) -> Tensor:
    values = [_image(item.value, number) for number, item in enumerate(items(start, stop), start)]
    if not any(is_array(value) for value in values):
        return preprocess(values)
    images = [image_of(value, number, preprocess) for number, value in enumerate(values, start)]
    if len({image.shape for image in images}) > 1:
        raise ValueError(f"the images from sample {start} on differ in size: give batch_size=1.")
    return torch.cat(images)


def _image(value: Any, number: int) -> Any:
    """Returns an image with channels first, or a picture; raises ValueError for anything else."""
    if is_array(value):
        return upright_array(value, f"sample {number}")
    file = not isinstance(value, str) or value.lower().endswith(pictures.SUFFIXES) or exists(value)
    if not isinstance(value, _PICTURES) or not file:
        given = f"sample {number} is {checks.quote(value)}, but this model reads images"
        raise ValueError(f"{given}: give PIL images, paths of picture files, or arrays.")
    return value


def upright_array(array: Tensor | np.ndarray, where: str) -> Tensor:
    """Returns an image, or a batch of them, with channels before height and width.

    Only uint8 arrays can have channels last, 1 or 3 of them; one without channels is grey.
    """
    image = torch.as_tensor(array)
    if image.dtype == torch.uint8 and image.ndim == 2:
        return image[None]
    if image.ndim not in (3, 4):
        raise ValueError(f"{where} has shape {list(image.shape)}: give [channels, height, width].")
    last_is_channels = image.shape[-1] in (1, 3) and image.shape[-3] not in (1, 3)
    return image.movedim(-1, -3) if image.dtype == torch.uint8 and last_is_channels else image


def image_of(value: Any, number: int, preprocess: Preprocess) -> Tensor:
    """Returns the preprocessed image of a sample `[1, channels, height, width]`.

    Raises ValueError, naming the sample, for what `preprocess` refuses.
    """
    try:
        return preprocess(value[None] if is_array(value) else [value])
    except pictures.Undecodable:
        raise
    except ValueError as error:
        raise ValueError(f"sample {number}: {error}") from error


class MaskReader:
    """Reads the class maps of samples; Ray and worker processes can be sent it.

    255 is class 1 if the masks of all samples, `numbers`, hold only 0 and 255; otherwise 255 is
    ignored. One mask cannot decide this, because an image may have only background and ignored
    pixels. binary: whether 255 is class 1, if that is known. A mask must have the size of its
    upright image; the mask of a preprocessed image is not resized either.
    """

    def __init__(
        self, items: Items, preprocess: Preprocess, numbers: range, binary: bool | None = None
    ) -> None:
        self.items, self.preprocess, self.numbers, self.binary = items, preprocess, numbers, binary

    def __call__(self, start: int, stop: int) -> UInt8[Tensor, "batch height width"]:
        """Returns the class maps of the samples from `start` to `stop` - 1."""
        if self.binary is None:  # slow, so only when the first mask is read
            self.binary = all(map(self._may_be_binary, self.numbers))
        maps = []
        for number, item in enumerate(self.items(start, stop), start):
            mask = _mask_picture(item, number)
            size = _size_of(item.value, number)
            if mask.mode not in MASK_MODES or mask.size != size:
                raise ValueError(
                    f"the mask of sample {number} is {mask.size} of mode {mask.mode!r}, but its "
                    f"image is {size}: give one number per pixel (mode L, P or 1)."
                )
            if is_array(item.value) and torch.as_tensor(item.value).is_floating_point():
                maps.append(torch.from_numpy(np.array(mask).astype(np.uint8))[None])
            else:
                maps.append(self.preprocess([mask]))
        classes = torch.cat(maps)
        return classes.where(classes != IGNORE, 1) if self.binary else classes

    def _may_be_binary(self, number: int) -> bool:
        with suppress(pictures.Undecodable):  # raised when it is read
            mask = _mask_picture(self.items(number, number + 1)[0], number)
            values = np.asarray(mask) if mask.mode in ("L", "P") else np.zeros(1)
            return not ((values != 0) & (values != IGNORE)).any()
        return True


def _mask_picture(item: Item, number: int) -> Image.Image:
    """Returns the mask of an item as a picture; raises ValueError unless it is [height, width]."""
    if item.mask is None:
        raise pictures.Undecodable(f"sample {number} has no mask, but other samples do.")
    if isinstance(item.mask, _PICTURES):
        return pictures.loaded(item.mask, "mask")[0]
    array = torch.as_tensor(item.mask)
    array = array[0] if array.ndim == 3 and len(array) == 1 else array
    whole = not array.is_floating_point() and not array.is_complex()
    if array.ndim != 2 or not whole or array.min() < 0 or array.max() > 255:
        given = f"the mask of sample {number} is {array.dtype} of shape {list(array.shape)}"
        raise ValueError(f"{given}: give the class of each pixel, 0 to 255, [height, width].")
    return Image.fromarray(array.to(torch.uint8).cpu().numpy())


def _size_of(value: Any, number: int) -> tuple[int, int]:
    """Returns the (width, height) of a sample's image when it is upright."""
    what = f"the image of sample {number}"
    if is_array(value):
        height, width = upright_array(value, what).shape[-2:]
        return width, height
    if isinstance(value, pictures.Later):
        return value.size()
    if isinstance(value, Image.Image):
        return pictures.upright_size(value, what)
    return pictures.header(Path(value), what)[1]


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
                digest.update(pictures.quoted(value).encode())
        elif is_array(value):
            array = torch.as_tensor(value).detach().cpu().contiguous()
            digest.update(f"array {array.dtype} {list(array.shape)}".encode())
            digest.update(array.view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode("utf-8", "surrogatepass"))
    return digest.digest()
