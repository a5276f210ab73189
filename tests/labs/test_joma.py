"""JoMA (arXiv 2310.00535): theorems by integration and enumeration, figures, tree, entropy."""

import math

import joma
import joma_entropy
import joma_tree
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joma import (
    DELTA,
    KINDS,
    SLACK,
    attended,
    blow_up_time,
    classes,
    converged,
    drift,
    elapsed,
    enumerated,
    flow,
    flowed,
    grown,
    growth_invariant,
    problem,
    sibling,
)
from joma_entropy import bounce, measured
from joma_tree import LENGTH, PAD, Network, best_correlation, train, tree
from scipy.integrate import quad
from scipy.special import erfinv, ndtr

import crate_interp as ci
from crate_interp.measures import attention_entropy

# Theorem 1: attention logits z follow the weights V of the layer above


@pytest.mark.parametrize("kind", KINDS)
def test_the_flow_is_the_gradient(kind):
    x, target, state = problem(3)

    def loss(flat):
        s = flat.reshape(state.shape)
        out = np.tanh(attended(kind, s[:, -1], x) @ s[:, :-1])
        return ((target - out) ** 2).sum(axis=1).mean() / 2

    steps = 1e-6 * np.eye(state.size)
    slope = [(loss(state.ravel() + h) - loss(state.ravel() - h)) / 2e-6 for h in steps]
    np.testing.assert_allclose(flow(kind, state, x, target).ravel(), -np.array(slope), atol=1e-8)


@pytest.mark.parametrize("kind", ["linear", "exp"])
def test_theorem_1_drifts_by_the_integrator_alone(kind):
    (coarse, moved), (fine, _) = drift(kind, 64, 0), drift(kind, 128, 0)
    assert moved > 0.05  # the logits themselves have moved
    assert fine < 1e-7 and 11 < coarse / fine < 22  # 2^4


def test_theorem_1_holds_for_softmax_in_part_only():
    coarse, fine = drift("softmax", 64, 0)[0], drift("softmax", 128, 0)[0]
    assert fine > 1e-3 and coarse == pytest.approx(fine, rel=1e-3)  # no matter of step size
    assert drift("softmax", 64, 0, of="exp")[0] > 2 * fine  # but the minus term helps


# Theorem 2: v' = delta e^(v^2 / 2), where one feature blows up first


def test_theorem_2():
    end = blow_up_time(DELTA)
    assert end == math.sqrt(math.pi / 2)
    times = end * np.array([0.1, 0.5, 0.9, 0.999])
    v = flowed(lambda v: DELTA * np.exp(v**2 / 2), times, np.zeros(4))
    wanted = math.sqrt(2 / math.pi) * times[None] + 0 * v
    np.testing.assert_allclose(growth_invariant(v, DELTA), wanted, rtol=1e-9)
    for at, t in enumerate(times):
        np.testing.assert_allclose(v[:, at], grown(DELTA, t), rtol=1e-7)
    limits = math.sqrt(2) * erfinv(DELTA[1:])  # of those that do not win
    np.testing.assert_allclose(v[1:, -1], limits, rtol=5e-3)
    printed = growth_invariant(v, DELTA, 2)[:, 2]  # as printed: the same for all
    assert np.ptp(printed) > 0.05 * printed.max()
    assert grown(DELTA, (1 - 1e-15) * end)[0] > 7 and np.isnan(grown(DELTA, 1.001 * end)[0])


# Theorem 3: one ReLU unit near a critical point


def test_the_field_of_a_unit_is_that_of_samples():
    v, centre, scales = np.array([0.3, -0.8, 0.5, 0.1, 0.2]), 2 * joma.AXIS, (0.5, 2.0)
    rng = np.random.default_rng(0)
    x = centre + rng.normal(size=(400_000, 5)) * rng.choice(scales, size=(400_000, 1))
    u = (x @ v)[:, None]
    drawn = ((u > 0) * x, u.clip(0) * x)
    for exact, each in zip(joma.half_space(v, centre, scales), drawn, strict=True):
        assert (np.abs(exact - each.mean(axis=0)) < 5 * each.std(axis=0) / 400_000**0.5).all()


@pytest.mark.parametrize("gradient", joma.GRADIENTS)
def test_theorem_3_has_its_form_and_sign(gradient):
    rate, mu = joma.unit_flow(gradient, 2.0, (1.0,))
    assert np.abs(rate(mu)).max() < 1e-12
    found = joma.near_critical(gradient, 2.0, (1.0,))
    assert found["misfit"] < 0.1 < found["misfit of one"] and found["across"] * mu[0] > 0
    if gradient.startswith("constant"):  # by hand: x+ Phi(r) over |mu|, and nothing along a ray
        assert found["across"] == pytest.approx(2 * ndtr(2 * mu[0]) * mu[0], rel=1e-6)
        assert abs(found["along"]) < 1e-9


