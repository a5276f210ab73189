"""The benchmarks run and hold; the slow timings are made by `make bench`, a looser look at them here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


def run(name, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, BENCHMARKS / name, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )


def test_memory_of_a_sweep_does_not_grow():
    done = run("bench_memory.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_small_gram_is_faster():
    done = run("bench_rates.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_maskcut_is_faster_than_the_dense_solver():
    done = run("bench_maskcut.py", "small")
    assert done.returncode == 0 and "dense over ours" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["bench_forward.py", "bench_probes.py"])
def test_timings_refuse_two_threads(name):
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1 and "OMP_NUM_THREADS=1" in done.stderr
