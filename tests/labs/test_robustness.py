"""Changed pictures: what PGD may do to a pixel, and that it does more than random noise."""

import pytest
import robustness as lab_of
import torch
import torch.nn.functional as F
from pairs import KINDS, logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [1, 8])
def test_pgd_stays_near_the_picture_and_raises_the_loss_more_than_noise(kind, eps):
    model, (x, labels, done) = lab_of.network(kind, 1), lab_of.pictures(13)
    attacked = lab_of.pgd(model, x, labels, eps)
    for changed in (attacked, done[f"noise {eps}"]):
        assert (changed - x).abs().max() <= eps + 1e-4
        assert changed.min() >= 0 and changed.max() <= 255
    with torch.no_grad():
        every = (x, done[f"noise {eps}"], attacked)
        clean, noisy, worst = (F.cross_entropy(logits(model, y), labels) for y in every)
    assert worst > noisy and worst > clean + 0.3


def test_a_shift_blurs_or_changes_the_ground_alone():
    x, _, done = lab_of.pictures(5)
    blur, ground = done["blur"], done["inverted ground"]
    assert torch.allclose(blur[:, :, 9, 9], x[:, :, 8:11, 8:11].mean((2, 3)))
    assert torch.equal(ground, torch.where(ground == x, x, 255 - x))
    assert 0.1 < (ground == x).float().mean() < 0.9
