"""Data that gives its samples one by one as samples: torch's map-style datasets, and lists.

Items are read when they are needed. Before that, all are read once, for their digests and labels.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from crate_interp.core.pictures import Undecodable, loaded
from crate_interp.core.progress import tqdm
from crate_interp.core.safe_text import plain
from crate_interp.data.class_maps import check_mask, class_maps, is_binary, unresized
from crate_interp.data.images import tensor_samples
from crate_interp.data.items import (
    Item,
    digest_of,
    image_of,
    images_of,
    is_array,
    item_of,
    known_labels,
    label_of,
    mask_picture,
    size_of,
    tokens_of,
)
from crate_interp.data.samples import Preprocess, Samples

# How often the first and the last sample are drawn again. Each sample is also read twice, so a
# random flip stays unnoticed in n samples with probability 2^-(n + 2 DRAWS), below 0.1 %.
DRAWS = 5


def is_item_data(data: object) -> bool:
    """Tells whether data has a length and gives its items by number: a Dataset, a list, a tuple."""
    sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return sized and not isinstance(data, (str, bytes, Mapping)) and not is_array(data)


def names_of(data: object) -> tuple[str, ...] | None:
    """Returns the names of classes that a dataset gives, `classes` or `class_to_idx`, or None."""
    while isinstance(data, Subset):
        data = data.dataset
    classes = getattr(data, "classes", None)
    numbers = getattr(data, "class_to_idx", None)
    if not classes and isinstance(numbers, Mapping):
        classes = sorted(numbers, key=lambda name: numbers[name])
        if [numbers[name] for name in classes] != list(range(len(classes))):
            return None
    if isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes):
        return tuple(classes)
    return None


def read_item(data: Any, number: int) -> Item:
    """Returns an item. Raises Undecodable for an unreadable file, ValueError for other errors."""
    try:
        thing = data[number]
    except ValueError:
        raise
    except OSError as error:  # Pillow's error for a file that is not a picture is one of these
        raise Undecodable(f"cannot read data[{number}]: {plain(error, 300)}") from error
    except Exception as error:  # the code of a dataset is its user's
        raise ValueError(
            f"data[{number}] raised {type(error).__name__}: {plain(error, 300)}."
        ) from error
    item = item_of(thing, f"data[{number}]")
    return Item(item.value, label_of(item.label, f"data[{number}]"), item.mask)


def is_pair(data: object) -> bool:
    """Tells whether data is all images (or tokens) with all labels, as a pair or a dictionary."""
    if isinstance(data, Mapping):
        return True
    tensors = getattr(data, "tensors", None)  # of a torch TensorDataset
    if isinstance(tensors, tuple) and len(tensors) in (1, 2):
        return True
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    value, second = data
    if isinstance(data, list):  # a batch as a DataLoader gives it; else a list of items
        return is_array(value) and is_array(second) and second.ndim < value.ndim
    return is_array(value) or isinstance(value, (list, tuple))


def taken_apart(data: object) -> Item:
    """Returns all values, labels and masks of a pair, a dictionary or a TensorDataset.

    Raises ValueError unless there are as many labels, and as many masks, as values.
    """
    whole = item_of(getattr(data, "tensors", data), "data")
    count = len(whole.value)
    labels = whole.label
    if labels is not None:
        labels = [label_of(label, f"sample {number}") for number, label in enumerate(labels)]
    for name, part in (("labels", labels), ("masks", whole.mask)):
        if part is not None and len(part) != count:
            raise ValueError(f"data has {count} samples and {len(part)} {name}. Give one for each.")
    return Item(whole.value, labels, whole.mask)


def labelled(samples: Samples, labels: list[Any] | None) -> Samples:
    """Returns samples with labels, which become part of the fingerprint."""
    if labels is None:
        return samples
    digest = hashlib.sha256(repr(labels).encode()).hexdigest()
    print_ = f"{samples.fingerprint}:labels:sha256:{digest}"
    return dataclasses.replace(samples, labels=labels[: samples.n], fingerprint=print_)


def pair_samples(
    data: object, preprocess: Preprocess, preprocess_masks: Preprocess | None, limit: int | None
) -> Samples:
    """Returns images with their labels or masks as samples.

    data: (images, labels), (images, masks), {"image": ..., "label": ...} or a TensorDataset; images
    are an array or a list of pictures. Raises ValueError as `taken_apart` and `item_samples` do.
    """
    whole = taken_apart(data)
    parts = [None] * len(whole.value)
    if not is_array(whole.value):
        each = zip(whole.value, whole.label or parts, whole.mask or parts, strict=True)
        rows = [{"image": value, "label": label, "mask": mask} for value, label, mask in each]
        return item_samples(rows, preprocess, preprocess_masks, limit)
    samples = labelled(tensor_samples(whole.value, preprocess, limit), whole.label)
    if whole.mask is None:
        return samples

    def read(start: int, stop: int) -> list[Item]:
        pairs = zip(whole.value[start:stop], whole.mask[start:stop], strict=True)
        return [Item(value, mask=mask) for value, mask in pairs]

    each = b"".join(digest_of(Item(None, mask=mask)) for mask in whole.mask)
    digest = hashlib.sha256(each).hexdigest()
    masks = masks_of(read, range(len(whole.mask)), preprocess_masks)
    return dataclasses.replace(
        samples, masks=masks, fingerprint=f"{samples.fingerprint}:masks:sha256:{digest}"
    )


def item_samples(
    data: Any,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None = None,
    limit: int | None = None,
) -> Samples:
    """Returns the first `limit` items of a dataset or list as samples of images.

    Items are a picture (PIL image, path or array), (picture, label), (picture, mask), or a
    dictionary of these. Floats count as preprocessed. Names of labels are the dataset's `classes`,
    or the keys of its `class_to_idx`. The fingerprint is a digest of pixels, files and labels; an
    item that cannot be decoded has a digest of the error.

    Raises ValueError for items of other forms, and for floats that `preprocess` refuses. Reading a
    sample raises it for an item that has changed since it was digested.
    """
    count = len(data) if limit is None else min(limit, len(data))
    digests, labels, masked = [], [], False
    for number in tqdm(range(count), desc="reading items once", delay=3, leave=False):
        try:
            item = read_item(data, number)
        except Undecodable as error:
            item = Item(None)
            digests.append(hashlib.sha256(str(error).encode()).digest())
        else:
            digests.append(digest_of(item))
        if is_array(item.value) and torch.as_tensor(item.value).is_floating_point():
            image_of(item.value, number, preprocess)
        labels.append(item.label)
        masked = masked or item.mask is not None

    def read(start: int, stop: int) -> list[Item]:
        items = [read_item(data, number) for number in range(start, stop)]
        for number, item in enumerate(items, start):
            if digest_of(item) != digests[number]:
                raise ValueError(
                    f"data[{number}] is not the same when it is read twice. Take random steps, "
                    "such as RandomCrop, out of the dataset's transform."
                )
        return items

    ends = () if isinstance(data, (list, tuple)) or not count else {0, count - 1}
    for number in [*ends] * DRAWS:
        with suppress(Undecodable):
            read(number, number + 1)
    return Samples(
        n=count,
        labels=known_labels(labels),
        fingerprint=f"items:sha256:{hashlib.sha256(b''.join(digests)).hexdigest()}",
        read=lambda start, stop: images_of(read(start, stop), start, preprocess),
        masks=masks_of(read, range(count), preprocess_masks) if masked else None,
        names=names_of(data),
    )


def masks_of(
    read: Callable[[int, int], Sequence[Item]], numbers: range, preprocess_masks: Preprocess | None
) -> Callable[[int, int], Tensor] | None:
    """Returns a function that reads the class maps of items, or None if masks are not wanted.

    numbers: those of all samples, whose masks together decide whether 255 is a class.

    A mask must have the size of its picture. That of a preprocessed image is not resized either.
    """
    if preprocess_masks is None:
        return None

    def pictures(start: int, stop: int) -> list[Image.Image]:
        items = enumerate(read(start, stop), start)
        return [loaded(mask_picture(item, number), "mask")[0] for number, item in items]

    @cache
    def binary() -> bool:
        """Looks at all masks of the data set: slow, so only when the first mask is read."""
        return is_binary(mask for n in numbers for mask in pictures(n, n + 1))

    def masks(start: int, stop: int) -> Tensor:
        maps = []
        pairs = zip(read(start, stop), pictures(start, stop), strict=True)
        for number, (item, mask) in enumerate(pairs, start):
            check_mask(mask.mode, mask.size, size_of(item.value, number), f"sample {number}")
            floats = is_array(item.value) and torch.as_tensor(item.value).is_floating_point()
            maps.append(class_maps(unresized if floats else preprocess_masks, [mask], binary()))
        return torch.cat(maps)

    return masks


def token_items(data: Any, limit: int | None) -> tuple[Tensor, list[Any] | None]:
    """Returns the tokens `[n, pos]` of the first `limit` items, and their labels or None.

    Raises ValueError if the items are not tokens, or have different numbers of them.
    """
    count = len(data) if limit is None else min(limit, len(data))
    items = [read_item(data, number) for number in range(count)]
    rows = [tokens_of(item.value, f"data[{number}]") for number, item in enumerate(items)]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"the items have {', '.join(map(str, lengths[:4]))} tokens. Give tokens of one length, "
            "or the texts, which are cut into windows."
        )
    return torch.stack(rows), known_labels([item.label for item in items])
