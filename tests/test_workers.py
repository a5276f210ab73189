"""The same bits for one process and for many, each sample once, whatever the sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from working import VERBS, digest, work

SCRIPT = Path(__file__).with_name("working.py")


def started(command, **settings):
    """Returns what a process printed that works on the data; command: what starts the script."""
    verb, settings = settings.pop("verb"), json.dumps(settings)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, SCRIPT, verb, settings],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def torchrun(processes):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_torchrun_gives_the_bits_of_one_process(tmp_path, verb, processes):
    out = tmp_path / "out"
    printed = started(torchrun(processes), verb=verb, n=600, out=str(out))
    wanted = digest(work(verb, 600))
    assert len(printed) == processes and set(printed) - {"None"} == {wanted}
    assert digest(VERBS[verb][1].load(out)) == wanted
