"""Folders of results that strangers made: each is refused in a line, before memory is taken."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.core.files import digest

INDEX = "meta.json"


@pytest.fixture(scope="module")
def result():
    data = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    return ci.sweep(make(), data, probes="sparsity", controls=0, progress=False)


def bomb(path, kind):
    if kind == "values":
        table = pa.table({"sample": pa.array(np.zeros(2**25, np.int64))})
    else:
        words = pa.DictionaryArray.from_arrays(np.zeros(2**16, np.int32), ["x" * 2**12])
        table = pa.table({"sample": words})
    parquet.write_table(table, path)
    assert path.stat().st_size < 2**20


@pytest.mark.parametrize("kind", ["values", "characters"])
def test_a_table_that_claims_more_than_its_bytes(result, kind, tmp_path):
    result.save(tmp_path)
    path = tmp_path / "samples.parquet"
    bomb(path, kind)
    meta = json.loads((tmp_path / INDEX).read_text())
    meta["files"][path.name] = digest(path)
    (tmp_path / INDEX).write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=f"it claims [0-9,]+ {kind}, more than its size allows"):
        ci.SweepResult.load(tmp_path)


@pytest.mark.parametrize(
    "damage", ["column", "other layers", "format 0", "settings", "model", "n_layers"]
)
def test_a_result_whose_digests_are_right_and_whose_content_is_not(result, damage, tmp_path):
    result.save(tmp_path)
    meta, path = json.loads((tmp_path / INDEX).read_text()), tmp_path / "samples.parquet"
    if damage == "format 0":
        meta["format"] = 0
    elif damage in ("column", "other layers"):
        table = result.table("samples")
        odd = table.assign(layer="x", **{"sparsity.l1": "y"})
        table = table.drop(columns="layer") if damage == "column" else odd
        table.to_parquet(path, index=False)
        meta["files"][path.name] = digest(path)
    elif damage == "model":
        meta["model"] = "a\x1b[2Jb"
    elif damage == "n_layers":
        meta["n_layers"] = 10**9
    else:
        meta["statistics"] = {"zero_fraction": 3}
    (tmp_path / INDEX).write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="was not written|saved Sweep|is damaged") as caught:
        ci.SweepResult.load(tmp_path)
    assert "\n" not in str(caught.value)
