"""What a report says first: its sentences and signs hold the numbers of its tables."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import LAYERS, make
from crate_interp.probes.built_in import statistic
from crate_interp.sweeps.findings import along_layers, at_attention, finding, strip
from crate_interp.sweeps.layer_curves import numbers

NAMES = {
    "before": "compression.subspace_rate_pre",
    "after": "compression.subspace_rate_mid",
    "official": "compression.official_rate",
}


@pytest.fixture(scope="module")
def data():
    return torch.randn(6, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def result(data):
    return ci.sweep(make(), data, progress=False, controls=0)


@pytest.fixture(scope="module")
def twins(data):
    return [ci.sweep(make(seed=seed), data, progress=False, controls=0) for seed in (7, 8)]


def planted(result, **columns):
    """A result with these rates in place of its own: name -> an array `[sample, layer]`."""
    samples = result.samples()
    for name, values in columns.items():
        values = np.asarray(values, dtype=float)
        for layer, column in enumerate(values.T):
            samples.loc[samples["layer"] == layer, NAMES[name]] = column
    return ci.SweepResult({**result.stored, "samples": samples}, result.meta)


def table(result, name):
    rows = result.layers()
    rows = rows[rows["probe"] + "." + rows["statistic"] == NAMES[name]]
    return rows.set_index("layer")["mean"].dropna()


def test_changes_are_those_of_the_table_and_paired(result):
    step, samples = at_attention(result), result.samples()
    before, after = table(result, "before"), table(result, "after")
    np.testing.assert_allclose(step.before, before)
    np.testing.assert_allclose(step.after, after)
    for place, layer in enumerate(step.layers):
        rows = samples[samples["layer"] == layer]
        moved = (rows[NAMES["after"]] / rows[NAMES["before"]] - 1).to_numpy()
        error = 2.570582 * moved.std(ddof=1) / len(moved) ** 0.5  # Student's t, 5 degrees
        assert step.change[place] == pytest.approx(moved.mean())
        assert step.high[place] == pytest.approx(moved.mean() + error)
    along = along_layers(result)
    wide = samples.pivot(index="sample", columns="layer", values=NAMES["official"]).dropna(axis=1)
    steps = wide.to_numpy()[:, 1:] / wide.to_numpy()[:, :-1] - 1
    np.testing.assert_allclose(along.change, steps.mean(axis=0))
    assert along.layers.tolist() == list(range(1, LAYERS))


def test_a_change_is_that_of_an_audit(data, result):
    audit = ci.audit(make(), data, untrained=0, grid=False, progress=False).table()
    rows = audit.query("number == 'compresses' and frame == 'stream'")
    np.testing.assert_allclose(at_attention(result).change, rows["value"], rtol=2e-4)


def test_the_finding_says_the_numbers_of_the_tables(result, twins):
    along, official = finding(result, twins).split(" With every code")
    rates = table(result, "official")
    untrained = np.mean([table(twin, "official") for twin in twins], axis=0)
    for value in (rates.iloc[0], rates.iloc[-1]):
        assert f" {value:.4g}" in official
    assert official.endswith(f"(untrained copies: {untrained[0]:.4g} to {untrained[-1]:.4g}).")
    assert ("falls from" in official) == (rates.iloc[-1] < rates.iloc[0])
    change = 100 * at_attention(result).change
    ends = f"({change.min():+.1f} to {change.max():+.1f}\u00a0%; untrained copies "
    assert ends in along
    header, rows = numbers(result, twins)
    (row,) = [row for row in rows if row[0] == statistic(result.meta, NAMES["official"]).title]
    assert row[2] == f"{rates.iloc[0]:.4g} ({untrained[0]:.4g})" and header[2] == "layer 0"


def test_planted_changes_are_found_and_told_apart(result):
    """R^c falls in layer 0, rises in layer 1, and in layer 2 nobody can tell."""
    before = np.full((6, LAYERS), 10.0) + np.arange(6)[:, None]
    noise = np.array([1.0, -1, 1, -1, 1, -1])
    after = before + np.stack([-2 + 0.1 * noise, 3 + 0.1 * noise, noise], axis=1)
    official = np.stack([20 + noise, 19.6 + noise, 30 + noise], axis=1)
    one = planted(result, before=before, after=after, official=official)
    second, first = finding(one, []).split(" With every code")
    assert "rises from 20 nats per token in layer 0 to 30 in layer 2." in first
    words = "Attention lowers R^c of the stream at eps 0.1 in 1 and raises it in 1 of 3 layers"
    assert words in second and "untrained" not in first + second
    change = 100 * (after / before - 1).mean(axis=0)
    assert f"({change[0]:+.1f} to {change[1]:+.1f}\u00a0%)." in second
    rows = {row.title: "".join(sign.mark for sign in row.signs) for row in strip(one, [])}
    assert rows == {
        "R^c of the stream falls at attention": "+\N{MINUS SIGN}?",
        "Authors' R^c is lower than a layer before": ".+\N{MINUS SIGN}",
    }
    assert "19.6" not in first  # lower than both ends, by less than .05 of what lies between


def test_a_ring_says_that_every_untrained_network_does_the_same(result):
    noise = np.arange(6)[:, None] * 0.01
    low, high = np.full((6, LAYERS), 10.0), np.full((6, LAYERS), 11.0) + noise
    rising, falling = (
        planted(result, before=low, after=high),
        planted(result, before=high, after=low),
    )
    for twins, ringed in (([rising, rising], True), ([rising, falling], False), ([falling], False)):
        row = strip(rising, twins)[0]
        assert [sign.ringed for sign in row.signs] == [ringed] * LAYERS
        assert all(sign.kind == "bad" for sign in row.signs)


def test_beyond_untrained_is_outside_the_interval_of_one_more_untrained_network(result):
    """By hand, for weights: mean of seeds ± t sd sqrt(1 + 1/s), t = 2.776 for five seeds."""
    weights = result.stored["weights"]
    overlaps = weights["statistic"] == "head_overlap"

    def moved(amount):
        value = weights["value"].where(~overlaps, weights["value"] + amount)
        return ci.SweepResult(
            {**result.stored, "weights": weights.assign(value=value)}, result.meta
        )

    seeds = np.array([-0.02, -0.01, 0.0, 0.01, 0.02])
    half = 2.776 * seeds.std(ddof=1) * (1 + 1 / 5) ** 0.5  # .0481; the largest seed is at .02
    twins = [moved(amount) for amount in seeds]
    for amount, mark in (
        (0.03, "?"), (0.99 * half, "?"), (1.01 * half, "\N{MINUS SIGN}"), (-1.01 * half, "+")
    ):  # fmt: skip
        rows = {row.title: row for row in strip(moved(amount), twins)}
        signs = rows["Heads overlap less than untrained"].signs
        assert [sign.mark for sign in signs] == [mark] * LAYERS, amount
    one = {row.title: row for row in strip(moved(9.0), twins[:1])}
    assert {sign.mark for sign in one["Heads overlap less than untrained"].signs} == {"?"}
