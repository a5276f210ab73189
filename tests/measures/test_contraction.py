"""The rate of contract-and-broadcast attention and the use of its representatives."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp.measures as m
from crate_interp.measures.gradients import written
from crate_interp.measures.rates import head_codes
from tensors import close, draw

seeds = st.integers(0, 2**31)
epsilons = st.sampled_from([0.05, 0.3, 1.0, 4.0])
HEADS, POS, P, REP = 3, 13, 5, 7


def drawn(seed):
    """Codes, and a contraction whose rows sum to 1."""
    return draw(seed, HEADS, POS, P), (2 * draw(seed + 1, HEADS, REP, POS)).softmax(dim=-1)


def one_each(*tokens):
    """A contraction `[1, rep, pos]` in which each representative reads one token."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), POS)[None].double()


# the rate


@given(seeds, epsilons)
def test_all_tokens_as_their_own_representatives(seed, eps):
    z, u = draw(seed, POS, 11), draw(seed + 1, HEADS, 11, P)
    codes, itself = head_codes(z, u), torch.eye(POS, dtype=z.dtype).expand(HEADS, -1, -1)
    close(m.contracted_rate(codes, itself, eps), m.subspace_coding_rate(z, u, eps))
    slope = written(m.contracted_rate_gradient(codes, itself, eps), u)
    close(slope, m.subspace_coding_rate_gradient(z, u, eps))


def test_representatives_that_read_all_tokens_alike():
    # each is the mean code: 1/2 ln(1 + p |mean|^2 / eps^2), whatever m
    codes, _ = drawn(0)
    even = torch.full((HEADS, REP, POS), 1 / POS, dtype=torch.float64)
    wanted = 0.5 * torch.log(1 + P * codes.mean(dim=1).square().sum(dim=-1) / 0.09)
    close(m.contracted_rate(codes, even, 0.3), wanted, 1e-12)
    assert m.contracted_rate(codes, torch.zeros_like(even), 0.3).abs().max() == 0


@given(seeds, epsilons)
def test_what_changes_the_rate_in_a_known_way(seed, eps):
    codes, contraction = drawn(seed)
    rate = m.contracted_rate(codes, contraction, eps)
    order = torch.randperm(POS, generator=torch.Generator().manual_seed(seed))
    turn = torch.linalg.qr(draw(seed + 2, P, P))[0]
    for same in (
        m.contracted_rate(codes[:, order], contraction[..., order], eps),
        m.contracted_rate(codes, contraction.flip(1), eps),
        m.contracted_rate(codes, contraction.repeat(1, 2, 1), eps),
        m.contracted_rate(codes.repeat(1, 2, 1), contraction.repeat(1, 1, 2) / 2, eps),
        m.contracted_rate(codes @ turn, contraction, eps),
        m.contracted_rate(-3 * codes, contraction, 3 * eps),
        m.contracted_rate(codes.flip(0), contraction.flip(0), eps).flip(0),
    ):
        close(same, rate)
    slope = m.contracted_rate_gradient(codes, contraction, eps)
    close(
        m.contracted_rate_gradient(codes[:, order], contraction[..., order], eps), slope[:, order]
    )
    close(m.contracted_rate_gradient(codes @ turn, contraction, eps), slope @ turn)


def test_gradients_are_those_of_autograd_and_of_differences():
    z, u, (_, contraction) = draw(2, POS, 11).requires_grad_(), draw(3, HEADS, 11, P), drawn(4)
    rate = lambda z: m.contracted_rate(head_codes(z, u), contraction, 0.7).sum()  # noqa: E731
    form = written(m.contracted_rate_gradient(head_codes(z, u), contraction, 0.7), u)
    close(form, torch.autograd.grad(rate(z), z)[0])
    along = draw(5, POS, 11)
    with torch.no_grad():
        close((rate(z + 1e-5 * along) - rate(z - 1e-5 * along)) / 2e-5, (form * along).sum(), 1e-8)
        assert rate(z - 0.05 * form) < rate(z)
    codes, contraction = draw(6, 2, 3, 2).requires_grad_(), draw(7, 2, 5, 3).requires_grad_()
    for measure in (m.contracted_rate, m.contracted_rate_gradient):
        assert torch.autograd.gradcheck(
            lambda *x, measure=measure: measure(*x, 0.7), (codes, contraction)
        )


