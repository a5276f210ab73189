"""Files from the Hugging Face Hub: one clear error per failure, and digests compared."""

import errno
import os
import time
from pathlib import Path
from typing import Any

from crate_interp.checkpoints.hub import hub_cache, registry, timeout
from crate_interp.checkpoints.hub.download import REASONS, download, is_transport
from crate_interp.checkpoints.hub.hub_metadata import COMMIT, Offer, ask
from crate_interp.core.errors import CheckpointError
from crate_interp.core.files import stays_inside

_WAITS = (1, 2, 4, 8, 8)  # seconds before the Hub is asked again
_AGAIN = "Nothing was kept: load it again; "
_BUSY = (408, 429, 500, 502, 503, 504)


class MissingFile(CheckpointError):
    """The repo has no such file."""


class NotCached(CheckpointError):
    """The cache lacks the file, and the network is switched off."""


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
    """Returns the local path of a file of a repo.

    The file is downloaded with a progress bar unless the cache of huggingface_hub has it; its
    stored tokens, HF_HUB_OFFLINE and HF_ENDPOINT count. row: the row of the table of models that
    tells size and digest. Raises CheckpointError where the file cannot be had, or is another.
    """
    from huggingface_hub import constants

    check_file(file)
    wanted = _checked_revision(revision)
    what = f"{repo}/{file}" + (f" at revision {revision!r}" if revision else "")
    try:
        found = hub_cache.find(repo, file, wanted, cache_dir)
        if found is None or not COMMIT.fullmatch(wanted):  # a branch may have moved
            if local_files_only or constants.HF_HUB_OFFLINE:
                offer = None
            else:
                offer = _asked(repo, file, wanted, token, found is None)
            if offer is not None:
                return _kept(offer, repo, file, wanted, row, cache_dir, what)
            if found is None:
                raise _absent(what, local_files_only or constants.HF_HUB_OFFLINE)
        if row is not None:
            check_digest(found, row)
        return found
    except CheckpointError:
        raise
    except Exception as error:  # the client's errors share no class: its own, httpx's, the system's
        raise _kind(error)(_explain(error, repo, file, revision, what)) from None


