"""Which files in the folder of a run are ours: nothing else is removed or written over.

A ledger names each file below chunks/, with its digest, before the file gets its name. Settings,
ledgers and the listing of the data's files are known by what they hold.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from crate_interp.core.files import (
    check_regular,
    foreign,
    is_one,
    is_own_name,
    odd_kind,
    open_regular,
)
from crate_interp.core.folders import read_index
from crate_interp.data.folder_listing import is_listing

# LISTING: the file with the names and sizes of the data's files, if they were listed
RUN, CHUNKS, LISTING = "run.json", "chunks", "listing.parquet"
LEDGERS = "ledger-*.jsonl"

_BEGIN = b'{"stage": "'  # of each line of a ledger
_CHUNK_FILE = re.compile(r"[a-z]+(-[0-9]+)?-[0-9]{6,}\.(parquet|arrow)")


def is_run(found: Mapping[str, Any]) -> bool:
    """Tells whether the content of a run.json is that of a run of ours."""
    kinds = {"format": int, "kind": str, "stages": list, "settings": dict}
    return all(type(found.get(name)) is kind for name, kind in kinds.items())


def check_places(out: Path) -> None:
    """Raises ValueError if a run would write through a link, or over a file that is not ours."""
    for path in (out / RUN, out / LISTING, *out.glob(LEDGERS)):
        if path.is_symlink():
            check_regular(path)
    if (out / CHUNKS).is_symlink():
        raise ValueError(f"{str(out / CHUNKS)!r} is a link: remove it, or give another folder.")
    # listed before the ledgers are read: a chunk that another process writes now is in its ledger
    there = [path for path in _entries(out) if _CHUNK_FILE.fullmatch(path.name)]
    known = {line.get("file") for path in out.glob(LEDGERS) for line in _lines(path)[0]}
    for path in there:
        check_regular(path)
    odd = [path.name for path in there if path.name not in known and not _holds_tables(path)]
    if odd:
        raise foreign(out / CHUNKS, odd)


def discard(out: Path) -> None:
    """Removes the settings, the ledgers and the chunks of a run; its result stays.

    Raises ValueError, before anything is removed, if anything below chunks/ has no digest in a
    ledger, or if a ledger, the settings or the listing were not written by this library.
    """
    ledgers = {path: _lines(path) for path in out.glob(LEDGERS)}
    odd = [path.name for path, (_, ours) in ledgers.items() if not ours]
    known: dict[str, set[str]] = {}
    for lines, ours in ledgers.values():
        for line in lines if ours else ():
            if "file" in line:
                known.setdefault(line["file"], set()).add(line["sha256"])
    chunks = _entries(out)
    odd += [f"{CHUNKS}/{path.name}" for path in chunks if not is_one(path, known.get(path.name))]
    run, listing = out / RUN, out / LISTING
    if os.path.lexists(run) and (odd_kind(run) or not is_run(read_index(run))):
        odd.append(RUN)
    if os.path.lexists(listing) and (odd_kind(listing) or not is_listing(listing)):
        odd.append(LISTING)
    if odd:
        raise foreign(out, odd)
    for path in chunks:  # first, because only the ledgers tell that they are ours
        path.unlink(missing_ok=True)
    with suppress(OSError):
        (out / CHUNKS).rmdir()
    for path in (*ledgers, listing, run):
        path.unlink(missing_ok=True)


def _entries(out: Path) -> list[Path]:
    return sorted((out / CHUNKS).iterdir()) if (out / CHUNKS).is_dir() else []


def parsed(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yields each line of a ledger with its content, or with None for a line that is unfinished.

    Raises OSError if the ledger is no file.
    """
    with open_regular(path) as file:
        texts = file.read().splitlines()
    for text in texts:
        try:
            yield text, json.loads(text)
        except (ValueError, RecursionError):  # the process that wrote it died
            yield text, None


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Returns the lines of a ledger, and whether all that the file holds was written by us."""
    if odd_kind(path):
        return [], False
    found, ours = [], True
    for text, line in parsed(path):
        if is_line(line):
            found.append(line)
        else:
            ours &= line is None and (text.startswith(_BEGIN) or _BEGIN.startswith(text))
    return found, ours and (bool(found) or is_own_name(path.name))


def is_line(line: object) -> bool:
    """Tells whether a value is a line of a ledger: the chunks of a stage, or a file's digest."""
    if not isinstance(line, dict) or not isinstance(line.get("stage"), str):
        return False
    named = isinstance(line.get("file"), str) and isinstance(line.get("sha256"), str)
    return named or type(line.get("chunks")) is int


def _holds_tables(path: Path) -> bool:
    """Tells whether a file is a chunk of which no ledger is left."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        return parquet.read_schema(path).names == ["table", "content"]
    except (OSError, ValueError, pa.ArrowException):
        return False
