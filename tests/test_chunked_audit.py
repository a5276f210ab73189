"""Audits and segmentations in chunks: the same bits from shards, after an error, and merged."""

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Features, Image
from PIL import Image as Pillow

import crate_interp as ci
from conftest import make
from crate_interp.data import open_data
from crate_interp.questions import chunked_pass
from selection import few

N = 7
QUIET = dict(batch_size=2, progress=False)


@pytest.fixture(scope="module")
def model():
    return make("crate", n_layers=1, mean=[0.5] * 3, std=[0.25] * 3)


@pytest.fixture(scope="module")
def data(model):
    random, rows = np.random.default_rng(0), []
    for _ in range(N):
        mask = ((random.random((6, 20)) > 0.6) * 255).astype(np.uint8)
        picture = random.integers(0, 256, (6, 20, 3), dtype=np.uint8)
        rows.append({"image": Pillow.fromarray(picture), "mask": Pillow.fromarray(mask)})
    table = Dataset.from_list(rows, features=Features({"image": Image(), "mask": Image()}))
    return open_data(table, model.preprocess, None, model.preprocess_masks)


def audit(model, data, **more):
    return ci.audit(model, data, **{**dict(grid=False, untrained=2), **QUIET, **more})


def segment(model, data, **more):
    return ci.segment(model, data, **{**dict(untrained=2), **QUIET, **more})


VERBS = {"audit": audit, "segment": segment}


@pytest.fixture(params=few(VERBS))
def verb(request):
    return request.param


def same(one, two):
    """All other tables are computed from the stored ones and the meta."""
    assert type(one) is type(two) and list(one.stored) == list(two.stored)
    for name, table in one.stored.items():
        pd.testing.assert_frame_equal(table, two.table(name), check_exact=True, obj=name)
    run = ("seconds", "engine", "command", "run")
    metas = [{key: it for key, it in r.meta.items() if key not in run} for r in (one, two)]
    assert metas[0] == metas[1]


@pytest.fixture
def measured(monkeypatch):
    """The chunks that are measured while a test runs: (stage, chunk)."""
    seen, whole = [], chunked_pass.Stage.measured

    def noted(stage, task, *more):
        seen.append((stage.name, task.number))
        return whole(stage, task, *more)

    monkeypatch.setattr(chunked_pass.Stage, "measured", noted)
    return seen


@pytest.mark.slow
def test_two_shards_are_one_process_and_the_same_call_makes_the_result(
    verb, model, data, tmp_path, measured
):
    run = VERBS[verb]
    whole = run(model, data, chunk_size=3)
    every, out = set(measured), tmp_path / "run"
    assert len(measured) == len(every) == {"audit": 9, "segment": 13}[verb]
    measured.clear()
    assert run(model, data, chunk_size=3, out=out, shard="0/2") is None
    same(whole, run(model, data, chunk_size=3, out=out, shard="1/2"))
    assert len(measured) == len(every) and set(measured) == every  # each once
    measured.clear()
    (out / "meta.json").unlink()
    same(whole, run(model, data, chunk_size=3, out=out))  # without a shard
    assert not measured and (out / "meta.json").exists()


@pytest.mark.slow
def test_an_error_costs_only_its_chunk(verb, model, data, tmp_path, monkeypatch, measured):
    run = VERBS[verb]
    whole = run(model, data, chunk_size=3)
    every = list(measured)
    for k in (1, 4):  # in the first stage, and in a later one
        out = tmp_path / str(k)
        measured.clear()
        before = chunked_pass.Stage.measured

        def broken(stage, task, *more, before=before, k=k):
            if len(measured) == k:
                raise OSError("the disk is gone")
            return before(stage, task, *more)

        with monkeypatch.context() as patch:
            patch.setattr(chunked_pass.Stage, "measured", broken)
            with pytest.raises(OSError, match="the disk is gone"):
                run(model, data, chunk_size=3, out=out)
        assert measured == every[:k]
        same(whole, run(model, data, chunk_size=3, out=out))
        assert measured == every


