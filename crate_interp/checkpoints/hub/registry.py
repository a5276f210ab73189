"""The models that load by name: the table registry.json, and functions that find its rows."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crate_interp.checkpoints.progress import byte_bar

if TYPE_CHECKING:
    import pandas as pd

ASSETS = Path(__file__).parent.parent.parent / "assets"

# One row per public file. `config`: preprocessing, and the fields that shapes do not reveal.
# `steps`: the training steps that load with revision="step-N". `beside`: files of the repo that
# must lie next to the weights. repo and file are null if the file lies elsewhere, at `link`.
MODELS: tuple[dict[str, Any], ...] = tuple(
    json.loads((Path(__file__).parent / "registry.json").read_text(encoding="utf-8"))
)


def list_models() -> "pd.DataFrame":
    """Returns a pandas table of the known models.

    Its columns are name, family, repo, file, revision, sha256, bytes, licence, params, embedded,
    status, config, paper, beside, link, note, steps. status: "verified on fixture" (the layout
    was checked against the authors' code), "layout inferred" (no file in this layout could be
    checked), "trained for this library", or "contents unknown". paper: numbers that the authors
    report.
    """
    import pandas as pd

    return pd.DataFrame(list(MODELS)).astype({"bytes": "Int64", "params": "Int64"})


def find(name: str) -> dict[str, Any] | None:
    """Returns the row of a model, or None."""
    return next((row for row in MODELS if row["name"] == name), None)


def folder_of(row: dict[str, Any]) -> Path:
    """Returns the folder of an embedded model."""
    return ASSETS / row["name"]


def of_repo(repo: str, file: str | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a repo on the Hub, or of one file in it."""
    return [
        row for row in MODELS if row["repo"] == repo and row["file"] and file in (None, row["file"])
    ]


def of_digest(path: Path) -> dict[str, Any] | None:
    """Returns the row whose digest is that of the file at `path`, or None.

    The file is read only if some row has its size.
    """
    size = path.stat().st_size
    rows = [row for row in MODELS if row["bytes"] == size and row["sha256"]]
    digest = sha256(path) if rows else None
    return next((row for row in rows if row["sha256"] == digest), None)


def sha256(path: Path) -> str:
    """Returns the digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, byte_bar(path.stat().st_size, f"checking {path.name}") as bar:
        while block := file.read(2**22):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()
