"""open_data: which kind of data is meant."""

from collections.abc import Callable
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crate_interp.data.coco import coco_samples
from crate_interp.data.cutout_folder import cutout_samples
from crate_interp.data.images import folder_samples, tensor_samples
from crate_interp.data.named import named_dataset, named_fingerprint
from crate_interp.data.samples import Samples, check_limit, first
from crate_interp.data.tables import table_samples
from crate_interp.data.voc import voc_samples

_KINDS = (
    'a float or uint8 tensor [n, channels, h, w], a datasets.Dataset, "embedded:NAME", "imagefolder:DIR", "cutouts:DIR", '
    '"voc:DIR", "coco:ANNOTATIONS.json" or "hf:owner/name:split"'
)
_WITH_MASKS = {"voc": voc_samples, "coco": coco_samples, "cutouts": cutout_samples}


def open_data(
    data: Any,
    preprocess: Callable[[Any], Tensor],
    limit: int | None = None,
    preprocess_masks: Callable[[Any], Tensor] | None = None,
) -> Samples:
    """The samples of `data`, the first `limit` of them; `preprocess` turns pictures or uint8 arrays into floats.

    data: a float tensor (taken as preprocessed), a uint8 tensor or array `[n, channels, h, w]`, a datasets.Dataset (its
    first image column; its label column), "embedded:fashion", or "imagefolder:DIR" (labels are subfolders). Raises
    ValueError for anything else, for no images, and for NaN or Inf in a float tensor, before any work starts.
    "hf:owner/name:split" is fetched from the Hub by datasets.

    With masks, which `preprocess_masks` turns into class maps (without it they are left out): a datasets.Dataset with a
    mask column (crate_interp/data/tables.py), "embedded:cutouts", "voc:DIR" or "voc:DIR:SPLIT" (data/voc.py),
    "coco:ANNOTATIONS.json" or "coco:ANNOTATIONS.json:IMAGEDIR" (data/coco.py), and objects with alpha,
    "cutouts:DIR" or "cutouts:DIR:SEED" (data/cutout_folder.py).
    """
    check_limit(limit)
    if isinstance(data, str):
        samples = _named(data, preprocess, preprocess_masks)
    elif isinstance(data, Tensor) or type(data).__module__ == "numpy":
        samples = tensor_samples(torch.as_tensor(data), preprocess, limit)
    elif hasattr(data, "features") and hasattr(data, "column_names"):
        samples = table_samples(data, preprocess, preprocess_masks)
    else:
        raise ValueError(f"cannot take data from {type(data).__name__}: give {_KINDS}.")
    if samples.n == 0:
        raise ValueError("the data is empty: there is no image in it.")
    samples.read(0, 1)  # what is wrong with the first image is said now, not under a progress bar
    return first(samples, limit)


def _named(
    data: str, preprocess: Callable[[Any], Tensor], preprocess_masks: Callable[[Any], Tensor] | None
) -> Samples:
    scheme, _, name = data.partition(":")
    if (
        scheme == "imagefolder" and name
    ):  # without one it would be the folder one happens to stand in
        return folder_samples(Path(expanduser(name)), preprocess)
    if scheme in _WITH_MASKS and name:
        return _WITH_MASKS[scheme](name, preprocess, preprocess_masks)
    return table_samples(
        named_dataset(data, _KINDS), preprocess, preprocess_masks, named_fingerprint(data)
    )
