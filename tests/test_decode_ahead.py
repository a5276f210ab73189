"""Worker processes that decode samples ahead: same bits, own errors, no process left behind."""

import gc
import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch

import crate_interp as ci
from conftest import PLAIN, make, make_lm
from crate_interp.sweeps.runs import decode_ahead
from crate_interp.sweeps.runs.batches import Chunk
from gathered import CHUNKS, COUNT, folder, same, table


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
def test_all_kinds_of_data(model, wanted):
    lm = make_lm()
    tokens = torch.randint(0, 47, (COUNT, 13), generator=torch.Generator().manual_seed(1))
    for network, data in ((model, table().to_iterable_dataset()), (lm, tokens)):
        result = ci.sweep(network, data, workers=2, **CHUNKS)
        same(result, wanted if network is model else ci.sweep(lm, tokens, **CHUNKS))


@pytest.mark.slow
def test_nothing_is_forked_where_nothing_is_left_to_do(model, tmp_path, monkeypatch):
    ci.sweep(model, table(), out=tmp_path, workers=2, **CHUNKS)
    monkeypatch.setattr(decode_ahead, "_started", None)
    ci.sweep(model, table(), out=tmp_path, workers=2, **CHUNKS)


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
    with pytest.raises(ValueError, match=r"a/22\.png' is gone"):
        ci.sweep(model, samples, workers=2, **CHUNKS)
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
    with pytest.raises(ValueError if how == "killed" else KeyboardInterrupt) as error:
        ci.sweep(model, table(), workers=2, out=tmp_path, **CHUNKS)
    if how == "killed":
        assert "ended (DataLoader worker" in str(error.value) and "continues" in str(error.value)
    del error
    assert children() == []
    assert (tmp_path / "chunks" / "sweep-000000.parquet").is_file()
    same(ci.sweep(model, table(), workers=2, out=tmp_path, **CHUNKS), wanted)


@pytest.mark.slow
def test_few_batches_wait(model):
    """Two for each worker, and one that is measured."""
    asked, measured = [], []
    data = ci.data.open_data(table(), model.preprocess)
    counts = multiprocessing.get_context("fork").Value("i", 0)

    def read(start, stop):
        with counts.get_lock():
            counts.value += 1
        return data.read(start, stop)

    def forward(network, batch):
        measured.append(len(batch))
        time.sleep(0.05)  # time enough to read too much
        asked.append(counts.value)
        network.full_forward(batch)

    samples = ci.data.Samples(COUNT, None, "some", read)
    ci.sweep(model, samples, workers=2, forward=forward, **CHUNKS | dict(batch_size=1))
    assert sum(measured) == COUNT
    assert all(count - place <= 2 * 2 + 1 for place, count in enumerate(asked))
    assert max(count - place for place, count in enumerate(asked)) > 1


def test_exceptions_that_are_sent_keep_their_words():
    class Odd(ValueError):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    class Foreign(Exception):
        pass

    for error, kind, words in (
        (Odd("this", "that"), ValueError, "this and that"),
        (Foreign("elsewhere"), RuntimeError, "Foreign: elsewhere"),
        (OSError(5, "Input/output error"), OSError, "[Errno 5] Input/output error"),
    ):
        sent = pickle.loads(pickle.dumps(decode_ahead._sendable(error)))
        assert type(sent) is kind and str(sent) == words


def test_wrong_numbers_of_workers(model, monkeypatch):
    with pytest.raises(ValueError, match="workers=-1"):
        ci.sweep(model, table(), workers=-1, **CHUNKS)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ValueError, match="workers=2 needs processes that fork"):
        ci.sweep(model, table(), workers=2, **CHUNKS)
