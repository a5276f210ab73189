"""Rates of weighted tokens, and how representatives and memberships are used: closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import crate_interp.measures as m
import reference
from crate_interp.measures.gradients import written
from crate_interp.measures.rates import head_codes
from tensors import close, complete, draw, orthonormal

seeds = st.integers(0, 2**31)
epsilons = st.sampled_from([0.05, 0.3, 1.0, 4.0])
HEADS, POS, P, REP = 3, 13, 5, 7


def drawn(seed):
    """Codes, and a contraction whose rows sum to 1."""
    return draw(seed, HEADS, POS, P), (2 * draw(seed + 1, HEADS, REP, POS)).softmax(dim=-1)


def one_each(*tokens):
    """A contraction `[1, rep, pos]` in which each representative reads one token."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), POS)[None].double()


# the contracted rate


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


def test_the_gradient_as_the_paper_prints_it():
    # eq. 7, tokens as columns: U_k^T Q (I_m + p / (m eps^2) (U_k^T Q)^T U_k^T Q)^-1 A_k^T
    codes, contraction = drawn(8)
    b, q = P / (REP * 0.09), (contraction @ codes).mT
    inverse = torch.linalg.inv(torch.eye(REP, dtype=q.dtype) + b * q.mT @ q)
    close(m.contracted_rate_gradient(codes, contraction, 0.3), b * (q @ inverse @ contraction).mT)


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


def test_use_has_gradients_and_zeros_have_none():
    contraction = drawn(11)[1][:, :3, :2].requires_grad_()
    for measure in (m.contraction_coverage, m.representatives_in_use):
        assert torch.autograd.gradcheck(measure, contraction)
        zeros = torch.zeros_like(contraction, requires_grad=True)
        value = measure(zeros)
        assert value.abs().max() == 0
        (slope,) = torch.autograd.grad(value.sum(), zeros)
        assert slope.isfinite().all()


WIDE = HEADS * P


def members(seed):
    """Codes, and memberships that sum to 1 over heads."""
    return draw(seed, HEADS, POS, P), (2 * draw(seed + 1, HEADS, POS)).softmax(dim=0)


def determinants(codes, membership, eps):
    """n_k / 2N logdet(I + d / (n_k eps^2) C_k^T diag(pi_k) C_k), what the diagonal bounds."""
    size = membership.sum(dim=-1)
    moments = codes.mT @ (membership.unsqueeze(-1) * codes) / size[:, None, None]
    eye = torch.eye(P, dtype=codes.dtype)
    return size / (2 * POS) * torch.linalg.slogdet(eye + WIDE / eps**2 * moments)[1]


# the variational rate


def test_groups_in_their_own_subspaces():
    # C_k^T C_k = E I in group k: the bound is exact, and both are p/2 ln(1 + d E / (n eps^2))
    n, energy, eps, u = 7, 4.0, 0.3, complete(0, HEADS, P)
    z = torch.cat([2 * orthonormal(k, n, P) @ u[k].T for k in range(HEADS)])
    labels = torch.arange(HEADS).repeat_interleave(n)
    membership = F.one_hot(labels).T.double()
    got = m.variational_rate(head_codes(z, u), membership, eps)
    close(got, P / (2 * HEADS) * math.log(1 + WIDE * energy / (n * eps**2)), 1e-12)
    close(got.sum(), m.mcr2_coding_rate(z, labels, eps), 1e-12)


def test_one_token():
    codes = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]], dtype=torch.float64)  # d = 4
    membership = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
    wanted = [0.125 * (math.log(1 + 16 * 9) + math.log(1 + 16 * 16)), 0.375 * math.log(1 + 16)]
    close(m.variational_rate(codes, membership, 0.5), torch.tensor(wanted), 1e-7)


@given(seeds, epsilons)
def test_it_is_an_upper_bound(seed, eps):
    codes, soft = members(seed)
    hard = F.one_hot(torch.arange(POS) % HEADS).T.double()
    for membership in (soft, hard, torch.ones_like(soft)):
        rate = m.variational_rate(codes, membership, eps)
        assert (rate >= determinants(codes, membership, eps) - 1e-12).all()
    # all tokens in every group: R^c, which has p in place of d
    z, u = draw(seed + 2, POS, WIDE), complete(seed + 3, HEADS, P)
    bound = m.variational_rate(head_codes(z, u), torch.ones_like(soft), eps)
    assert (bound >= m.subspace_coding_rate(z, u, eps / HEADS**0.5) - 1e-12).all()
    # tokens that lie in the subspace of their group: R^c of MCR2
    inside = torch.cat([codes[k, hard[k] > 0] @ u[k].T for k in range(HEADS)])
    labels = torch.arange(HEADS).repeat_interleave(hard.sum(dim=1).long())
    own = m.variational_rate(head_codes(inside, u), F.one_hot(labels).T.double(), eps)
    assert own.sum() >= m.mcr2_coding_rate(inside, labels, eps) - 1e-12


@given(seeds, epsilons)
def test_the_principal_directions_make_it_exact(seed, eps):
    codes, membership = members(seed)
    _, turn = torch.linalg.eigh(codes.mT @ (membership.unsqueeze(-1) * codes))
    close(m.variational_rate(codes @ turn, membership, eps), determinants(codes, membership, eps))