@pytest.mark.slow
def test_twins_are_made_only_where_they_are_measured(verb, model, data, tmp_path, monkeypatch):
    run, seeds, twin = VERBS[verb], [], chunked_pass.twin

    def noted(model, seed):
        seeds.append(seed)
        return twin(model, seed)

    monkeypatch.setattr(chunked_pass, "twin", noted)
    run(model, data, chunk_size=3, out=tmp_path)
    assert seeds == [0, 1]
    (tmp_path / "chunks" / "untrained-1-000001.parquet").unlink()
    (tmp_path / "meta.json").unlink()
    run(model, data, chunk_size=3, out=tmp_path)
    assert seeds == [0, 1, 1]


@pytest.mark.slow
def test_another_setting_is_refused_by_its_name(model, data, tmp_path):
    few = dict(untrained=0, chunk_size=3)
    result = audit(model, data, out=tmp_path / "audit", **few)
    for words, more in (
        ("eps is 0.1 there and 0.2 here", dict(eps=0.2)),
        ("chunk_size is 3 there and 2 here", dict(chunk_size=2)),
        ("batch_size is 2 there and 3 here", dict(batch_size=3)),
        ("stages is .* there and .*untrained-0.* here", dict(untrained=1)),
    ):
        with pytest.raises(ValueError, match=words):
            audit(model, data, out=tmp_path / "audit", **{**few, **more})
    segment(model, data, out=tmp_path / "segment", **few)
    with pytest.raises(ValueError, match="segmentation.settings.mass is 0.6 there and 0.5 here"):
        segment(model, data, out=tmp_path / "segment", mass=0.5, **few)
    with pytest.raises(ValueError, match="holds a result of kind 'audit'"):
        segment(model, data, out=tmp_path / "audit", **few)
    over = audit(model, data, out=tmp_path / "audit", eps=0.2, resume=False, **few)
    assert over.meta["settings"]["eps"] == 0.2 != result.meta["settings"]["eps"]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
def test_any_chunks_any_shards(model, data, tmp_path, chunk_size, grid):
    """More shards than chunks too. With batches of one sample other chunks have the same ones."""
    options = dict(chunk_size=chunk_size, untrained=1, batch_size=1)
    for verb, more in (("audit", dict(grid=grid)), ("segment", {})):
        run = VERBS[verb]
        whole = run(model, data, **options, **more)
        for place in reversed(range(11)):  # those without a chunk first
            found = run(model, data, out=tmp_path / verb, shard=f"{place}/11", **options, **more)
        same(whole, found)
        other = run(model, data, **{**options, **more, "chunk_size": 7})
        for name in {"numbers", "samples", "constants"} & set(whole.stored):
            mine, theirs = whole.table(name), other.table(name)
            pd.testing.assert_frame_equal(mine, theirs, rtol=1e-12, atol=0, obj=name)


@pytest.mark.slow
def test_nothing_is_measured_where_nothing_is_left(model, data, tmp_path, measured):
    options = dict(progress=False, untrained=1, chunk_size=4)
    audit(model, data, out=tmp_path, **options)
    measured.clear()
    audit(model, data, out=tmp_path, **options)
    assert not measured


@pytest.mark.slow
def test_missing_and_damaged_chunks_are_measured_again(model, tmp_path, capsys):
    images = torch.randn(11, 3, 6, 20)
    run = lambda: ci.sweep(model, images, probes="sparsity", chunk_size=1, out=tmp_path, **QUIET)  # noqa: E731
    result = run()
    (tmp_path / "meta.json").unlink()
    chunks = [tmp_path / "chunks" / f"sweep-{place:06d}.parquet" for place in range(11)]
    for place in (2, 5, 6, 7, 10):
        chunks[place].unlink()
    content = bytearray(chunks[4].read_bytes())
    content[100] ^= 1
    chunks[4].write_bytes(content)
    same(result, run())
    assert "damaged chunks were measured again: sweep-000004.parquet" in capsys.readouterr().err
