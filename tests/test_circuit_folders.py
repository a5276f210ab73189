"""Atoms, atlases, probes, heads, surgery, autoencoders in a folder: shards, crashes, settings."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm
from crate_interp.circuits import composition
from crate_interp.data import open_data, open_text
from crate_interp.models.sae import SAEConfig
from crate_interp.sweeps.runs.chunked_pass import Stage

N, BATCH, CHUNK = 11, 2, 3  # chunks of 3, 3, 3 and 2
QUIET = dict(batch_size=BATCH, chunk_size=CHUNK, progress=False)
POINT = "blocks.1.hook_resid_post"
LABELS = [place % 2 for place in range(N)]


@pytest.fixture(scope="module")
def vision():
    model = make("crate-alpha")
    images = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(5))
    return model, replace(open_data(images, model.preprocess), labels=LABELS)


@pytest.fixture(scope="module")
def text():
    lm = make_lm()
    tokens = torch.randint(0, 47, (N, 13), generator=torch.Generator().manual_seed(0))
    return lm, open_text(tokens, lm.windows)


def autoencoder(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ci.SparseAutoencoder(SAEConfig(hook_name=POINT, d_in=31, d_sae=17))


def surgery(model, data, mixes=(0.5,), **more):
    return ci.surgery(model, data, replacements=["gradient", 3], mixes=mixes, **QUIET, **more)


def saes(model, data, coder=0, **more):
    return ci.saes.evaluate(model, data, {POINT: autoencoder(coder)}, **QUIET, **more)


# what measures; how many chunks it has; a setting that is another, and the field that says so
KINDS = {
    "atoms": (lambda *a, **m: ci.atoms(*a, **QUIET, **m), 4, {"top": 5}, "settings.top"),
    "atlas": (lambda *a, **m: ci.atlas(*a, **QUIET, **m), 9, {"ablate": 2}, "settings.ablate"),
    "linear_probe": (
        lambda *a, **m: ci.linear_probe(*a, **{"test": 0.5} | QUIET | m), 4,
        {"labels": [1 - one for one in LABELS]}, "labels.value",
    ),
    "composition": (
        lambda *a, **m: composition(*a, through="data", **QUIET, **m), 4, {"role": "v"},
        "settings.role",
    ),
    "head_ablation": (
        lambda *a, **m: ci.ablate_heads(*a, **QUIET, **m), 8, {"metric": "accuracy"},
        "settings.metric",
    ),
    "surgery": (surgery, 4, {"mixes": (0.25,)}, "settings.mixes"),
    "saes": (saes, 8, {"coder": 1}, f"the autoencoder at {POINT}"),
}  # fmt: skip
FAST = ("head_ablation",)
EACH = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in KINDS]


def same(one, two):
    assert list(one.tables) == list(two.tables)
    for name, table in one.tables.items():
        pd.testing.assert_frame_equal(table, two.table(name), check_exact=True, obj=name)
    for name in ("data", "n_samples", "config", "settings", "chunk_size"):
        assert one.meta.get(name) == two.meta.get(name), name


@pytest.fixture
def counted(monkeypatch):
    """The chunks that are measured; `stop` is how many may be, before an error."""

    counted, measured = SimpleNamespace(done=[], stop=None), Stage.measured

    def count(stage, task, *more):
        if counted.stop is not None and len(counted.done) >= counted.stop:
            raise OSError("the machine is gone")
        counted.done.append((stage.name, task.number))
        return measured(stage, task, *more)

    monkeypatch.setattr(Stage, "measured", count)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", EACH)
def test_two_shards_make_what_one_process_makes(vision, kind, tmp_path, counted, capsys):
    measure, chunks, _, _ = KINDS[kind]
    whole = measure(*vision)
    assert len(counted.done) == len(set(counted.done)) == chunks
    counted.done.clear()
    given = dict(out=tmp_path)
    found = [measure(*vision, shard=shard, **given) for shard in ("0/2", "1/2", "0/2", "1/2")]
    assert sorted(counted.done) == sorted(set(counted.done)) and len(counted.done) == chunks
    assert found[0] is None and "shard 0/2 is done" in capsys.readouterr().err
    same(whole, found[-1])
    same(whole, type(whole).load(tmp_path))
    for path in tmp_path.glob("*.parquet"):
        path.unlink()
    same(whole, measure(*vision, out=tmp_path))
    assert len(counted.done) == chunks  # nothing was measured again


@pytest.mark.slow
@pytest.mark.parametrize("kind", EACH)
def test_what_is_measured_when_the_work_dies_is_not_measured_again(vision, kind, tmp_path, counted):
    measure, chunks, changed, field = KINDS[kind]
    whole = measure(*vision)
    counted.done.clear()
    counted.stop = chunks // 2 + 1  # in a second stage, if there is one
    with pytest.raises(OSError, match="the machine is gone"):
        measure(*vision, out=tmp_path)
    counted.stop = None
    with pytest.raises(ValueError, match="holds a run with other settings") as error:
        measure(*vision, out=tmp_path, **changed)
    assert field in str(error.value) and len(counted.done) == chunks // 2 + 1
    same(whole, measure(*vision, out=tmp_path))
    assert len(counted.done) == len(set(counted.done)) == chunks


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean", "zero"])
def test_windows_and_ablation_to_zero(text, how, tmp_path):
    measure = lambda **more: ci.ablate_heads(*text, how=how, **QUIET, **more)  # noqa: E731
    whole = measure()
    assert [measure(out=tmp_path, shard=shard) is None for shard in ("0/3", "1/3")] == [True] * 2
    while measure(out=tmp_path, shard="2/3") is None:
        measure(out=tmp_path, shard="0/3"), measure(out=tmp_path, shard="1/3")
    same(whole, ci.HeadAblation.load(tmp_path))


@pytest.mark.slow
def test_an_autoencoder_of_windows_with_padding(text, tmp_path):
    lm, data = text
    mask = torch.ones(N, 13)
    mask[4, 7:] = 0
    measure = lambda mask, **more: ci.saes.evaluate(  # noqa: E731
        lm, data, {POINT: autoencoder()}, attention_mask=mask, **QUIET, **more
    )
    whole = measure(mask)
    same(whole, measure(mask, out=tmp_path))
    with pytest.raises(ValueError, match="attention_mask.value has changed"):
        measure(torch.ones(N, 13), out=tmp_path)


def test_composition_of_weights_takes_no_folder(tmp_path):
    with pytest.raises(ValueError, match="out is for through=.data."):
        composition(make(), out=tmp_path)
    with pytest.raises(ValueError, match="needs a folder that all shards share"):
        composition(make(), shard="0/2")
    assert not list(tmp_path.iterdir())
