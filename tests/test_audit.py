"""The audit: a model that keeps every claim, one that breaks each, and random models."""

import torch

import crate_interp as ci
from conftest import make
from ideal import EPS, HEADS, IMAGES, P, attention_replaced, broken, descent, ideal, words


def test_the_theory_is_kept_in_every_cell():
    assert broken(words(ideal())) == set()


def test_a_step_uphill():
    """Uphill, every claim about the direction is broken, that about the signed step size too."""
    found = broken(words(ideal(), lambda z, u: -descent(z, u, EPS, 1.0)))
    assert found == {"compresses", "gradient", "step", "neumann_direction"}


def test_a_step_sideways():
    """Turning tokens into each other keeps R^c; a short descent after it lowers it.

    Neumann's form is nearly the gradient here.
    """
    skew = torch.randn(13, 13, generator=torch.Generator().manual_seed(0))
    turn = torch.linalg.matrix_exp(
        0.3 * (skew - skew.T) / torch.linalg.matrix_norm(skew - skew.T, ord=2)
    )

    def update(z, u):
        turned = turn @ z
        return turned + descent(turned, u, EPS, 0.05) - z

    assert broken(words(ideal(), update)) == {"gradient", "neumann_direction"}


def test_a_step_too_long():
    """Three times 1 / L is beyond the guarantee; R^c falls all the same, as the bound is not tight."""
    assert broken(words(ideal(), lambda z, u: descent(z, u, EPS, 3.0))) == {"step"}


def largest_eigenvalue(model):
    """Returns, for each layer, the least over samples of the largest alpha lambda at eps = 1."""
    least = []
    with attention_replaced(model, lambda z, u: descent(z, u, EPS, 1.0)):
        _, cache = model.run_with_cache(IMAGES)
    for layer, block in enumerate(model.blocks):
        codes = torch.einsum("bnd,kdp->bknp", cache["resid_pre", layer], block.attn.U.detach())
        least.append(
            float(torch.linalg.matrix_norm(codes, ord=2).square().amax(dim=1).min()) * P / 13
        )
    return least


def test_an_eps_where_the_series_diverges_a_little():
    """In every sample an eigenvalue just above 1 breaks the condition, but not yet the direction."""
    model = ideal()
    eps = (
        largest_eigenvalue(model)[0] / 1.02
    ) ** 0.5  # the steps are of eps: only layer 0 is the same as at EPS
    with attention_replaced(model, lambda z, u: descent(z, u, eps, 1.0)):
        table = ci.audit(model, IMAGES, eps=eps, untrained=0, progress=False).table()
    first = table[table["layer"] == 0].set_index("claim")["verdict"]
    assert {claim for claim, word in first.items() if word == "broken"} == {"neumann"}


def test_an_eps_where_the_series_diverges():
    """Far above 1 its sign turns, and it points uphill."""
    assert broken(words(ideal(), eps=0.3)) == {"neumann", "neumann_direction"}


def test_a_code_too_large():
    """Thirty times the solution is worse than the start, goes no part of the way, is not optimal.

    The next layer's stream is thirty times as long; eps is so large that the series converges.
    """
    enlarge = [(lambda name: name.endswith("mlp.hook_post"), lambda code, hook: 30 * code)]
    assert broken(words(ideal(), eps=300.0, more=enlarge)) == {
        "descends",
        "share",
        "converged",
        "kkt",
    }


def test_half_a_step():
    """With D = I the code is ReLU(y - lambda / 2): three quarters of the decrease, no solution."""
    assert broken(words(ideal(eta=0.5, square=True))) == {"converged", "kkt"}


def test_a_twentieth_of_a_step():
    """A step this short hardly applies the penalty: what is zero was so before."""
    assert broken(words(ideal(eta=0.05, square=True, spread=0.8))) == {
        "share",
        "converged",
        "kkt",
        "threshold",
    }


def test_zeros_by_sign():
    """If LayerNorm leaves as many negative entries as positive, half the zeros need no threshold."""
    model = ideal()
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.weight.fill_(1.0)
            block.ln2.bias.fill_(0.0)
    assert broken(words(model)) == {"threshold"}


def test_bases_too_long():
    """A longer basis is neither orthonormal nor a cover of the space."""
    model = ideal()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.u_proj.weight.mul_(1.3)
    assert broken(words(model)) == {"orthonormal", "complete"}


def test_one_subspace_three_times():
    model = ideal()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.u_proj.weight.copy_(block.attn.u_proj.weight[:P].repeat(HEADS, 1))
    assert broken(words(model)) == {"complete"}


def test_a_dictionary_too_long():
    """D = 1.2 Q with eta = 1 / 1.44 solves the lasso in one step; R(DZ) is R at a larger scale."""
    assert broken(words(ideal(eta=1 / 1.44, scale=1.2))) == {"dictionary", "rate_kept"}


def test_random_models_keep_and_break():
    found = set()
    for seed in range(20):
        model = make("crate", seed=seed, n_layers=1)
        data = torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(seed))
        found |= set(ci.audit(model, data, untrained=0, progress=False).table()["verdict"])
    assert {"kept", "broken"} <= found
