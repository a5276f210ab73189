"""ci.verify of saved results and of runs: what was changed is named."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.core.files import digest
from crate_interp.results.kinds import KINDS, kind_of

N = 7
DATA = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))
OPTIONS = dict(batch_size=2, chunk_size=3, progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("verify") / "out"
    ci.sweep(make(), DATA, probes="sparsity", controls=0, out=out, **OPTIONS)
    return out


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "out")


def failed(report):
    assert report["ok"] == all(check["ok"] for check in report["checks"])
    assert json.loads(json.dumps(report)) == report
    return {check["name"]: check["detail"] for check in report["checks"] if not check["ok"]}


def test_a_whole_folder(folder):
    report = ci.verify(folder)
    assert report["ok"] and not failed(report) and report["cannot_check"] == []
    assert report["result"] == "sweep" and report["source"] == str(folder)
    assert report["hash"] == ci.SweepResult.load(folder).digest()
    assert report["digests"]["samples.parquet"] == digest(folder / "samples.parquet")
    names = [check["name"] for check in report["checks"]]
    assert names == ["files are those that were saved", "can be loaded", "hash of tables and meta",
                     "chunks of sweep"]  # fmt: skip
    meta = ci.SweepResult.load(folder).meta
    wanted = {"model_digest", "data", "versions", "dtype", "device", "threads", "engine", "command"}
    assert wanted <= set(meta) and meta["data"][0]["fingerprint"]


def test_a_table_that_was_changed(copy):
    path = copy / "samples.parquet"
    table = pd.read_parquet(path)
    table.loc[0, "sparsity.l1"] += 1e-12
    table.to_parquet(path, index=False)
    found = failed(ci.verify(copy))
    assert found["files are those that were saved"] == "7 files; differ: samples.parquet"
    assert "can be loaded" in found and found["hash of tables and meta"].startswith(
        "meta.json says"
    )
    index = json.loads((copy / "meta.json").read_text())
    index["files"][path.name] = digest(path)  # somebody who knows the format
    (copy / "meta.json").write_text(json.dumps(index))
    assert list(failed(ci.verify(copy))) == ["hash of tables and meta"]


def test_a_meta_that_was_changed(copy):
    index = json.loads((copy / "meta.json").read_text())
    for name, value, right in (
        ("threads", 99, False), ("dtype", "float64", False), ("seconds", 0.5, True),
        ("engine", "ray", True), ("device", "cuda:0", True),
    ):  # fmt: skip
        (copy / "meta.json").write_text(json.dumps(index | {name: value}))
        assert ci.verify(copy)["ok"] == right, name
    index.pop("hash")
    (copy / "meta.json").write_text(json.dumps(index))
    report = ci.verify(copy)
    assert report["ok"] and "an older version" in report["cannot_check"][0]


@pytest.mark.parametrize("damage", ["missing", "bit", "ledger", "unfinished", "other kind"])
def test_a_run_that_was_changed(copy, damage):
    path = copy / "chunks" / "sweep-000001.parquet"
    if damage == "missing":
        path.unlink()
    elif damage == "bit":
        content = bytearray(path.read_bytes())
        content[50] ^= 1
        path.write_bytes(content)
    elif damage == "ledger":
        next(copy.glob("ledger-*.jsonl")).unlink()
    elif damage == "unfinished":
        (copy / "meta.json").unlink()
    else:
        index = json.loads((copy / "meta.json").read_text())
        (copy / "meta.json").write_text(json.dumps(index | {"result": "poem"}))
    report = ci.verify(copy)
    found = failed(report)
    if damage in ("missing", "bit"):
        assert found == {"chunks of sweep": "2 of 3; missing or damaged: 1"}
    elif damage == "ledger":
        assert found == {"chunks of sweep": "their number is unknown"}
    elif damage == "unfinished":
        assert not found and "the result: it is not written before" in report["cannot_check"][0]
    else:
        assert found == {"is a result": "no kind 'poem'"}


def test_the_files_of_a_store(tmp_path):
    options = dict(points="blocks.0.hook_resid_mid", out=tmp_path, **OPTIONS)
    ci.store(make(), DATA, **options)
    report = ci.verify(tmp_path)
    assert report["ok"] and report["result"] == "store"
    assert report["checks"][-1] == {"name": "files of activations", "ok": True, "detail": "3 files"}
    path = tmp_path / "chunks" / "activations-000001.arrow"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    wanted = {"files of activations": "3 files; differ: activations-000001.arrow"}
    assert failed(ci.verify(tmp_path)) == wanted


def test_options_of_checkpoints_are_refused(copy):
    with pytest.raises(ValueError, match="options are for checkpoints"):
        ci.verify(copy, family="crate")


def test_every_kind_of_result_is_known():
    assert all(kind_of(kind).name == kind for kind in KINDS)
    sources = Path(ci.__file__).parent.rglob("*.py")
    written = re.findall(r'^    KIND = "(\w+)"$', "\n".join(p.read_text() for p in sources), re.M)
    assert sorted(written) == sorted(KINDS)
