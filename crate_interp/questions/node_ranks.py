"""Lets one process of a node fetch a model while the node's other processes wait.

The first process writes a file that says when it has finished; the other processes wait for it.

torchrun sets LOCAL_RANK, RANK and WORLD_SIZE. torch.distributed is never initialised.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from crate_interp.core.files import lives, odd_kind, remove_unfinished, write_text
from crate_interp.core.folders import read_index
from crate_interp.core.progress import stream, tqdm
from crate_interp.core.safe_text import file_name

_LOOK = 0.1  # seconds between two looks at the file of the first process
_LONG = 600.0  # seconds within which the first process must write that it has begun


@contextmanager
def after_rank_0(out: str | Path | None) -> Iterator[None]:
    """Runs the `with` block in a node's LOCAL_RANK 0 process first, then in its other processes.

    out: the folder of the run, which all processes share. If the first process fails, the others
    print a note and continue. A process without a rank or a folder does not wait.
    """
    rank = os.environ.get("LOCAL_RANK")
    if out is None or rank is None or int(os.environ.get("LOCAL_WORLD_SIZE", "2")) < 2:
        yield
        return
    marker = _marker(Path(out))
    if int(rank) != 0:
        _wait(marker)
        yield
        return
    marker.parent.mkdir(parents=True, exist_ok=True)
    _remove_old(marker)
    _say(marker, "fetches")
    try:
        yield
    except BaseException:
        _say(marker, "failed")
        raise
    _say(marker, "done")


def device_of_rank() -> str:
    """Returns this process's GPU, "cuda:N" for LOCAL_RANK N, or "cpu" without GPUs.

    If this process sees fewer GPUs than there are ranks (for example, only its own GPU), N is taken
    modulo the number of visible GPUs.
    """
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def _marker(out: Path) -> Path:
    """Returns the path of this launch's file, whose name contains the id of the parent process."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = "-".join(os.environ.get(name, "") for name in names)
    return out / f"{_prefix()}{os.getppid()}-{file_name(launch)}.json"


def _prefix() -> str:
    return f".crate-interp-fetched-{file_name(socket.gethostname())}-"


def _say(marker: Path, state: str) -> None:
    write_text(marker, json.dumps({"pid": os.getpid(), "state": state}))


def _wait(marker: Path) -> None:
    """Waits until the first process is done, has failed, or is gone."""
    until = time.monotonic() + _LONG
    while True:
        found = read_index(marker)
        state = found.get("state")
        if state == "done":
            return
        if state == "fetches" and _lives(found.get("pid")):
            until = time.monotonic() + _LONG
        elif state is not None or time.monotonic() > until:
            tqdm.write("rank 0 of this node could not load: this process continues.", file=stream())
            return
        time.sleep(_LOOK)


def _remove_old(marker: Path) -> None:
    """Removes each launch's file on this node, if the process that wrote the file has ended."""
    remove_unfinished(marker.parent, f".{_prefix()}")
    for path in marker.parent.iterdir():
        found = read_index(path) if path.name.startswith(_prefix()) and not odd_kind(path) else {}
        if set(found) == {"pid", "state"} and not _lives(found["pid"]):
            path.unlink(missing_ok=True)


def _lives(pid: object) -> bool:
    return type(pid) is int and pid > 0 and lives(pid)
