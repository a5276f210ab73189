"""Seeded random tensors in float64, and the comparison that the closed forms share."""

import torch
from torch.testing import assert_close


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(seed, rows, columns):
    return torch.linalg.qr(draw(seed, rows, columns))[0]


def complete(seed, heads, p):
    """Returns U [head, heads * p, p] that cut the space into orthogonal subspaces."""
    return orthonormal(seed, heads * p, heads * p).unflatten(1, (heads, p)).permute(1, 0, 2)


def close(got, wanted, tol=1e-10):
    assert_close(got, torch.as_tensor(wanted, dtype=got.dtype).expand_as(got), rtol=tol, atol=tol)
