"""What `data` may be -> samples in a fixed order, with labels and a fingerprint. Knows no model and no probe."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from crate_interp.hints import did_you_mean
from crate_interp.measures.checks import all_finite

_EMBEDDED = {"fashion": "fashion.parquet"}  # files in assets/
_ASSETS = Path(__file__).parent / "assets"
_KINDS = 'a float or uint8 tensor [n, channels, h, w], a datasets.Dataset, "embedded:NAME" or "imagefolder:DIR"'


@dataclass(frozen=True)
class Samples:
    """n images in a fixed order. `read(start, stop)` gives those as preprocessed floats `[batch, channels, h, w]`."""

    n: int
    labels: list[Any] | None
    fingerprint: str  # of the order and content (tensors, embedded), of names and sizes (folders), or datasets' own
    read: Callable[[int, int], Float[Tensor, "batch channels height width"]]


def open_data(data: Any, preprocess: Callable[[Any], Tensor], limit: int | None = None) -> Samples:
    """The samples of `data`, the first `limit` of them; `preprocess` turns pictures or uint8 arrays into floats.

    data: a float tensor (taken as preprocessed), a uint8 tensor or array `[n, channels, h, w]`, a datasets.Dataset (its
    first image column; its label column), "embedded:fashion", or "imagefolder:DIR" (labels are subfolders). Raises
    ValueError for anything else, for no images, and for NaN or Inf in a float tensor, before any work starts.
    """
    if limit is not None and (not isinstance(limit, Integral) or limit < 1):
        raise ValueError(f"limit={limit!r}: give a whole number of at least 1, or None for all samples.")
    if isinstance(data, str):
        samples = _named(data, preprocess)
    elif isinstance(data, Tensor) or type(data).__module__ == "numpy":
        samples = _tensor(torch.as_tensor(data), preprocess, limit)
    elif hasattr(data, "features") and hasattr(data, "column_names"):
        samples = _dataset(data, preprocess)
    else:
        raise ValueError(f"cannot take data from {type(data).__name__}: give {_KINDS}.")
    if samples.n == 0:
        raise ValueError("the data is empty: there is no image in it.")
    samples.read(0, 1)  # what is wrong with the first image is said now, not under a progress bar
    n = samples.n if limit is None else min(limit, samples.n)
    labels = None if samples.labels is None else samples.labels[:n]
    return Samples(n=n, labels=labels, fingerprint=samples.fingerprint, read=samples.read)


def _named(data: str, preprocess: Callable[[Any], Tensor]) -> Samples:
    scheme, _, name = data.partition(":")
    if scheme == "embedded":
        digest = hashlib.sha256(_embedded_file(name).read_bytes()).hexdigest()
        return _dataset(embedded(name), preprocess, f"embedded:{name}:sha256:{digest}")
    if scheme == "imagefolder" and name:  # without one it would be the folder one happens to stand in
        return _folder(Path(name).expanduser(), preprocess)
    hint = " Did you mean 'embedded:fashion'?" if data in _EMBEDDED else ""
    raise ValueError(f"cannot take data from {data!r}: give {_KINDS}.{hint}")


def _tensor(images: Tensor, preprocess: Callable[[Any], Tensor], limit: int | None) -> Samples:
    if images.ndim != 4:
        raise ValueError(f"data has shape {list(images.shape)}: images are [n, channels, height, width].")
    if not (images.is_floating_point() or images.dtype == torch.uint8):
        raise ValueError(f"data is {images.dtype}: give preprocessed floats, or uint8 images (0 to 255).")
    images = images[:limit].detach()
    if images.is_floating_point():
        bad = [index for index, image in enumerate(images) if not all_finite(image)]
        if bad:
            raise ValueError(
                f"data holds NaN or Inf in {len(bad)} of {len(images)} images, the first at index {bad[0]}."
            )
    digest = hashlib.sha256(f"{images.dtype} {list(images.shape)}".encode())
    for part in images.split(256):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    read = lambda start, stop: preprocess(images[start:stop])  # noqa: E731
    return Samples(n=len(images), labels=None, fingerprint=f"tensor:sha256:{digest.hexdigest()}", read=read)


def _dataset(dataset: Any, preprocess: Callable[[Any], Tensor], fingerprint: str | None = None) -> Samples:
    import datasets

    features = dataset.features or {}
    columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise ValueError(
            f"the dataset has no image column; its columns are {', '.join(dataset.column_names) or 'none'}."
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError("the dataset is a stream without a length: give a map-style datasets.Dataset.")
    label = next((n for n, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    label = label or next((n for n in ("label", "labels") if n in features), None)

    def read(start: int, stop: int) -> Tensor:
        return preprocess(list(dataset[start:stop][columns[0]]))

    labels = list(dataset[label]) if label else None
    return Samples(len(dataset), labels, fingerprint or f"datasets:{dataset._fingerprint}", read)


def embedded(name: str) -> Any:
    """The embedded data set `name` as a datasets.Dataset with an image and a label column; ValueError if unknown."""
    import datasets
    import pyarrow.parquet

    # straight from the table: Dataset.from_parquet would write a copy into the user's cache
    return datasets.Dataset(pyarrow.parquet.read_table(_embedded_file(name)))


def _embedded_file(name: str) -> Path:
    if name not in _EMBEDDED:
        hint = did_you_mean(f"embedded:{name}", [f"embedded:{known}" for known in _EMBEDDED])
        raise ValueError(f"no embedded data is called {name!r}: there is {', '.join(_EMBEDDED)}. {hint}".rstrip())
    return _ASSETS / _EMBEDDED[name]


def _folder(folder: Path, preprocess: Callable[[Any], Tensor]) -> Samples:
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder: give imagefolder:DIR with a folder of images.")
    suffixes = set(Image.registered_extensions())
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not paths:
        raise ValueError(f"the folder {str(folder)!r} has no images (files ending in .png, .jpg and the like).")
    for path in paths:
        _check_header(path)
    names = [path.relative_to(folder).as_posix() for path in paths]
    listing = "\n".join(f"{name} {path.stat().st_size}" for name, path in zip(names, paths, strict=True))
    labels = [name.split("/")[0] for name in names] if all("/" in name for name in names) else None
    digest = hashlib.sha256(listing.encode()).hexdigest()
    return Samples(
        n=len(paths),
        labels=labels,
        fingerprint=f"imagefolder:names-and-sizes:sha256:{digest}",
        read=lambda start, stop: preprocess(paths[start:stop]),
    )


def _check_header(path: Path) -> None:
    """A file that is no image is found before an hour of work, not after it; only its first bytes are read."""
    try:
        Image.open(path).close()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot read the image {str(path)!r}: {error}") from None
