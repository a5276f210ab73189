"""Entropy and stable rank along a training: the statistic, its test, and what is measured."""

import joma_entropy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joma_entropy import bounce, changes, measured, of_entropy
from lab import Steps

import crate_interp as ci
from crate_interp.measures import attention_entropy


def test_a_bounce_needs_a_fall_and_a_rise():
    assert bounce(np.array([5.0, 3.0, 1.0])) == 0 == bounce(np.array([1.0, 3.0, 5.0]))
    assert bounce(np.array([5.0, 1.0, 3.0])) == 2 == bounce(np.array([3.0, 1.0, 4.0]))
    assert bounce(np.array([2.0, 5.0, 2.0])) == 0  # a hill is no dip


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=11), st.floats(-9, 9))
def test_a_bounce_is_not_negative_and_sees_no_offset(values, offset):
    curve = np.array(values)
    assert bounce(curve) >= 0
    assert bounce(curve + offset) == pytest.approx(bounce(curve), abs=1e-9)
    assert bounce(curve[::-1]) == bounce(curve)


def test_a_curve_that_turns_is_told_from_a_trend_and_from_too_few_steps():
    turning = np.stack([abs(np.arange(41) - 20.0), abs(np.arange(41) - 25.0)])
    noise = 0.05 * np.random.default_rng(0).normal(size=(2, 41))
    found = changes(turning + noise)
    assert [abs(one.at - at) <= 1 for one, at in zip(found, (20, 25), strict=True)] == [True] * 2
    assert all(one.p <= 0.05 and one.after > one.before for one in found)
    assert all(one.p > 0.05 for one in changes(np.exp(-np.arange(41) / 9) + noise))
    assert changes(turning[:, ::7]) == []


@pytest.mark.parametrize("last, answer", [(1.0, "undecided"), (-3.0, "not supported")])
def test_few_checkpoints_decide_nothing_and_a_falling_curve_has_no_bounce(last, answer):
    steps = np.array([2.0, 1.0, -2.0, last])
    entropy = steps[:, None, None] + np.zeros((4, 3, 5))  # [step, layer, sample]
    entropy += 0.01 * np.arange(5)
    row = of_entropy("crate-tiny-fashion", entropy, 3.0)
    assert row["answer"] == answer and row["ours"] == pytest.approx(3.0 if last == 1 else 0.0)
    assert ("3 increments are too few" in row["why"]) and row["n"] == 5


def test_measured_is_the_cache_and_the_weights():
    model = ci.load("crate-tiny-induction", revision="step-0")
    tokens = joma_entropy.inputs("crate-tiny-induction", 3, model)
    assert tokens.shape == (3, 49)
    entropy, ranks = measured(model, tokens)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    for layer, block in enumerate(model.blocks):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        by_hand = attention_entropy(pattern).mean(dim=(1, 2))
        np.testing.assert_allclose(entropy[layer], by_hand.numpy(), rtol=1e-5)
        values = np.linalg.svd(block.mlp.D.detach().numpy(), compute_uv=False)
        assert ranks[layer] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)


@pytest.mark.slow
def test_the_lab_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setitem(joma_entropy.COUNT, "quick", 5)
    found = joma_entropy.run("quick", Steps(tmp_path))
    assert len(found.table()) == 3 and joma_entropy.draw(found).axes
