"""The lab on reconstruction: what fills images in, and the error of an inverse."""

import pytest
import reconstruction
import tiny_mae
import torch


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_visible_pixels_are_those_of_the_patches_that_the_network_keeps():
    mae = tiny_mae.make_mae(0)
    images, noise = random(3, 1, 28, 28), tiny_mae.noise_of(3, 0)
    with torch.no_grad():
        given = mae(images, noise)
        seen = tiny_mae.visible_pixels(mae, given.mask)
        changed = mae(images + 5 * (1 - seen), noise)
        torch.testing.assert_close(given.pred, changed.pred)
        pictures = mae.unpatchify(given.pred)
        error = tiny_mae.removed_error(pictures, images, seen).mean()
    assert seen.mean() == pytest.approx(12 / 49)
    torch.testing.assert_close(error, given.loss)


def test_the_nearest_image_in_the_visible_pixels():
    images, gallery = random(3, 1, 5, 7), random(11, 1, 5, 7, seed=1)
    seen = (random(3, 1, 5, 7, seed=2) > 0).float()
    slow = [
        min(gallery, key=lambda y, x=x, s=s: (s * (x - y)).square().sum().item())
        for x, s in zip(images, seen, strict=True)
    ]
    torch.testing.assert_close(tiny_mae.nearest(images, seen, gallery), torch.stack(slow))


def test_the_linear_prediction_knows_pixels_that_others_determine():
    """Pixels of rank two, of which five are seen: the rest follows, up to the ridge."""
    basis = random(2, 1, 5, 7)
    gallery = torch.einsum("nk,kchw->nchw", random(97, 2, seed=1), basis)
    images = torch.einsum("nk,kchw->nchw", random(3, 2, seed=2), basis)
    seen = torch.zeros(3, 1, 5, 7)
    seen[:, :, 2] = 1
    found = reconstruction.linear_prediction(images, seen, gallery)
    assert (found - images).norm() < 0.1 * images.norm()
    torch.testing.assert_close(found * seen, images * seen)


def test_the_error_of_an_inverse_at_its_best_scale():
    wanted, found = random(3, 5, 7), random(3, 5, 7, seed=1)
    assert reconstruction.scaled_error(-2 * wanted, wanted).max() < 1e-3
    scales = torch.linspace(-1, 1, 2001)
    slow = torch.stack(
        [(w - scales[:, None, None] * f).norm(dim=(1, 2)).min() / w.norm()
         for w, f in zip(wanted, found, strict=True)]
    )  # fmt: skip
    torch.testing.assert_close(
        reconstruction.scaled_error(found, wanted), slow, atol=1e-4, rtol=1e-3
    )


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
