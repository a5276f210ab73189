"""What `data` may be -> samples in a fixed order, with labels and a fingerprint. Knows no model and no probe."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from crate_interp.hints import did_you_mean
from crate_interp.measures.checks import all_finite

_EMBEDDED = {"fashion": "fashion.parquet", "held-out-text": "held-out-text.parquet"}  # files in assets/
_ASSETS = Path(__file__).parent / "assets"
_HUB = '"hf:owner/name:split"'
_KINDS = (
    f'a float or uint8 tensor [n, channels, h, w], a datasets.Dataset, "embedded:NAME", "imagefolder:DIR" or {_HUB}'
)
_TEXT_KINDS = (
    f'whole numbers [n, pos], a list of strings, a datasets.Dataset with a text column, "embedded:NAME" or {_HUB}'
)


@dataclass(frozen=True)
class Samples:
    """n samples in a fixed order. `read(start, stop)` gives preprocessed floats `[batch, channels, h, w]` or token ids `[batch, pos]`."""

    n: int
    labels: list[Any] | None
    fingerprint: str  # of the order and content (tensors, embedded), of names and sizes (folders), or datasets' own
    read: Callable[[int, int], Shaped[Tensor, "batch ..."]]


def open_data(data: Any, preprocess: Callable[[Any], Tensor], limit: int | None = None) -> Samples:
    """The samples of `data`, the first `limit` of them; `preprocess` turns pictures or uint8 arrays into floats.

    data: a float tensor (taken as preprocessed), a uint8 tensor or array `[n, channels, h, w]`, a datasets.Dataset (its
    first image column; its label column), "embedded:fashion", or "imagefolder:DIR" (labels are subfolders). Raises
    ValueError for anything else, for no images, and for NaN or Inf in a float tensor, before any work starts.
    "hf:owner/name:split" is fetched from the Hub by datasets.
    """
    _check_limit(limit)
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
    return _first(samples, limit)


def open_text(data: Any, windows: Callable[[list[str]], Tensor], limit: int | None = None) -> Samples:
    """The samples of a language model: windows of tokens, the first `limit` of them; `windows` makes them of texts.

    data: whole numbers `[n, pos]` (taken as token ids), a list of strings, a datasets.Dataset (its first text column),
    "embedded:held-out-text" or "hf:owner/name:split". A window is a sample; there are no labels. Raises ValueError for
    anything else, for no tokens, and for texts shorter than one window.
    """
    _check_limit(limit)
    if isinstance(data, Tensor) or type(data).__module__ == "numpy":
        return _first(_token_samples(torch.as_tensor(data)), limit)
    if isinstance(data, str):
        texts = _texts_of(_named_dataset(data, _TEXT_KINDS))
    elif hasattr(data, "features") and hasattr(data, "column_names"):
        texts = _texts_of(data)
    elif isinstance(data, (list, tuple)):
        texts = list(data)
    else:
        raise ValueError(f"cannot take text from {type(data).__name__}: give {_TEXT_KINDS}.")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("the data is empty: there is no text in it." if not texts else "data holds more than strings.")
    return _first(_token_samples(windows(texts)), limit)


def _check_limit(limit: Any) -> None:
    if limit is not None and (not isinstance(limit, Integral) or limit < 1):
        raise ValueError(f"limit={limit!r}: give a whole number of at least 1, or None for all samples.")


def _first(samples: Samples, limit: int | None) -> Samples:
    n = samples.n if limit is None else min(limit, samples.n)
    labels = None if samples.labels is None else samples.labels[:n]
    return Samples(n=n, labels=labels, fingerprint=samples.fingerprint, read=samples.read)


def _token_samples(tokens: Tensor) -> Samples:
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens are {tokens.dtype} of shape {list(tokens.shape)}: give whole numbers [n, pos].")
    if 0 in tokens.shape:
        raise ValueError(f"the data is empty: tokens have shape {list(tokens.shape)}.")
    tokens = tokens.long()
    digest = hashlib.sha256(f"tokens {list(tokens.shape)}".encode())
    digest.update(tokens.cpu().contiguous().numpy().data)
    return Samples(len(tokens), None, f"tokens:sha256:{digest.hexdigest()}", lambda start, stop: tokens[start:stop])


def _texts_of(dataset: Any) -> list[str]:
    import datasets

    features = dataset.features or {}
    columns = [
        n for n, f in features.items() if isinstance(f, datasets.Value) and f.dtype in ("string", "large_string")
    ]
    if not columns:
        raise ValueError(
            f"the dataset has no text column; its columns are {', '.join(dataset.column_names) or 'none'}."
        )
    return list(dataset[columns[0]])


def _named(data: str, preprocess: Callable[[Any], Tensor]) -> Samples:
    scheme, _, name = data.partition(":")
    if scheme == "imagefolder" and name:  # without one it would be the folder one happens to stand in
        return _folder(Path(name).expanduser(), preprocess)
    found = _named_dataset(data, _KINDS)
    if scheme != "embedded":
        return _dataset(found, preprocess)
    digest = hashlib.sha256(_embedded_file(name).read_bytes()).hexdigest()
    return _dataset(found, preprocess, f"embedded:{name}:sha256:{digest}")


def _named_dataset(data: str, kinds: str) -> Any:
    """The datasets.Dataset that "embedded:NAME" or "hf:owner/name:split" names."""
    scheme, _, name = data.partition(":")
    if scheme == "embedded":
        return embedded(name)
    if scheme == "hf":
        return _from_hub(name)
    hint = f" Did you mean 'embedded:{data}'?" if data in _EMBEDDED else ""
    raise ValueError(f"cannot take data from {data!r}: give {kinds}.{hint}")


def _from_hub(name: str) -> Any:
    repo, _, split = name.partition(":")
    if repo.count("/") != 1 or not split:
        raise ValueError(f"'hf:{name}': write hf:owner/name:split, such as hf:ylecun/mnist:test.")
    import datasets

    try:
        return datasets.load_dataset(repo, split=split)
    except Exception as error:  # of many libraries: network, missing repository, wrong split
        raise ValueError(f"cannot load 'hf:{name}': {' '.join(str(error).split())[:300]}") from error


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
    """The embedded data set `name` as a datasets.Dataset: images with labels, or texts; ValueError if unknown."""
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