def _asked(
    repo: str, file: str, revision: str, token: str | bool | None, needed: bool
) -> Offer | None:
    """Returns what the Hub offers.

    Where the cache has the file, None is the answer if the Hub cannot be reached or does not
    let us in; where it is needed, a busy Hub is asked again, and the error is raised at last.
    """
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT") or None
    for wait in (*_WAITS, None):
        try:
            return timeout.watched(lambda _: ask(repo, file, revision, token, endpoint))
        except (CheckpointError, errors.EntryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception as error:
            if not needed and (_status(error) or _unreachable(error)):
                return None
            if wait is None or not (_status(error) in _BUSY or is_transport(error)):
                raise
        time.sleep(wait)
    return None


def _kept(
    offer: Offer,
    repo: str,
    file: str,
    revision: str,
    row: dict[str, Any] | None,
    cache_dir: str | Path | None,
    what: str,
) -> Path:
    """Returns the path of an offered file, after downloading it unless the cache has it."""
    from huggingface_hub.utils import WeakFileLock

    folder = hub_cache.folder_of(repo, cache_dir)
    path = hub_cache.pointer(folder, offer.commit, file)
    if path.exists():
        digest = None
    else:
        if row is not None:
            _check_size(f"{what} on the Hub", offer.size, row)
        lock = folder.parent / ".locks" / folder.name / f"{offer.digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # so that eight workers do not fetch one file eight times
            digest = _arrived(folder, offer, row, what)
            path = hub_cache.keep(folder, offer, file)
    hub_cache.note(folder, revision, offer.commit)
    if digest is None and row is not None:
        check_digest(path, row)
    return path


def _arrived(folder: Path, offer: Offer, row: dict[str, Any] | None, what: str) -> str | None:
    """Returns the digest of a file that was downloaded now, or None if its blob was there."""
    blob = folder / "blobs" / offer.digest
    if blob.exists():
        return None
    hub_cache.tidy(folder)
    new = hub_cache.unfinished(folder, offer)
    digest = download(offer, new, what)
    try:
        if row is not None:
            _check_sha256(f"{what} on the Hub", digest, row)
        os.replace(new, blob)
    finally:
        new.unlink(missing_ok=True)
    return digest


def check_file(file: str) -> None:
    """Raises CheckpointError for a name that is no path inside a repo."""
    if not stays_inside(file):
        raise CheckpointError(
            f"file={file!r} is no path inside a repo: give one such as 'torch/crate_alpha_B16.pth'."
        )


def _checked_revision(revision: str | None) -> str:
    if revision is not None and not stays_inside(revision):  # the cache keeps it as a path
        raise CheckpointError(
            f"revision={revision!r} is no name of a branch or tag, and no commit: give one "
            "such as 'main'."
        )
    return revision or "main"


def check_digest(path: Path, row: dict[str, Any]) -> None:
    """Raises CheckpointError unless the file has the size and digest in the table of models."""
    remove = f"Remove {path} and load it again; "
    _check_size(str(path), path.stat().st_size, row, remove)
    if row["sha256"] is not None:
        _check_sha256(str(path), registry.sha256(path), row, remove)


def _check_size(what: str, size: int, row: dict[str, Any], remedy: str = _AGAIN) -> None:
    if row["bytes"] is not None and size != row["bytes"]:
        raise _other(row, f"{what} has {size} bytes, wanted {row['bytes']}", remedy)


def _check_sha256(what: str, digest: str, row: dict[str, Any], remedy: str = _AGAIN) -> None:
    if row["sha256"] is not None and digest != row["sha256"]:
        raise _other(row, f"{what} has the digest {digest}, wanted {row['sha256']}", remedy)


def _other(row: dict[str, Any], came: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{row['name']}: {came}. {remedy}if it fails anew the file on the Hub has changed: "
        "give revision='main' to take it as it is."
    )


def _absent(what: str, off: bool) -> CheckpointError:
    if off:
        return NotCached(
            f"{what} is not in the cache, and the network is switched off (local_files_only, or "
            "HF_HUB_OFFLINE=1): load it once with it on."
        )
    return CheckpointError(
        f"cannot reach the Hub for {what}, and the cache does not have it: what answers is no "
        "Hub. Check HF_ENDPOINT and the network."
    )


def _explain(error: Exception, repo: str, file: str, revision: str | None, what: str) -> str:
    from huggingface_hub import errors

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
    if _status(error) in REASONS:
        return f"cannot download {what}: {REASONS[_status(error)]}. Nothing was kept."
    if isinstance(error, errors.EntryNotFoundError):
        at = f" at revision {revision!r}" if revision else ""
        tree = f"https://huggingface.co/{repo}/tree/{revision or 'main'}"
        return f"{repo} has no file {file!r}{at}: see {tree}."
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is no name of a repo: write owner/name."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {what} does not fit. "
            "Free some room, or give another place: cache_dir='...'."
        )
    if isinstance(error, TimeoutError):
        return (
            f"cannot download {what}: the server sent nothing, or hardly anything, for "
            f"{timeout.SILENCE:g} seconds. Nothing was kept: try again later."
        )
    if is_transport(error):
        return (
            f"cannot reach the Hub for {what}, and the cache does not have it: "
            f"{_first(error)}. Try again later."
        )
    return f"cannot download {what}: {_first(error)}. Nothing was kept."


def _kind(error: Exception) -> type[CheckpointError]:
    """Returns the class of the error, for callers that can do without the file."""
    from huggingface_hub import errors

    return MissingFile if isinstance(error, errors.EntryNotFoundError) else CheckpointError


def _status(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def _unreachable(error: Exception) -> bool:
    from huggingface_hub import errors

    return is_transport(error) or isinstance(error, (TimeoutError, errors.OfflineModeIsEnabled))


def _first(error: BaseException) -> str:
    """Returns the first sentence of an error's words, on one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words.split(". ")[0].rstrip(".")