def test_a_group_without_tokens_adds_nothing():
    codes, membership = members(1)
    membership[1] = 0
    rate = m.variational_rate(codes, membership, 0.3)
    assert rate[1] == 0 and (rate[[0, 2]] > 0).all()
    assert m.variational_rate_gradient(codes, membership, 0.3)[1].abs().max() == 0


def test_a_head_of_the_official_code_steps_against_it():
    codes, membership = members(7)
    moment = (membership / membership.sum(dim=-1, keepdim=True)).unsqueeze(1) @ codes.square()
    step = -codes * membership.unsqueeze(-1) / (1 + moment)  # ToST's TSSA, before its output map
    close(-POS * m.variational_rate_gradient(codes, membership, math.sqrt(WIDE)), step, 1e-12)


# memberships


def test_memberships_by_hand():
    membership = torch.tensor([[1.0, 0.5, 0.25], [0.0, 0.5, 0.75]], dtype=torch.float64)
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    wanted = torch.tensor([0.0, math.log(2), entropy], dtype=torch.float64)
    close(m.assignment_entropy(membership), wanted, 1e-12)
    wanted = torch.tensor([1.0, 2.0, 1.6], dtype=torch.float64)
    close(m.subspaces_per_token(membership), wanted, 1e-12)
    close(m.membership_share(membership), torch.tensor([7 / 12, 5 / 12]), 1e-7)
    balance = -(7 * math.log2(7 / 12) + 5 * math.log2(5 / 12)) / 12
    close(m.membership_balance(membership), balance, 1e-12)
    even = torch.full((HEADS, POS), 1 / HEADS, dtype=torch.float64)
    apart = F.one_hot(torch.arange(12) % HEADS).T.double()  # decided, and as balanced
    for each, tokens in ((even, HEADS), (apart, 1)):
        close(m.subspaces_per_token(each), float(tokens))
        close(m.assignment_entropy(each), math.log(tokens))
        close(m.membership_balance(each), 1.0)
    assert m.membership_balance(F.one_hot(torch.zeros(7).long(), HEADS).T.double()) == 0


@given(seeds)
def test_memberships_against_slow_forms_and_their_ranges(seed):
    _, membership = members(seed)
    rows = membership.T.numpy()
    close(m.assignment_entropy(membership), torch.from_numpy(reference.attention_entropy(rows)))
    close(m.subspaces_per_token(membership), torch.from_numpy(reference.effective_support(rows)))
    assert m.membership_share(membership).sum() == pytest.approx(1)
    balance = m.membership_balance(membership)
    assert m.assignment_entropy(membership).mean() <= balance * math.log(HEADS) + 1e-12
    assert 0 <= balance <= 1 + 1e-12
    number = m.subspaces_per_token(membership)
    assert (number >= 1 - 1e-12).all() and (number <= HEADS + 1e-12).all()


def test_memberships_have_gradients_and_batch_axes():
    membership = members(10)[1][:, :3].requires_grad_()
    stack = torch.stack([membership.flip(0), membership])
    for measure in (
        m.assignment_entropy, m.subspaces_per_token, m.membership_share, m.membership_balance,
    ):  # fmt: skip
        assert torch.autograd.gradcheck(measure, membership)
        close(measure(stack)[1], measure(membership), 1e-12)


# of both rates


RATES = {
    "contracted": (m.contracted_rate, m.contracted_rate_gradient, drawn),
    "variational": (m.variational_rate, m.variational_rate_gradient, members),
}


@pytest.mark.parametrize("name", RATES)
def test_gradients_are_those_of_autograd_and_of_differences(name):
    measure, gradient, weighted = RATES[name]
    z, u, (_, weights) = draw(2, POS, WIDE).requires_grad_(), draw(3, HEADS, WIDE, P), weighted(4)
    rate = lambda z: measure(head_codes(z, u), weights, 0.7).sum()  # noqa: E731
    form = written(gradient(head_codes(z, u), weights, 0.7), u)
    close(form, torch.autograd.grad(rate(z), z)[0])
    along = draw(5, POS, WIDE)
    with torch.no_grad():
        close((rate(z + 1e-5 * along) - rate(z - 1e-5 * along)) / 2e-5, (form * along).sum(), 1e-8)
        assert rate(z - 0.05 * form) < rate(z)
    codes, weights = weighted(6)
    small = codes[:, :3].requires_grad_(), weights[..., :3].requires_grad_()
    for function in (measure, gradient):
        assert torch.autograd.gradcheck(lambda *x, of=function: of(*x, 0.7), small)


@pytest.mark.parametrize("name", RATES)
def test_batch_axes_and_dtypes(name):
    codes, weights = (torch.stack(each) for each in zip(*map(RATES[name][2], (8, 9)), strict=True))
    codes, weights = codes.expand(3, -1, -1, -1, -1), weights.expand(3, *weights.shape)
    for measure in RATES[name][:2]:
        whole = measure(codes, weights, 0.3)
        close(whole[2, 1], measure(codes[2, 1], weights[2, 1], 0.3), 1e-12)
        for dtype, near in ((torch.float32, (1e-5, 1e-6)), (torch.bfloat16, (0.05, 0.005))):
            rough = measure(codes.to(dtype), weights.to(dtype), 0.3)
            assert rough.dtype == dtype
            torch.testing.assert_close(rough.double(), whole, rtol=near[0], atol=near[1])
