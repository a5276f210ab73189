"""Data sets given by name: those embedded in the package, and those on the Hub."""

import hashlib
import itertools
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from crate_interp.core import checks, hub_names, safe_text, waiting
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
_LEAST = 2**16  # bytes that are progress
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
    data = embedded(name)
    digest = hashlib.sha256(_embedded_file(name).read_bytes()).hexdigest()
    fingerprint = f"embedded:{name}:sha256:{digest}"
    return table_samples(data, preprocess, preprocess_masks, fingerprint)


def _embedded_file(name: str) -> Path:
    if name not in EMBEDDED:
        hint = checks.did_you_mean(name, EMBEDDED)
        raise ValueError(
            f"no embedded data is called {name!r}: give {', '.join(EMBEDDED)}. {hint}".rstrip()
        )
    path = _ASSETS / EMBEDDED[name]
    if not path.is_file():
        raise ValueError(f"embedded:{name} lacks {str(path)!r}: install crate_interp again.")
    return path


def from_hub(name: str) -> Table:
    """Returns the data set "owner/name:split", fetched from the Hub by datasets.

    The split may be a sum of slices, such as "train[:10%]+test". Raises ValueError if the name has
    another form, before anything is asked, if the data set cannot be loaded, and if the server is
    silent.
    """
    found = hub_names.data_set(name)
    if found is None:
        raise ValueError(
            f"'hf:{safe_text.plain(name, 200)}': write hf:owner/name:split, such as "
            "hf:ylecun/mnist:test, of letters, digits, '-', '_' and '.'."
        )
    repo, split = found
    import datasets

    try:
        return waiting.watched(
            lambda watch: datasets.load_dataset(repo, split=split), lambda: _progress(repo)
        )
    except TimeoutError:
        reason = f"{waiting.silence()}. Try again later"
        raise ValueError(f"cannot load 'hf:{name}': {reason}.") from None
    except Exception as error:  # errors of many libraries: network, missing repository, wrong split
        raise ValueError(f"cannot load 'hf:{name}': {safe_text.plain(error, 300)}") from error


def _progress(repo: str) -> tuple[int, int]:
    """Returns numbers that grow while datasets works: of processor time, and of bytes on disk.

    The steps are large, so that a byte now and then is no progress.
    """
    from datasets import config
    from huggingface_hub import constants

    folders = (
        Path(constants.HF_HUB_CACHE, f"datasets--{repo.replace('/', '--')}"),
        Path(config.HF_DATASETS_CACHE, repo.replace("/", "___")),
    )
    size = 0
    for path in itertools.chain.from_iterable(folder.rglob("*") for folder in folders):
        with suppress(OSError):  # files come and go
            size += path.lstat().st_size
    return int(50 * time.process_time() / waiting.SILENCE), size // _LEAST


def hub_samples(name: str, preprocess: Preprocess, preprocess_masks: Preprocess | None) -> Samples:
    """Returns the images of the data set "owner/name:split" on the Hub.

    Its tables must hold the bytes of the pictures. If they hold only file names, an error of
    data/tables.py says what to type instead.
    """
    return table_samples(from_hub(name), preprocess, preprocess_masks)
