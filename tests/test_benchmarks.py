"""The benchmarks run and hold; `make bench` makes the long timings, with all cases."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import refuses

BENCHMARKS = Path(__file__).parent / "benchmarks"


def run(name, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, BENCHMARKS / name, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_memory_of_a_sweep_does_not_grow():
    done = run("bench_memory.py", "small")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_small_gram_is_faster():
    done = run("bench_rates.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_family_equals_its_plain_forwards():
    done = run("bench_whitebox.py", "small")
    assert done.returncode == 0 and "over forwards" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_maskcut_is_faster_than_the_dense_solver():
    done = run("bench_maskcut.py", "small")
    assert done.returncode == 0 and "dense over ours" in done.stdout, done.stdout + done.stderr


TIMED = [path for path in sorted(BENCHMARKS.glob("*.py")) if "settle()" in path.read_text()]


@pytest.mark.parametrize("path", TIMED, ids=lambda path: path.name)
def test_timings_refuse_two_threads(path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    refuses("OMP_NUM_THREADS=1", lambda: module.settle(), SystemExit)
    if path.stem != "timing":
        refuses("OMP_NUM_THREADS=1", lambda: module.main(), SystemExit)


def test_every_benchmark_with_a_timing_is_among_them():
    timed = {path for path in BENCHMARKS.glob("*.py") if "least(" in path.read_text()}
    assert timed <= set(TIMED) and len(timed) > 5
