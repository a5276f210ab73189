"""What must not change a measure, or must change it in a known way, on tall and wide inputs."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import crate_interp.measures as m
from tensors import draw

seeds = st.integers(0, 2**31)
epsilons = st.sampled_from([0.05, 0.3, 1.0, 4.0])
scales = st.floats(1e-3, 1e3)
shapes = st.sampled_from([(13, 11), (7, 17), (23, 5)])  # pos, d_model
HEADS, D_HEAD, CLASSES, KAPPA, SIGMA = 2, 3, 3, 0.3, 0.5

RATES = {
    "R": lambda z, u, labels, eps: m.coding_rate(z, eps),
    "R^c": lambda z, u, labels, eps: m.subspace_coding_rate(z, u, eps),
    "Delta R": lambda z, u, labels, eps: m.rate_reduction(z, u, eps),
    "MCR2": lambda z, u, labels, eps: m.mcr2_coding_rate(z, labels, eps),
}
GRADIENTS = {
    "of R": lambda z, u, eps: m.coding_rate_gradient(z, eps),
    "of R^c": m.subspace_coding_rate_gradient,
    "of two terms of R^c": m.neumann_gradient,
}
STEPS = {
    "exact": m.gradient_step,
    "two terms": m.neumann_step,
    "first term": m.first_order_step,
    "third order": m.third_order_step,
    "attention": m.attention_step,
}


def drawn(seed, shape):
    """Tokens, bases and labels."""
    n, d = shape
    labels = torch.randint(0, CLASSES, (n,), generator=torch.Generator().manual_seed(seed))
    return draw(seed, n, d), draw(seed + 1, HEADS, d, D_HEAD) / math.sqrt(d), labels


def orthogonal(seed, d):
    return torch.linalg.qr(draw(seed, d, d))[0]


def shuffle(seed, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def close(got, wanted):
    """Relative to the largest entry."""
    assert_close(got, wanted, rtol=0, atol=1e-9 * max(float(wanted.abs().max()), 1e-300))


def close_rates(got, wanted, whole):
    """Delta R is relative to R, or to itself where it is larger."""
    assert_close(got, wanted, rtol=1e-9, atol=1e-9 * float(whole))


def twice(x):
    return torch.cat([x, x])


def padded(x, dim):
    return torch.cat([x, torch.zeros_like(x)], dim=dim)


@given(seeds, shapes, epsilons)
def test_order_of_tokens(seed, shape, eps):
    (z, u, labels), order = drawn(seed, shape), shuffle(seed, shape[0])
    whole = m.coding_rate(z, eps)
    for rate in RATES.values():
        close_rates(rate(z[order], u, labels[order], eps), rate(z, u, labels, eps), whole)
    for gradient in GRADIENTS.values():
        close(gradient(z[order], u, eps), gradient(z, u, eps)[order])
    for step in STEPS.values():
        close(step(z[order], u, eps, KAPPA), step(z, u, eps, KAPPA)[order])
    close(m.paper_mssa(z[order], u, eps), m.paper_mssa(z, u, eps)[order])
    close(m.coding_length(z[order], eps), m.coding_length(z, eps))
    close(m.sparse_rate_reduction(z[order], u, eps, 0.1), m.sparse_rate_reduction(z, u, eps, 0.1))
    for measure in (m.spectrum, m.effective_rank, m.stable_rank, m.firing_rate, m.condition_number):
        close(measure(z[order]), measure(z))
    close(m.subspace_spectrum(z[order], u), m.subspace_spectrum(z, u))
    close(m.subspace_snr(z[order], u), m.subspace_snr(z, u))
    close(m.membership_entropy(z[order], u), m.membership_entropy(z, u)[order])


@given(seeds, shapes, epsilons)
def test_rotation_of_the_space(seed, shape, eps):
    (z, u, labels), q = drawn(seed, shape), orthogonal(seed + 2, shape[1])
    turned, bases = z @ q, q.T @ u
    whole = m.coding_rate(z, eps)
    for rate in RATES.values():
        close_rates(rate(turned, bases, labels, eps), rate(z, u, labels, eps), whole)
    for gradient in GRADIENTS.values():
        got, wanted = gradient(turned, bases, eps), gradient(z, u, eps)
        close(got, wanted @ q)
        close(got.norm(), wanted.norm())
    for step in STEPS.values():
        close(step(turned, bases, eps, KAPPA), step(z, u, eps, KAPPA) @ q)
    close(
        m.posterior_mean(turned, q.T @ orthonormal(u), SIGMA),
        m.posterior_mean(z, orthonormal(u), SIGMA) @ q,
    )
    close(m.spectrum(turned), m.spectrum(z))
    close(m.subspace_spectrum(turned, bases), m.subspace_spectrum(z, u))
    for measure in (m.membership_entropy, m.subspace_snr, m.projection_energy):
        close(measure(turned, bases), measure(z, u))
    close(m.principal_angles(bases[0], bases[1]), m.principal_angles(u[0], u[1]))
    close(m.incoherence(bases), m.incoherence(u))
    close(m.column_cosines(q @ z.T), m.column_cosines(z.T))
    for measure in (m.effective_rank, m.stable_rank, m.condition_number):
        close(measure(turned), measure(z))


def orthonormal(u):
    return torch.linalg.qr(u)[0]


@given(seeds, shapes, epsilons)
def test_every_token_twice(seed, shape, eps):
    z, u, labels = drawn(seed, shape)
    n, whole = shape[0], m.coding_rate(z, eps)
    for rate in RATES.values():
        close_rates(rate(twice(z), u, twice(labels), eps), rate(z, u, labels, eps), whole)
    for gradient in GRADIENTS.values():  # each of the two moves the rate by half as much
        got, wanted = gradient(twice(z), u, eps), gradient(z, u, eps)
        close(got, twice(wanted) / 2)
        close(got.norm(), wanted.norm() / math.sqrt(2))
    rank = min(shape)
    close(m.spectrum(twice(z))[:rank], 2 * m.spectrum(z))
    assert m.spectrum(twice(z))[rank:].abs().sum() <= 1e-12 * m.spectrum(z)[0]
    close(m.subspace_spectrum(twice(z), u), 2 * m.subspace_spectrum(z, u))
    close(m.rate_of_spectrum(2 * m.spectrum(z), 2 * n, shape[1], eps), whole)
    assert torch.equal(m.neumann_invalid(twice(z), u, eps), m.neumann_invalid(z, u, eps))
    for measure in (m.effective_rank, m.stable_rank, m.firing_rate):
        close(measure(twice(z)), measure(z))
    close(m.subspace_snr(twice(z), u), m.subspace_snr(z, u))
    close(m.subspace_attention(twice(z)), twice(m.subspace_attention(z)))


@given(seeds, shapes, epsilons, scales)
def test_scale_of_tokens_against_eps(seed, shape, eps, scale):
    z, u, labels = drawn(seed, shape)
    whole = m.coding_rate(z, eps / scale)
    for rate in RATES.values():
        close_rates(rate(scale * z, u, labels, eps), rate(z, u, labels, eps / scale), whole)
    for gradient in GRADIENTS.values():
        close(gradient(scale * z, u, eps), gradient(z, u, eps / scale) / scale)
    close(m.coding_length(scale * z, eps), m.coding_length(z, eps / scale))
    close(m.spectrum(scale * z), scale**2 * m.spectrum(z))
    close(m.subspace_spectrum(scale * z, u), scale**2 * m.subspace_spectrum(z, u))
    grid = m.rate_of_spectrum(m.spectrum(scale * z), *shape, [eps, 2 * eps])
    close(grid, torch.stack([whole, m.coding_rate(z, 2 * eps / scale)]))


@given(seeds, shapes, epsilons)
def test_zero_tokens(seed, shape, eps):
    z, u, labels = drawn(seed, shape)
    n, wider = shape[0], eps * math.sqrt(2)
    whole = m.coding_rate(z, wider)
    for rate in RATES.values():
        close_rates(rate(padded(z, 0), u, twice(labels), eps), rate(z, u, labels, wider), whole)
    own_class = torch.cat([labels, torch.full_like(labels, CLASSES)])
    close(m.mcr2_coding_rate(padded(z, 0), own_class, eps), m.mcr2_coding_rate(z, labels, eps) / 2)
    for gradient in GRADIENTS.values():
        got = gradient(padded(z, 0), u, eps)
        close(got[:n], gradient(z, u, wider))
        assert got[n:].abs().max() == 0
    rank = min(shape)
    close(m.spectrum(padded(z, 0))[:rank], m.spectrum(z))
    close(m.effective_rank(padded(z, 0)), m.effective_rank(z))


@given(seeds, shapes, epsilons)
def test_zero_features(seed, shape, eps):
    z, u, labels = drawn(seed, shape)
    finer, wide, tall = eps / math.sqrt(2), padded(z, 1), padded(u, 1)
    close(m.coding_rate(wide, eps), m.coding_rate(z, finer))
    close(m.mcr2_coding_rate(wide, labels, eps), m.mcr2_coding_rate(z, labels, finer))
    close(m.subspace_coding_rate(wide, tall, eps), m.subspace_coding_rate(z, u, eps))
    close(m.coding_rate_gradient(wide, eps), padded(m.coding_rate_gradient(z, finer), 1))
    for gradient in (m.subspace_coding_rate_gradient, m.neumann_gradient):
        close(gradient(wide, tall, eps), padded(gradient(z, u, eps), 1))
    for step in STEPS.values():
        close(step(wide, tall, eps, KAPPA), padded(step(z, u, eps, KAPPA), 1))
    close(m.spectrum(wide)[: min(shape)], m.spectrum(z))
    close(m.subspace_spectrum(wide, tall), m.subspace_spectrum(z, u))
    close(m.principal_angles(tall[0], tall[1]), m.principal_angles(u[0], u[1]))
    close(m.membership_entropy(wide, tall), m.membership_entropy(z, u))


@given(seeds, shapes, epsilons)
def test_names_and_sizes_of_classes(seed, shape, eps):
    z, _, labels = drawn(seed, shape)
    rate = m.mcr2_coding_rate(z, labels, eps)
    renamed = torch.tensor([5, 0, 3])[labels]  # and classes without tokens between them
    close(m.mcr2_coding_rate(z, renamed, eps), rate)
    weights = torch.nn.functional.one_hot(labels, CLASSES).double()
    close(m.mcr2_coding_rate(z, weights, eps), rate)
    close(m.mcr2_coding_rate(z, weights[:, shuffle(seed, CLASSES)], eps), rate)
    close(m.mcr2_coding_rate(z, torch.zeros_like(labels), eps), m.coding_rate(z, eps))
    parts = weights.repeat(1, 2) / 2  # each class in two halves: N_k halves, and with it the Gram
    close(m.mcr2_coding_rate(z, parts, eps), rate)
    assert rate <= m.coding_rate(z, eps) * (1 + 1e-9)


@given(seeds, scales)
def test_what_has_no_scale(seed, scale):
    z, u, _ = drawn(seed, (13, 11))
    lengths = scale * (0.1 + draw(seed + 2, 13, 1).abs())
    codes = torch.stack([z, z.flip(0)])
    close(m.official_coding_rate(codes * lengths), m.official_coding_rate(codes))
    sparse = z.relu()
    for measure in (m.hoyer, m.gini, m.l1_l2_ratio):
        close(measure(sparse * lengths), measure(sparse))
        close(measure(-sparse), measure(sparse))
    for measure in (m.l0_norm, m.zero_fraction, m.support_for_energy):
        assert torch.equal(measure(sparse * lengths), measure(sparse))
    close(m.mean_magnitude(sparse * lengths), m.mean_magnitude(sparse) * lengths[:, 0])
    close(m.membership_entropy(z * lengths, u), m.membership_entropy(z, u))
    close(m.subspace_snr(scale * z, u), m.subspace_snr(z, u))
    for measure in (m.effective_rank, m.stable_rank, m.condition_number):
        close(measure(scale * z), measure(z))
    close(m.column_cosines(z * lengths[:11, 0]), m.column_cosines(z))
    close(m.mutual_coherence(z * -lengths[:11, 0]), m.mutual_coherence(z))
    pattern = z.softmax(dim=-1)
    assert torch.equal(m.mass_cover(pattern * lengths, 0.7), m.mass_cover(pattern, 0.7))


@given(seeds, st.floats(-2, 2))
def test_basis_of_a_subspace(seed, stretch):
    z, u, _ = drawn(seed, (7, 17))
    mix = (
        orthogonal(seed + 2, D_HEAD)
        @ torch.diag(10 ** torch.tensor([stretch, 0.0, -stretch])).double()
    )
    other = u @ (mix @ orthogonal(seed + 3, D_HEAD))
    for measure in (m.principal_angles, m.subspace_overlap):
        close(measure(other[0], u[1]), measure(u[0], u[1]))
        close(measure(u[1], u[0]), measure(u[0], u[1]))
    assert m.principal_angles(other[0], u[0]).max() <= 1e-11
    close(m.principal_angles(u[0], u[1]).cos().square().mean(), m.subspace_overlap(u[0], u[1]))
    close(m.principal_angles(u[0], u[1])[0].cos(), m.incoherence(u))
    for measure in (m.incoherence, m.head_overlap):
        close(measure(other), measure(u))
    for measure in (m.membership_entropy, m.subspace_snr, m.projection_energy):
        close(measure(z, other), measure(z, u))


@given(seeds)
def test_order_of_features(seed):
    z = draw(seed, 13, 19).relu()
    order = torch.stack([shuffle(seed + i, 19) for i in range(13)])
    moved = z.gather(1, order)
    for measure in (m.l1_norm, m.mean_magnitude, m.l1_l2_ratio, m.hoyer, m.gini):
        close(measure(moved), measure(z))
    for measure in (m.l0_norm, m.zero_fraction, m.support_for_energy):
        assert torch.equal(measure(moved), measure(z))
    assert torch.equal(m.firing_rate(z[:, order[0]]), m.firing_rate(z)[order[0]])
    pattern = draw(seed + 1, 13, 19).softmax(dim=-1)
    for measure in (m.attention_entropy, m.official_attention_entropy, m.effective_support):
        close(measure(pattern.gather(1, order)), measure(pattern))
    assert torch.equal(m.mass_cover(pattern.gather(1, order), 0.7), m.mass_cover(pattern, 0.7))


@given(seeds)
def test_order_of_heads(seed):
    z, u, _ = drawn(seed, (13, 11))
    turned = u.flip(0)
    for gradient in GRADIENTS.values():
        close(gradient(z, turned, 0.3), gradient(z, u, 0.3))
    for measure in (m.membership_entropy, lambda z, u: m.posterior_mean(z, orthonormal(u), SIGMA)):
        close(measure(z, turned), measure(z, u))
    for measure in (m.subspace_snr, lambda z, u: m.neumann_invalid(z, u, 0.3), m.subspace_spectrum):
        close(measure(z, turned), measure(z, u).flip(0))
    close(m.subspace_attention(z @ turned), m.subspace_attention(z @ u).flip(0))
