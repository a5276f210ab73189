"""Folders of results: a changed bit is refused, and so is what is not a result of this version."""

import json
import os
import shutil

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, refuses
from crate_interp.core.files import digest

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
