"""Stores with right digests whose files lie: refused in a sentence, and no process ends."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.core.files import digest
from crate_interp.results.json_schemas import DESCRIPTION
from crate_interp.sweeps.stores import arrow_files
from crate_interp.sweeps.stores.activation_store import ActivationStore, facts_of
from selection import few

N = 7
STREAM, PATTERN, POOLED = "blocks.0.hook_resid_pre", "blocks.0.attn.hook_pattern", "hook_pooled"
DATA = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))
FIRST = "activations-000000.arrow"


@pytest.fixture(scope="module")
def net():
    return make(pool="mean")


@pytest.fixture(scope="module")
def whole(net, tmp_path_factory):
    out = tmp_path_factory.mktemp("s") / "out"
    points = [STREAM, PATTERN, POOLED]
    ci.store(net, DATA, points=points, out=out, batch_size=2, chunk_size=4, progress=False)
    return out


@pytest.fixture
def out(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "out")


def lie(out, content):
    """Replaces the first file of a store, and corrects size and digest in its index."""
    path = out / "chunks" / FIRST
    if content is not None:
        path.write_bytes(content)
    index = ActivationStore.load(out)
    table = index.table()
    if content is not None:
        table.loc[0, ["sha256", "bytes"]] = digest(path), len(content)
    else:
        table.loc[0, "bytes"] = 0
    ActivationStore({"files": table}, index.meta).save(out)


def buffers(path, column):
    """The buffers of a column in the first batch of a file, as (first byte, size)."""
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
        batch = next(iter(pa.ipc.open_stream(content)))
        held = batch.column(batch.schema.names.index(column)).buffers()
        return [(b.address - content.address, b.size) for b in held if b is not None and b.size]


def with_numbers(path, column, which, place, *numbers):
    """The bytes of a file with other 32-bit numbers from `place` on, in a buffer of a column."""
    content, (start, _) = bytearray(path.read_bytes()), buffers(path, column)[which]
    start += 4 * place
    content[start : start + 4 * len(numbers)] = np.array(numbers, np.int32).tobytes()
    return bytes(content)


OFFSETS = {
    "far outside": (STREAM, 0, 1, 2**30),
    "far outside, inner": (PATTERN, 1, 3, 2**30),
    "below 0": (STREAM, 0, 1, -(2**30)),
    "the row before": (STREAM, 0, 1, 0),
    "inside, other rows": (STREAM, 1, 0, 31, 62),
    "ends early": (STREAM, 0, 2, 13),
    "a text one byte longer": ("input", 0, 2, 129),
    "a shorter text": ("input", 0, 1, 63),
    "a text of another row": ("input", 0, 0, 64),
}


@pytest.mark.parametrize("kind", few(OFFSETS, 4))
def test_offsets_that_lie(net, out, kind):
    """The first three ended the process with a signal."""
    lie(out, with_numbers(out / "chunks" / FIRST, *OFFSETS[kind]))
    with pytest.raises(ValueError, match=f"is damaged: '{FIRST}': .*Repeat the same") as caught:
        ci.open_store(out)
    assert "\n" not in str(caught.value)


def rewritten(path, change, **options):
    table = change(pa.ipc.open_stream(path.read_bytes()).read_all())
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, **options) as to:
        to.write_table(table)
    return path.read_bytes()


def column(name, values):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values(table))


TABLES = {
    "compressed": (lambda table: table, dict(options=pa.ipc.IpcWriteOptions(compression="zstd"))),
    "no input": (lambda table: table.drop_columns("input"), {}),
    "samples as texts": (column("sample", lambda t: t["sample"].cast("string")), {}),
    "a missing text": (column("input", lambda t: pa.array([None] * len(t), "string")), {}),
    "a dictionary": (column("input", lambda t: t["input"].dictionary_encode()), {}),
    "doubles": (
        column(POOLED, lambda t: pa.array([[0.5] * 31] * len(t), pa.list_(pa.float64(), 31))),
        {},
    ),  # fmt: skip  # noqa: E501
    "another width": (
        column(POOLED, lambda t: pa.array([[0.5] * 30] * len(t), pa.list_(pa.float32(), 30))),
        {},
    ),  # fmt: skip  # noqa: E501
    "a missing value": (column(POOLED, lambda t: pa.array([None] * len(t), t[POOLED].type)), {}),
}


@pytest.mark.parametrize("kind", few(TABLES, 4))
def test_columns_that_lie(out, kind):
    change, options = TABLES[kind]
    lie(out, rewritten(out / "chunks" / FIRST, change, **options))
    with pytest.raises(ValueError, match=f"is damaged: '{FIRST}': .*Repeat the same"):
        ci.open_store(out)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a device"])
def test_an_arrow_file_that_is_no_file(out, kind):
    path = out / "chunks" / FIRST
    path.unlink()
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir,
     "link to a device": lambda: path.symlink_to("/dev/zero")}[kind]()  # fmt: skip
    lie(out, None)
    with pytest.raises(ValueError, match="is damaged: there is no file"):
        ci.open_store(out)


# In a process without datasets, as the check runs. Each change is tried in a process of its own.
HARNESS = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import arrow_validation
import pyarrow as pa

points, path, changes = json.load(sys.stdin)
good = open(path, "rb").read()

def values():
    with pa.memory_map(path) as file:
        return pa.ipc.open_stream(file).read_all().to_pydict()

before, found = values(), []
for change in changes:
    bad = bytearray(good)
    for place, content in change:
        bad[place : place + len(content)] = content
    open(path, "wb").write(bad)
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            arrow_validation.check(path, points, "float32")
        except Exception:
            os._exit(1)
        os._exit(0 if values() == before else 2)
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(found))
"""


