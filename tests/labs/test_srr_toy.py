"""The toy of update rules: CRATE-T beside the others, the regimes, and the rule of the answer."""

import pytest
import srr_toy
import torch
from lab import Steps

from crate_interp.measures import attention_step, subspace_attention
from crate_interp.measures.rates import head_codes

EPS = 0.7


def tokens(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


def test_crate_t_writes_by_the_matrix_that_is_not_transposed():
    """Head by head and column by column, as eq. 10 has it, for 3 heads of 5 in 15 dimensions."""
    z, u = tokens(7, 15), torch.linalg.qr(tokens(15, 15, 1))[0].reshape(15, 3, 5).movedim(1, 0)
    a = 5 / (7 * EPS**2)
    wide = torch.cat(list(u), dim=1)  # [d_model, head * d_head]
    stacked = torch.cat([subspace_attention(z @ one) for one in u], dim=1).T
    wanted = z.T + 0.3 * a**2 * wide.T @ stacked
    torch.testing.assert_close(srr_toy.transposed_step(z, u, EPS, 0.3), wanted.T)


def test_variants_of_the_identity_are_one_and_increments_as_long():
    z = tokens(7, 15)
    eye = torch.eye(15, dtype=torch.float64).reshape(15, 3, 5).movedim(1, 0)
    c, t = attention_step(z, eye, EPS, 0.3), srr_toy.transposed_step(z, eye, EPS, 0.3)
    torch.testing.assert_close(c, t)
    torch.testing.assert_close(attention_step(z, eye, EPS, -0.3), 2 * z - c)
    u = torch.linalg.qr(tokens(15, 15, 1))[0].reshape(15, 3, 5).movedim(1, 0)
    c, t = attention_step(z, u, EPS, 0.3), srr_toy.transposed_step(z, u, EPS, 0.3)
    a = 5 / (7 * EPS**2)
    identity = 0.3 * a**2 * subspace_attention(head_codes(z, u)).transpose(0, 1).flatten(1)
    lengths = [torch.linalg.norm(step) for step in (c - z, t - z, identity)]
    torch.testing.assert_close(lengths[0], lengths[1])
    torch.testing.assert_close(lengths[0], lengths[2])
    assert torch.linalg.norm(c - t) > 0.1 * lengths[0]


def test_the_regimes_are_what_they_say():
    for regime, low, high in (("all x below 1 at first", 0, 0), ("most x above 1", 0.9, 1)):
        shares = [row[4] for row in srr_toy.passed("(c) first-order term", regime, 0)
                  if row[0] == "share above 1"]  # fmt: skip
        assert low <= min(shares) and max(shares) <= high


@pytest.mark.slow
def test_rule_b_turns_with_the_regime():
    found = srr_toy.run("quick", Steps(None)).table()
    assert len(found) == 4 and found["n"].eq(5).all()
    assert found["answer"].tolist().count("depends") == 1
    assert found[found["answer"].eq("depends")]["claim"].iloc[0].startswith("(b)")
