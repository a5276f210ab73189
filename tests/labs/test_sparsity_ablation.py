"""The lab on the sparsity term: what is done to a network, and the rules of its claims."""

import ablated
import pytest
import sparsity_ablation
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


def test_the_rules():
    def claims(clean, start=0.0):
        runs = {
            lambd: [dict.fromkeys(ablated.CORRUPTIONS, 0.9) | {"l0": 0.5 - lambd / 5 + 0.001 * k}
                    for k in range(3)]
            for lambd in sparsity_ablation.TRAINED_AT
        }  # fmt: skip
        for run, change in zip(runs[0.5], clean, strict=True):
            run["clean"] += change
        begun = {lambd: [{"l0": 0.5 - start * lambd}] * 3 for lambd in runs}
        return sparsity_ablation.training_claims(runs, begun)

    assert claims([0.001, 0.0012, 0.0011])[0]["answer"] == "supported"
    assert claims([0.1, 0.11, 0.12])[0]["answer"] == "not supported"
    assert claims([0.0, 0.05, -0.05])[0]["answer"] == "undecided"
    # the threshold alone, before training, may make codes as sparse
    assert [row["answer"] for row in claims([0.0] * 3)[1:3]] == ["supported"] * 2
    assert [row["answer"] for row in claims([0.0] * 3, 0.4)[1:3]] == ["not supported"] * 2


def test_a_loss_of_hits_is_more_than_that_of_a_random_change():
    own = [1.0] * 64
    lost = [0.0] * 32 + [1.0] * 32
    after = {sparsity_ablation.OWN: {"clean": own}, 0.0: {"clean": lost}}
    assert sparsity_ablation.loses_claim(after, own)["answer"] == "supported"
    assert sparsity_ablation.loses_claim(after, lost)["answer"] == "undecided"
    low, high = sparsity_ablation.hits_interval(own, own)
    assert -0.06 < low < 0 < high < 0.06  # no change in 64 excludes 4 / (64 + 4)
