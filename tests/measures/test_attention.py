"""Attention sharpness: closed forms, order, edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crate_interp.measures import attention_entropy, effective_support, top_mass


def pattern(seed, *shape, temperature=1.0):
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits / temperature).softmax(dim=-1)


def test_closed_forms():
    n = 13
    uniform, one = torch.full((3, n), 1 / n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(
        attention_entropy(uniform), torch.full((3,), math.log(n), dtype=torch.float64)
    )
    assert attention_entropy(one).abs().max() == 0
    torch.testing.assert_close(
        effective_support(uniform), torch.full((3,), float(n), dtype=torch.float64)
    )
    torch.testing.assert_close(effective_support(one), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(top_mass(uniform, 5), torch.full((3,), 5 / n, dtype=torch.float64))
    torch.testing.assert_close(top_mass(one, 1), torch.ones(n, dtype=torch.float64))
    # by hand: (1/2, 1/4, 1/4): entropy 1.5 ln 2, support 1 / (1/4 + 1/16 + 1/16) = 8/3
    row = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    assert attention_entropy(row).item() == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert effective_support(row).item() == pytest.approx(8 / 3, rel=1e-12)
    assert top_mass(row, 2).item() == 0.75


@given(st.integers(0, 2**31))
def test_sharper_logits_are_sharper_in_every_measure(seed):
    rows = pattern(seed, 5, 13)
    sharper = pattern(seed, 5, 13, temperature=0.5)
    assert (attention_entropy(sharper) < attention_entropy(rows)).all()
    assert (effective_support(sharper) < effective_support(rows)).all()
    assert (top_mass(sharper, 5) > top_mass(rows, 5)).all()
    # Renyi-2 below Shannon
    assert (effective_support(rows) <= attention_entropy(rows).exp() + 1e-9).all()


def test_gradient_is_finite_at_zero_mass():
    rows = torch.eye(3, dtype=torch.float64).requires_grad_()
    attention_entropy(rows).sum().backward()
    assert rows.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_masked_patterns_keep_their_bits(dtype, scale):
    """Against the logarithm of every probability, with 0 ln 0 = 0; 60 is nearly one-hot."""
    scores = scale * torch.randn(3, 37, 37, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(37, 37, dtype=torch.bool).tril()
    rows = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).to(dtype)
    assert (rows == 0).any()
    plain = -(rows.masked_fill(rows == 0, 1).log() * rows).sum(dim=-1)
    got = attention_entropy(rows)
    # terms of probabilities below the normal floats are smaller than 1e-35
    assert got.dtype == dtype and (got - plain).double().abs().max() < 1e-35
    large = plain > 1e-20
    assert large.any() and torch.equal(got[large], plain[large])
