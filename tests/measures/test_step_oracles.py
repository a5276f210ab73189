"""The attention step, as pure rules and as the module of the hooked model: known values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
import crate_interp.measures as m
from crate_interp.models.layers.attention import MSSA
from crate_interp.models.layers.norm import NoNorm
from tensors import close, draw, orthonormal

seeds = st.integers(0, 2**31)
HEADS, P, POS = 3, 5, 17
D = HEADS * P
EPS, KAPPA = 0.7, 0.3
A = P / (POS * EPS**2)  # the alpha of the theory
RULES = (m.gradient_step, m.neumann_step, m.first_order_step, m.third_order_step, m.attention_step)


def complete(seed):
    return orthonormal(seed, D, D).unflatten(1, (HEADS, P)).permute(1, 0, 2)


def with_spectrum(seed, u, x):
    """Returns tokens whose codes in every head have alpha * (singular value)^2 = x [head, p].

    The singular vectors are random.
    """
    codes = [
        orthonormal(seed + k, POS, P) * (row / A).sqrt() @ orthonormal(seed - k, P, P)
        for k, row in enumerate(x)
    ]
    return sum(code @ basis.T for code, basis in zip(codes, u, strict=True))


def mssa(variant, weight, **over):
    """The model's attention in float64 with U^T = weight, as a function of tokens [pos, d]."""
    cfg = ci.CrateConfig(
        family="crate", d_model=D, n_layers=1, n_heads=HEADS, variant=variant, image_size=32, **over
    )
    layer = MSSA(cfg).double()
    layer.u_proj.weight.data = weight.clone()
    return layer


def attended(layer, x):
    return layer(x[None], NoNorm())[0].detach()


def columns_of(u):
    """U^T stacked, [head * p, d]: how the model stores it."""
    return u.mT.flatten(0, 1)


# attention


@pytest.mark.parametrize("basis", ["complete", "generic"])
def test_identical_tokens(basis):
    u = complete(0) if basis == "complete" else draw(0, HEADS, D, P) / 4
    z = draw(1, 1, D).repeat(POS, 1)
    own = z if basis == "complete" else sum(z @ b @ b.T for b in u)
    close(m.subspace_attention(z @ u), z @ u, 1e-12)
    close(m.attention_step(z, u, EPS, KAPPA), z + KAPPA * A**2 * own)
    close(m.paper_mssa(z, u, EPS), A * own)
    close(attended(mssa("c", columns_of(u)), z), own)


def test_no_logits_give_the_mean():
    u, z = complete(2), draw(3, POS, D)
    codes = z @ u
    mean = codes.mean(dim=1, keepdim=True)
    close(m.subspace_attention(codes, scale=0.0), mean, 1e-12)
    close(m.subspace_attention(codes, scale=1e-12), mean)
    s = 1e-7  # logits of the order s^2, output s^2 times the mean token
    close(attended(mssa("c", s * columns_of(u)), z) / s**2, z.mean(dim=0))


def test_large_logits_select_the_token_itself():
    # distinct, of equal length
    codes = torch.nn.functional.normalize(draw(4, HEADS, POS, P), dim=-1)
    gap = 1 - (codes @ codes.mT - 2 * torch.eye(POS)).max().item()
    close(m.subspace_attention(codes, scale=60 / gap), codes)  # e^-60 for each other token
    u = complete(5)
    z = sum(code @ basis.T for code, basis in zip(codes, u, strict=True))
    s = math.sqrt(60 / gap * math.sqrt(P))  # the model divides by sqrt(p)
    close(attended(mssa("c", s * columns_of(u)), z) / s**2, z)


def test_rows_of_tokens_are_the_columns_of_the_papers():
    codes = draw(6, HEADS, POS, P)
    b = codes.mT  # B_k, tokens as columns
    close(m.subspace_attention(codes), (b @ (b.mT @ b).softmax(dim=-2)).mT, 1e-12)
    assert (m.subspace_attention(codes) - (b @ (b.mT @ b).softmax(dim=-1)).mT).abs().max() > 0.01


def test_the_model_is_the_rule_up_to_its_scale():
    # its logits are divided by sqrt(p): that is the rule with U / p^(1/4), times sqrt(p)
    z, u = draw(11, POS, D), draw(12, HEADS, D, P) / 3
    kappa = math.sqrt(P) / A**2
    close(attended(mssa("c", columns_of(u)), z), m.attention_step(z, u / P**0.25, EPS, kappa) - z)
    close(attended(mssa("n", columns_of(u)), z), m.attention_step(z, u / P**0.25, EPS, -kappa) - z)
    close(
        attended(mssa("identity", columns_of(u)), z),
        m.subspace_attention(z @ u, P**-0.5).transpose(0, 1).flatten(1),
    )
    # N = 2 Z - C
    close(m.attention_step(z, u, EPS, KAPPA) + m.attention_step(z, u, EPS, -KAPPA), 2 * z)
    close(m.attention_step(z, u, EPS, KAPPA) - z, KAPPA * A * m.paper_mssa(z, u, EPS))


