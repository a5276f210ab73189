"""Subspaces, dictionaries and the sharpness of attention: closed forms and order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp.measures as m
from tensors import close, complete, draw


def test_a_complete_orthonormal_cover():
    u = complete(0, 3, 5)
    assert m.orthonormality_defect(u).max() < 1e-12 and m.completeness_defect(u) < 1e-12
    assert m.head_overlap(u).max() < 1e-12
    close(m.projection_energy(draw(1, 7, 15), u).sum(dim=-1), 1.0)
    assert (m.projection_energy(draw(1, 7, 15), u[:2]).sum(dim=-1) < 0.999).all()  # not complete


def test_worked_by_hand():
    u = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # U^T U - I = diag(3, 0): 3 / sqrt 2
    assert m.orthonormality_defect(u).item() == pytest.approx(3 / math.sqrt(2))
    # U U^T - I = diag(3, 0, -1): sqrt 10 / sqrt 3
    assert m.completeness_defect(u[None]).item() == pytest.approx(math.sqrt(10 / 3), rel=1e-6)
    angle = 0.4
    line, other = torch.tensor([[1.0], [0.0]]), torch.tensor([[math.cos(angle)], [math.sin(angle)]])
    assert m.subspace_overlap(line, other).item() == pytest.approx(math.cos(angle) ** 2, rel=1e-6)
    # D = diag(1, 2): G = diag(1, 4), c = 2.5, |G - cI| = sqrt(4.5), over sqrt 2
    assert m.dictionary_defect(torch.diag(torch.tensor([1.0, 2.0]))).item() == pytest.approx(
        1.5, rel=1e-6
    )
    z = torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(m.projection_energy(z, u[None])[:, 0], torch.tensor([0.36, 0.0]))


def test_scale_free_defect_by_hand():
    frame = torch.linalg.qr(draw(10, 11, 5))[0]
    for matrix in (frame, 1e-3 * frame, 1e25 * frame.T):
        assert m.scale_free_defect(matrix) < 1e-12
    # D = diag(1, 2): G = diag(1, 4), c = 2.5, |G - cI| = sqrt(4.5), over 2.5 sqrt 2
    assert m.scale_free_defect(torch.diag(torch.tensor([1.0, 2.0]))).item() == pytest.approx(0.6)
    rank_1 = draw(11, 7, 1) @ draw(12, 1, 13)
    assert m.scale_free_defect(rank_1).item() == pytest.approx(6**0.5)
    assert m.scale_free_defect(draw(13, 30, 300, 100)).mean().item() == pytest.approx(
        3**-0.5, rel=0.02
    )
    mixed = torch.stack([torch.zeros(5, 3), torch.eye(5, 3)])
    assert m.scale_free_defect(mixed).isnan().tolist() == [True, False]
    assert m.dictionary_defect(mixed).tolist() == [0, 0]


def test_output_map_cosine_by_hand():
    u = draw(14, 3, 11, 5)
    signs = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    w_o = signs[:, None, None] * u.mT
    torch.testing.assert_close(m.output_map_cosine(w_o, u), signs.sign())
    # one entry of two: <a, b> = 3, lengths 5 and 1
    a, b = torch.zeros(1, 2, 3), torch.zeros(1, 3, 2)
    a[0, 0, 1], a[0, 1, 2], b[0, 1, 0] = 3.0, 4.0, 1.0
    assert m.output_map_cosine(a, b).item() == pytest.approx(0.6)
    many = m.output_map_cosine(draw(15, 3000, 5, 11), draw(16, 3000, 11, 5))
    assert abs(many.mean()) < 4 * (55 * 3000) ** -0.5
    assert many.std().item() == pytest.approx(55**-0.5, rel=0.05)


@given(st.integers(0, 2**31))
def test_scale_free_measures_ignore_scale_and_rotation(seed):
    d, w_o, u = draw(seed, 7, 13), draw(seed + 1, 2, 5, 11), draw(seed + 2, 2, 11, 5)
    left, right = (torch.linalg.qr(draw(seed + 3, n, n))[0] for n in (7, 13))
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # noqa: E731
    gram = d.numpy() @ d.numpy().T
    c = np.trace(gram) / 7
    slow = np.linalg.norm(gram / c - np.eye(7)) / 7**0.5
    assert m.scale_free_defect(d).item() == pytest.approx(slow)
    assert m.scale_free_defect(d).item() == pytest.approx(m.dictionary_defect(d).item() / c)
    close(m.scale_free_defect(-3e-20 * left @ d @ right), m.scale_free_defect(d))
    close(m.scale_free_defect(d.T), m.scale_free_defect(d))
    cosine = m.output_map_cosine(w_o, u)
    entries = [
        sum(a[i, j] * b[j, i] for i in range(5) for j in range(11))
        / (np.linalg.norm(a) * np.linalg.norm(b))
        for a, b in zip(w_o.numpy(), u.numpy(), strict=True)
    ]
    np.testing.assert_allclose(cosine.numpy(), entries, rtol=1e-9)
    turn = torch.linalg.qr(draw(seed + 4, 11, 11))[0]
    close(m.output_map_cosine(1e-30 * w_o @ turn.T, 7 * turn @ u), cosine)


def pattern(seed, *shape, temperature=1.0):
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits / temperature).softmax(dim=-1)


def test_closed_forms():
    """Of the entropy: test_geometry_oracles.py."""
    n = 13
    uniform, one = torch.full((3, n), 1 / n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    close(m.effective_support(uniform), float(n))
    close(m.effective_support(one), 1.0)
    close(m.top_mass(uniform, 5), 5 / n)
    close(m.top_mass(one, 1), 1.0)
    # by hand: (1/2, 1/4, 1/4): entropy 1.5 ln 2, support 1 / (1/4 + 1/16 + 1/16) = 8/3
    row = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    assert m.attention_entropy(row).item() == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert m.effective_support(row).item() == pytest.approx(8 / 3, rel=1e-12)
    assert m.top_mass(row, 2).item() == 0.75


@given(st.integers(0, 2**31))
def test_sharper_logits_are_sharper_in_every_measure(seed):
    rows = pattern(seed, 5, 13)
    sharper = pattern(seed, 5, 13, temperature=0.5)
    assert (m.attention_entropy(sharper) < m.attention_entropy(rows)).all()
    assert (m.effective_support(sharper) < m.effective_support(rows)).all()
    assert (m.top_mass(sharper, 5) > m.top_mass(rows, 5)).all()
    # Renyi-2 below Shannon
    assert (m.effective_support(rows) <= m.attention_entropy(rows).exp() + 1e-9).all()


def test_gradient_is_finite_at_zero_mass():
    rows = torch.eye(3, dtype=torch.float64).requires_grad_()
    m.attention_entropy(rows).sum().backward()
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
    got = m.attention_entropy(rows)
    # terms of probabilities below the normal floats are smaller than 1e-35
    assert got.dtype == dtype and (got - plain).double().abs().max() < 1e-35
    large = plain > 1e-20
    assert large.any() and torch.equal(got[large], plain[large])
