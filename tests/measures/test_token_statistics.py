"""The rate of token statistics attention and its memberships: closed forms, bounds, invariances."""

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
HEADS, POS, P = 3, 13, 5
D = HEADS * P


def drawn(seed):
    """Codes, and memberships that sum to 1 over heads."""
    return draw(seed, HEADS, POS, P), (2 * draw(seed + 1, HEADS, POS)).softmax(dim=0)


def determinants(codes, membership, eps):
    """n_k / 2N logdet(I + d / (n_k eps^2) C_k^T diag(pi_k) C_k), what the diagonal bounds."""
    size = membership.sum(dim=-1)
    moments = codes.mT @ (membership.unsqueeze(-1) * codes) / size[:, None, None]
    eye = torch.eye(P, dtype=codes.dtype)
    return size / (2 * POS) * torch.linalg.slogdet(eye + D / eps**2 * moments)[1]


# the rate


def test_groups_in_their_own_subspaces():
    # C_k^T C_k = E I in group k: the bound is exact, and both are p/2 ln(1 + d E / (n eps^2))
    n, energy, eps, u = 7, 4.0, 0.3, complete(0, HEADS, P)
    z = torch.cat([2 * orthonormal(k, n, P) @ u[k].T for k in range(HEADS)])
    labels = torch.arange(HEADS).repeat_interleave(n)
    membership = F.one_hot(labels).T.double()
    got = m.variational_rate(head_codes(z, u), membership, eps)
    close(got, P / (2 * HEADS) * math.log(1 + D * energy / (n * eps**2)), 1e-12)
    close(got.sum(), m.mcr2_coding_rate(z, labels, eps), 1e-12)


def test_one_token():
    codes = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]], dtype=torch.float64)  # d = 4
    membership = torch.tensor([[0.25], [0.75]], dtype=torch.float64)
    wanted = [0.125 * (math.log(1 + 16 * 9) + math.log(1 + 16 * 16)), 0.375 * math.log(1 + 16)]
    close(m.variational_rate(codes, membership, 0.5), torch.tensor(wanted), 1e-7)


@given(seeds, epsilons)
def test_it_is_an_upper_bound(seed, eps):
    codes, soft = drawn(seed)
    hard = F.one_hot(torch.arange(POS) % HEADS).T.double()
    for membership in (soft, hard, torch.ones_like(soft)):
        rate = m.variational_rate(codes, membership, eps)
        assert (rate >= determinants(codes, membership, eps) - 1e-12).all()
    # all tokens in every group: R^c, which has p in place of d
    z, u = draw(seed + 2, POS, D), complete(seed + 3, HEADS, P)
    bound = m.variational_rate(head_codes(z, u), torch.ones_like(soft), eps)
    assert (bound >= m.subspace_coding_rate(z, u, eps / HEADS**0.5) - 1e-12).all()
    # tokens that lie in the subspace of their group: R^c of MCR2
    inside = torch.cat([codes[k, hard[k] > 0] @ u[k].T for k in range(HEADS)])
    labels = torch.arange(HEADS).repeat_interleave(hard.sum(dim=1).long())
    own = m.variational_rate(head_codes(inside, u), F.one_hot(labels).T.double(), eps)
    assert own.sum() >= m.mcr2_coding_rate(inside, labels, eps) - 1e-12


@given(seeds, epsilons)
def test_the_principal_directions_make_it_exact(seed, eps):
    codes, membership = drawn(seed)
    _, turn = torch.linalg.eigh(codes.mT @ (membership.unsqueeze(-1) * codes))
    close(m.variational_rate(codes @ turn, membership, eps), determinants(codes, membership, eps))


@given(seeds, epsilons)
def test_what_changes_the_rate_in_a_known_way(seed, eps):
    codes, membership = drawn(seed)
    rate = m.variational_rate(codes, membership, eps)
    order = torch.randperm(POS, generator=torch.Generator().manual_seed(seed))
    close(m.variational_rate(codes[:, order], membership[:, order], eps), rate)
    close(m.variational_rate(codes.flip(0), membership.flip(0), eps), rate.flip(0))
    close(m.variational_rate(-codes.flip(-1), membership, eps), rate)
    close(m.variational_rate(codes.repeat(1, 2, 1), membership.repeat(1, 2), eps), rate)
    close(m.variational_rate(3 * codes, membership, 3 * eps), rate)
    close(m.variational_rate(codes, membership / 4, eps), rate / 4)
    slope = m.variational_rate_gradient(codes, membership, eps)
    close(m.variational_rate_gradient(codes[:, order], membership[:, order], eps), slope[:, order])
    close(m.variational_rate_gradient(codes, membership / 4, eps), slope / 4)


