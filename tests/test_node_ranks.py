"""The first process of a node loads before the others; they share nothing but files."""

import threading
import time

import pytest
import torch

from crate_interp.questions.node_ranks import after_rank_0, device_of_rank


@pytest.fixture
def rank(monkeypatch):
    def become(number):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/run")

    return become


def waiting(out):
    """Starts a thread that goes second, and returns it and what it notes when it may go."""
    went = []

    def go():
        with after_rank_0(out):
            went.append(time.monotonic())

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread, went


def test_a_process_that_is_no_rank_goes_at_once(tmp_path, monkeypatch, rank):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with after_rank_0(tmp_path / "out"):
        pass
    rank(1)
    with after_rank_0(None):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_second_rank_goes_when_the_first_is_done(tmp_path, rank, capfd):
    rank(0)
    with after_rank_0(tmp_path):
        rank(1)
        thread, went = waiting(tmp_path)
        thread.join(0.3)
        assert thread.is_alive() and not went
        done = time.monotonic()
    thread.join()
    assert went[0] >= done and capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_others_go_ahead_when_the_first_fails(tmp_path, rank, capfd, error):
    rank(0)
    with pytest.raises(error), after_rank_0(tmp_path):
        raise error("no such model")
    rank(1)
    with after_rank_0(tmp_path):
        pass
    assert capfd.readouterr().err == "rank 0 of this node could not load: this process continues.\n"


def test_the_device_of_a_rank(monkeypatch, rank):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rank(3)
    assert device_of_rank() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert device_of_rank() == "cuda:3"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_rank() == "cuda:0"  # each rank sees one, its own
    monkeypatch.delenv("LOCAL_RANK")
    assert device_of_rank() == "cuda:0"
