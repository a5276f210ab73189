"""Fetches files from the Hugging Face Hub, compares their digests, and explains each failure."""

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crate_interp.checkpoints.hub import cache, download, registry
from crate_interp.checkpoints.hub.metadata import COMMIT, Offer, ask, shown
from crate_interp.core import hub_names, waiting
from crate_interp.core.errors import CheckpointError
from crate_interp.core.waiting import Watch, watched

_WAITS = (1, 2, 4, 8, 8)  # seconds before the Hub is asked again
_AGAIN = "Nothing was kept: load it again."
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

    The file is downloaded with a progress bar unless the cache of huggingface_hub has it. Stored
    tokens, HF_HUB_OFFLINE and HF_ENDPOINT are respected. row: the file's row in the table of
    models, with its size and digest. Raises CheckpointError if the file cannot be fetched, or
    differs from its row.
    """
    from huggingface_hub import constants, errors

    _check_names(repo, file, revision)
    wanted = _Wanted(repo, file, revision, row, cache_dir)
    off = local_files_only or constants.HF_HUB_OFFLINE
    try:
        found = cache.find(repo, file, wanted.version, cache_dir)
        if found is None or not COMMIT.fullmatch(wanted.version):  # a branch may have moved
            offer = None if off else _asked(wanted, token, found is None)
            if offer is not None:
                return _kept(wanted, offer)
            if found is None:
                raise _absent(wanted.name, off)
        _check_file(wanted, found)
        return found
    except CheckpointError:
        raise
    except Exception as error:  # the client raises its own errors, httpx's and the system's
        # MissingFile is a class of its own, for callers that can do without the file
        kind = MissingFile if isinstance(error, errors.EntryNotFoundError) else CheckpointError
        raise kind(_explain(wanted, error)) from None


@dataclass(frozen=True)
class _Wanted:
    """The requested file: its place on disk, and its row in the table of models."""

    repo: str
    file: str
    revision: str | None
    row: dict[str, Any] | None
    cache_dir: str | Path | None

    @property
    def version(self) -> str:
        """The branch, tag or commit."""
        return self.revision or "main"

    @property
    def name(self) -> str:
        """The file's name in errors."""
        return f"{self.repo}/{self.file}{self.at}"

    @property
    def at(self) -> str:
        """The words for the revision in errors, or "" if no revision was given."""
        return f" at revision {self.revision!r}" if self.revision else ""

    def check(self, what: str, column: str, came: object, remedy: str) -> None:
        """Raises CheckpointError if the table has another value than `came`.

        column: bytes or sha256.
        """
        row = self.row or {}
        if row.get(column) not in (None, came):
            shown = f"{came} bytes" if column == "bytes" else f"the digest {came}"
            raise CheckpointError(
                f"{row['name']}: {what} has {shown}; expected {row[column]}. {remedy} If that "
                "fails too, the file on the Hub has changed: give revision='main' to load it as "
                "it is."
            )


def _asked(wanted: _Wanted, token: str | bool | None, needed: bool) -> Offer | None:
    """Returns the Hub's offer for a file.

    needed: whether the cache lacks the file. If the cache has the file, the result is None when the
    Hub cannot be reached or refuses access. If the cache lacks the file, a busy Hub is asked
    several times before its error is raised.
    """
    from huggingface_hub import errors

    def patiently(watch: Watch) -> Offer | None:
        for wait in (*_WAITS, None):
            try:
                return ask(wanted.repo, wanted.file, wanted.version, token, endpoint)
            except (CheckpointError, errors.EntryNotFoundError, errors.RevisionNotFoundError):
                raise
            except Exception as error:
                if not needed and (_status(error) or _unreachable(error)):
                    return None
                if wait is None or not (_status(error) in _BUSY or download.is_transport(error)):
                    raise
            time.sleep(wait)
        return None

    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        return watched(patiently)
    except TimeoutError:
        if needed:
            raise
        return None


