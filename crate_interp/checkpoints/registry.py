"""The models that load by name: the table registry.json, and how a row of it is found."""

import hashlib
import json
from pathlib import Path
from typing import Any

from crate_interp.checkpoints.progress import byte_bar

ASSETS = Path(__file__).parent.parent / "assets"

# One row per public file; `config` has the fields its tensors cannot tell and its preprocessing. `steps`: the training
# steps that load with revision="step-N". `beside`: files of the repo that must lie beside the weights. repo and file are
# null where the file lies elsewhere (`link`).
MODELS: tuple[dict[str, Any], ...] = tuple(
    json.loads((Path(__file__).parent / "registry.json").read_text(encoding="utf-8"))
)


def list_models() -> Any:
    """A pandas table of the known models: name, family, repo, file, revision, sha256, bytes, licence, params, embedded,
    status, config, paper, beside, link, note, steps.

    status: "verified on fixture" (this layout was checked against the authors' code), "layout inferred" (no file of it
    could be checked). paper: numbers its authors report.
    """
    import pandas as pd

    return pd.DataFrame(list(MODELS)).astype({"bytes": "Int64", "params": "Int64"})


def names() -> list[str]:
    """The names `ci.load` knows."""
    return [row["name"] for row in MODELS]


def find(name: str) -> dict[str, Any] | None:
    """The row of a model, or None."""
    return next((row for row in MODELS if row["name"] == name), None)


def weights_of(row: dict[str, Any], revision: str | None) -> Path:
    """Where the weights of an embedded model lie: the model itself, or a step along its training."""
    path = ASSETS / row["file"]
    return path if revision is None else path.parent / "steps" / f"{revision}.safetensors"


def of_repo(repo: str, file: str | None = None) -> list[dict[str, Any]]:
    """The rows of a repo on the Hub, or of one file in it."""
    return [
        row for row in MODELS if row["repo"] == repo and row["file"] and file in (None, row["file"])
    ]


def of_digest(path: Path) -> dict[str, Any] | None:
    """The row whose file this is; the file is read only where some row has its size."""
    size = path.stat().st_size
    rows = [row for row in MODELS if row["bytes"] == size and row["sha256"]]
    digest = sha256(path) if rows else None
    return next((row for row in rows if row["sha256"] == digest), None)


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, byte_bar(path.stat().st_size, f"checking {path.name}") as bar:
        while block := file.read(2**22):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()
