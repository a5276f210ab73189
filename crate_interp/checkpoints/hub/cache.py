"""The cache on this machine of files from the Hub, in the layout of huggingface_hub's cache.

`blobs/DIGEST` holds a file, `snapshots/COMMIT/NAME` points to it, and `refs/BRANCH` holds a
commit. huggingface_hub documents this layout, and other libraries find our files in the cache.
Files that are already in the cache are trusted.
"""

import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from crate_interp.checkpoints.hub.metadata import Offer

_WEEK = 7 * 24 * 3600
_ENDING = ".crate-interp.incomplete"
_LEFT = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\.[0-9a-f]{32}" + re.escape(_ENDING))


def folder_of(repo: str, cache_dir: str | Path | None) -> Path:
    """Returns the cache's folder of a repo; the folder need not exist."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE if cache_dir is None else cache_dir).expanduser().resolve()
    return root / ("models--" + repo.replace("/", "--"))


def find(repo: str, file: str, revision: str, cache_dir: str | Path | None) -> Path | None:
    """Returns the path of a file that was downloaded before, or None."""
    import huggingface_hub as hub

    root = folder_of(repo, cache_dir).parent
    found = hub.try_to_load_from_cache(repo, file, cache_dir=root, revision=revision)
    return Path(found) if isinstance(found, str) else None


def pointer(folder: Path, commit: str, file: str) -> Path:
    """Returns the path of a file in the snapshot of a commit."""
    return folder / "snapshots" / commit / file


def unfinished(folder: Path, offer: Offer) -> Path:
    """Returns a path that only this process uses, for a download that is not finished."""
    return folder / "blobs" / f"{offer.digest}.{uuid.uuid4().hex}{_ENDING}"


def keep(folder: Path, offer: Offer, file: str) -> Path:
    """Makes a file's path in a commit's snapshot point to the file's blob; returns the path."""
    place, blob = pointer(folder, offer.commit, file), folder / "blobs" / offer.digest
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f"{uuid.uuid4().hex}{_ENDING}")
    try:
        os.symlink(os.path.relpath(blob, place.parent), new)
    except OSError:  # a file system without links, or Windows without the right to make them
        new = blob
    os.replace(new, place)
    return place


def note(folder: Path, revision: str, commit: str) -> None:
    """Records the commit of a branch or tag, for use without a network.

    A cache that cannot be written to stays as it is.
    """
    if revision == commit:
        return
    ref = folder / "refs" / revision
    new = ref.with_name(f"{uuid.uuid4().hex}{_ENDING}")
    with suppress(OSError):
        if ref.exists() and ref.read_text() == commit:
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(commit)
        os.replace(new, ref)


def tidy(folder: Path) -> None:
    """Removes downloads of this library that broke off over a week ago, and nothing else."""
    with suppress(OSError):
        for path in (folder / "blobs").iterdir():
            if (
                _LEFT.fullmatch(path.name)
                and path.is_file()
                and not path.is_symlink()
                and path.stat().st_mtime < time.time() - _WEEK
            ):
                path.unlink(missing_ok=True)
