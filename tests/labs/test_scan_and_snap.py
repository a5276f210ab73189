"""Scan and snap: frequencies, the slope of the scores in closed form, and its own rules."""

import math

import numpy as np
import pytest
import scan_and_snap as lab_module
import torch
from scan_and_snap import ANSWERS, COMMON, DISTINCT, TOKENS, frequencies, inputs, left_by, loss_of


def test_distinct_tokens_are_of_one_answer():
    counts = frequencies(torch.Generator().manual_seed(0))
    assert counts.shape == (ANSWERS, TOKENS)
    torch.testing.assert_close(counts.sum(dim=-1), torch.ones(ANSWERS).double())
    has = counts > 0
    assert has[:, -COMMON:].all() and (has[:, :-COMMON].sum(dim=0) == 1).all()
    assert (has[:, :-COMMON].sum(dim=1) == DISTINCT).all()


def test_the_slope_of_the_scores():
    """dz = f (g - f <f, g>) with g the slope by f: what normalising leaves of it."""
    generator = torch.Generator().manual_seed(1)
    counts, answers = frequencies(generator), torch.arange(ANSWERS)
    z = torch.randn(ANSWERS, TOKENS, generator=generator).double().requires_grad_()
    y = torch.randn(TOKENS, ANSWERS, generator=generator).double()
    (slope,) = torch.autograd.grad(loss_of(counts, z, y, answers), [z])
    f = inputs(counts, z.detach())
    torch.testing.assert_close(f.norm(dim=-1), torch.ones(ANSWERS).double())
    wrong = (torch.softmax(f @ y, dim=-1) - torch.eye(ANSWERS)) / ANSWERS
    g = wrong @ y.T
    wanted = f * (g - f * (f * g).sum(dim=-1, keepdim=True))
    torch.testing.assert_close(slope, wanted)


def test_it_starts_at_chance():
    counts = frequencies(torch.Generator().manual_seed(2))
    zero = torch.zeros(ANSWERS, TOKENS).double()
    start = loss_of(counts, zero, torch.zeros(TOKENS, ANSWERS).double(), torch.arange(ANSWERS))
    assert start.item() == pytest.approx(math.log(ANSWERS))


def test_one_b_is_found():
    begun = inputs(frequencies(torch.Generator().manual_seed(3)), torch.zeros(ANSWERS, TOKENS))
    found = lab_module.measured(2 * 0.7 * begun**2, begun)
    assert found["growth"] == pytest.approx(0.7) and found["error"] == pytest.approx(0, abs=1e-20)
    assert found["distinct"] > 0


def test_what_a_form_leaves():
    t = np.linspace(40, 6000, 101)
    b = 3 - 2 * np.log(t)
    assert left_by(np.log(t), b) == pytest.approx(0, abs=1e-12)
    b = 0.3 * lab_module.published(t, 7.0) + 1
    assert lab_module.misfit(t, b) == pytest.approx(0, abs=1e-6)
    assert lab_module.misfit(t, np.sin(t)) > 0.5
