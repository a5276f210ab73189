"""Folders of runs that claim what is not there: answered at once, in a sentence."""

import functools
import json
import os
import shutil
import time

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.core.files import digest
from crate_interp.results import json_schemas
from crate_interp.sweeps.ledgers.chunk_tables import packed, unpacked
from crate_interp.sweeps.ledgers.ledger import Ledger

N = 7
DATA = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))
OPTIONS = dict(probes="sparsity", controls=0, batch_size=2, chunk_size=3, progress=False)
RUN = {"format": 1, "kind": "sweep", "stages": ["sweep"], "settings": {}}
LIES = [None, True, -1, 1.5, 5, 10**30, "\ud800", "a\nb", "", [], [3], {}, {"a": []}, float("nan")]
DEEP = functools.reduce(lambda inner, _: [inner], range(500), [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("r") / "out"
    ci.sweep(make(), DATA, out=out, **OPTIONS)
    return out


def folder(out, *lines, settings=RUN):
    (out / "chunks").mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps(settings))
    (out / "ledger-a-1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return out


def timed(work):
    start = time.process_time()
    try:
        return work(), time.process_time() - start
    except ValueError as error:
        assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 5000
        return error, time.process_time() - start


@pytest.mark.parametrize("chunks", [100_000, 10**7])
def test_a_ledger_that_claims_millions_of_chunks(tmp_path, chunks):
    """This took over 40 seconds."""
    out = folder(tmp_path, {"stage": "sweep", "chunks": chunks})
    assert (out / "ledger-a-1.jsonl").stat().st_size < 45
    report, seconds = timed(lambda: ci.verify(out))
    words = f"0 of {chunks:,}; missing or damaged: 0, 1, 2, 3, 4, 5, 6, 7, ..."
    assert report["checks"] == [{"name": "chunks of sweep", "ok": False, "detail": words}]
    error, more = timed(lambda: ci.merge(out))
    assert f"(missing: sweep 0-{chunks - 1})" in str(error) and seconds + more < 1


def entry(chunk, sha256=f"sha256:{0:064}"):
    return {"stage": "sweep", "chunk": chunk, "start": chunk, "stop": chunk + 1, "sha256": sha256}


@pytest.mark.slow
def test_many_missing_chunks(tmp_path):
    """This took over 20 seconds: the set of missing chunks was made again for each chunk."""
    n = 20_000
    out = folder(tmp_path, {"stage": "sweep", "chunks": n}, *map(entry, range(n)))
    report, seconds = timed(lambda: ci.verify(out))
    assert report["checks"][0]["detail"].startswith(f"0 of {n:,};") and seconds < 8


def test_many_damaged_chunks(tmp_path):
    n = 300
    out = folder(tmp_path, {"stage": "sweep", "chunks": n}, *map(entry, range(n)))
    for chunk in range(n):
        Ledger(out).path("sweep", chunk).write_bytes(b"")
    assert f"(damaged: sweep 0-{n - 1})" in answered(out)


def test_ranges_of_missing_and_damaged_chunks(tmp_path):
    out = folder(tmp_path, {"stage": "sweep", "chunks": 10**7}, *map(entry, (3, 4, 7, 10**8)))
    Ledger(out).path("sweep", 4).write_bytes(b"")
    assert Ledger(out).missing("sweep") == [
        range(3), range(3, 4), range(4, 5), range(5, 7), range(7, 8), range(8, 10**7),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"missing: sweep 0-3, 5-9999999; damaged: sweep 4\)"):
        ci.merge(out)


def test_two_numbers_of_chunks_are_refused(whole, tmp_path):
    """The smaller number would make a result of a part of the data."""
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "ledger-zz-1.jsonl").write_text(json.dumps({"stage": "sweep", "chunks": 2}))
    match = "record both 3 and 2 chunks of 'sweep'. Start over"
    with pytest.raises(ValueError, match=match):
        ci.merge(out)
    assert match in ci.verify(out)["checks"][-1]["detail"]
    (out / "meta.json").unlink()
    with pytest.raises(ValueError, match=match):
        ci.sweep(make(), DATA, out=out, **OPTIONS)


def answered(out):
    """A report and, from merge, a sentence; whatever the folder holds."""
    report = ci.verify(out)
    json.dumps(report).encode()
    assert not report["ok"] and "\ud800" not in str(report)
    error, _ = timed(lambda: ci.merge(out))
    assert isinstance(error, ValueError)
    return str(error)


@pytest.mark.parametrize("name", [name.removesuffix("?") for name in json_schemas.RUN])
@pytest.mark.parametrize("value", [*LIES, "gone", DEEP], ids=lambda value: repr(value)[:12])
def test_settings_that_lie(tmp_path, name, value):
    if (name, value) == ("settings", {}) or (name == "settings" and value == {"a": []}):
        return
    changed = {**RUN, name: value}
    if value == "gone":
        del changed[name]
    out = folder(tmp_path, {"stage": "sweep", "chunks": 2}, settings=changed)
    if "stages" in changed:
        assert name in answered(out) or value == DEEP
    else:
        with pytest.raises(ValueError, match="stages is missing"):
            ci.merge(out)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["chunk", "start", "stop", "sha256", "seconds", "stage", "chunks"]),
    st.sampled_from([*LIES, DEEP]),
)
def test_lines_that_lie(tmp_path_factory, name, value):
    """Such a line is not ours: what it claims is missing."""
    lines = [{"stage": "sweep", "chunks": 2}, entry(0) | {"seconds": 1}, entry(1)]
    lines[0 if name == "chunks" else 1][name] = value
    numbers = (-1, 1.5, 10**30) if name == "seconds" else ()  # any number is a duration
    if value == 5 and name not in ("sha256", "stage") or value in numbers:
        return  # no lie
    out = folder(tmp_path_factory.mktemp("r"), *lines)
    assert "missing: " in answered(out)
    assert 0 not in Ledger(out).entries("sweep") or name == "chunks"


