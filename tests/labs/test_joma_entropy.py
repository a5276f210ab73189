"""Entropy and stable rank along a training: the statistic, and what is measured."""

import joma_entropy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joma_entropy import bounce, measured

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
