"""Comparisons of results whose numbers are known, against scipy's, slow loops and closed forms."""

from functools import partial

import numpy as np
import pytest
import scipy.stats

import crate_interp as ci
from comparing import made, numbers, row
from conftest import refuses
from crate_interp.comparisons.difference_tables import layer_pairs
from crate_interp.stats.bootstrap import RESAMPLES
from crate_interp.stats.contrasts import Spread, against_networks, contrast, paired
from crate_interp.stats.intervals import holm, max_t

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
    low, high = slow_interval(own[:, 1])
    found = row(result, R, 1)
    assert (found["low"], found["high"]) == (pytest.approx(low), pytest.approx(high))
    assert result.table()["holds"].tolist() == [True, True, True]


def slow_interval(values):
    """The bootstrap-t interval, resample by resample."""
    n, random, t = len(values), np.random.default_rng(0), []
    for counts in random.multinomial(n, np.full(n, 1 / n), size=RESAMPLES):
        rows = np.repeat(values, counts)
        t.append((rows.mean() - values.mean()) / (rows.std(ddof=1) / n**0.5))
    place, error = int(0.025 * (RESAMPLES + 1)), scipy.stats.sem(values)
    t = np.sort(t)
    return values.mean() - t[-place] * error, values.mean() - t[place - 1] * error


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


def test_equal_networks_differ_by_exactly_nothing():
    values = numbers(0, N, LAYERS)
    everything = dict(heads={"a.h": numbers(1, N, LAYERS, 2)}, weights={"w.d": [1.0, 2.0, 3.0]})
    result = ci.compare(made({R: values}, **everything), made({R: values}, **everything))
    table = result.table()
    assert (table["difference"] == 0).all() and not table["holds"].any()
    of_samples = table[table["probe"] != "w"]
    assert of_samples[["low", "high", "p"]].isna().all(axis=None)  # nothing to test
    assert result.headline() == "made (a) against made (b): every difference is 0."
    three = [made({R: values})] * 3
    many = ci.compare(three, three).table()
    assert (many["difference"] == 0).all() and many["p"].isna().all()


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


def test_the_same_twins_on_both_sides_differ_by_nothing():
    one, two = numbers(0, N, LAYERS, shift=1.0), numbers(0, N, LAYERS)
    twins = [made({R: numbers(s, N, LAYERS)}, name=f"twin {s}") for s in range(4)]
    table = ci.compare(made({R: one}), made({R: two}), untrained=(twins, twins)).table()
    assert (table["untrained"] == 0).all() and table["untrained_low"].isna().all()
    sd = np.stack([numbers(s, N, LAYERS).mean(0) for s in range(4)]).std(axis=0, ddof=1)
    half = scipy.stats.t.ppf(0.975, 3) * np.sqrt(2 * sd**2 + scipy.stats.sem(one - two) ** 2)
    np.testing.assert_allclose(table["excess_high"] - table["excess"], half)


def test_heads_are_averaged_for_each_sample_or_left_out():
    a, b = numbers(0, N, LAYERS, 5), numbers(1, N, LAYERS, 2)
    result = ci.compare(made({}, heads={"a.h": a}), made({}, heads={"a.h": b}))
    wanted = paired(a.mean(axis=2) - b.mean(axis=2))
    np.testing.assert_allclose(result.table()["low"], wanted.low)
    assert result.meta["heads_averaged"] == ["a.h"]
    # without the numbers of each sample single networks cannot be paired, but groups need none
    values = {R: numbers(2, N, LAYERS)}
    kept = [made(values, moments={"a.h": each}) for each in (a, b)]
    result = ci.compare(*kept)
    assert list(result.table()["probe"].unique()) == ["compression"]
    assert "kept only the means of heads" in result.meta["not_compared"]["a.h"]
    assert result.not_compared()["statistic"].tolist() == ["a.h"]
    groups = ci.compare([kept[0]] * 2, [kept[1]] * 2)
    assert row(groups, "a.h", 1)["a"] == pytest.approx(a[:, 1].mean())


