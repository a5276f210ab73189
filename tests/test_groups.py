"""Samples that belong together: intervals, tests and splits treat groups as independent."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from crate_interp.data.texts import windows_of_texts
from crate_interp.stats.contrasts import by_group, columns_of_sums
from crate_interp.stats.intervals import interval_of_sums
from selection import few

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from windows_of_texts import GROUPS, SIZES, STATISTICS, covered_texts, measured  # noqa: E402

TEXT = "embedded:held-out-text"
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def lm():
    return ci.load("crate-tiny-lm")


@pytest.fixture(scope="module")
def fashion():
    return ci.load("crate-tiny-fashion")


@pytest.mark.parametrize("name", few(STATISTICS))
@pytest.mark.parametrize("memory", few([0.75, 0.35, 0.55]))
def test_intervals_over_texts_hold_the_mean(name, memory):
    """Of the same windows taken as independent, 95 % intervals hold it in .6 to .8 of cases."""
    texts, windows = covered_texts(np.random.default_rng(1), name, memory, 600)
    assert texts >= 0.9
    assert windows < 0.87


def slow_by_group(values, groups):
    names, columns = sorted(set(groups)), []
    for column in values.T:
        mean = np.nanmean(column)
        there = ~np.isnan(column)
        away = {}
        for name in names:
            own = column[there & (groups == name)]
            if len(own):
                away[name] = (own - mean).sum() / (1 - len(own) / there.sum())
        middle = np.mean(list(away.values()))
        scale = len(away) / there.sum()
        columns.append([mean + scale * (away[n] - middle) if n in away else np.nan for n in names])
    return np.array(columns).T


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(11, 23), st.sampled_from([0.0, 0.1]))
def test_values_of_groups_against_a_slow_form(seed, count, missing):
    random = np.random.default_rng(seed)
    groups = random.permutation(np.repeat(np.arange(count), random.integers(1, 7, count)))
    values = random.normal(3, 2, (len(groups), 5))
    values[random.random(values.shape) < missing / 2] = np.nan
    found = by_group(values, groups)
    if len(groups) == count:
        assert found is values
        return
    enough = [len(set(groups[~np.isnan(column)])) >= 10 for column in values.T]
    close = {"rtol": 1e-10, "atol": 1e-10}
    np.testing.assert_allclose(found[:, enough], slow_by_group(values, groups)[:, enough], **close)
    np.testing.assert_allclose(np.nanmean(found, axis=0), np.nanmean(values, axis=0), **close)
    # names and order do not matter, nor does a constant
    order = random.permutation(len(groups))
    turned = by_group(values[order], 100 - groups[order])[::-1]
    np.testing.assert_allclose(turned[:, enough], found[:, enough], **close)
    np.testing.assert_allclose(by_group(values + 7, groups), found + 7, **close)


def test_sums_of_parts_give_the_interval_of_the_whole():
    random = np.random.default_rng(3)
    values, groups = random.normal(1, 2, (57, 5)), np.repeat(range(19), 3)
    parts = []
    for own in (groups < 7, groups >= 7):
        names = np.unique(groups[own])
        total = np.stack([values[groups == name].sum(axis=0) for name in names])
        n = np.array([(groups == name).sum() for name in names])
        sums = {"n": own.sum(), "total": values[own].sum(axis=0), "squares": 0.0}
        parts.append(pd.DataFrame(sums | columns_of_sums(total, n)))
    mean, low, high = interval_of_sums(parts[0] + parts[1])
    means = np.stack([values[groups == name].mean(axis=0) for name in range(19)])
    assert mean == pytest.approx(values.mean(axis=0))
    half = 2.10092 * means.std(axis=0, ddof=1) / 19**0.5  # groups are of one size
    assert high - low == pytest.approx(2 * half, rel=1e-5)


def test_windows_know_their_text(lm):
    rows = ci.data.embedded("held-out-text")["text"]
    found = list(windows_of_texts(lm.window_rows, rows))
    assert torch.equal(torch.tensor([row for row, _ in found]), lm.windows(rows))
    assert tuple(np.bincount([text for _, text in found])) == SIZES
    # the last token of a window is of its text
    ends = np.cumsum([len(lm.tokenizer.encode(text)) + 1 for text in rows])
    for number in (0, 14, 15, 100, 374):
        last = (number + 1) * (lm.cfg.n_ctx - lm.cfg.prepend_bos) - 1
        assert found[number][1] == np.searchsorted(ends, last, side="right")


def test_intervals_of_a_sweep_are_over_texts(lm):
    result = measured()
    layers, table = result.layers(), result.samples()
    low, high = result.mean_ends(layers)
    for name in STATISTICS:
        probe, statistic = name.split(".")
        row = (layers["probe"] == probe) & (layers["statistic"] == statistic)
        row &= layers["layer"] == 2
        own = table.loc[table["layer"] == 2, name].to_numpy()
        free = by_group(own[:, None], GROUPS)[:, 0]
        half = 2.07961 * free.std(ddof=1) / 22**0.5
        assert (high - low)[row] == pytest.approx([2 * half], rel=1e-5)
        # taken as independent, the windows would give at most two thirds of it
        assert 2 * 1.96 * own.std() / len(own) ** 0.5 < 0.67 * 2 * half
    short = ci.sweep(lm, TEXT, limit=90, controls=0, probes=["sparsity", "attention"], **QUIET)
    assert np.isnan(short.mean_ends(short.layers())).all()
    assert np.isnan(short.mean_ends(short.heads())).all()
    assert short.caution() and not short.caution().startswith("Intervals")


def test_groups_of_a_user(fashion, tmp_path):
    table = ci.data.embedded("fashion").select(range(48))
    patients = [f"patient {n // 4}" for n in range(48)]
    named = table.add_column("patient", patients)
    more = {"how": "zero", **QUIET}
    one = ci.ablate_heads(fashion, table, groups=patients, **more)
    two = ci.ablate_heads(fashion, named, groups="patient", out=tmp_path, **more)
    pd.testing.assert_frame_equal(one.heads(), two.heads())
    alone = ci.ablate_heads(fashion, table, **more).heads()
    assert (one.heads()["drop"] == alone["drop"]).all()
    assert (one.heads()["low"] != alone["low"]).any()
    assert one.independent == (12, "groups")
    with pytest.raises(ValueError, match="groups"):
        ci.ablate_heads(fashion, named, out=tmp_path, **more)  # a folder of grouped samples
    for wrong in ("patience", patients[:7], [1.5] * 48, 3):
        with pytest.raises(ValueError, match="groups"):
            ci.ablate_heads(fashion, named, groups=wrong, **more)
    with pytest.raises(ValueError, match="stream"):
        ci.sweep(fashion, named.to_iterable_dataset(), groups="patient", **QUIET)


def test_a_linear_probe_splits_by_group(fashion):
    table = ci.data.embedded("fashion").select(range(200))
    groups = [n // 5 for n in range(200)]
    found = ci.linear_probe(fashion, table, groups=groups, **QUIET)
    samples = found.samples().query("layer == 0")
    held = samples["linear.accuracy"].notna().to_numpy()
    sides = pd.Series(held).groupby(groups).nunique()
    assert (sides == 1).all() and 0 < held.sum() < 100