def test_variants():
    z, eye = draw(13, POS, D), torch.eye(D, dtype=torch.float64)
    c, n, t, identity = (attended(mssa(v, eye), z) for v in ("c", "n", "t", "identity"))
    close(t, c, 1e-12)
    close(identity, c, 1e-12)
    close(n, -c, 1e-12)
    assert c.abs().max() > 0.1
    # a complete cover: increments of equal length, though not the same
    turn = columns_of(complete(14))
    c, t, identity = (attended(mssa(v, turn), z) for v in ("c", "t", "identity"))
    close(torch.stack([t.norm(), identity.norm()]), c.norm())
    assert min((c - t).norm(), (c - identity).norm(), (t - identity).norm()) > 0.1 * c.norm()
    generic = draw(15, D, D) / 3
    c, t = (attended(mssa(v, generic), z) for v in ("c", "t"))
    assert (c - t).norm() > 0.1 * c.norm() and abs(c.norm() / t.norm() - 1) > 1e-3


@pytest.mark.parametrize("variant", ["c", "n", "t", "identity"])
def test_the_learned_output_holds_every_variant(variant):
    z, weight = draw(16, POS, D), draw(17, D, D) / 3
    own = {
        "c": weight.T,
        "n": -weight.T,
        "t": weight,
        "identity": torch.eye(D, dtype=torch.float64),
    }[variant]
    layer = mssa("crate", weight)
    layer.out_proj.weight.data, layer.out_proj.bias.data = (
        own.contiguous(),
        torch.zeros(D, dtype=torch.float64),
    )
    close(attended(layer, z), attended(mssa(variant, weight), z), 1e-12)


# singular values


FACTORS = {  # what one step of each rule does to a singular value with x = alpha s^2
    m.gradient_step: lambda x: 1 - KAPPA * A / (1 + x),
    m.neumann_step: lambda x: 1 - KAPPA * A * (1 - x),
    m.first_order_step: lambda x: 1 - KAPPA * A + 0 * x,
    m.third_order_step: lambda x: 1 + KAPPA * A * x,
}


@pytest.mark.parametrize("rule", FACTORS)
def test_singular_values_after_a_step(rule):
    u = complete(18)
    x = draw(19, HEADS, P).abs() * 2
    z = with_spectrum(20, u, x)
    close(A * m.subspace_spectrum(z, u), x.sort(dim=-1, descending=True).values)
    wanted = (x * FACTORS[rule](x) ** 2).sort(dim=-1, descending=True).values
    close(A * m.subspace_spectrum(rule(z, u, EPS, KAPPA), u), wanted)


@given(seeds)
def test_which_rules_compress(seed):
    u = complete(seed)
    low, high = 0.9 * torch.rand(
        2, HEADS, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    high = 1.1 + 9 * high
    for x, below in ((low + 1e-3, True), (high, False)):
        z = with_spectrum(seed, u, x)
        close(m.neumann_invalid(z, u, EPS), torch.full((HEADS,), 0.0 if below else 1.0))
        before = m.subspace_coding_rate(z, u, EPS)
        change = {
            rule: m.subspace_coding_rate(rule(z, u, EPS, KAPPA), u, EPS) - before for rule in RULES
        }
        assert (change[m.gradient_step] < 0).all() and (change[m.first_order_step] < 0).all()
        assert (change[m.third_order_step] > 0).all()
        assert (change[m.neumann_step] < 0).all() if below else (change[m.neumann_step] > 0).all()


# the gradient step as descent


@given(seeds, st.sampled_from([0.02, 0.1, 0.5, 1.0]))
def test_descent_to_second_order(seed, scale):
    """|R^c(Z - k G) - R^c(Z) + k |G|^2| <= 9 alpha / 8 k^2 |G|^2.

    The Hessian is at most 9 alpha / 4.
    """
    u, z = complete(seed), scale * draw(seed + 1, POS, D)
    slope = m.subspace_coding_rate_gradient(z, u, EPS).square().sum()
    before = m.subspace_coding_rate(z, u, EPS).sum()
    for kappa in (0.5, 0.05, 0.005):
        after = m.subspace_coding_rate(m.gradient_step(z, u, EPS, kappa), u, EPS).sum()
        assert abs(after - before + kappa * slope) <= 9 * A / 8 * kappa**2 * slope + 1e-12
    longest = 0.999 * 2 / (9 * A / 4)
    assert m.subspace_coding_rate(m.gradient_step(z, u, EPS, longest), u, EPS).sum() < before


def test_order_of_the_remainder_and_a_step_too_long():
    u, z = complete(23), 0.3 * draw(24, POS, D)
    slope = m.subspace_coding_rate_gradient(z, u, EPS).square().sum()
    before = m.subspace_coding_rate(z, u, EPS).sum()
    rest = [
        m.subspace_coding_rate(m.gradient_step(z, u, EPS, k), u, EPS).sum() - before + k * slope
        for k in (2e-3, 1e-3)
    ]
    assert rest[0] / rest[1] == pytest.approx(4, rel=0.01)
    # s (1 - 3 / 1.01): longer by 1.97
    small = with_spectrum(25, u, torch.full((HEADS, P), 0.01, dtype=torch.float64))
    after = m.gradient_step(small, u, EPS, 3 / A)
    close(A * m.subspace_spectrum(after, u), 0.01 * (1 - 3 / 1.01) ** 2)
    before = m.subspace_coding_rate(small, u, EPS)
    assert (m.subspace_coding_rate(after, u, EPS) > before).all()
