"""The norm ladder: a slow form, its propositions each with a construction, and invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crate_interp import measures as m

BATCH, HEADS, POS, WIDTH = 2, 3, 13, 5


def codes_of(seed, *shape):
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randn(*(shape or (BATCH, HEADS, POS, WIDTH)), generator=rng, dtype=torch.float64)
    return codes * (0.5 + 3 * torch.rand(codes.shape[:-1], generator=rng).double())[..., None]


def slow(u, visible):
    """Six numbers for each token of one head, written from the docstring with two loops."""
    n, width = u.shape
    norms = [math.sqrt(sum(x * x for x in row)) for row in u.tolist()]
    flat = [[x / norms[p] * sum(norms) / n for x in row] for p, row in enumerate(u.tolist())]
    rows = []
    for p in range(n):
        seen = [j for j in range(n) if visible[p][j]]
        patterns = []
        for v in (u.tolist(), flat):
            score = {j: sum(a * b for a, b in zip(v[p], v[j], strict=True)) for j in seen}
            power = {j: math.exp((s - max(score.values())) / width**0.5) for j, s in score.items()}
            patterns.append({j: x / sum(power.values()) for j, x in power.items()})
        a, f = patterns
        scale = 1 / (2 * width**0.5)
        rise = sum(a[j] * scale * (norms[j] ** 2 - norms[p] ** 2) for j in seen)
        gap = {j: sum((x - y) ** 2 for x, y in zip(u[p], u[j], strict=True)) for j in seen}
        rows.append([
            norms[p], a[p], sum(a[j] for j in seen if j != p),
            sum(a[j] for j in seen if norms[j] > norms[p]), rise,
            sum(a[j] * scale * float(gap[j]) for j in seen), sum(min(a[j], f[j]) for j in seen),
        ])  # fmt: skip
    return np.array(rows)


@pytest.mark.parametrize("causal", [False, True])
def test_a_slow_form(causal):
    codes = codes_of(0)
    visible = torch.ones(POS, POS, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    mine = torch.stack(m.norm_ladder(codes, visible if causal else None), dim=-1)
    wanted = [[slow(head, visible.tolist()) for head in sample] for sample in codes]
    np.testing.assert_allclose(mine.numpy(), np.array(wanted), rtol=1e-11, atol=1e-13)
    half = m.norm_ladder(codes.float(), visible)
    assert {one.dtype for one in half} == {torch.float32}
    assert [one.shape for one in half] == [(BATCH, HEADS, POS)] * 7


def test_rise_less_distance_is_the_score_above_oneself():
    codes = codes_of(1)
    scores = codes @ codes.transpose(-1, -2) / WIDTH**0.5
    above = (scores.softmax(-1) * scores).sum(-1) - scores.diagonal(dim1=-2, dim2=-1)
    steps = m.norm_ladder(codes)
    torch.testing.assert_close(steps.rise - steps.distance, above)


@given(st.integers(0, 999), st.floats(0, 2))
def test_a_token_wins_by_a_margin_exactly_if_its_rise_pays_for_it(seed, margin):
    u = codes_of(seed, POS, WIDTH)
    squares, gaps = u.square().sum(-1), torch.cdist(u, u).square()
    scores = u @ u.T
    wins = scores >= scores.diagonal()[:, None] + margin
    pays = squares[None] >= squares[:, None] + gaps + 2 * margin
    close = (scores - scores.diagonal()[:, None] - margin).abs() < 1e-9
    assert bool((wins == pays)[~close].all())


@given(st.integers(0, 999))
def test_codes_of_one_norm_look_most_at_themselves_rotated_or_not(seed):
    u = m.with_norms(codes_of(seed, 1, POS, 4), torch.tensor(1.7, dtype=torch.float64))[0]
    angles = torch.arange(POS).double()[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turned = torch.cat([
        u[:, :2] * angles.cos() - u[:, 2:] * angles.sin(),
        u[:, :2] * angles.sin() + u[:, 2:] * angles.cos(),
    ], dim=-1)  # fmt: skip
    for codes in (u, turned):
        scores = codes @ codes.T
        assert bool((scores <= scores.diagonal()[:, None] + 1e-12).all())
        assert m.norm_ladder(codes[None]).flat_share.min() == pytest.approx(1.0)


def from_scores(scores):
    """Codes [pos, pos] with these scores; they exist only if the table has no negative eigenvalue.

    The scores are scaled as a head of this width scales them.
    """
    values, vectors = torch.linalg.eigh(scores * scores.shape[0] ** 0.5)
    assert values.min() > -1e-9 * values.max()
    return vectors * values.clamp(min=0).sqrt()


def any_causal_table(table):
    """The construction of the page: S = sym(L) + s (N - max(p, j)), s = 4 |sym(L)|."""
    n = len(table)
    both = table.tril() + table.tril(-1).T
    place = torch.arange(n)
    steps = n - torch.maximum(place[:, None], place[None]).to(table)
    return both + 4 * torch.linalg.matrix_norm(both, 2) * steps


@given(st.integers(0, 999))
def test_any_causal_table_is_that_of_a_tied_head_at_a_price_in_norm(seed):
    table = torch.randn(POS, POS, generator=torch.Generator().manual_seed(seed)).double()
    u = from_scores(any_causal_table(table))
    causal = torch.ones(POS, POS, dtype=torch.bool).tril()
    wanted, mine = (
        scores.masked_fill(~causal, -torch.inf).softmax(-1)
        for scores in (table, u @ u.T / POS**0.5)
    )
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("margin", [0.5, 3.0])
def test_a_previous_token_head_needs_two_margins_a_place_and_eight_suffice(margin):
    table = torch.zeros(POS, POS, dtype=torch.float64)
    table[torch.arange(1, POS), torch.arange(POS - 1)] = margin
    scores = any_causal_table(table)
    u = from_scores(scores)
    above = (u @ u.T / POS**0.5).tril() - (u @ u.T / POS**0.5).diagonal()[:, None]
    assert above.diagonal(-1) == pytest.approx(margin)
    squares = u.square().sum(-1) / POS**0.5
    falls = squares[:-1] - squares[1:]
    assert bool((falls >= 2 * margin).all()) and bool((falls <= 8 * margin + 1e-9).all())
    steps = m.norm_ladder(u[None], torch.ones(POS, POS, dtype=torch.bool).tril())
    assert bool((steps.rise[0, 1:] > steps.distance[0, 1:]).all())


@given(st.integers(0, 999))
def test_with_the_diagonal_masked_equal_norms_suffice_for_any_table(seed):
    table = torch.randn(POS, POS, generator=torch.Generator().manual_seed(seed)).double()
    both = table.tril(-1) + table.tril(-1).T
    scores = both + torch.linalg.matrix_norm(both, 2) * torch.eye(POS).double()
    u = from_scores(scores)
    assert u.norm(dim=-1).max() == pytest.approx(u.norm(dim=-1).min())
    others = torch.ones(POS, POS, dtype=torch.bool).tril(-1)
    wanted, mine = (one.masked_fill(~others, -torch.inf)[1:].softmax(-1)
                    for one in (table, u @ u.T / POS**0.5))  # fmt: skip
    torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)


def test_a_duplicate_costs_no_norm():
    u = m.with_norms(codes_of(3, 1, POS, WIDTH), torch.tensor(9.0, dtype=torch.float64))
    u[0, 11] = u[0, 4]
    steps = m.norm_ladder(u, torch.ones(POS, POS, dtype=torch.bool).tril())
    pattern = (u[0] @ u[0].T / WIDTH**0.5)[11, :12].softmax(-1)
    assert pattern[4] == pytest.approx(pattern[11]) and pattern[4] > 0.4
    assert steps.rise[0, 11].abs() < 1e-12


@given(st.integers(0, 999))
def test_the_ladder_is_that_of_turned_codes_and_of_tokens_in_another_order(seed):
    rng = torch.Generator().manual_seed(seed)
    u, order = codes_of(seed), torch.randperm(POS, generator=rng)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=rng).double())[0]
    steps = m.norm_ladder(u)
    for one, turned, moved in zip(
        steps, m.norm_ladder(u @ turn), m.norm_ladder(u[:, :, order]), strict=True
    ):
        torch.testing.assert_close(turned, one)
        torch.testing.assert_close(moved, one[..., order])


def test_what_it_refuses_and_what_is_not_finite():
    u = codes_of(0)
    u[1, 2, 3, 4] = math.nan
    for one in m.norm_ladder(u):
        assert one.isnan().all(dim=-1).tolist() == [[False] * 3, [False, False, True]]
        assert not one[0].isnan().any()
    with pytest.raises(ValueError, match="no tokens"):
        m.norm_ladder(u[:, :, :0])
    with pytest.raises(ValueError, match="does not see itself"):
        m.norm_ladder(u, torch.ones(POS, POS, dtype=torch.bool).tril(-1))
    for visible in (torch.ones(POS, POS), torch.ones(2, POS, POS, dtype=torch.bool)):
        with pytest.raises((ValueError, TypeError), match="bool|visible"):
            m.norm_ladder.__wrapped__(u, visible)
    with pytest.raises(ValueError, match="no heads"):
        m.norm_ladder(u[:, :0])
    for dtype in (torch.float16, torch.float32):
        zero = torch.zeros(1, 3, 5, dtype=dtype)
        assert not m.with_norms(zero, torch.ones(())).any()
        tiny = m.with_norms(zero + 1e-5, torch.tensor(100.0)).norm(dim=-1)
        assert bool((tiny - 100).abs().max() < 1)


def test_a_peaked_head_and_a_single_token_have_no_rise_out_of_nothing():
    u = codes_of(5) * 60  # each token looks at itself or at a longer one, and nowhere else
    steps = m.norm_ladder(u)
    assert float(steps.distance.min()) >= 0 and float(steps.elsewhere.min()) >= 0
    assert bool((steps.rise[steps.elsewhere == 0] == 0).all())
    one = m.norm_ladder(u[:, :, :1])
    assert not one.rise.any() and not one.distance.any() and not one.elsewhere.any()