def _kept(wanted: _Wanted, offer: Offer) -> Path:
    """Returns the path of an offered file, after downloading it unless the cache has it."""
    from huggingface_hub.utils import WeakFileLock

    folder = cache.folder_of(wanted.repo, wanted.cache_dir)
    path = cache.pointer(folder, offer.commit, wanted.file)
    came = False
    if not path.exists():
        wanted.check(f"{wanted.name} on the Hub", "bytes", offer.size, _AGAIN)
        lock = folder.parent / ".locks" / folder.name / f"{offer.digest}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # so that eight workers do not fetch the same file eight times
            came = _downloaded(wanted, offer, folder)
            path = cache.keep(folder, offer, wanted.file)
    cache.note(folder, wanted.version, offer.commit)
    if not came:
        _check_file(wanted, path)
    return path


def _downloaded(wanted: _Wanted, offer: Offer, folder: Path) -> bool:
    """Downloads a file and checks it; returns False if its blob was already in the cache."""
    blob = folder / "blobs" / offer.digest
    if blob.exists():
        return False
    cache.tidy(folder)
    new = cache.unfinished(folder, offer)
    digest = download.download(offer, new, wanted.name)
    try:
        wanted.check(f"{wanted.name} on the Hub", "sha256", digest, _AGAIN)
        os.replace(new, blob)
    finally:
        new.unlink(missing_ok=True)
    return True


def check_file(file: str) -> None:
    """Raises CheckpointError for a name that is not a path inside a repo."""
    if not hub_names.is_file(file):
        raise CheckpointError(
            f"file={shown(file)} is not a path inside a repo: give one such as "
            "'torch/crate_alpha_B16.pth'."
        )


def _check_names(repo: str, file: str, revision: str | None) -> None:
    """Raises CheckpointError for names that the Hub cannot have; the cache uses them as paths."""
    if not hub_names.is_repo(repo):
        raise CheckpointError(
            f"{shown(repo)} is not the name of a repo: write owner/name, each of at most 96 "
            "letters, digits, '-', '_' and '.'."
        )
    check_file(file)
    if revision is not None and not hub_names.is_revision(revision):
        raise CheckpointError(
            f"revision={shown(revision)} is not a branch, tag or commit: give one such as 'main'."
        )


def _check_file(wanted: _Wanted, path: Path) -> None:
    """Raises CheckpointError unless a file has the size and digest in the table of models."""
    if wanted.row is not None:
        remove = f"Remove {path} and load it again."
        wanted.check(str(path), "bytes", path.stat().st_size, remove)
        if wanted.row["sha256"] is not None:
            wanted.check(str(path), "sha256", registry.sha256(path), remove)


def _absent(what: str, off: bool) -> CheckpointError:
    if off:
        return NotCached(
            f"{what} is not in the cache, and the network is switched off (local_files_only, or "
            "HF_HUB_OFFLINE=1): load it once with the network on."
        )
    return CheckpointError(
        f"cannot reach the Hub for {what}, and the cache does not have it: the server that answers "
        "is not a Hub. Check HF_ENDPOINT and the network."
    )


def _explain(wanted: _Wanted, error: Exception) -> str:
    from huggingface_hub import errors

    repo, revision, what = wanted.repo, wanted.revision, wanted.name

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms on huggingface.co, then run `hf auth login`, "
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
            "give a branch, a tag or a full commit hash, or leave revision out."
        )
    if _status(error) in download.REASONS:
        return f"cannot download {what}: {download.REASONS[_status(error)]}. Nothing was kept."
    if isinstance(error, errors.EntryNotFoundError):
        tree = f"https://huggingface.co/{repo}/tree/{wanted.version}"
        return f"{repo} has no file {wanted.file!r}{wanted.at}: see {tree}."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {what} does not fit. "
            "Free some room, or give another place: cache_dir='...'."
        )
    if isinstance(error, TimeoutError):
        return f"cannot download {what}: {waiting.silence()}. Nothing was kept: try again later."
    if download.is_transport(error):
        return (
            f"cannot reach the Hub for {what}, and the cache does not have it: "
            f"{_first(error)}. Try again later."
        )
    return f"cannot download {what}: {_first(error)}. Nothing was kept."


def _status(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def _unreachable(error: Exception) -> bool:
    from huggingface_hub import errors

    return download.is_transport(error) or isinstance(
        error, (TimeoutError, errors.OfflineModeIsEnabled)
    )


def _first(error: BaseException) -> str:
    """Returns the first sentence of an error's text, on one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words.split(". ")[0].rstrip(".")
