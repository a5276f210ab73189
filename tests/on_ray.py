"""Sweeps on Ray clusters of this machine, whose workers and nodes are killed meanwhile.

    python tests/on_ray.py killed DIR

runs one of the scenarios below in an empty folder and prints what it returns as JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
import ray

from working import digest, network, work

VERB = "sweep"


def workers():
    """Returns the processes of this cluster that measure a chunk."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [one] * ("ray::_measured" in " ".join(one.cmdline()))
    return found


def after_chunks(out, count, act):
    """Starts a thread that acts when so many chunks are in a folder."""

    def watch():
        while len(list(out.glob("chunks/*.parquet"))) < count:
            time.sleep(0.01)
        act()

    threading.Thread(target=watch, daemon=True).start()


def killed(place, verb=VERB):
    """One of two workers dies of SIGKILL; the driver starts a cluster and ends it."""
    victims = []

    def kill():
        victims.append(workers()[0].pid)
        os.kill(victims[0], signal.SIGKILL)

    after_chunks(place / "out", 2, kill)
    result = work(verb, 600, network(0.1), out=place / "out", engine="ray")
    return {"digest": digest(result), "killed": len(victims), "open": ray.is_initialized()}


def slow(place):
    """A sweep that somebody interrupts or kills."""
    return {"digest": digest(work(VERB, 600, network(1.0), out=place / "out", engine="ray"))}


if __name__ == "__main__":
    scenario, folder = sys.argv[1:]
    sys.stdout.write(json.dumps(globals()[scenario](Path(folder))) + "\n")
