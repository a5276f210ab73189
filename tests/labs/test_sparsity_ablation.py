"""The lab on the sparsity term: what is done to a network, and the rules of its claims."""

import pytest
import sparsity_ablation as ablated
import torch

from crate_interp.measures import ista_step


@pytest.fixture(scope="module")
def model():
    return ablated.make_digits_model(0.1, 0)


@pytest.fixture(scope="module")
def images():
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_threshold_is_the_lambda_of_ista(model, images):
    with torch.no_grad(), ablated.threshold(model, 0.7):
        _, cache = model.run_with_cache(images)
        y = model.blocks[1].ln2(cache["blocks.1.hook_resid_mid"])
        d = model.blocks[1].mlp.D
        slow = ista_step(y, y, d, model.cfg.eta, 0.7)
    torch.testing.assert_close(cache["blocks.1.mlp.hook_post"], slow, atol=1e-5, rtol=1e-5)
    assert {block.mlp.lambd for block in model.blocks} == {0.1}


def test_a_threshold_above_everything_leaves_no_code(model, images):
    """lambda to infinity gives 0, eta lambda = 0 keeps half of a symmetric input."""
    with ablated.threshold(model, 1e6):
        assert ablated.code_share(model, images) == [0.0] * 3
    with ablated.threshold(model, 0.0):
        assert ablated.code_share(model, images)[0] == pytest.approx(0.5, abs=0.05)


def test_the_share_of_nonzeros_of_gaussian_tokens_is_the_closed_form():
    """D = I, standard normal y: (1 - erf(eta lambda / sqrt 2)) / 2, .4960 at .01."""
    y = torch.randn(100_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = ista_step(y, y, torch.eye(3, dtype=y.dtype), 0.1, 0.1)
    expected = 0.5 * (1 - torch.erf(torch.tensor(0.01 / 2**0.5)))
    assert (z > 0).double().mean() == pytest.approx(float(expected), abs=0.004)
    assert float(expected) == pytest.approx(0.4960, abs=5e-5)


def test_noise_and_signs_have_the_size_that_is_stated(model, images):
    names = "blocks.0.mlp.hook_post"
    with torch.no_grad():
        clean = model.run_with_cache(images, names_filter=names)[1][names]
        with model.hooks(fwd_hooks=ablated.noisy_codes(0)):
            noisy = model.run_with_cache(images, names_filter=names)[1][names]
        pre = "blocks.0.mlp.hook_pre"
        still = model.run_with_cache(images, names_filter=pre)[1][pre]
        with model.hooks(fwd_hooks=ablated.random_signs(model, 0.1, 0)):
            moved = model.run_with_cache(images, names_filter=pre)[1][pre]
    ratio = (noisy - clean).square().mean().sqrt() / clean.square().mean().sqrt()
    assert ratio == pytest.approx(ablated.CODE_NOISE, rel=0.05)
    torch.testing.assert_close((moved - still).abs(), torch.full_like(still, 0.01))