def test_a_group_without_tokens_adds_nothing():
    codes, membership = drawn(1)
    membership[1] = 0
    rate = m.variational_rate(codes, membership, 0.3)
    assert rate[1] == 0 and (rate[[0, 2]] > 0).all()
    assert m.variational_rate_gradient(codes, membership, 0.3)[1].abs().max() == 0


def test_gradients_are_those_of_autograd_and_of_differences():
    z, u, (_, membership) = draw(2, POS, D).requires_grad_(), draw(3, HEADS, D, P), drawn(4)
    rate = lambda z: m.variational_rate(head_codes(z, u), membership, 0.7).sum()  # noqa: E731
    form = written(m.variational_rate_gradient(head_codes(z, u), membership, 0.7), u)
    close(form, torch.autograd.grad(rate(z), z)[0])
    along = draw(5, POS, D)
    with torch.no_grad():
        close((rate(z + 1e-5 * along) - rate(z - 1e-5 * along)) / 2e-5, (form * along).sum(), 1e-8)
        assert rate(z - 0.05 * form) < rate(z)
    codes, membership = (x[:, :3].requires_grad_() for x in drawn(6))
    for measure in (m.variational_rate, m.variational_rate_gradient):
        assert torch.autograd.gradcheck(
            lambda c, pi, measure=measure: measure(c, pi, 0.7), (codes, membership)
        )


def test_a_head_of_the_official_code_steps_against_it():
    codes, membership = drawn(7)
    moment = (membership / membership.sum(dim=-1, keepdim=True)).unsqueeze(1) @ codes.square()
    step = -codes * membership.unsqueeze(-1) / (1 + moment)  # ToST's TSSA, before its output map
    close(-POS * m.variational_rate_gradient(codes, membership, math.sqrt(D)), step, 1e-12)


def test_batch_axes_and_dtypes():
    codes, membership = draw(8, 2, 7, HEADS, POS, P), draw(9, 2, 7, HEADS, POS).softmax(dim=2)
    for measure in (m.variational_rate, m.variational_rate_gradient):
        whole = measure(codes, membership, 0.3)
        close(whole[1, 3], measure(codes[1, 3], membership[1, 3], 0.3), 1e-12)
        half = measure(codes.bfloat16(), membership.bfloat16(), 0.3)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.double(), whole, rtol=0.05, atol=0.005)


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
    _, membership = drawn(seed)
    rows = membership.T.numpy()
    close(m.assignment_entropy(membership), torch.from_numpy(reference.attention_entropy(rows)))
    close(m.subspaces_per_token(membership), torch.from_numpy(reference.effective_support(rows)))
    assert m.membership_share(membership).sum() == pytest.approx(1)
    balance = m.membership_balance(membership)
    assert m.assignment_entropy(membership).mean() <= balance * math.log(HEADS) + 1e-12
    assert 0 <= balance <= 1 + 1e-12
    number = m.subspaces_per_token(membership)
    assert (number >= 1 - 1e-12).all() and (number <= HEADS + 1e-12).all()


@given(seeds)
def test_what_does_not_change_memberships(seed):
    _, membership = drawn(seed)
    order = torch.randperm(POS, generator=torch.Generator().manual_seed(seed))
    for measure in (m.assignment_entropy, m.subspaces_per_token):
        close(measure(membership[:, order]), measure(membership)[order])
        close(measure(membership.flip(0)), measure(membership))
    share, balance = m.membership_share(membership), m.membership_balance(membership)
    for same in (membership[:, order], membership.repeat(1, 2)):
        close(m.membership_share(same), share)
        close(m.membership_balance(same), balance)
    close(m.membership_share(membership.flip(0)), share.flip(0))
    close(m.membership_balance(membership.flip(0) * 3), balance)


def test_memberships_have_gradients_and_batch_axes():
    membership = drawn(10)[1][:, :3].requires_grad_()
    stack = torch.stack([membership.flip(0), membership])
    for measure in (
        m.assignment_entropy, m.subspaces_per_token, m.membership_share, m.membership_balance,
    ):  # fmt: skip
        assert torch.autograd.gradcheck(measure, membership)
        close(measure(stack)[1], measure(membership), 1e-12)


# bad input


def test_not_finite():
    for bad in (math.nan, math.inf):
        codes, membership = drawn(11)
        codes[1, 2, 3] = bad
        assert m.variational_rate(codes, membership, 0.3).isnan().tolist() == [False, True, False]
        slope = m.variational_rate_gradient(codes, membership, 0.3)
        assert slope.isnan().flatten(1).all(dim=1).tolist() == [False, True, False]
        codes, membership = drawn(11)
        membership[1, 2] = bad
        assert m.variational_rate(codes, membership, 0.3).isnan().tolist() == [False, True, False]
        for measure in (m.assignment_entropy, m.subspaces_per_token):
            assert measure(membership).isnan().nonzero().tolist() == [[2]]
        assert m.membership_share(membership).isnan().tolist() == [False, True, False]
        assert m.membership_balance(membership).isnan()
