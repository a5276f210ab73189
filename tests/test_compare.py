"""Comparisons of results and of models, against scipy, slow loops and closed forms."""

import numpy as np
import pytest
import scipy.stats
import torch

import crate_interp as ci
from comparing import made, numbers, row
from conftest import make
from crate_interp.comparisons import run
from crate_interp.comparisons.difference_tables import layer_pairs
from crate_interp.stats.bootstrap import RESAMPLES
from crate_interp.stats.contrasts import Spread, against_networks, contrast, paired
from crate_interp.stats.intervals import holm, max_t
from test_intervals import slow

N, LAYERS = 41, 3
R = "compression.rate_pre"


def test_one_against_one_is_paired_by_sample():
    one, step = numbers(0, N, LAYERS), np.array([0.0, 0.5, -2.0])
    noise = 0.01 * numbers(1, N, LAYERS)
    result = ci.compare(made({R: one}), made({R: one - step + noise}, name="other"))
    own = step - noise  # a - b
    for layer in range(LAYERS):
        found = row(result, R, layer)
        assert found["difference"] == pytest.approx(own[:, layer].mean())
        assert (found["a"], found["n"]) == (pytest.approx(one[:, layer].mean()), N)
        assert found["a"] - found["b"] == pytest.approx(found["difference"])
        # unpaired, the interval would be thirty times as wide
        assert found["high"] - found["low"] < 0.02 < one[:, layer].std() / 6
        assert np.isnan(found["untrained"]) and np.isnan(found["excess_p"])
    found, values = row(result, R, 1), own[:, 1]
    place, error, t = int(0.025 * (RESAMPLES + 1)), scipy.stats.sem(values), slow(values)
    assert found["low"] == pytest.approx(values.mean() - t[-place] * error)
    assert found["high"] == pytest.approx(values.mean() - t[place - 1] * error)
    assert result.table()["holds"].tolist() == [True, True, True]


def test_p_is_two_sided_and_adjusted_over_the_layers_of_a_statistic():
    shift = np.array([0.0, 0.28, 0.05])
    values = np.random.default_rng(7).normal(size=(N, LAYERS)) + shift
    result = ci.compare(made({R: values, "a.b": values}), made({R: 0 * values, "a.b": 0 * values}))
    raw = paired(values)
    adjusted = max_t(values, raw.p)
    np.testing.assert_allclose(result.table()["p"], np.tile(adjusted, 2))
    np.testing.assert_allclose(raw.p, scipy.stats.ttest_1samp(values, 0).pvalue, atol=0.02)
    assert ((raw.p <= 0.05) == ((raw.low > 0) | (raw.high < 0))).all()
    mirrored = ci.compare(made({R: 0 * values}), made({R: values}))
    np.testing.assert_allclose(mirrored.table()["p"], adjusted, rtol=1e-9)
    np.testing.assert_allclose(mirrored.table()["low"], -raw.high, atol=0.02)


def test_groups_are_compared_by_welchs_t_over_networks():
    a = [numbers(seed, N, LAYERS, shift=0.3 * seed) for seed in range(4)]
    b = [numbers(9 + seed, N, LAYERS, shift=0.1 * seed) for seed in range(6)]
    result = ci.compare([made({R: one}) for one in a], [made({R: one}) for one in b])
    means = [np.stack([one.mean(axis=0) for one in group]) for group in (a, b)]
    wanted = scipy.stats.ttest_ind(*means, equal_var=False)
    ends = wanted.confidence_interval()
    table = result.table()
    np.testing.assert_allclose(table["difference"], means[0].mean(0) - means[1].mean(0))
    np.testing.assert_allclose(table["low"], ends.low)
    np.testing.assert_allclose(table["high"], ends.high)
    np.testing.assert_allclose(table["p"], holm(wanted.pvalue))
    assert (table["n"] == 10).all()
    assert "Intervals over fewer than 5 networks are wide" in result.caution()


def test_one_network_against_several_is_one_more_network():
    one, many = numbers(0, N, LAYERS, shift=1.0), [numbers(s, N, LAYERS) for s in range(1, 6)]
    means = np.stack([each.mean(axis=0) for each in many])
    error = scipy.stats.sem(one)
    wanted = against_networks(one.mean(axis=0), error, means)
    table = ci.compare(made({R: one}), [made({R: each}) for each in many]).table()
    numbers_wanted = (wanted.value, *wanted.ends)
    for name, values in zip(("difference", "low", "high"), numbers_wanted, strict=True):
        np.testing.assert_allclose(table[name], values)
    np.testing.assert_allclose(table["p"], holm(wanted.p))
    turned = ci.compare([made({R: each}) for each in many], made({R: one})).table()
    np.testing.assert_allclose(turned["low"], -table["high"])
    np.testing.assert_allclose(turned["p"], table["p"])


