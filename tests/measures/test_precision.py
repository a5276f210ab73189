"""Where floats run out.

Autocast, tokens all alike, tiny and huge scales, half precision, gradients beside a failure.
"""

import math

import pytest
import torch
from torch.testing import assert_close

import reference
from crate_interp import measures as m


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_autocast_changes_no_number():
    z = seeded(197, 1) @ seeded(1, 384, seed=1)
    z = z / z.abs().max() * 0.1
    u, codes = seeded(3, 384, 7, seed=2), seeded(3, 197, 7, seed=3)
    weights = codes.square().mean(dim=-1)
    calls = (
        lambda: m.coding_rate(z, 0.1),
        lambda: m.coding_rate(z=z, eps=0.1),
        lambda: m.subspace_coding_rate(z, u, 0.1),
        lambda: m.official_coding_rate(codes),
        lambda: m.projection_energy(z, u),
        lambda: m.head_overlap(u),
        lambda: m.subspace_overlap(u[0], u[1]),
        lambda: m.variational_rate(codes, weights, 0.1),
        lambda: m.contracted_rate(codes, weights.unsqueeze(1).expand(-1, 5, -1), 0.1),
    )
    for call in calls:
        plain = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(call(), plain)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_all_alike(seed):
    """A wide float32 Gram of rank one.

    Hundreds of pivots should be one, and each is off by the rounding of the first.
    """
    z = seeded(1, 768, seed=seed).repeat(785, 1)
    z *= 0.1 / z.abs().max()
    assert m.coding_rate(z, 0.1).item() == pytest.approx(
        reference.coding_rate(z.numpy(), 0.1), rel=1e-5
    )


def test_a_rate_beside_one():
    z = seeded(197, 64) * 1e-5
    assert m.coding_rate(z, 0.5).item() == pytest.approx(
        reference.coding_rate(z.numpy(), 0.5), rel=1e-4
    )
    assert m.coding_rate(torch.zeros(5, 7), 0.5).item() == 0


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-19, 1.0, 1e18, 1e25, 1e30])
def test_what_knows_no_scale_has_none(scale):
    codes, z, u = seeded(2, 53, 17), seeded(5, 23, seed=1), seeded(3, 23, 7, seed=2)
    wanted = reference.official_coding_rate(codes.numpy())
    assert m.official_coding_rate(codes * scale).numpy() == pytest.approx(wanted, rel=1e-5)
    assert_close(m.projection_energy(z * scale, u), m.projection_energy(z, u), rtol=1e-4, atol=1e-6)
    assert_close(m.hoyer(z * scale), m.hoyer(z), rtol=1e-4, atol=1e-6)
    # scales beside each other, and zeros
    mixed = torch.cat([codes * scale, codes, torch.zeros(2, 3, 17)], dim=1)
    assert m.official_coding_rate(mixed).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    u, z = seeded(3, 23, 7).to(dtype), seeded(5, 23, seed=1).to(dtype)
    for got, wanted in (
        (m.head_overlap(u), m.head_overlap(u.float())),
        (m.projection_energy(z, u), m.projection_energy(z.float(), u.float())),
        (m.coding_rate(z, 0.1), m.coding_rate(z.float(), 0.1)),
    ):
        assert got.dtype == dtype
        assert_close(got.float(), wanted, rtol=0.03, atol=0.01)


def test_a_failed_factor_does_not_poison_gradients():
    for seed in range(5):
        z = (seeded(1, 67, seed=seed, dtype=torch.float64).repeat(53, 1) * 1e7).requires_grad_()
        m.coding_rate(z, 0.1).backward()
        assert z.grad.isfinite().all()


def test_an_empty_batch_has_no_numbers():
    empty = torch.empty(0, 3, 13, 5)
    assert m.official_coding_rate(empty).shape == (0, 3) and m.hoyer(empty).shape == (0, 3, 13)


def nan_where(bad):
    """Where measures are NaN if a sample, a head, a row or a token has one bad entry."""
    codes, tokens, rows = seeded(3, 13, 5), seeded(3, 7, 5), torch.full((3, 5), 0.2)
    reading, member = seeded(3, 7, 13).softmax(dim=-1), seeded(3, 13).softmax(dim=0)
    bad_codes, bad_reading = codes.clone(), reading.clone()
    for part in (bad_codes, bad_reading, tokens):
        part[1, 2, 3] = bad
    bad_member = member.clone()
    bad_member[1, 2] = rows[1, 2] = bad
    for name in ("attention_entropy", "effective_support"):
        yield name, getattr(m, name)(rows)
    for name in ("zero_fraction", "l1_norm", "hoyer"):
        yield name, getattr(m, name)(-rows)
    yield "top_mass", m.top_mass(rows, 2)
    yield "coding_rate", m.coding_rate(tokens, 0.1)
    yield "coding_rate in float64", m.coding_rate(tokens.double(), 0.1)
    for name, weights, spoilt in (
        ("contracted_rate", reading, bad_reading), ("variational_rate", member, bad_member)
    ):  # fmt: skip
        yield name, getattr(m, name)(bad_codes, weights, 0.3)
        yield f"{name}, weights", getattr(m, name)(codes, spoilt, 0.3)
        slope = getattr(m, f"{name}_gradient")(bad_codes, weights, 0.3)
        yield f"{name}_gradient", slope.flatten(1).mean(dim=1)
    yield "contraction_coverage", m.contraction_coverage(bad_reading)
    yield "representatives_in_use", m.representatives_in_use(bad_reading)
    yield "membership_share", m.membership_share(bad_member)
    for name in ("assignment_entropy", "subspaces_per_token"):
        yield name, getattr(m, name)(bad_member)[[0, 2, 1]]
    assert m.membership_balance(bad_member).isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(bad):
    for name, found in nan_where(bad):
        assert found.isnan().tolist() == [False, True, False], name


def test_what_is_no_code_and_no_distribution():
    huge = torch.full((3, 5), 2e38)  # finite, though their sum is not
    assert m.zero_fraction(huge).tolist() == [0.0] * 3 and m.hoyer(huge).tolist() == [0.0] * 3
    # no distribution: no entropy, even where a row has zeros
    signed = torch.tensor([[0.0, 1.0], [-0.5, 1.5]])
    assert m.attention_entropy(signed).isnan().tolist() == [False, True]
