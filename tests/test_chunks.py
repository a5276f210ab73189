"""Chunks of a run, whatever happens to their folder: nothing is lost, and a run goes on."""

import errno
import inspect
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make, refuses
from crate_interp.core.run_options import Run
from crate_interp.questions import chunks
from crate_interp.questions.batches import Chunk
from crate_interp.questions.chunks import InMemory, shard_of
from crate_interp.questions.experiment import Pass, Task
from crate_interp.questions.run_folder import in_folder
from working import digest, network, work

CHUNKS = 4
SETTINGS = {"batch_size": 5, "chunk_size": 7}
WHOLE = "((0 1) (2 3))"


def joined(mine, theirs, meta):
    """Merges tables into a text that shows in which order they were merged."""
    return pd.DataFrame({"order": [f"({mine['order'].item()} {theirs['order'].item()})"]})


SWEEP = Pass("sweep", lambda chunk: {}, {"one": joined})


def task(number):
    return Task(number, 7 * number, 7 * number + 7)


def tables(number):
    chunk = {"start": [7 * number], "stop": [7 * number + 7], "seconds": [0.0]}
    return {"one": pd.DataFrame({"order": [f"{number}"]}), "chunk": pd.DataFrame(chunk)}


def run(out, settings=SETTINGS, shard="0/1", resume=True, until=CHUNKS, total=CHUNKS):
    """Makes the chunks of a shard; returns what all chunks hold, or None, and how many it made."""
    shard, made = shard_of(shard), 0
    opened = in_folder(out, ci.SweepResult, settings, {}, shard, resume)
    with opened as chunks:
        chunks.open(SWEEP)
        for number in range(until):
            if number % shard.total == shard.place and not chunks.finished(SWEEP, number):
                chunks.put(SWEEP, task(number), tables(number))
                made += 1
        if until < total:
            return None, made
        chunks.ended(SWEEP, total)
        found = chunks.merged(SWEEP, total)
    return found and found["one"]["order"].item(), made


def files(out):
    return sorted(path.name for path in (out / "chunks").glob("*.parquet"))


def tree(count, first=0):
    """The order of merging: of the largest blocks that fit, from the last one on."""
    if count == 1:
        return f"{first}"
    half = 1 << (count - 1).bit_length() - 1
    return f"({tree(half, first)} {tree(count - half, first + half)})"


@settings(deadline=None)
@given(st.integers(1, 23), st.randoms())
def test_the_order_of_merging_does_not_depend_on_the_order_of_chunks(count, random):
    chunks, numbers = InMemory({}), [*range(count)]
    random.shuffle(numbers)
    chunks.open(SWEEP)
    for number in numbers:
        chunks.put(SWEEP, task(number), tables(number))
        held = chunks.blocks["sweep"].values()
        assert sum(block.count for block in held) == numbers.index(number) + 1
    assert len(held) == count.bit_count() and len(chunks.tables) == len(held)
    assert chunks.merged(SWEEP, count)["one"]["order"].item() == tree(count)
    assert not chunks.tables  # nothing keeps their memory


@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_a_finished_pass_keeps_a_file_for_each_bit_of_its_length(tmp_path, count):
    assert run(tmp_path, until=count, total=count) == (tree(count), count)
    assert len(files(tmp_path)) == count.bit_count()
    assert run(tmp_path, until=count, total=count) == (tree(count), 0)


def test_a_deleted_chunk_is_measured_again(tmp_path):
    run(tmp_path, until=3)
    (tmp_path / "chunks" / "sweep-000002.parquet").unlink()
    assert run(tmp_path) == (WHOLE, 2)


