"""The hash of a result: equal for equal values, whatever stores them, and for nothing else."""

import datetime
import json
import math

import numpy as np
import pandas as pd
import pytest

import crate_interp as ci
from crate_interp.results.result_files import OF_A_RUN, digest_of_result
from folders import two_sweeps

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


def test_a_result_keeps_its_hash_on_the_disk(sweeps, tmp_path):
    one, two = sweeps
    assert one.digest() != two.digest() and one.digest().startswith("sha256:")
    folder = one.save(tmp_path / "a")
    index = json.loads((folder / "meta.json").read_text())
    assert index["hash"] == one.digest() and "hash" not in one.meta
    again = ci.SweepResult.load(folder)
    assert again.digest() == one.digest() and again.meta == one.meta
    with one.saved_with_pages(tmp_path / "b") as stage:
        (stage / "x.txt").write_text("a page")
    assert json.loads((tmp_path / "b" / "meta.json").read_text())["hash"] == one.digest()
    index.pop("hash")  # as an older version wrote it
    (folder / "meta.json").write_text(json.dumps(index))
    assert ci.SweepResult.load(folder).digest() == one.digest()