def test_no_change_of_the_structure_passes_unnoticed(whole, tmp_path):
    """Whatever bytes of headers and offsets are changed: an error, or the same values."""
    path = shutil.copy(whole / "chunks" / FIRST, tmp_path)
    content = Path(path).read_bytes()
    inside = set()
    for name in ("sample", "input", STREAM, PATTERN, POOLED):
        start, size = buffers(path, name)[-1]
        inside |= set(range(start - 7, start + size))  # a change is at most eight bytes
    second = content.index(b"\xff\xff\xff\xff", max(inside))  # the next batch is left as it is
    places = [place for place in range(second) if place not in inside]
    draw, changes = random.Random(0), []
    for _ in range(150):
        change = []
        for _ in range(draw.choice((1, 1, 2))):
            size = draw.choice((1, 2, 4, 8))
            number = draw.choice((0, 1, 255, -1, 2 ** (8 * size - 1) - 1, draw.randrange(2**16)))
            number %= 2 ** (8 * size)
            place = draw.choice(places)
            change.append((place - place % size, list(number.to_bytes(size, "little"))))
        changes.append(change)
    room = Path(arrow_files.__file__).parent
    points = ActivationStore.load(whole).meta["points"]
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, room], input=json.dumps([points, path, changes]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert set(found) == {0, 1} and found.count(1) > 50


def test_a_check_that_dies_is_an_error(out, monkeypatch):
    monkeypatch.setattr(arrow_files, "_CHECK", out / "check.py")
    (out / "check.py").write_text("import os\nos.kill(os.getpid(), 11)")
    with pytest.raises(ValueError, match="the process that checked its files failed .*-11"):
        ci.open_store(out)


def test_only_files_of_others_are_checked(net, whole, out, monkeypatch):
    asked = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: asked.append(b) or run(*a, **b))
    assert len(ci.open_store(whole)) == N and not asked
    copied = ci.open_store(out)
    assert copied.with_format("torch")[:][STREAM].shape == (N, 13, 31) and len(asked) == 1
    ci.open_store(out)
    assert len(asked) == 1
    path = out / "chunks" / FIRST
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    ci.open_store(out)
    assert len(asked) == 2 and json.loads(asked[1]["input"])["paths"] == [str(path)]


SHAPES = [[-1, 3], [0], [2.0], ["3"], [True], 3, None, [[3]], [2**40]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_that_are_none(out, shape):
    meta = json.loads((out / "meta.json").read_text())
    meta["points"][STREAM] = shape
    (out / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=f"is damaged: points.{STREAM}.* is .*, not a"):
        ci.open_store(out)


@pytest.mark.parametrize("name", [3, None, 1.5, b"a", "../a.arrow", "a\0.arrow"], ids=repr)
def test_names_of_files_that_are_none(out, name):
    """Texts that are no names of files, and names that are no texts."""
    index = ActivationStore.load(out)
    table = index.table()
    table["file"] = [name] * len(table)
    ActivationStore({"files": table}, index.meta).save(out)
    with pytest.raises(ValueError, match="is not a saved ActivationStore") as caught:
        ci.open_store(out)
    assert "\n" not in str(caught.value)


LIES = [None, True, -1, 1.5, 10**30, "\ud800", [], [3], {}, {"a": 3}, float("nan")]


ROW = datasets.Dataset.from_dict({"sample": [0], "input": ["x"]})


@settings(max_examples=50)
@given(st.sampled_from([*DESCRIPTION, "crate_interp"]), st.sampled_from(LIES))
def test_data_that_calls_itself_a_store(name, value):
    held = {"crate_interp": "store", "points": {}, "stored": "float32", "model": "m", "unit": "x"}
    held |= {"data": [{"fingerprint": None, "start": 0, "stop": 1}]}
    held |= {"dtype": "float32", "model_digest": "sha256:0"}
    ROW.info.description = json.dumps(held)
    assert facts_of(ROW) == held
    ROW.info.description = json.dumps(held | {name: value})
    if name == "crate_interp" or (name, value) in (("model", None), ("points", {})):
        assert facts_of(ROW) in (None, held | {name: value})
    else:
        with pytest.raises(ValueError, match=f"calls itself a store .*{name}.* is"):
            facts_of(ROW)


@pytest.mark.parametrize("text", ['["crate_interp"]', '"crate_interp"', '{"crate_interp"', "["])
def test_other_descriptions_are_of_other_data(text):
    for description in (text, '["crate_interp", ' + "[" * 10**5, 3, ["crate_interp"], None):
        ROW.info.description = description
        assert facts_of(ROW) is None


def test_a_store_without_its_columns(net, whole):
    data = ci.open_store(whole)
    for given_ in (data.select_columns(["sample", "input"]), data.rename_column("sample", "place")):
        with pytest.raises(ValueError, match="the column .* is missing, or has another shape"):
            ci.sweep(net, given_, progress=False)
