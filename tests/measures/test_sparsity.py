"""Sparsity of codes: worked values and edges."""

import math

import pytest
import torch

from crate_interp.measures import hoyer, l1_norm, zero_fraction


def test_worked_by_hand():
    z = torch.tensor([[0.0, 3.0, 0.0, -4.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert zero_fraction(z).tolist() == [0.5, 1.0, 0.0]
    assert zero_fraction(z, tol=3.0).tolist() == [0.75, 1.0, 1.0]
    assert l1_norm(z).tolist() == [7.0, 0.0, 8.0]
    # (sqrt 4 - 7/5) / (sqrt 4 - 1) = 0.6; all zero is 1 by definition; equal entries 0
    torch.testing.assert_close(hoyer(z), torch.tensor([0.6, 1.0, 0.0]))
    assert hoyer(torch.tensor([[0.0, 0.0, 5.0]])).item() == pytest.approx(1)


def test_not_finite():
    z = torch.ones(3, 5)
    z[0, 1], z[2, 2] = math.nan, -math.inf
    for measure in (zero_fraction, l1_norm, hoyer):
        assert measure(z).isnan().tolist() == [True, False, True]
    huge = torch.full((3, 5), 2e38)  # finite, though their sum is not
    assert zero_fraction(huge).tolist() == [0.0] * 3 and hoyer(huge).tolist() == [0.0] * 3
