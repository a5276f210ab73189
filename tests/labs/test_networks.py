"""The labs on whole networks: reconstruction, the sparsity term, costs."""

import costs
import pytest
import reconstruction
import sparsity_ablation as ablated
import torch
import train_tiny_mae as tiny_mae
from torch.testing import assert_close

from crate_interp.measures import ista_step


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_visible_pixels_are_those_of_the_patches_that_the_network_keeps():
    mae = tiny_mae.make_mae(0)
    images, noise = random(3, 1, 28, 28), tiny_mae.noise_of(3, 0)
    with torch.no_grad():
        given = mae(images, noise)
        seen = tiny_mae.visible_pixels(mae, given.mask)
        changed = mae(images + 5 * (1 - seen), noise)
        assert_close(given.pred, changed.pred)
        pictures = mae.unpatchify(given.pred)
        error = tiny_mae.removed_error(pictures, images, seen).mean()
    assert seen.mean() == pytest.approx(12 / 49)
    assert_close(error, given.loss)


def test_the_nearest_image_in_the_visible_pixels():
    images, gallery = random(3, 1, 5, 7), random(11, 1, 5, 7, seed=1)
    seen = (random(3, 1, 5, 7, seed=2) > 0).float()
    slow = [
        min(gallery, key=lambda y, x=x, s=s: (s * (x - y)).square().sum().item())
        for x, s in zip(images, seen, strict=True)
    ]
    assert_close(tiny_mae.nearest(images, seen, gallery), torch.stack(slow))


def test_the_linear_prediction_knows_pixels_that_others_determine():
    """Pixels of rank two, of which five are seen: the rest follows, up to the ridge."""
    basis = random(2, 1, 5, 7)
    gallery = torch.einsum("nk,kchw->nchw", random(97, 2, seed=1), basis)
    images = torch.einsum("nk,kchw->nchw", random(3, 2, seed=2), basis)
    seen = torch.zeros(3, 1, 5, 7)
    seen[:, :, 2] = 1
    found = reconstruction.linear_prediction(images, seen, gallery)
    assert (found - images).norm() < 0.1 * images.norm()
    assert_close(found * seen, images * seen)


def test_the_error_of_an_inverse_at_its_best_scale():
    wanted, found = random(3, 5, 7), random(3, 5, 7, seed=1)
    assert reconstruction.scaled_error(-2 * wanted, wanted).max() < 1e-3
    scales = torch.linspace(-1, 1, 2001)
    slow = torch.stack(
        [(w - scales[:, None, None] * f).norm(dim=(1, 2)).min() / w.norm()
         for w, f in zip(wanted, found, strict=True)]
    )  # fmt: skip
    assert_close(reconstruction.scaled_error(found, wanted), slow, atol=1e-4, rtol=1e-3)


def test_a_decoder_that_copies_the_encoder_backwards_has_no_error(monkeypatch):
    """The layers are paired as they should be: the blocks are replaced by exact inverses."""
    mae = tiny_mae.make_mae(0)
    images = random(3, 1, 28, 28)
    with torch.no_grad():
        _, cache = mae.run_with_cache(images, mask_ratio=0.0)
    for layer, block in enumerate(mae.decoder_blocks):
        answer = cache[f"blocks.{3 - layer}.hook_resid_pre"]
        monkeypatch.setattr(
            block, "forward", lambda x, block=block, answer=answer: block.hook_resid_post(answer)
        )
    found = reconstruction.inverses(mae, images)
    assert max(value.max() for what in ("stream", "layer") for value in found[what]) < 1e-3
    assert min(value.min() for value in found["copy"]) > 0.1


def test_a_stream_in_another_basis_is_turned_back():
    wanted = random(8, 17, 7)
    turn = torch.linalg.qr(random(7, 7, seed=3))[0]
    turned = reconstruction.rotated(3 * wanted @ turn, wanted)
    assert reconstruction.scaled_error(3 * wanted @ turn, wanted).min() > 0.5
    assert reconstruction.scaled_error(turned, wanted[4:]).max() < 1e-3
    noise = reconstruction.rotated(random(8, 17, 7, seed=4), wanted)
    assert reconstruction.scaled_error(noise, wanted[4:]).mean() > 0.9


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
    assert_close(cache["blocks.1.mlp.hook_post"], slow, atol=1e-5, rtol=1e-5)
    assert {block.mlp.lambd for block in model.blocks} == {0.1}


def test_a_threshold_above_everything_leaves_no_code(model, images):
    """lambda to infinity gives 0, eta lambda = 0 keeps half of a symmetric input."""
    with ablated.threshold(model, 1e6):
        assert ablated.code_share(model, images) == [0.0] * 3
    with ablated.threshold(model, 0.0):
        assert ablated.code_share(model, images)[0] == pytest.approx(0.5, abs=0.05)


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
    assert_close((moved - still).abs(), torch.full_like(still, 0.01))


N, D = 13, 20  # d is 4 heads of 5


@pytest.mark.parametrize("kind", costs.KINDS)
def test_the_formula_is_what_torchs_counter_sees(kind):
    assert costs.layer_operations(kind, N, D) == costs.counted_layer(kind, N, D)


def test_the_published_sizes():
    for d, layers, heads, printed in costs.PUBLISHED.values():
        assert round(costs.published_parameters("crate", d, layers, heads) / 1e6, 2) == printed
    # a ViT-B has 86,567,656 with biases of q, k and v, and without the embedding's two norms
    assert costs.published_parameters("vit", 768, 12, 12) == 86_567_656 - 12 * 3 * 768 + 4 * 768


def test_peak_memory_of_a_chain():
    """Five products and sigmoids of [7, 11] floats: one is kept, two are being made."""
    x, w = torch.zeros(7, 11, requires_grad=True), torch.zeros(11, 11)
    size = 7 * 11 * 4

    def chain():
        z = x
        for _ in range(5):
            z = (z @ w).sigmoid()
        return z

    with torch.no_grad(), costs.PeakMemory() as memory:
        kept = chain()
        assert (memory.now, memory.peak) == (size, 3 * size)
        del kept
        assert memory.now == 0
    with costs.PeakMemory() as memory:
        kept = chain()
        assert (memory.now, memory.peak) == (5 * size, 6 * size)
    assert kept.shape == (7, 11)
