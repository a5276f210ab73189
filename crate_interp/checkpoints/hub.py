"""Files from the Hugging Face Hub: one clear error per failure, and digests compared."""

import errno
import os
from pathlib import Path, PurePosixPath
from typing import Any

from crate_interp.checkpoints import registry
from crate_interp.errors import CheckpointError

_REASONS = {
    401: "the Hub does not accept the token: `hf auth login`, or token='hf_...'",
    403: "the token has no access to it: ask for access, or give another token",
    429: "the Hub asks to slow down (429): try again in some minutes",
}


class MissingFile(CheckpointError):
    """The repo has no such file."""


class NotCached(CheckpointError):
    """The cache lacks the file, and the network is switched off."""


def fetch(
    repo: str,
    file: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> Path:
    """Returns the local path of a file of a repo.

    The file is downloaded with a progress bar unless the cache has it. huggingface_hub does
    this, so that its cache, HF_HUB_OFFLINE, HF_ENDPOINT and stored tokens count. Raises
    CheckpointError where the file cannot be had.
    """
    import huggingface_hub as hub

    check_file(file)
    try:
        path = hub.hf_hub_download(
            repo,
            file,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            token=token,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    except Exception as error:  # the client's errors share no class: its own, httpx's, the system's
        raise _kind(error, local_files_only)(
            _explain(error, repo, file, revision, local_files_only)
        ) from None
    return Path(path)


def check_file(file: str) -> None:
    """Raises CheckpointError for a name that is no path inside a repo."""
    path = PurePosixPath(str(file))
    if (
        not isinstance(file, str)
        or not file
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in file
        or "\0" in file
    ):
        raise CheckpointError(
            f"file={file!r} is no path inside a repo: give one such as 'torch/crate_alpha_B16.pth'."
        )


def check_digest(path: Path, row: dict[str, Any]) -> None:
    """Raises CheckpointError unless the file has the size and digest in the table of models."""
    size = path.stat().st_size
    remedy = (
        f"Remove {path} and load it again; if it fails anew the file on the Hub has changed: "
        "give revision='main' to take it as it is."
    )
    if row["bytes"] is not None and size != row["bytes"]:
        raise CheckpointError(
            f"{row['name']}: {path} has {size} bytes, wanted {row['bytes']}. {remedy}"
        )
    if row["sha256"] is not None and (digest := registry.sha256(path)) != row["sha256"]:
        raise CheckpointError(
            f"{row['name']}: {path} has the digest {digest}, wanted {row['sha256']}. {remedy}"
        )


def _explain(error: Exception, repo: str, file: str, revision: str | None, local_only: bool) -> str:
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    what = f"{repo}/{file}{at}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms on huggingface.co, then `hf auth login`, "
            "or give a token with access: token='hf_...'."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the Hub has no repo {repo!r}, or it is private: check the name, "
            "or give a token with access: token='hf_...'."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{repo} has no revision {revision!r}: "
            "give a branch, a tag or a full commit hash, or leave it out."
        )
    cause = (
        error.__cause__
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__
        else error
    )
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in _REASONS:
        return f"cannot download {what}: {_REASONS[status]}. Nothing was kept."
    if isinstance(error, errors.LocalEntryNotFoundError):
        if _kind(error, local_only) is NotCached:
            off = "the network is switched off (local_files_only, or HF_HUB_OFFLINE=1)"
            return f"{what} is not in the cache, and {off}: load it once with it on."
        return (
            f"cannot reach the Hub for {what}, and the cache does not have it: "
            f"{_first(error.__cause__ or error)}. Try again later."
        )
    if isinstance(error, errors.EntryNotFoundError):
        tree = f"https://huggingface.co/{repo}/tree/{revision or 'main'}"
        return f"{repo} has no file {file!r}{at}: see {tree}."
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is no name of a repo: write owner/name."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {what} does not fit. "
            "Free some room, or give another place: cache_dir='...'."
        )
    return f"cannot download {what}: {_first(error)}. Nothing was kept."


def _kind(error: Exception, local_only: bool) -> type[CheckpointError]:
    """Returns the class of the error, for callers that can do without the file."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        off = (
            local_only
            or isinstance(error.__cause__, errors.OfflineModeIsEnabled)
            or constants.HF_HUB_OFFLINE
        )
        return NotCached if off else CheckpointError
    return MissingFile if isinstance(error, errors.EntryNotFoundError) else CheckpointError


def _first(error: BaseException) -> str:
    """Returns the first sentence of an error's words, on one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words.split(". ")[0].rstrip(".")
