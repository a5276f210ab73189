"""The models that load by name, and their download from the Hugging Face Hub.

huggingface_hub downloads, resumes, caches and goes offline. This file says which file a name stands
for (registry.json), compares its digest, and turns each error of that client into one sentence.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crate_interp.core.errors import CheckpointError
from crate_interp.core.files import digest, stays_inside
from crate_interp.core.safe_text import plain

if TYPE_CHECKING:
    import pandas as pd

ASSETS = Path(__file__).parent.parent / "assets"

# One row per public file. `config`: preprocessing, and the fields that shapes do not reveal.
# `steps`: the training steps that load with revision="step-N". `beside`: files of the repo that
# must lie next to the weights. repo and file are null if the file lies elsewhere, at `link`.
_REGISTRY = Path(__file__).parent / "registry.json"
MODELS: tuple[dict[str, Any], ...] = tuple(json.loads(_REGISTRY.read_text(encoding="utf-8")))


class MissingFile(CheckpointError):
    """The repo has no such file."""


class NotCached(CheckpointError):
    """The cache lacks the file, and the network is switched off."""


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


def of_repo(repo: str, file: str | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a repo on the Hub, or of one file in it."""
    rows = [row for row in MODELS if row["repo"] == repo and row["file"]]
    return [row for row in rows if file in (None, row["file"])]


def of_digest(path: Path) -> dict[str, Any] | None:
    """Returns the row whose digest is that of the file at `path`, or None.

    The file is read only if some row has its size.
    """
    size = path.stat().st_size
    rows = [row for row in MODELS if row["bytes"] == size and row["sha256"]]
    found = digest(path).removeprefix("sha256:") if rows else None
    return next((row for row in rows if row["sha256"] == found), None)


def fetch(
    repo: str,
    file: str,
    *,
    revision: str | None = None,
    row: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> Path:
    """Returns the local path of a file of a repo, downloaded unless huggingface_hub's cache has it.

    Stored tokens, HF_HUB_OFFLINE and HF_ENDPOINT are respected.

    Args:
        repo: "owner/name".
        file: a path inside the repo.
        revision: a branch, tag or commit; None is "main".
        row: the file's row in the table of models, with its size and digest.
        cache_dir, local_files_only, token: as in huggingface_hub.

    Raises:
        CheckpointError: the file cannot be fetched, or differs from its row. MissingFile if the
            repo lacks the file, and NotCached if the network is switched off.
    """
    import huggingface_hub

    if not stays_inside(file):
        raise CheckpointError(f"file={file!r} is not a path inside a repo, such as 'torch/x.pth'.")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        path = huggingface_hub.hf_hub_download(
            repo, file, revision=revision, cache_dir=cache_dir, token=token, endpoint=endpoint,
            local_files_only=local_files_only, library_name="crate_interp",
        )  # fmt: skip
    except Exception as error:  # the client raises its own errors, those of HTTP and the system's
        raise _explained(error, repo, file, revision, local_files_only) from error
    path, wanted = Path(path), (row or {}).get("sha256")
    if row is not None and wanted and digest(path) != f"sha256:{wanted}":
        raise CheckpointError(
            f"{row['name']}: {path} has another sha256 than {wanted}. Remove it and load it again. "
            "If that fails too, the file on the Hub has changed: give revision='main' to load it."
        )
    return path


def _explained(
    error: Exception, repo: str, file: str, revision: str | None, local_files_only: bool
) -> CheckpointError:
    """Returns one sentence for an error of huggingface_hub: what came, and what to do."""
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    uncached = isinstance(error, errors.LocalEntryNotFoundError)
    reason = error.__cause__ if uncached else error
    words = plain(" ".join(str(reason or error).split()) or type(error).__name__, 200)
    access = "give a token with access: token='hf_...'."
    if uncached and (local_files_only or constants.HF_HUB_OFFLINE):
        return NotCached(
            f"{repo}/{file}{at} is not in the cache, and the network is switched off "
            "(local_files_only, or HF_HUB_OFFLINE=1): load it once with the network on."
        )
    if isinstance(error, errors.EntryNotFoundError) and not uncached:
        tree = f"https://huggingface.co/{repo}/tree/{revision or 'main'}"
        return MissingFile(f"{repo} has no file {file!r}{at}: see {tree}.")
    # kind of error -> what it means; the first that fits
    meanings: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{repo} is gated: accept its terms on its page, then {access}",
        errors.RepositoryNotFoundError: f"the Hub has no repo {repo!r}, or it is private: check "
        f"the name, or {access}",
        errors.RevisionNotFoundError: f"{repo} has no revision {revision!r}: give a branch, a tag "
        "or a full commit hash, or leave revision out.",
        Exception: f"cannot download {repo}/{file}{at}: {words}. Load it again: the "
        "download continues where it stopped.",
    }
    return CheckpointError(next(text for kind, text in meanings.items() if isinstance(error, kind)))
