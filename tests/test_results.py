"""Results: saved, hashed, loaded, merged from two halves, or refused in a line."""

import datetime
import json
import math
import os
import shutil
from functools import partial
from operator import attrgetter

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, refuses
from crate_interp.core.files import digest
from crate_interp.data import open_data, part
from crate_interp.results.result_files import OF_A_RUN, digest_of_result
from folders import two_sweeps
from golden.cases import SMALL
from golden.subjects import subject
from selection import few

N, CUT, BATCH = 11, 6, 3  # the cut lies between two batches, so that both ways see the same ones
QUIET = dict(batch_size=BATCH, progress=False)


SLOW = ("audit", "surgery", "segment", "atlas")  # they take seconds
MERGED = ("sweep", "atoms", "circuits.composition", *SLOW)


@pytest.fixture(scope="module")
def vision():
    model, data = subject("crate-alpha")
    return model, open_data(data, model.preprocess, None, model.preprocess_masks)


def same(one, two, rtol, leave_out=()):
    assert list(one.tables) == list(two.tables)
    for name, table in one.tables.items():
        if name not in leave_out:
            pd.testing.assert_frame_equal(table, two.table(name), rtol=rtol, atol=0, obj=name)


def survives(result, folder):
    """A result comes back as it was saved."""
    again = type(result).load(result.save(folder))
    same(result, again, 0)
    assert again.meta == result.meta and repr(again) == repr(result)
    files = json.loads((folder / INDEX).read_text())["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {INDEX}
    assert result.meta["format"] == 1 and result.meta["result"] == result.KIND


@pytest.mark.parametrize("kind", few(MERGED, 3))
def test_two_halves_merge_into_the_whole(vision, kind, tmp_path):
    model, data = vision
    measure = partial(attrgetter(kind)(ci), **SMALL[kind], **QUIET)
    whole = measure(model, data)
    halves = [measure(model, part(data, *ends)) for ends in ((0, CUT), (CUT, N))]
    survives(whole, tmp_path)
    # sums of floats in another order; examples keep the heads that each half had
    leave_out = ("examples",) if kind == "segment" else ()
    for merged in (halves[0].merge(halves[1]), halves[1].merge(halves[0])):
        same(whole, merged, 1e-12, leave_out)
        assert merged.meta["n_samples"] == N
        assert merged.meta["data"] == whole.meta["data"]
        assert merged.meta["data"][0]["start"] == 0 and merged.meta["data"][0]["stop"] == N
        assert "disjoint" not in merged.meta
    refuses("samples 0 to 5 are in both results", lambda: halves[0].merge(whole))


def test_other_data_is_numbered_after_ours(vision):
    model, data = vision
    one = ci.sweep(model, data.read(0, 4), controls=0, **QUIET)
    two = ci.sweep(model, data.read(4, 9), controls=0, **QUIET)
    merged = one.merge(two)
    assert list(merged.samples()["sample"].unique()) == list(range(9))
    prints = [result.meta["data"][0]["fingerprint"] for result in (one, two)]
    assert merged.meta["data"] == [
        {"fingerprint": prints[0], "start": 0, "stop": 4},
        {"fingerprint": prints[1], "start": 0, "stop": 5, "first": 4},
    ]
    assert merged.meta["disjoint"] == "not checked"
    third = ci.sweep(model, data.read(9, 11), controls=0, **QUIET)
    assert list(merged.merge(third).samples()["sample"].unique()) == list(range(11))
    refuses("samples 0 to 4 are in both results", lambda: merged.merge(two))


def test_what_differs_is_named(vision):
    model, data = vision
    one = ci.sweep(model, part(data, 0, CUT), probes="sparsity", **QUIET)
    for field, other in (
        ("probes", ci.sweep(model, part(data, CUT, N), probes="attention", **QUIET)),
        ("model_digest", ci.sweep(make("crate-alpha", seed=1), data.read(6, 8), probes="sparsity")),
        ("dtype", _with(one, dtype="float64")),
        ("versions", _with(one, versions={"torch": "0"})),
    ):
        refuses(f"the results differ in {field}: ", partial(one.merge, other))
    with pytest.raises(ValueError, match="cannot merge AtomResult into SweepResult"):
        one.merge(ci.atoms(model, part(data, CUT, N), **QUIET))


def _with(result, **changes):
    return type(result)(result.stored, result.meta | changes)


INDEX = "meta.json"


@pytest.fixture(scope="module")
def result():
    data = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    return ci.sweep(make(), data, probes="sparsity", controls=0, progress=False)


@pytest.fixture
def out(result, tmp_path):
    return result.save(tmp_path / "out")


def refused(out, match):
    assert refuses(match, lambda: ci.SweepResult.load(out)).isprintable()


def index(out, **change):
    """Writes entries of meta.json, or removes those that are "gone"."""
    meta = json.loads((out / INDEX).read_text()) | change
    (out / INDEX).write_text(json.dumps({k: v for k, v in meta.items() if v != "gone"}))


def written(out, table):
    """Writes a table, and its digest, as somebody does who knows the format."""
    path = out / "samples.parquet"
    table.to_parquet(path, index=False)
    index(out, files=json.loads((out / INDEX).read_text())["files"] | {path.name: digest(path)})


@pytest.mark.parametrize("name", ["samples", "moments", "layers"])
def test_a_changed_bit_of_a_table_is_refused(out, name):
    path = out / f"{name}.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refused(out, f"{name}.parquet' does not belong .*: its digest is not the one in meta.json. Sa")
    path.unlink()
    refused(out, f"{name}.parquet' does not belong")


def test_a_changed_number_is_refused_though_its_file_has_its_digest(out, result):
    table = result.table("samples")
    written(out, table)
    assert ci.SweepResult.load(out).digest() == result.digest()
    table.loc[0, "sparsity.l1"] += 1e-12
    written(out, table)
    refused(out, "of this version: ValueError, it has changed since it was saved. Measure it")


def test_a_changed_entry_of_meta_is_refused_unless_it_is_of_the_run(out):
    for change, right in (
        (dict(threads=99), False), (dict(dtype="float64"), False), (dict(seconds=0.5), True),
        (dict(engine="ray"), True), (dict(device="cuda:0"), True), (dict(n_samples=4), False),
    ):  # fmt: skip
        copy = shutil.copytree(out, out.with_name(next(iter(change))))
        index(copy, **change)
        ci.SweepResult.load(copy) if right else refused(copy, "it has changed since it was saved")


DAMAGES = {
    "no index": (lambda out: (out / INDEX).unlink(), "leaves no meta.json"),
    "text": (lambda out: (out / INDEX).write_text("x"), "does not hold a saved SweepResult"),
    "deep": (lambda out: (out / INDEX).write_text("[" * 10**5), "does not hold a saved Sweep"),
    "list": (lambda out: (out / INDEX).write_text("[]"), "kind 'None' in format None"),
    "of nobody": (lambda out: index(out, format="gone"), "in format None, but SweepResult"),
    "newer": (lambda out: index(out, format=2), "in format 2, but SweepResult.load of this"),
    "other kind": (lambda out: index(out, result="a\x1b[2J"), r"of kind 'a\\+x1b\[2J' in for"),
    "no unit": (
        lambda out: index(out, unit="gone", hash="gone"),
        "of this version: KeyError, 'unit'",
    ),
    "no files": (lambda out: index(out, files="gone"), "its digest is not the one in meta.json"),
    "not parquet": (lambda out: (out / "samples.parquet").write_text("x"), "its digest is not"),
    "pipe": (
        lambda out: ((out / "samples.parquet").unlink(), os.mkfifo(out / "samples.parquet")),
        "is a folder, pipe, socket or device",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_a_result_is_refused_in_a_sentence(out, damage):
    change, match = DAMAGES[damage]
    change(out)
    refused(out, match)


def test_a_folder_of_an_earlier_version_loads(out, result):
    """Early versions saved no hash, and entries that this version does not know."""
    index(out, hash="gone", mine={"a": [1, None]})
    loaded = ci.SweepResult.load(out)
    assert loaded.meta["mine"] == {"a": [1, None]}
    pd.testing.assert_frame_equal(loaded.table(), result.table())


def test_nothing_that_a_result_holds_is_run_by_its_view(out, result):
    markup = '<img src=x onerror="alert(1)">\x1b[2J'
    index(out, unit=markup, model=markup, hash="gone")
    loaded = ci.SweepResult.load(out)
    view = loaded._repr_html_()
    assert "<img" not in view and "\x1b" not in view + repr(loaded)


META = {"model": "m", "threads": 1, "versions": {"torch": "2.13.0"}}


def of(column, **meta):
    return digest_of_result({"samples": pd.DataFrame({"x": column})}, META | meta)


@pytest.fixture(scope="module")
def sweeps():
    return two_sweeps()


SAME = [
    [[1, 2, 3], [1.0, 2.0, 3.0], np.array([1, 2, 3], np.float32), np.array([1, 2, 3], np.uint8)],
    [[1.0, None], [1.0, math.nan], pd.array([1, None], "Int64"), np.array([1, None], object)],
    [[None, None], [math.nan] * 2, [pd.NA, pd.NaT], np.array([None, math.nan], object)],
    [["a", None], ["a", math.nan], pd.array(["a", None], "string"), pd.Categorical(["a", None])],
    [[True, False], np.array([True, False], object), pd.array([True, False], "boolean")],
    [[[1, 2], [3]], [(1.0, 2.0), [3]], [np.array([1, 2]), np.array([3.0], np.float32)]],
    [[], np.array([], object), np.array([], np.int64), pd.array([], "Int64")],
    [[2**60 + 1, 2], np.array([2**60 + 1, 2]), np.array([2**60 + 1, 2], object)],
]
OTHERS = [
    [1, 2], [2, 1], [1, 2, 3], [1, None], [None, 1], [0, 0], [-0.0, 0], [True, True], ["1", "2"],
    [b"1", b"2"], ["a", "bc"], ["ab", "c"], [[1], [2]], [[1, 2], []], [[], [1, 2]], [None, None],
    ["", None], [math.inf, 1], [2**60, 0], [2**60 + 1, 0], [1.0000000000000002, 2], [],
    [[None], [1]], [[[1]], [2]], [datetime.date(2020, 1, 2), None], ["None", None],
]  # fmt: skip


@pytest.mark.parametrize("columns", SAME)
def test_the_type_of_a_column_does_not_count(columns):
    assert len({of(column) for column in columns}) == 1


def test_every_value_counts():
    assert len({of(column) for column in OTHERS}) == len(OTHERS)


def test_names_order_and_meta_count():
    one, two = pd.DataFrame({"a": [1], "b": [2]}), pd.DataFrame({"b": [2], "a": [1]})
    tables = [
        {"x": one}, {"x": two}, {"y": one}, {"x": one, "y": two}, {"y": two, "x": one}, {},
        {"x": one.rename(columns={"a": "c"})}, {"x": one.drop(columns="a")}, {"x": one[:0]},
    ]  # fmt: skip
    digests = [digest_of_result(given, META) for given in tables]
    digests += [of([1]), of([1], threads=2), of([1], dtype="float16"), of([1], versions={})]
    assert len(set(digests)) == len(digests)
    for name in (*OF_A_RUN, "files", "hash"):
        assert of([1], **{name: "another"}) == of([1])