def test_a_flipped_bit_is_found_told_and_mended(tmp_path, capfd):
    """Wherever it is; some bits of a parquet file, as those of its statistics, tell nothing."""
    run(tmp_path, until=3)
    path, made = tmp_path / "chunks" / "sweep-000002.parquet", []
    whole = path.read_bytes()
    for place in (0, *range(7, len(whole), len(whole) // 23), len(whole) - 1):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        assert run(tmp_path, until=3) == (None, len([*path.parent.glob("*.damaged")]) - len(made))
        made = [*path.parent.glob("*.damaged")]
    assert len(made) > 8 and all(kept.read_bytes() != whole for kept in made)
    assert "sweep-000002.parquet was damaged and is measured again" in capfd.readouterr().err
    assert run(tmp_path) == (WHOLE, 1)


def test_a_writer_that_died_between_two_steps_of_a_merge(tmp_path):
    """The merged block is there, and its parts are too; or two parts are not merged yet."""
    run(tmp_path, until=1)
    part = tmp_path / "chunks" / "sweep-000000.parquet"
    content = part.read_bytes()
    run(tmp_path, until=2)
    part.write_bytes(content)
    assert run(tmp_path, until=2) == (None, 0) and files(tmp_path) == ["sweep-000000+2.parquet"]
    assert run(tmp_path) == (WHOLE, 2)


def test_a_chunk_of_another_run_is_no_chunk_of_this_one(tmp_path):
    run(tmp_path / "one", until=1)
    run(tmp_path / "other", settings=SETTINGS | {"seed": 1}, until=1)
    name = "chunks/sweep-000000.parquet"
    (tmp_path / "one" / name).replace(tmp_path / "other" / name)
    assert run(tmp_path / "other", settings=SETTINGS | {"seed": 1}) == (WHOLE, CHUNKS)


HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(tmp_path):
    tmp_path.joinpath("chunks").mkdir()
    place = tmp_path / "chunks" / "shard-0-of-2.lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, place], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_two_jobs_on_one_shard(tmp_path, held):
    refuses("another process works on shard 0/2.*Wait until it", lambda: run(tmp_path, shard="0/2"))
    assert run(tmp_path, shard="1/2")[0] is None  # another shard may
    refuses("resume=False would remove its chunks", lambda: run(tmp_path, resume=False))
    held.kill()
    held.wait()
    assert run(tmp_path, shard="0/2") == (WHOLE, CHUNKS // 2)  # the lock died with it


RUNS = {
    "torn": '{"format": 3, "kind": "sw',
    "a list": "[]",
    "too deep": "[" * 10**5,
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", RUNS)
def test_settings_that_are_torn_or_hostile(tmp_path, name):
    run(tmp_path, until=2)
    (tmp_path / "run.json").write_text(RUNS[name], errors="surrogateescape")
    with pytest.raises(ValueError, match="holds no settings of a run") as caught:
        run(tmp_path)
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()
    refuses("did not write.*'run.json'. Nothing was removed", lambda: run(tmp_path, resume=False))
    (tmp_path / "run.json").rename(tmp_path / "mine.json")
    assert run(tmp_path, resume=False) == (WHOLE, CHUNKS)


@pytest.mark.parametrize("count", [1, 3, 5, 10**7])
def test_another_number_of_chunks_is_refused(tmp_path, count):
    """A smaller one would make a result of some of the data."""
    run(tmp_path, until=2)
    (tmp_path / "chunks" / "sweep.json").write_text(f'{{"chunks": {count}}}')
    refuses("chunks of 'sweep', but this data has 4.*restart", lambda: run(tmp_path))
    assert run(tmp_path, resume=False) == (WHOLE, CHUNKS)


def test_a_folder_of_an_earlier_version_is_refused_and_stays(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1, "kind": "sweep", "settings": {}}')
    refuses("format is 1 there", partial(run, tmp_path))
    assert (tmp_path / "run.json").read_text().startswith('{"format": 1')


N, CHUNK = 23, 7
SMALL = dict(n=N, chunk_size=CHUNK, batch_size=5, controls=0, probes="sparsity")


@pytest.fixture(scope="module")
def whole():
    return digest(work("sweep", **SMALL))


def swept(out, **more):
    return work("sweep", **SMALL, out=out, **more)


class Stopped(Exception):
    pass


def run_until(out, chunk, error=Stopped):
    """Runs until a chunk is reached, raises there, and returns the error."""
    left = [chunk * 2]  # a chunk is two batches

    def stop():
        left[0] -= 1
        if left[0] < 0:
            raise error

    with before_each_batch(stop), pytest.raises(error) as raised:
        swept(out, model=network())
    return raised.value


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
        result = swept(out, model=network(), **more)
    return digest(result), (len(batches) + 1) // 2


def test_an_interrupt_says_that_the_rest_stays(tmp_path, whole):
    assert f"continues in {tmp_path}." in run_until(tmp_path, 1, KeyboardInterrupt).__notes__[0]
    assert counted(tmp_path) == (whole, CHUNKS - 1)


def test_a_full_disk_loses_nothing(tmp_path, whole, monkeypatch):
    """The disk is full at the third chunk."""

    def full(path, writer):
        if path.name == "sweep-000002.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, writer)

    written = chunks.write
    monkeypatch.setattr(chunks, "write", full)
    refuses("No space left on device. Finished chunks are kept", partial(swept, tmp_path))
    monkeypatch.setattr(chunks, "write", written)
    assert counted(tmp_path) == (whole, CHUNKS - 2)


def test_a_run_in_other_settings_is_refused_by_field(tmp_path, whole):
    swept(tmp_path)
    with pytest.raises(
        ValueError, match="another model; settings.config.n_layers is 2 there and 3 here"
    ):
        swept(tmp_path, model=ci.HookedCrate(ci.CrateConfig.from_dict(
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
        refuses("[Gg]ive another folder", partial(swept, out))
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
