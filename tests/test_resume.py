"""A run goes on where an earlier one ended, whatever happened to its folder; its options."""

import errno
import inspect
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import crate_interp as ci
from conftest import make, refuses
from crate_interp.core.run_options import Run
from crate_interp.questions import chunks
from crate_interp.questions.batches import Chunk
from working import digest, network, work

N, CHUNK, CHUNKS = 23, 7, 4
SMALL = dict(n=N, chunk_size=CHUNK, batch_size=5, controls=0, probes="sparsity")


@pytest.fixture(scope="module")
def whole():
    return digest(work("sweep", **SMALL))


def run(out, **more):
    return work("sweep", **SMALL, out=out, **more)


class Stopped(Exception):
    pass


def run_until(out, chunk, error=Stopped):
    """Runs until a chunk is reached, and raises there."""
    left = [chunk * 2]  # a chunk is two batches

    def stop():
        left[0] -= 1
        if left[0] < 0:
            raise error

    with before_each_batch(stop), pytest.raises(error):
        run(out, model=network())


@contextmanager
def before_each_batch(act):
    """Calls `act()` before each batch is measured; no hook, which would be an edit of the model."""
    measure = Chunk.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chunk, "measure", lambda *given: (act(), measure(*given))[1])
        yield


def counted(out, **more):
    """Returns the digest of a run, and how many chunks it measured."""
    batches = []
    with before_each_batch(lambda: batches.append(1)):
        result = run(out, model=network(), **more)
    return digest(result), (len(batches) + 1) // 2


def test_an_interrupt_says_that_the_rest_stays(tmp_path, whole, capfd):
    run_until(tmp_path, 1, KeyboardInterrupt)
    assert "interrupted. The same call continues" in capfd.readouterr().err
    assert counted(tmp_path) == (whole, CHUNKS - 1)


def test_a_full_disk_loses_nothing(tmp_path, whole, monkeypatch):
    """The disk is full at the third chunk."""

    def full(path, writer):
        if path.name == "sweep-000002.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, writer)

    written = chunks.write
    monkeypatch.setattr(chunks, "write", full)
    refuses("No space left on device. Finished chunks are kept", partial(run, tmp_path))
    monkeypatch.setattr(chunks, "write", written)
    assert counted(tmp_path) == (whole, CHUNKS - 2)


def test_a_run_in_other_settings_is_refused_by_field(tmp_path, whole):
    run(tmp_path)
    with pytest.raises(
        ValueError, match="another model; settings.config.n_layers is 2 there and 3 here"
    ):
        run(tmp_path, model=ci.HookedCrate(ci.CrateConfig.from_dict(
            network().cfg.to_dict() | {"n_layers": 3})).eval())  # fmt: skip
    with pytest.raises(ValueError, match="settings.batch_size is 5 there and 6 here.*restart"):
        work("sweep", **SMALL | {"batch_size": 6}, out=tmp_path)
    assert counted(tmp_path) == (whole, 0)
    restarted = work("sweep", **SMALL | {"batch_size": 6}, out=tmp_path, resume=False)
    assert restarted.meta["batch_size"] == 6


def test_folders_that_cannot_be_written(tmp_path):
    """The suite may run as root, which may write anywhere but in these places."""
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below", Path("/proc/nothing"), Path("/dev/null/out")):
        refuses("[Gg]ive another folder", partial(run, out))
    assert file.read_text() == "mine"


def verbs(kind):
    """Every public function whose options are of that class."""
    named = [getattr(room, name) for room in (ci, ci.circuits, ci.saes) for name in room.__all__]
    found = dict.fromkeys(item for item in named if inspect.isfunction(item))
    taken = {item: inspect.signature(item).parameters.get("run") for item in found}
    return [item for item, run in taken.items() if run and run.annotation.__args__ == (kind,)]


IN_CHUNKS = verbs(Run)


@pytest.mark.parametrize("verb", IN_CHUNKS)
def test_an_unknown_option_gets_its_nearest(verb, unchecked):
    more = {"saes": {}} if verb is ci.saes.evaluate else {}
    more |= {"points": None} if verb is ci.store else {}
    with pytest.raises(TypeError, match=r"'batchsize'\. Did you mean batch_size"):
        verb(make(), torch.zeros(1, 3, 6, 20), batchsize=3, **more)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyzzy'\. It takes model,"):
        verb(make(), torch.zeros(1, 3, 6, 20), xyzzy=3, **more)
