"""Data sets given by name: those embedded in the package, and those on the Hub."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from crate_interp.core import checks, hub_names, safe_text
from crate_interp.data.samples import Preprocess, Samples
from crate_interp.data.tables import Table, table_samples

if TYPE_CHECKING:  # the import takes a second, so it waits until a data set is opened
    import datasets

EMBEDDED = {  # name -> file in assets/
    "fashion": "fashion.parquet",
    "pictures": "pictures.parquet",
    "held-out-text": "held-out-text.parquet",
    "repeats": "repeats.parquet",
}
_ASSETS = Path(__file__).parent.parent / "assets"


def embedded(name: str) -> "datasets.Dataset":
    """Returns the embedded data set `name`: images with labels (and masks), texts, or tokens.

    Raises ValueError, which suggests the nearest names, if there is no data set of that name.
    """
    import datasets
    import pyarrow.parquet

    # read from the table, since Dataset.from_parquet would write a copy into the user's cache
    return datasets.Dataset(pyarrow.parquet.read_table(_embedded_file(name)))


def embedded_samples(
    name: str, preprocess: Preprocess, preprocess_masks: Preprocess | None
) -> Samples:
    """Returns the images of an embedded data set; its fingerprint is the digest of its file."""
    digest = hashlib.sha256(_embedded_file(name).read_bytes()).hexdigest()
    fingerprint = f"embedded:{name}:sha256:{digest}"
    return table_samples(embedded(name), preprocess, preprocess_masks, fingerprint)


def _embedded_file(name: str) -> Path:
    if name not in EMBEDDED:
        hint = checks.did_you_mean(name, EMBEDDED)
        raise ValueError(
            f"no embedded data is called {name!r}: give {', '.join(EMBEDDED)}. {hint}".rstrip()
        )
    return _ASSETS / EMBEDDED[name]


def from_hub(name: str) -> Table:
    """Returns the data set "owner/name:split", fetched from the Hub by datasets.

    The split may be a sum of slices, such as "train[:10%]+test". Raises ValueError if the name has
    another form, before anything is asked, and if the data set cannot be loaded.
    """
    found = hub_names.data_set(name)
    if found is None:
        raise ValueError(
            f"'hf:{safe_text.plain(name, 200)}': write hf:owner/name:split, such as "
            "hf:ylecun/mnist:test, of letters, digits, '-', '_' and '.'."
        )
    import datasets

    try:
        return datasets.load_dataset(found[0], split=found[1])
    except Exception as error:  # errors of many libraries: network, missing repository, wrong split
        raise ValueError(f"cannot load 'hf:{name}': {safe_text.plain(error, 300)}") from error


def hub_samples(name: str, preprocess: Preprocess, preprocess_masks: Preprocess | None) -> Samples:
    """Returns the images of the data set "owner/name:split" on the Hub.

    Its tables must hold the bytes of the pictures. If they hold only file names, an error of
    data/tables.py says what to type instead.
    """
    return table_samples(from_hub(name), preprocess, preprocess_masks)
