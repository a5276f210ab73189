"""Data sets that a name stands for: the embedded ones and those of the Hub."""

import hashlib
from pathlib import Path
from typing import Any

from crate_interp import checks

_EMBEDDED = {  # files in assets/
    "fashion": "fashion.parquet",
    "cutouts": "cutouts.parquet",
    "held-out-text": "held-out-text.parquet",
}
_ASSETS = Path(__file__).parent.parent / "assets"


def named_dataset(data: str, kinds: str) -> Any:
    """The datasets.Dataset that "embedded:NAME" or "hf:owner/name:split" names; `kinds` is what the error offers."""
    scheme, _, name = data.partition(":")
    if scheme == "embedded":
        return embedded(name)
    if scheme == "hf":
        return _from_hub(name)
    hint = f" Did you mean 'embedded:{data}'?" if data in _EMBEDDED else ""
    raise ValueError(f"cannot take data from {data!r}: give {kinds}.{hint}")


def named_fingerprint(data: str) -> str | None:
    """That of the file of an embedded data set; None for others, which have datasets' own."""
    scheme, _, name = data.partition(":")
    if scheme != "embedded":
        return None
    return f"{data}:sha256:{hashlib.sha256(_embedded_file(name).read_bytes()).hexdigest()}"


def embedded(name: str) -> Any:
    """The embedded data set `name` as a datasets.Dataset: images with labels (and masks), or texts; ValueError if unknown."""
    import datasets
    import pyarrow.parquet

    # straight from the table: Dataset.from_parquet would write a copy into the user's cache
    return datasets.Dataset(pyarrow.parquet.read_table(_embedded_file(name)))


def _embedded_file(name: str) -> Path:
    if name not in _EMBEDDED:
        hint = checks.did_you_mean(name, _EMBEDDED)
        raise ValueError(
            f"no embedded data is called {name!r}: there is {', '.join(_EMBEDDED)}. {hint}".rstrip()
        )
    path = _ASSETS / _EMBEDDED[name]
    if not path.is_file():
        raise ValueError(
            f"the file of embedded:{name}, {str(path)!r}, is missing: install crate_interp again."
        )
    return path


def _from_hub(name: str) -> Any:
    repo, _, split = name.partition(":")
    if repo.count("/") != 1 or not split:
        raise ValueError(f"'hf:{name}': write hf:owner/name:split, such as hf:ylecun/mnist:test.")
    import datasets

    try:
        return datasets.load_dataset(repo, split=split)
    except Exception as error:  # of many libraries: network, missing repository, wrong split
        raise ValueError(
            f"cannot load 'hf:{name}': {' '.join(str(error).split())[:300]}"
        ) from error
