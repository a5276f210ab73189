"""Worker processes that decode samples ahead: same bits, own errors, no process left behind."""

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch

import crate_interp as ci
from conftest import PLAIN, make
from crate_interp.questions.batches import Chunk
from gathered import CHUNKS, same, table


@pytest.fixture(scope="module")
def model():
    return make(**PLAIN)


@pytest.fixture(scope="module")
def wanted(model):
    return ci.sweep(model, table(), **CHUNKS)


class Calls:
    n = 0


def children():
    """The processes of this one that still run; those that end get a moment."""
    gc.collect()
    for _ in range(200):
        if not multiprocessing.active_children():
            break
        time.sleep(0.05)
    return multiprocessing.active_children()


@pytest.mark.parametrize("workers", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_do_not_change_a_bit(model, wanted, workers):
    random = torch.get_rng_state()
    same(ci.sweep(model, table(), workers=workers, **CHUNKS), wanted)
    assert torch.equal(random, torch.get_rng_state())
    assert children() == []


@pytest.mark.parametrize("how", ["killed", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_what_is_done_stays(model, wanted, how, tmp_path, monkeypatch):
    calls, measure = Calls(), Chunk.measure

    def stopped(*given):  # a forward would be a setting of the run
        calls.n += 1
        if calls.n == 5:
            (one, *_) = multiprocessing.active_children()
            if how == "interrupted":
                raise KeyboardInterrupt
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            # a signal tells of it, as an error in whatever runs then: here, and not in a library
            # that makes a warning of it
            time.sleep(60)
        measure(*given)

    monkeypatch.setattr(Chunk, "measure", stopped)
    with pytest.raises(RuntimeError if how == "killed" else KeyboardInterrupt) as error:
        ci.sweep(model, table(), workers=2, out=tmp_path, **CHUNKS)
    if how == "killed":
        assert "DataLoader worker" in str(error.value)
    del error
    assert children() == []
    assert (tmp_path / "chunks" / "sweep-000000.parquet").is_file()
    same(ci.sweep(model, table(), workers=2, out=tmp_path, **CHUNKS), wanted)
