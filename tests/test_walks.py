"""How many files and functions a reader walks through, from a call to its answer."""

import subprocess
import sys
from pathlib import Path

MOST = {"load": (28, 108), "sweep": (67, 386), "audit": (78, 561)}  # files, functions


def test_a_walk_stays_short():
    script = Path(__file__).with_name("walks.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    walks = {name: tuple(map(int, rest)) for name, *rest in map(str.split, run.stdout.splitlines())}
    assert set(walks) == set(MOST)
    for name, (files, functions) in walks.items():
        assert files <= MOST[name][0] and functions <= MOST[name][1], (name, files, functions)
