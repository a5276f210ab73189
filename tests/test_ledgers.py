"""The folder of a run, whatever happens to it: nothing that is done is lost, no number is wrong."""

import json
import subprocess
import sys

import pandas as pd
import pytest

from conftest import refuses
from crate_interp.questions import ledger as ledgers
from crate_interp.sweeps.ledgers.ledger import Ledger
from crate_interp.questions.shards import shard_of

CHUNKS = 4
SETTINGS = {
    "format": 1,
    "kind": "sweep",
    "stages": ["sweep"],
    "settings": {"batch_size": 5, "chunk_size": 7},
}
WHOLE = [0.0, 1.0, 4.0, 9.0]


def run(out, settings=SETTINGS, shard="0/1", resume=True, until=CHUNKS):
    """Makes the chunks of a shard; returns what all chunks hold, or None, and how many it made."""
    shard, made = shard_of(shard), 0
    with ledgers.opened(out, settings, shard, resume) as ledger:
        entries = ledger.entries("sweep")
        for number in range(until):
            if number % shard.total == shard.place and not ledger.has("sweep", number, entries):
                tables = {"one": pd.DataFrame({"square": [float(number**2)]})}
                ledger.write("sweep", number, 7 * number, 7 * number + 7, tables, 0.1)
                made += 1
        if until < CHUNKS:
            return None, made
        ledger.begin("sweep", CHUNKS)
        if ledger.missing("sweep") != []:
            return None, made
        entries = ledger.entries("sweep")
        found = [ledger.read("sweep", number, entries) for number in range(CHUNKS)]
    return [tables["one"]["square"].item() for tables in found], made


def chunk(out, number):
    return Ledger(out).path("sweep", number)


def lines(out):
    return [path for path in out.iterdir() if path.name.startswith("ledger-")]


def test_a_deleted_chunk_is_measured_again(tmp_path):
    run(tmp_path)
    chunk(tmp_path, 1).unlink()
    assert run(tmp_path) == (WHOLE, 1)


def test_a_torn_line_costs_its_chunk(tmp_path):
    run(tmp_path, until=3)
    (path,) = lines(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])  # while a line is written, its chunk has no name
    chunk(tmp_path, 2).unlink()
    assert run(tmp_path) == (WHOLE, CHUNKS - 2)
    assert all(json.loads(line) for line in path.read_text().splitlines()[:2])


HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(tmp_path):
    """Another process that works on a shard."""
    tmp_path.joinpath("chunks").mkdir()
    place = tmp_path / ".crate-interp-shard-0-of-2.lock"
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
    "torn": '{"format": 1, "kind": "sw',
    "a list": "[]",
    "too deep": "[" * 10**5,
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", RUNS)
def test_settings_that_are_torn_or_hostile(tmp_path, name):
    run(tmp_path, until=2)
    (tmp_path / "run.json").write_text(RUNS[name], errors="surrogateescape")
    with pytest.raises(ValueError, match="Move it to another place.*restart") as caught:
        run(tmp_path)
    assert len(str(caught.value)) < 2000 and str(caught.value).isprintable()
    refuses("did not write.*'run.json'. Nothing was removed", lambda: run(tmp_path, resume=False))
    (tmp_path / "run.json").rename(tmp_path / "mine.json")
    assert run(tmp_path, resume=False) == (WHOLE, CHUNKS)


@pytest.mark.parametrize("count", [3, 5, 10**7])
def test_another_number_of_chunks_is_refused(tmp_path, count):
    """A smaller one would make a result of some of the data."""
    run(tmp_path, until=2)
    (tmp_path / "ledger-zz-1.jsonl").write_text(json.dumps({"stage": "sweep", "chunks": count}))
    refuses(f"record {count:,} chunks .* data has 4 chunks.*restart", lambda: run(tmp_path))
    assert run(tmp_path, resume=False) == (WHOLE, CHUNKS)
