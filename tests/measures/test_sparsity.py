"""Sparsity of codes: worked values, a second implementation, invariances, edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from crate_interp.measures import hoyer, l1_norm, zero_fraction


def sparse(seed, *shape):
    z = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return z.relu()


def test_worked_by_hand():
    z = torch.tensor([[0.0, 3.0, 0.0, -4.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert zero_fraction(z).tolist() == [0.5, 1.0, 0.0]
    assert zero_fraction(z, tol=3.0).tolist() == [0.75, 1.0, 1.0]
    assert l1_norm(z).tolist() == [7.0, 0.0, 8.0]
    # (sqrt 4 - 7/5) / (sqrt 4 - 1) = 0.6; all zero is 1 by definition; equal entries 0
    torch.testing.assert_close(hoyer(z), torch.tensor([0.6, 1.0, 0.0]))
    assert hoyer(torch.tensor([[0.0, 0.0, 5.0]])).item() == pytest.approx(1)


@pytest.mark.parametrize("dtype, rel", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_a_slow_form(dtype, rel):
    z = sparse(0, 5, 7, 11).to(dtype)
    got = hoyer(z)
    for i in range(5):
        for j in range(7):
            assert got[i, j].item() == pytest.approx(
                reference.hoyer(z[i, j].numpy()), rel=rel, abs=rel
            )
            row = z[i, j].tolist()
            assert zero_fraction(z)[i, j].item() == pytest.approx(
                sum(x == 0 for x in row) / 11, rel=rel
            )
            assert l1_norm(z)[i, j].item() == pytest.approx(sum(map(abs, row)), rel=rel)


@given(st.integers(0, 2**31), st.floats(1e-150, 1e150))
def test_invariances(seed, scale):
    z = sparse(seed, 3, 13)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
    for other in (z[:, order], -z, z * scale):
        torch.testing.assert_close(hoyer(other), hoyer(z), rtol=1e-9, atol=1e-9)
        assert torch.equal(zero_fraction(other), zero_fraction(z))
    torch.testing.assert_close(l1_norm(z * scale), l1_norm(z) * scale, rtol=1e-12, atol=0)
    assert ((hoyer(z) >= 0) & (hoyer(z) <= 1)).all()


def test_not_finite_and_bad_arguments():
    z = torch.ones(3, 5)
    z[0, 1], z[2, 2] = math.nan, -math.inf
    for measure in (zero_fraction, l1_norm, hoyer):
        assert measure(z).isnan().tolist() == [True, False, True]
        with pytest.raises(ValueError, match="there is no code to measure"):
            measure(torch.ones(0, 5))
    huge = torch.full((3, 5), 2e38)  # finite, though their sum is not
    assert zero_fraction(huge).tolist() == [0.0] * 3 and hoyer(huge).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="tol=-1.0: give a number of at least 0"):
        zero_fraction(z, tol=-1.0)
    with pytest.raises(ValueError, match="at least 2 entries, got 1"):
        hoyer(torch.ones(3, 1))
