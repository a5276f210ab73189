"""Heads of a sweep together: their mean has a deviation of its own, and which is the sharpest."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

import crate_interp as ci
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
