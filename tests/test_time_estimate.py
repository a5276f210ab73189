"""What long work says at its beginning."""

import pytest
import torch

import crate_interp as ci
from crate_interp.sweeps.runs import time_estimate as module
from crate_interp.sweeps.runs.time_estimate import Forecast, crowded


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def run(clock, steps, n, **given):
    counted = []
    forecast = Forecast("sweep", "images", n, counted.append, busy=0.0, **given)
    for seconds, count in steps:
        clock[0] += float(seconds)
        forecast(count)
    return counted


def test_work_over_ten_minutes_is_announced_once(clock, capsys, monkeypatch):
    """0.5 s an image after a first batch of 100 s, which the controls make slow."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert run(clock, [(100, 20), (7, 14), (4, 8), (4, 8)], 5060) == [20, 14, 8, 8]
    told = capsys.readouterr().err
    assert told.count("sweep:") == 1
    assert "about 42 min for 5,060 images on this machine (1 thread); --limit n" in told


def test_short_work_is_not_announced(clock, capsys):
    run(clock, [(100, 20), (11, 22), (4, 8)], 1210)
    assert capsys.readouterr().err == ""
    run(clock, [(100, 20), (9, 2)], 10**6)  # nothing is known yet
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "threads, processes, load, cores, told",
    [(1, 1, 50, 2, False), (2, 1, 0.1, 2, False), (2, 1, 3, 2, True), (4, 4, 0, 8, True)],
)
def test_more_threads_than_cores(threads, processes, load, cores, told, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(module, "_cores", lambda: cores)
    assert ("OMP_NUM_THREADS=1" in crowded(float(load))) == told


def test_a_sweep_tells_it_unless_progress_is_off(monkeypatch, capsys):
    monkeypatch.setattr(module, "_TRIAL", 0.0)
    monkeypatch.setattr(module, "LONG", 0.0)
    torch.manual_seed(0)
    cfg = ci.CrateConfig(
        family="crate", d_model=15, n_layers=1, n_heads=3, image_size=14, patch_size=7, channels=1
    )
    model, images = ci.HookedCrate(cfg).eval(), torch.randn(7, 1, 14, 14)
    given = {"probes": ["sparsity"], "controls": 0, "batch_size": 3}
    ci.sweep(model, images, **given)
    assert "for 7 images on this machine" in capsys.readouterr().err
    ci.sweep(model, images, progress=False, **given)
    assert capsys.readouterr().err == ""
