"""The same bits for one process and for many, each sample once, whatever the sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from working import CHUNK, VERBS, digest, work

SCRIPT = Path(__file__).with_name("working.py")
SIZES = (1, 2, 103, CHUNK - 1, CHUNK, CHUNK + 1)


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


def check_samples(result, n):
    """Every sample is there once, and no other one."""
    assert result.meta["n_samples"] == n
    assert result.meta["data"] == [result.meta["data"][0] | {"start": 0, "stop": n}]
    for _, rows in result.samples().groupby("layer"):
        assert rows["sample"].tolist() == list(range(n))
    assert set(result.layers().query("statistic == 'rate_pre'")["n"]) == {n}


@pytest.mark.parametrize(
    "n", [*(pytest.param(n, marks=pytest.mark.slow) for n in SIZES[:-1]), SIZES[-1]]
)
def test_shards_of_one_process_have_each_sample_once(tmp_path, n):
    """Three shards, one after the other: most of the sizes have fewer chunks than that."""
    alone = work("sweep", n)
    check_samples(alone, n)
    parts = [work("sweep", n, out=tmp_path, shard=f"{place}/3") for place in (2, 0, 1)]
    whole = [part for part in parts if part is not None]
    check_samples(whole[-1], n)
    assert {digest(part) for part in whole} == {digest(alone)}


@pytest.mark.slow
def test_chunks_do_not_depend_on_the_number_of_shards(tmp_path):
    """One shard of two, one of three, then the rest in one process."""
    alone = digest(work("sweep", 103, chunk_size=11))
    assert work("sweep", 103, chunk_size=11, out=tmp_path, shard="1/2") is None
    assert work("sweep", 103, chunk_size=11, out=tmp_path, shard="0/3") is None
    assert digest(work("sweep", 103, chunk_size=11, out=tmp_path)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_torchrun_gives_the_bits_of_one_process(tmp_path, verb, processes):
    out = tmp_path / "out"
    printed = started(torchrun(processes), verb=verb, n=600, out=str(out))
    wanted = digest(work(verb, 600))
    assert len(printed) == processes and set(printed) - {"None"} == {wanted}
    assert digest(VERBS[verb][1].load(out)) == wanted


@pytest.mark.slow
def test_torchrun_with_more_processes_than_chunks(tmp_path):
    printed = started(torchrun(3), verb="sweep", n=CHUNK + 1, out=str(tmp_path))
    assert set(printed) - {"None"} == {digest(work("sweep", CHUNK + 1))}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_shards_that_run_at_different_times(tmp_path, verb):
    printed = [
        started([], verb=verb, n=600, out=str(tmp_path), shard=f"{place}/3") for place in (1, 2, 0)
    ]
    assert printed == [["None"], ["None"], [digest(work(verb, 600))]]
