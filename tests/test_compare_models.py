"""ci.compare on models: the same samples, heads averaged, twins, and what is kept on the disk."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from comparing import row
from conftest import LAYERS, make, make_lm, refuses
from crate_interp.comparisons import run
from crate_interp.questions.untrained_twins import twin

N = 7
FEW = dict(probes=["sparsity", "attention", "alignment"], progress=False)


@pytest.fixture(scope="module")
def data():
    return torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(3))


def test_numbers_are_those_of_the_models_themselves(data):
    """Against the caches, sample by sample."""
    a, b = make(), make(seed=1)
    result = ci.compare(a, b, data, untrained=0, batch_size=3, **FEW)
    zeros, entropies = [], []
    for model in (a, b):
        _, cache = model.run_with_cache(data)
        layers = [cache[f"blocks.{layer}.mlp.hook_post"] for layer in range(LAYERS)]
        zeros.append(torch.stack([(post == 0).double().mean(dim=(1, 2)) for post in layers]))
        rows = [cache[f"blocks.{layer}.attn.hook_pattern"].double() for layer in range(LAYERS)]
        entropy = [-(p * p.clamp(min=1e-300).log()).sum(-1).mean(-1) for p in rows]
        entropies.append(torch.stack([each.mean(-1) for each in entropy]))  # over heads
    for name, values in (("sparsity.zero_fraction", zeros), ("attention.entropy", entropies)):
        wanted = (values[0] - values[1]).mean(dim=1).numpy()
        found = [row(result, name, layer)["difference"] for layer in range(LAYERS)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert "attention.entropy" in result.meta["heads_averaged"]
    assert "sparsity.zero_fraction" not in result.meta["heads_averaged"]
    overlap = row(result, "alignment.head_overlap", 0)
    assert overlap["n"] == 1 and np.isnan(overlap["low"])


@pytest.mark.slow
def test_models_and_their_sweeps_compare_alike(data):
    a, b = make(), make(seed=1)
    of_models = ci.compare(a, b, data, untrained=0, **FEW).table()
    sweeps = [ci.sweep(model, data, controls=0, **FEW) for model in (a, b)]
    of_results = ci.compare(*sweeps)
    both = of_results.table()
    merged = of_models.merge(both, on=["probe", "statistic", "layer"], suffixes=("", "_r"))
    assert len(merged) == len(both) < len(of_models)
    for name in ("a", "b", "difference", "low", "high", "p"):
        np.testing.assert_allclose(merged[name], merged[f"{name}_r"], rtol=1e-6, atol=1e-12)
    assert "attention.entropy" in of_results.meta["not_compared"]
    mixed = ci.compare(sweeps[0], b, data, untrained=0, **FEW).table()
    np.testing.assert_allclose(mixed["difference"], both["difference"], rtol=1e-6, atol=1e-12)


def test_a_model_does_not_differ_from_itself(data):
    result = ci.compare(make(), make(), data, untrained=2, **FEW)
    table = result.table()
    assert (table["difference"] == 0).all() and not table["holds"].any()
    assert (table["untrained"] == 0).all() and (table["excess"] == 0).all()
    assert result.headline().endswith("every difference is 0.")


@pytest.mark.slow
def test_twins_are_the_untrained_networks_of_each_side(data):
    a, b = make(), make("crate-alpha")
    result = ci.compare(a, b, data, untrained=2, **FEW)
    found = row(result, "sparsity.zero_fraction", 1)
    for side, model in (("a", a), ("b", b)):
        means = []
        for seed in range(2):
            layers = ci.sweep(twin(model, seed), data, controls=0, **FEW).layers()
            own = layers[(layers["statistic"] == "zero_fraction") & (layers["layer"] == 1)]
            means.append(float(own["mean"].iloc[0]))
        assert found[f"untrained_{side}"] == pytest.approx(np.mean(means))
    assert found["excess"] == pytest.approx(found["difference"] - found["untrained"])
    assert [len(result.meta[side]["untrained"]) for side in "ab"] == [2, 2]


@pytest.mark.slow
def test_sides_of_one_architecture_share_their_twins(data, monkeypatch):
    made = []
    real = run.twin
    monkeypatch.setattr(run, "twin", lambda *args: made.append(args) or real(*args))
    result = ci.compare([make(), make(seed=1)], [make(seed=2)], data, untrained=3, **FEW)
    assert len(made) == 3 and result.meta["a"]["untrained"] == result.meta["b"]["untrained"]
    assert (result.table()["untrained"].dropna() == 0).all()


@pytest.mark.slow
def test_what_was_swept_is_kept_and_taken_again(data, tmp_path, monkeypatch):
    real, swept = run.sweep, []

    def counted(model, *args, **options):
        swept.append(model)
        if len(swept) == 3:
            raise KeyboardInterrupt
        return real(model, *args, **options)

    monkeypatch.setattr(run, "sweep", counted)
    options = dict(untrained=1, out=tmp_path / "out", **FEW)
    with pytest.raises(KeyboardInterrupt):
        ci.compare(make(), make(seed=1), data, **options)
    kept = sorted(path.name for path in (tmp_path / "out" / "sweeps").iterdir())
    assert kept == ["a-0", "b-0"]
    result = ci.compare(make(), make(seed=1), data, **options)
    assert len(swept) == 4  # only the twin, which was interrupted
    assert ci.Comparison.load(tmp_path / "out").meta == result.meta
    ci.compare(make(), make(seed=1), data, **options)
    assert len(swept) == 4
    own = options | {"probes": ci.probes.resolve("sparsity"), "untrained": 0}
    ci.compare(make(), make(seed=1), data, **own)
    ci.compare(make(), make(seed=1), data, **own)  # nobody knows whether the probe is the same
    assert len(swept) == 4 + 4
    del swept[4:]
    ci.compare(make(), make(seed=1), data, **options)
    assert len(swept) == 4 + 2  # those of other probes took their place
    del swept[4:]
    ci.compare(make(), make(seed=2), data, **options)  # another b
    ci.compare(make(), make(seed=2), data[:5], **options)  # other samples
    assert len(swept) == 4 + 1 + 3
    again = [ci.SweepResult.load(tmp_path / "out" / "sweeps" / name) for name in kept]
    own, saved = ci.compare(make(), make(seed=2), data[:5], **options), ci.compare(*again)
    np.testing.assert_array_equal(own.table()["difference"], saved.table()["difference"])
    assert saved.meta["heads_averaged"] == own.meta["heads_averaged"] != []


@pytest.mark.slow
def test_language_models_and_networks_of_other_heads_and_depths():
    tokens = torch.randint(0, 47, (N, 13), generator=torch.Generator().manual_seed(0))
    a, b = make_lm(), make_lm("gpt-baseline", n_layers=2, n_heads=3)
    result = ci.compare(a, b, tokens, untrained=2, probes=["sparsity", "attention"], progress=False)
    table = result.table()
    assert table["statistic"].nunique() > 2 and "images" not in result.caution()
    pairs = table[["layer", "layer_b"]].drop_duplicates().to_numpy().tolist()
    assert pairs == [[0, 0], [2, 1]]
    assert (table["n"] == N).all()


@pytest.mark.slow
def test_steps_of_a_training_differ_and_are_told_apart_by_name():
    end, start = (ci.load("crate-tiny-fashion", revision=at) for at in (None, "step-0"))
    result = ci.compare(
        end, start, "embedded:fashion", probes="sparsity", limit=8, untrained=2, progress=False
    )
    assert "crate-tiny-fashion (a) against crate-tiny-fashion (b)" in result.headline()
    assert result.table()["holds"].any()
    named = ci.compare(
        end, start, "embedded:fashion", probes="sparsity", limit=8, untrained=0,
        names=("end", "start"), progress=False,
    )  # fmt: skip
    assert named.headline().startswith("end against start: ")


def test_misuse_of_models_is_told_before_work_starts(data, monkeypatch, unchecked):
    model, lm = make(), make_lm()
    swept = ci.sweep(model, data, probes="sparsity", controls=0, progress=False)
    monkeypatch.setattr(run, "sweep", lambda *_, **__: pytest.fail("work has started"))
    refuses("different samples, tensor:", lambda: ci.compare(model, swept, data[:5]))
    refuses("models are compared on data", lambda: ci.compare(model, model))
    with pytest.raises(ValueError, match="images hold NaN or Inf"):
        ci.compare(model, model, torch.cat([data[:6], data[6:] * torch.nan]))
    refuses(
        "b is Linear.*give a model such as", lambda: ci.compare(model, torch.nn.Linear(2, 2), data)
    )
    with pytest.raises(ValueError, match="a is a list of networks of different architectures"):
        ci.compare([model, make("crate-alpha")], model, data)
    refuses("there is no probe 'sparse'", lambda: ci.compare(model, model, data, probes="sparse"))
    refuses("untrained=-1", lambda: ci.compare(model, model, data, untrained=-1))
    other, tokens = make_lm(n_ctx=6), torch.arange(12).view(2, 6)
    lm.window_rows = lambda texts: iter(tokens.tolist())
    other.window_rows = lambda texts: iter(tokens[:, :5].tolist())
    refuses("of different samples", lambda: ci.compare(lm, other, ["a text"]))
    refuses("a CLIP is two models|token", lambda: ci.compare(model, lm, data))
