"""Heads of a sweep together: their mean has a deviation of its own, and which is the sharpest."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import crate_interp as ci
from comparing import made
from crate_interp.sweeps.layer_curves import curve

N = 7


@pytest.fixture
def data():
    return torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(3))


def test_the_mean_over_heads_has_the_deviation_of_a_mean(model, data, tmp_path):
    kept = dataclasses.replace(ci.probes.attention(), per_head=("entropy", "entropy_cls"))
    whole = ci.sweep(model, data, probes=kept, progress=False, controls=0)
    samples = ci.data.open_data(data, model.preprocess)
    parts = [
        ci.sweep(model, ci.data.part(samples, *ends), probes=kept, progress=False, controls=0)
        for ends in ((0, 2), (2, N))
    ]
    for result in (whole, parts[0].merge(parts[1])):
        for name in ("entropy", "entropy_cls"):
            each = result.head_samples().groupby(["layer", "sample"])[f"attention.{name}"].mean()
            by_hand = each.groupby("layer").agg(["mean", "std"])
            rows = result.layers().query("statistic == @name and over == 'heads'")
            np.testing.assert_allclose(rows[["mean", "std"]], by_hand, rtol=1e-5)
            assert (rows["n"] == N).all()
            drawn = curve(result, f"attention.{name}")
            half = stats.t.ppf(0.975, N - 1) * by_hand["std"] / np.sqrt(N)
            np.testing.assert_allclose((drawn.high - drawn.low) / 2, half, rtol=1e-4)


def test_a_mean_over_heads_that_was_saved_without_its_deviation_has_none(model, data):
    options = dict(probes="attention", progress=False, controls=0)
    samples = ci.data.open_data(data, model.preprocess)
    first, rest = (
        ci.sweep(model, ci.data.part(samples, *ends), **options) for ends in ((0, 2), (2, N))
    )
    moments = first.stored["moments"].query("head >= 0")
    old = ci.SweepResult({**first.stored, "moments": moments}, first.meta)
    pd.testing.assert_frame_equal(old.heads(), first.heads())
    for result, n in ((old, 2), (old.merge(rest), N), (rest.merge(old), N)):
        rows = result.layers().query("over == 'heads'")
        assert len(rows) and rows["std"].isna().all() and (rows["n"] == n).all()


def test_cls_that_looks_at_itself_alone_divides_nothing_among_patches(model):
    """And a whole of a millionth is divided as one of a half."""
    left = torch.tensor([0.0, 1e-6, 0.5])
    shares = torch.tensor([0.7, 0.2, 0.1]) * left[:, None]
    rows = torch.cat([1 - left[:, None], shares], dim=1)  # [sample, key]
    pattern = rows[:, None, None].expand(-1, 5, 4, -1)  # [sample, head, query, key]
    found = ci.probes.attention().measure(model.blocks[0], {"attn.hook_pattern": pattern})
    found = found["entropy_patches"][:, 0]
    even = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    wanted = -(even * even.log()).sum()
    np.testing.assert_allclose(found, [0.0, wanted, wanted], rtol=1e-6)
    assert found.dtype == torch.float64


def test_the_sharpest_heads_say_whether_they_are_told_apart():
    """By hand: half of an interval is t s / sqrt(n), t = 4.303 for three samples."""
    apart = np.array([[[1.0, 9.0]], [[1.1, 9.1]], [[1.2, 9.2]]])
    near = apart - np.array([0.0, 7.9])  # means 1.1 and 1.2, half intervals .248
    unit = ("nats", 0.0, None, "entropy")
    said = {}
    for name, numbers in (("apart", apart), ("near", near)):
        result = made(
            {}, moments={"attention.entropy": numbers}, statistics={"attention.entropy": unit}
        )
        said[name] = result.sharpest()
    first = "Sharpest heads by entropy: L0H0 1.100 (0.8516 to 1.348; sd 0.1); L0H1 "
    assert said["apart"].startswith(f"{first}9.100 (8.852 to 9.348; sd 0.1).")
    assert said["apart"].endswith(" overlap the first: 0 of 1.")
    assert said["near"].startswith(f"{first}1.200 (0.9516 to 1.448; sd 0.1).")
    assert said["near"].endswith(" overlap the first: 1 of 1.")