COLUMNS = [
    ("chunk", "start"), ("chunk", "stop"), ("chunk", "seconds"), ("samples", "sample"),
    ("samples", "layer"), ("samples", "sparsity.l1"), ("moments", "mean"), ("moments", "head"),
    ("weights", "mean"), ("counts", "name"), ("counts", "value"),
]  # fmt: skip
VALUES = [None, -1, 0.5, "x", b"x", [1, 2], True, 2**62, float("nan")]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.sampled_from(COLUMNS), st.sampled_from([*VALUES, "gone", "no rows"]))
def test_tables_of_chunks_that_lie(whole, tmp_path_factory, place, value):
    """Digests are right: a result, or an error in a sentence; never an error of another type."""
    out = shutil.copytree(whole, tmp_path_factory.mktemp("r") / "out")
    name, column = place
    path = out / "chunks" / "sweep-000001.parquet"
    before = digest(path)
    tables = unpacked(path.read_bytes())
    table = tables.get(name, pd.DataFrame({"name": ["a"], "value": [1.0]}))
    if value == "gone":
        tables[name] = table.drop(columns=column, errors="ignore")
    elif value == "no rows":
        tables[name] = table.iloc[:0]
    else:
        tables[name] = table.assign(**{column: pd.Series([value] * len(table))})
    path.write_bytes(packed(tables))
    for ledger in out.glob("ledger-*"):
        ledger.write_text(ledger.read_text().replace(before, digest(path)))
    (out / "meta.json").unlink()
    timed(lambda: ci.merge(out))
    json.dumps(ci.verify(out))
    if name == "chunk" and value in ("gone", "no rows", "x"):
        error, _ = timed(lambda: ci.merge(out))
        assert "its table chunk" in str(error) and "sweep-000001" in str(error)


def test_a_chunk_with_tables_of_another_kind(whole, tmp_path):
    """A run that continues reads the same chunks as a merge."""
    out = shutil.copytree(whole, tmp_path / "out")
    path = out / "chunks" / "sweep-000001.parquet"
    before = digest(path)
    path.write_bytes(packed(unpacked(path.read_bytes()) | {"poems": pd.DataFrame({"a": [1]})}))
    for ledger in out.glob("ledger-*"):
        ledger.write_text(ledger.read_text().replace(before, digest(path)))
    (out / "meta.json").unlink()
    for work in (lambda: ci.merge(out), lambda: ci.sweep(make(), DATA, out=out, **OPTIONS)):
        error, _ = timed(work)
        assert isinstance(error, ValueError) and "poems" in str(error)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("name", ["samples.parquet", "run.json", "meta.json", "ledger",
                                  "chunks/sweep-000001.parquet"])  # fmt: skip
def test_special_files(whole, tmp_path, kind, name):
    """A pipe in place of samples.parquet was opened, and nobody writes into it."""
    out = shutil.copytree(whole, tmp_path / "out")
    path = next(out.glob("ledger-*")) if name == "ledger" else out / name
    path.unlink()
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir,
     "device": lambda: path.symlink_to("/dev/zero")}[kind]()  # fmt: skip
    if name in ("run.json", "meta.json"):
        timed(lambda: ci.verify(out))
    else:
        assert not ci.verify(out)["ok"]
    if name == "samples.parquet":
        with pytest.raises(ValueError, match="is a folder, pipe, socket or device"):
            ci.SweepResult.load(out)
    timed(lambda: ci.merge(out))