# Theorem 4: v' = (mu - v) e^(v^2 / 2), larger features converge exponentially faster


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 3.0])
def test_theorem_4_integral(mu):
    r = np.array([0.1, 0.5, 0.9, 0.999])
    for end in r:
        direct = quad(lambda x: math.exp(-(mu**2) * x**2 / 2) / (1 - x), 0, end, epsrel=1e-12)[0]
        assert elapsed(mu, -math.log1p(-end)) == pytest.approx(direct, rel=1e-9)
    times = [elapsed(mu, -math.log1p(-end)) for end in r]
    v = flowed(lambda v: (mu - v) * np.exp(v**2 / 2), times, np.zeros(1))[0]
    np.testing.assert_allclose(v / mu, r, rtol=1e-8)
    np.testing.assert_allclose(converged([mu], times)[0], -np.log1p(-r), rtol=1e-9)
    for y in -np.log(np.logspace(-12, -0.01, 25)):
        rest = elapsed(mu, y) - math.exp(-(mu**2) / 2) * y
        assert -1e-12 <= rest <= SLACK


def test_theorem_4_ratio():
    times = np.array([10.0, 100.0, 1000.0])
    y = converged([2.0, 1.0], times)
    away = np.abs(y[0] / y[1] / math.exp(1.5) - 1)
    # Lambda: (t - rest_j) / (t - rest_k) - 1, rests in [0, slack]
    assert (away <= SLACK / (times - SLACK)).all() and away[0] > 10 * away[2] > 0


# Theorem 5: two leaves of a binary latent hierarchy under one class


@pytest.mark.parametrize(
    "rho, depth, height, q, wanted",
    [(0.8, 4, 2, 0.5, 0.7048), (0.9, 5, 1, 0.95, 0.7680), (0.7, 3, 2, 0.2, 0.7064)],
)
def test_theorem_5(rho, depth, height, q, wanted):
    assert sibling(rho, depth, height, 2 * q - 1) == pytest.approx(wanted, abs=5e-5)
    prior, first = classes(q)
    assert prior @ first == pytest.approx(q)
    by_paths = enumerated(rho, depth, height, prior, first)
    assert by_paths == pytest.approx(
        sibling(rho, depth, height, prior @ (2 * first - 1)), rel=1e-12
    )
    # the offset as printed
    assert abs(by_paths - sibling(rho, depth, height, prior @ first)) > 0.01


# Figures 2 and 4


@pytest.mark.slow
def test_figure_4_has_the_published_digits():
    mu = joma.targets(0)
    entropy = joma.entropies(mu)
    assert len(entropy) == 5000 and entropy[0].item() == pytest.approx(math.log(10), abs=1e-5)
    assert entropy.argmin() == 669 and entropy.min().item() == pytest.approx(0.9416, abs=5e-5)
    assert entropy[-1].item() == pytest.approx(1.5493, abs=5e-5)
    assert joma.asymptote(mu).item() == pytest.approx(1.6216, abs=5e-5)


def test_entropy_does_not_rise_without_attention():
    entropy = joma.entropies(joma.targets(1), attends=False, iterations=2003)
    assert (entropy.diff() <= 1e-6).all() and entropy[-1] < 2


def test_figure_2_starts_at_an_exact_estimate():
    found = joma.joint_training("gauss", 2, 41)
    np.testing.assert_allclose(found["whole"][0], 1, atol=1e-5)
    assert found["whole"].shape == (41, 2) and found["v0"].shape == (41, 2, 20)
    np.testing.assert_allclose(found["x"].sum(axis=0), 1, atol=1e-6)
    assert found["x"][:10, 0].argmax() == 0 and found["x"][:10, 10].argmax() == 5


def test_a_bounce_needs_a_fall_and_a_rise():
    assert bounce(np.array([5.0, 3.0, 1.0])) == 0 == bounce(np.array([1.0, 3.0, 5.0]))
    assert bounce(np.array([5.0, 1.0, 3.0])) == 2 == bounce(np.array([3.0, 1.0, 4.0]))
    assert bounce(np.array([2.0, 5.0, 2.0])) == 0  # a hill is no dip


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=11), st.floats(-9, 9))
def test_a_bounce_is_not_negative_and_sees_no_offset(values, offset):
    curve = np.array(values)
    assert bounce(curve) >= 0
    assert bounce(curve + offset) == pytest.approx(bounce(curve), abs=1e-9)
    assert bounce(curve[::-1]) == bounce(curve)


