"""Activations on the disk: what the model computed, whole after any crash, read like a model."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, refuses
from crate_interp.sweeps.store_reading import ActivationStore

N, CHUNK, BATCH = 17, 5, 3
QUIET = dict(batch_size=BATCH, chunk_size=CHUNK, progress=False)
LAST = "blocks.2.hook_resid_post"
READ = ("hook_resid_pre", "hook_resid_mid", "attn.hook_u", "attn.hook_pattern", "mlp.hook_post")
# what the default probes read
POINTS = [LAST, *(f"blocks.{layer}.{point}" for layer in range(3) for point in READ)]
DATA = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def net():
    return make()


@pytest.fixture(scope="module")
def stored(net, tmp_path_factory):
    return ci.store(net, DATA, points=POINTS, out=tmp_path_factory.mktemp("s") / "out", **QUIET)


def folder_of(stored):
    return Path(stored.cache_files[0]["filename"]).parent.parent


def test_every_row_is_what_the_model_computed(net, stored):
    assert len(stored) == N and set(stored.column_names) == {"sample", "input", *POINTS}
    rows = stored.with_format("torch")
    assert rows["sample"][:].tolist() == list(range(N))
    for start in range(0, N, CHUNK):
        for first in range(start, min(start + CHUNK, N), BATCH):
            stop = min(first + BATCH, start + CHUNK, N)
            cache = net.run_with_cache(DATA[first:stop], names_filter=POINTS)[1]
            for name in POINTS:
                assert torch.equal(rows[first:stop][name], cache[name]), name


def compared(one, two):
    for name in ("samples", "head_samples", "moments", "weights"):
        yield name, one.table(name), two.table(name)


def test_a_sweep_of_a_store_is_that_of_the_model(net, stored):
    model = ci.sweep(net, DATA, controls=0, **QUIET)
    again = ci.sweep(net, stored, **QUIET)
    for name, one, two in compared(model, again):
        pd.testing.assert_frame_equal(one, two, rtol=1e-6, obj=name)
        assert one.equals(two)  # the same bits: float32 loses nothing
    assert again.meta["controls"] == 0 and not len(again.controls())
    assert again.meta["data"] == model.meta["data"]
    assert again.meta["store"]["dtype"] == "float32"
    assert again.meta["store"]["hash"] == ActivationStore.load(folder_of(stored)).digest()
    few = ci.sweep(net, stored, limit=7, **QUIET)
    assert few.meta["n_samples"] == 7
    alone = ci.sweep(net, DATA, limit=7, controls=0, **QUIET)  # in a batch of the same size
    assert few.samples().equals(alone.samples())


@pytest.mark.slow
def test_float16_rounds_and_says_so(net, stored, tmp_path):
    half = ci.store(net, DATA, points=POINTS, out=tmp_path / "h", dtype=torch.float16, **QUIET)
    assert half.features[LAST].dtype == "float16"
    rows, whole = (one.with_format("torch", dtype=torch.float64)[:] for one in (half, stored))
    for name in POINTS:
        error = (rows[name] - whole[name]).abs()
        assert (error <= torch.maximum(whole[name].abs() / 2048, torch.tensor(3e-8))).all(), name
    options = dict(probes=["sparsity", "attention"], controls=0, **QUIET)
    full, rounded = (ci.sweep(net, given, **options) for given in (DATA, half))
    assert rounded.meta["store"]["dtype"] == "float16"
    differ = 0
    for name, one, two in compared(full, rounded):
        if name == "moments":  # a variance over samples may be as small as the rounding
            one, two = (table.drop(columns="squares") for table in (one, two))
        pd.testing.assert_frame_equal(one, two, rtol=2e-3, atol=2e-5)
        differ += not one.equals(two)
    assert differ
    refuses("the results differ in", lambda: full.merge(rounded))


@pytest.mark.parametrize("damage", ["missing", "bit", "short"])
def test_a_damaged_file_is_refused_or_written_anew(net, stored, damage, tmp_path, capsys):
    out = shutil.copytree(folder_of(stored), tmp_path / "s")
    path = out / "chunks" / "activations-000002.arrow"
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        bad = bytearray(good[:-8] if damage == "short" else good)
        bad[len(bad) // 2] ^= 1
        path.write_bytes(bad)
    refuses("is damaged: .*Repeat the same", lambda: ci.open_store(out))
    found = ci.store(net, DATA, points=POINTS, out=out, **QUIET)
    assert "activations-000002.parquet was damaged and is measured again" in capsys.readouterr().err
    assert path.read_bytes() == good and len(found) == N


def test_what_is_refused(net, stored, tmp_path):
    with pytest.raises(KeyError, match="there is no hook point 'blocks.0.hook_resid_prae'. Did"):
        ci.store(net, DATA, points="blocks.0.hook_resid_prae", out=tmp_path / "x", **QUIET)
    with pytest.raises(ValueError, match="dtype"):
        ci.store(net, DATA, points=LAST, out=tmp_path / "x", dtype=torch.bfloat16, **QUIET)
    assert not (tmp_path / "x").exists()
    refuses("does not hold a saved ActivationStore", lambda: ci.open_store(tmp_path / "x"))
    ci.sweep(net, DATA, probes="sparsity", controls=0, progress=False).save(tmp_path / "r")
    refuses("holds a result of kind 'sweep'", lambda: ci.open_store(tmp_path / "r"))
    refuses("the store is of .* other weights", lambda: ci.sweep(make(seed=1), stored, **QUIET))
    refuses("a part of a store", lambda: ci.sweep(net, stored.select(range(4)), **QUIET))
    refuses("a part of a store", lambda: ci.sweep(net, stored.shuffle(seed=0), **QUIET))
    words = "only ci.sweep and ci.linear_probe take a store: give the store's data"
    refuses(words, lambda: ci.audit(net, stored, progress=False))
    with pytest.raises(ValueError, match="Leave out forward="):
        ci.sweep(net, stored, forward=lambda model, batch: model(batch), **QUIET)