def test_what_the_weights_decide_has_no_interval_but_an_excess():
    a, b = (
        made({}, weights={"w.d": [1.0, 2.0]}, n_layers=2),
        made({}, weights={"w.d": [3.0, 2.0]}, n_layers=2),
    )
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


def test_statistics_of_one_side_are_listed_with_the_reason():
    values = numbers(0, N, LAYERS)
    every = {R: values, "c.only": values, "d.unit": values, "e.eps": values}
    b = made({R: values, "d.unit": values, "e.eps": values, "f.b": values})
    b.meta["statistics"]["d.unit"][0] = "bits"
    b.meta["probes"]["e"]["settings"] = {"eps": 0.2}
    result = ci.compare(made(every), b)
    assert list(result.meta["statistics"]) == [R]
    assert result.meta["not_compared"] == {
        "c.only": "not every network of b has it",
        "d.unit": "a has it in nats, b in bits",
        "e.eps": "the probes differ: eps = 0.1 and 0.2",
        "f.b": "not every network of a has it",
    }
    some = ci.compare([made(every), made({R: values})], made({R: values}))
    assert some.meta["not_compared"]["c.only"] == "not every network of a has it"


def test_settings_that_do_not_hinder_are_noted():
    a, b = made({R: numbers(0, N, LAYERS)}), made({R: numbers(1, N, LAYERS)})
    b.meta["probes"]["compression"]["settings"] = {"eps": 0.1, "more": 3}
    b.meta["config"]["subspaces"] = "value"
    assert ci.compare(a, b).meta["noted"] == {
        "subspaces": "its own U in a, value in b",
        "compression.more": "not set in a, 3 in b",
    }


def test_a_comparison_comes_back_and_does_not_merge(tmp_path):
    twins = [made({R: numbers(s, N, LAYERS)}, name=f"twin {s}") for s in range(3)]
    result = ci.compare(
        made({R: numbers(0, N, LAYERS)}), made({R: numbers(1, N, LAYERS)}), untrained=(twins, twins)
    )
    again = ci.Comparison.load(result.save(tmp_path))
    assert again.meta == result.meta and repr(again) == repr(result)
    for name, table in result.tables.items():
        assert table.equals(again.table(name))
    assert "<table" in result._repr_html_()
    refuses("merge the sweeps, then compare them", partial(result.merge, again))
    networks = result.networks()
    assert networks.groupby(["side", "trained"])["network"].nunique().tolist() == [3, 1, 3, 1]


def test_misuse_is_told_in_a_line(unchecked):
    values = numbers(0, N, LAYERS)
    one, other = made({R: values}), made({R: values}, config={"family": "crate", "d_model": 3})
    of = lambda data, stop: made(  # noqa: E731
        {R: values}, data=[{"fingerprint": data, "start": 0, "stop": stop}]
    )
    for args, match in (
        ((one, of("g", N)), "different samples, f samples 0 to .* and g"),
        ((one, of("f", 9)), "same limit"),
        ((one, of(None, N)), "on a cache"),
        ((one, made({"other.rate": values})), "in common. compression.rate_pre: not every"),
        ((one, []), r"b is \[\]: give a model"),
        ((one, one, "embedded:fashion"), "are for models, but a and b are results"),
        ((one, "somewhere"), "b is 'somewhere': give a model"),
        ((one, [one, other]), "b is a list of"),
    ):
        refuses(match, partial(ci.compare, *args))
    for options, match in (
        ({"untrained": 2}, "untrained=2: give a number of twins to make of"),
        ({"untrained": ([one], "x")}, "with the results of the untrained twins"),
        ({"limit": 3}, "are for models"),
        ({"names": ("x",)}, "give two texts"),
    ):
        refuses(match, partial(ci.compare, one, one, **options))


def test_contrast_without_scatter_is_no_test():
    same = Spread(np.ones((3, 2)), 0.5)
    found = contrast(np.array([0.0, 2.0]), [same, same])
    assert np.isnan([*found.ends, found.p]).all() and found.value.tolist() == [0.0, 2.0]
    assert np.isnan(contrast(np.zeros(2), [Spread(np.ones((1, 2)), 1.0)]).p).all()