@pytest.mark.parametrize(("kind", "lower"), [("crate", "D"), ("gpt", "fc_in.weight")])
def test_measured_is_the_cache_and_the_weights(kind, lower):
    model = ci.load(f"{kind}-tiny-induction", revision="step-0")
    tokens = joma_entropy.inputs(f"{kind}-tiny-induction", 3, model)
    assert tokens.shape == (3, 49)
    entropy, ranks = measured(model, tokens)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    for layer, block in enumerate(model.blocks):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        by_hand = attention_entropy(pattern).mean(dim=(1, 2))
        np.testing.assert_allclose(entropy[layer], by_hand.numpy(), rtol=1e-5)
        values = np.linalg.svd(block.mlp.get_parameter(lower).detach(), compute_uv=False)
        assert ranks[layer] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)


@given(st.sampled_from(joma_tree.CELLS), st.integers(0, 99))
def test_a_class_is_the_union_of_its_latents(cell, seed):
    (n_0, n_1), classes, children = cell
    data = tree(classes, children, (n_0, n_1), seed)
    layer_0, layer_1 = data.latents
    assert layer_0.shape == (classes, n_0) and layer_1.shape == (classes, n_1)
    assert (layer_1.sum(dim=1) == children).all() and layer_0.sum(dim=1).max() <= children**2
    assert len({tuple(row) for row in layer_1.tolist()}) == classes  # no two classes are equal
    assert data.fills + data.tokens.shape[1] - 1 == LENGTH and (data.tokens[:, 0] == PAD).all()
    # two classes with the same layer-0 latents have the same tokens
    for row, latents in zip(data.tokens, layer_0, strict=True):
        present = row[row != PAD]
        assert len(set(present.tolist())) == len(present) and latents.sum() <= len(present)
        assert present.tolist() == sorted(present.tolist())


def test_one_filling_token_stands_for_all():
    data = tree(7, 2, (10, 20), 0)
    model = Network(17, 11, 7, 0)
    whole = torch.cat([torch.full((7, data.fills - 1), PAD), data.tokens], dim=1)
    assert whole.shape == (7, LENGTH)
    logits, units = model(data.tokens, data.fills)
    plain, every = model(whole, 1)
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    for few, many in zip(units, every, strict=True):
        torch.testing.assert_close(few.amax(dim=1), many.amax(dim=1), rtol=1e-4, atol=1e-5)


def test_training_learns_the_classes():
    data = tree(5, 2, (10, 20), 0)
    model = Network(31, 37, 5, 0)
    assert train(model, data, 0, 1e-2, 0) < 0.7 and train(model, data, 60, 1e-2, 0) == 1


def samples(rng):
    return torch.tensor(rng.integers(0, 2, (509, 5)).astype(float))


def test_best_correlation_is_one_of_a_copy_and_does_not_see_scale():
    rng = np.random.default_rng(1)
    latents, units = samples(rng), torch.tensor(rng.normal(size=(509, 31)))
    weights = torch.full((509,), 1 / 509, dtype=torch.float64)
    units[:, 7:12], units[:, 12] = 3 * latents + 2, 4.0
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(best_correlation(latents, units, weights), ones)
    units[:, 7:12] = torch.tensor(rng.normal(size=(509, 5)))
    found = best_correlation(latents, units, weights)
    scaled = units * torch.tensor(rng.uniform(0.1, 10, 31)) + torch.tensor(rng.normal(size=31))
    torch.testing.assert_close(best_correlation(latents, scaled, weights), found)
    every = np.corrcoef(latents.numpy().T, np.delete(units.numpy(), 12, axis=1).T)[:5, 5:]
    np.testing.assert_allclose(found.numpy(), every.max(axis=1), rtol=1e-9)


def test_weights_are_counts():
    rng = np.random.default_rng(2)
    latents, units = samples(rng)[:11], torch.tensor(rng.normal(size=(11, 7)))
    counts = torch.tensor(rng.integers(1, 5, 11))
    repeated = [x.repeat_interleave(counts, dim=0) for x in (latents, units)]
    total = int(counts.sum())
    equal = torch.full((total,), 1 / total, dtype=torch.float64)
    torch.testing.assert_close(
        best_correlation(latents, units, counts / total), best_correlation(*repeated, equal),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