def test_the_gradient_as_the_paper_prints_it():
    # eq. 7, tokens as columns: U_k^T Q (I_m + p / (m eps^2) (U_k^T Q)^T U_k^T Q)^-1 A_k^T
    codes, contraction = drawn(8)
    b, q = P / (REP * 0.09), (contraction @ codes).mT
    inverse = torch.linalg.inv(torch.eye(REP, dtype=q.dtype) + b * q.mT @ q)
    close(m.contracted_rate_gradient(codes, contraction, 0.3), b * (q @ inverse @ contraction).mT)


def test_batch_axes_and_dtypes():
    codes, contraction = draw(9, 2, HEADS, POS, P), draw(10, 2, HEADS, REP, POS).softmax(dim=-1)
    for measure in (m.contracted_rate, m.contracted_rate_gradient):
        whole = measure(codes, contraction, 0.3)
        close(whole[1], measure(codes[1], contraction[1], 0.3), 1e-12)
        single = measure(codes.float(), contraction.float(), 0.3)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), whole, rtol=1e-5, atol=1e-6)


# representatives


def test_representatives_by_hand():
    apart, same = one_each(0, 1, 2, 3), one_each(5, 5, 5, 5)
    close(m.contraction_coverage(apart), 4 / 13, 1e-12)
    close(m.representatives_in_use(apart), 4.0, 1e-12)
    close(m.contraction_coverage(same), 1 / 13, 1e-12)
    close(m.representatives_in_use(same), 1.0, 1e-12)
    even = torch.full((1, REP, POS), 1 / POS, dtype=torch.float64)
    close(m.contraction_coverage(even), 1.0, 1e-12)
    close(m.representatives_in_use(even), 1.0, 1e-12)
    pairs = one_each(0, 0, 1, 1, 1, 1)  # shares 1/3 and 2/3; 36 / (4 + 16)
    close(m.contraction_coverage(pairs), 1 / (13 * 5 / 9), 1e-12)
    close(m.representatives_in_use(pairs), 1.8, 1e-12)
    half = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)  # cos^2 = 1/2
    close(m.representatives_in_use(half), 4 / 3, 1e-12)


@given(seeds)
def test_ranges_and_invariances_of_the_use(seed):
    _, contraction = drawn(seed)
    order = torch.randperm(POS, generator=torch.Generator().manual_seed(seed))
    cover, number = m.contraction_coverage(contraction), m.representatives_in_use(contraction)
    assert (cover >= 1 / POS - 1e-12).all() and (cover <= 1 + 1e-12).all()
    assert (number >= 1 - 1e-12).all() and (number <= REP + 1e-12).all()
    for same in (
        contraction[..., order],
        contraction.flip(1),
        contraction.repeat(1, 2, 1),
        contraction.repeat(1, 1, 2),
        contraction * 3,
    ):
        close(m.contraction_coverage(same), cover)
        close(m.representatives_in_use(same), number)
    silent = torch.cat([contraction, torch.zeros_like(contraction)], dim=1)
    close(m.contraction_coverage(silent), cover)
    close(m.representatives_in_use(silent), number)
    for measure in (m.contraction_coverage, m.representatives_in_use):
        close(measure(contraction.flip(0)), measure(contraction).flip(0))
        close(measure(torch.stack([contraction, contraction.flip(0)]))[0], measure(contraction))


def test_use_has_gradients_and_zeros_have_none():
    contraction = drawn(11)[1][:, :3, :2].requires_grad_()
    for measure in (m.contraction_coverage, m.representatives_in_use):
        assert torch.autograd.gradcheck(measure, contraction)
        zeros = torch.zeros_like(contraction, requires_grad=True)
        value = measure(zeros)
        assert value.abs().max() == 0
        (slope,) = torch.autograd.grad(value.sum(), zeros)
        assert slope.isfinite().all()


# bad input


def test_not_finite():
    alone = [False, True, False]
    for bad in (math.nan, math.inf):
        codes, contraction = drawn(12)
        codes[1, 2, 3] = bad
        assert m.contracted_rate(codes, contraction, 0.3).isnan().tolist() == alone
        slope = m.contracted_rate_gradient(codes, contraction, 0.3)
        assert slope.isnan().flatten(1).all(dim=1).tolist() == alone
        codes, contraction = drawn(12)
        contraction[1, 2, 3] = bad
        assert m.contracted_rate(codes, contraction, 0.3).isnan().tolist() == alone
        assert m.contraction_coverage(contraction).isnan().tolist() == alone
        assert m.representatives_in_use(contraction).isnan().tolist() == alone