def test_the_excess_is_the_difference_of_two_differences():
    one, two = numbers(0, N, LAYERS, shift=1.0), numbers(0, N, LAYERS)
    random = [[numbers(10 * side + s, N, LAYERS) for s in range(1, 5)] for side in (1, 2)]
    twins = tuple(
        [made({R: each}, name=f"{side}{s}") for s, each in enumerate(group)]
        for side, group in zip("uv", random, strict=True)
    )
    means = [np.stack([each.mean(axis=0) for each in group]) for group in random]
    variances = [group.var(axis=0, ddof=1) for group in means]
    table = ci.compare(made({R: one}), made({R: two}), untrained=twins).table()
    untrained = means[0].mean(axis=0) - means[1].mean(axis=0)
    np.testing.assert_allclose(table["untrained"], untrained)
    np.testing.assert_allclose(table["excess"], (one - two).mean(axis=0) - untrained)
    welch = scipy.stats.ttest_ind(*means, equal_var=False).confidence_interval()
    np.testing.assert_allclose(table["untrained_low"], welch.low)
    # each side: one trained network that scatters as its twins do, and the mean of four twins
    parts = [1.25 * each for each in variances]
    total = parts[0] + parts[1] + scipy.stats.sem(one - two) ** 2
    freedom = (parts[0] + parts[1]) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 3)
    half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(total)
    np.testing.assert_allclose(table["excess_high"] - table["excess"], half)
    # groups: Welch's t of four groups
    groups = [[made({R: one}), made({R: one + 0.1}), made({R: one - 0.2})], [made({R: two})] * 2]
    table = ci.compare(*groups, untrained=twins).table()
    parts = np.stack(
        [np.full(LAYERS, np.var([0, 0.1, -0.2], ddof=1) / 3), *(v / 4 for v in variances)]
    )
    freedom = parts.sum(0) ** 2 / (parts**2 / np.array([[2], [3], [3]])).sum(0)
    half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(parts.sum(0))
    np.testing.assert_allclose(table["excess"] - table["excess_low"], half)


def test_what_the_weights_decide_has_no_interval_but_an_excess():
    a = made({}, weights={"w.d": [1.0, 2.0]}, n_layers=2)
    b = made({}, weights={"w.d": [3.0, 2.0]}, n_layers=2)
    found = ci.compare(a, b).table()
    assert found["difference"].tolist() == [-2.0, 0.0] and found["n"].tolist() == [1, 1]
    assert found[["low", "high", "p"]].isna().all(axis=None) and not found["holds"].any()
    assert "no difference has an interval" in ci.compare(a, b).headline()
    twins = [made({}, weights={"w.d": [x, x]}, n_layers=2, name=str(x)) for x in (1.0, 1.1, 1.2)]
    found = ci.compare(a, b, untrained=(twins, twins)).table()
    half = scipy.stats.t.ppf(0.975, 2) * np.sqrt(2) * 0.1
    assert found["excess_high"].tolist() == pytest.approx([-2 + half, half])
    many = ci.compare([a, a], [b, b]).table()
    # two equal networks show no spread
    assert many["p"].isna().all() and not many["holds"].any()


def test_a_sample_that_one_network_lacks_is_left_out_of_the_pairs():
    a, b = numbers(0, N, LAYERS), numbers(1, N, LAYERS)
    a[3, 1], b[4, 1] = np.nan, np.nan
    found = row(ci.compare(made({R: a}), made({R: b})), R, 1)
    there = [place for place in range(N) if place not in (3, 4)]
    assert found["n"] == N - 2 and found["a"] == pytest.approx(a[there, 1].mean())
    assert found["difference"] == pytest.approx((a - b)[there, 1].mean())


@pytest.mark.parametrize(
    "a, b, wanted",
    [
        (3, 3, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (3, 5, [(0, 0), (1, 2), (2, 4), (3, 5)]),
        (5, 3, [(0, 0), (2, 1), (4, 2), (5, 3)]),
        (4, 6, [(0, 0), (1, 2), (2, 3), (3, 5), (4, 6)]),
        (2, 12, [(0, 0), (1, 11), (2, 12)]),
        (1, 4, [(0, 3), (1, 4)]),
        (1, 1, [(0, 0), (1, 1)]),
    ],
)
def test_layers_of_the_same_depth_stand_side_by_side(a, b, wanted):
    assert layer_pairs(a, b) == wanted


def test_networks_of_different_depths():
    a, b = numbers(0, N, 3), numbers(1, N, 5)
    result = ci.compare(made({R: a}), made({R: b}, name="deep"))
    table = result.table()
    assert table[["layer", "layer_b"]].to_numpy().tolist() == [[0, 0], [1, 2], [2, 4]]
    np.testing.assert_allclose(table["difference"], (a - b[:, [0, 2, 4]]).mean(axis=0))
    assert "3 layers are compared with 5 at the same relative depth" in result.caution()
    assert result.meta["layers"] == [[0, 0], [1, 2], [2, 4], [3, 5]]


def test_contrast_without_scatter_is_no_test():
    same = Spread(np.ones((3, 2)), 0.5)
    found = contrast(np.array([0.0, 2.0]), [same, same])
    assert np.isnan([*found.ends, found.p]).all() and found.value.tolist() == [0.0, 2.0]
    assert np.isnan(contrast(np.zeros(2), [Spread(np.ones((1, 2)), 1.0)]).p).all()


FEW_SAMPLES = 7
FEW = dict(probes=["sparsity", "attention", "alignment"], progress=False)


@pytest.fixture(scope="module")
def data():
    return torch.randn(FEW_SAMPLES, 3, 6, 20, generator=torch.Generator().manual_seed(3))


def test_numbers_are_those_of_the_models_themselves(data):
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


def test_a_model_does_not_differ_from_itself(data):
    result = ci.compare(make(), make(), data, untrained=2, **FEW)
    table = result.table()
    assert (table["difference"] == 0).all() and not table["holds"].any()
    assert (table["untrained"] == 0).all() and (table["excess"] == 0).all()
    assert result.headline().endswith("every difference is 0.")


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
    again = [ci.SweepResult.load(tmp_path / "out" / "sweeps" / name) for name in kept]
    saved = ci.compare(*again)
    assert saved.meta["heads_averaged"] == result.meta["heads_averaged"] != []
    ci.compare(make(), make(seed=2), data[:5], **options)  # another b, other samples
    assert len(swept) == 4 + 3
