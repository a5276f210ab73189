"""Worker processes that decode samples ahead: same bits, own errors, no process left behind."""

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch

import crate_interp as ci
from conftest import PLAIN, make, refuses
from crate_interp.questions.batches import Chunk
from gathered import CHUNKS, folder, same, table


@pytest.fixture(scope="module")
def model():
    return make(**PLAIN)


@pytest.fixture(scope="module")
def wanted(model):
    return ci.sweep(model, table(), **CHUNKS)


class Calls:
    """How often something was called."""

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


@pytest.mark.slow
def test_errors_come_out_as_they_are(model, tmp_path):
    root = folder(tmp_path)
    (root / "b" / "05.png").write_bytes(b"no picture")
    messages = []
    for workers in (0, 2):
        with pytest.raises(ValueError, match="1 of the samples 0 to 6 cannot") as error:
            ci.sweep(model, f"imagefolder:{root}", workers=workers, **CHUNKS)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "Traceback" not in messages[0]
    (root / "b" / "05.png").unlink()
    samples = ci.data.open_data(f"imagefolder:{root}", model.preprocess)
    (root / "a" / "22.png").unlink()
    refuses(r"a/22\.png' is gone", lambda: ci.sweep(model, samples, workers=2, **CHUNKS))
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


def test_wrong_numbers_of_workers(model):
    refuses("workers=-1", lambda: ci.sweep(model, table(), workers=-1, **CHUNKS))
