"""Images of other sizes than the model's: their position embeddings are interpolated."""

import pytest
import torch
import torch.nn.functional as F

from conftest import BATCH, CLASSES, D_MODEL, make
from crate_interp.models.layers.embed import interpolate_positions


@pytest.mark.parametrize("family", ["crate", "crate-alpha"])
def test_other_image_sizes(family, images):
    model = make(family, interpolate_pos=True)
    same = make(family)
    assert torch.equal(model(images), same(images))  # its own grid is untouched
    larger = torch.randn(BATCH, 3, 10, 35)
    out, cache = model.run_with_cache(larger)
    assert out.shape == (BATCH, CLASSES) and cache["resid_pre", 0].shape == (
        BATCH,
        1 + 5 * 7,
        D_MODEL,
    )
    with pytest.raises(ValueError, match=r"both sides must be multiples of the patch \(2, 5\)"):
        model(torch.randn(BATCH, 3, 7, 20))


def test_interpolated_positions_follow_dino_not_a_plain_resize():
    table = torch.randn(1, 1 + 3 * 4, D_MODEL, dtype=torch.float64)
    got = interpolate_positions(table, (3, 4), (5, 7))
    assert torch.equal(got[:, 0], table[:, 0]) and got.shape == (1, 36, D_MODEL)
    image = table[:, 1:].reshape(1, 3, 4, D_MODEL).permute(0, 3, 1, 2)
    resized = (
        F.interpolate(image, size=(5, 7), mode="bicubic")
        .permute(0, 2, 3, 1)
        .reshape(1, 35, D_MODEL)
    )
    assert not torch.allclose(got[:, 1:], resized)
    torch.testing.assert_close(got[:, 1:], _dino(image, (5, 7)), atol=1e-12, rtol=1e-12)


def _dino(image, size):
    """Cubic convolution (a = -0.75) at (i + 0.5) / scale - 0.5, scale = (size + 0.1) / grid.

    Edges are repeated.
    """

    def weights(length, out):
        matrix = torch.zeros(out, length, dtype=torch.float64)
        for i in range(out):
            x = (i + 0.5) * length / (out + 0.1) - 0.5
            base = int(torch.floor(torch.tensor(x)))
            for j in range(base - 1, base + 3):
                t = abs(x - j)
                a = -0.75
                w = (
                    (a + 2) * t**3 - (a + 3) * t**2 + 1
                    if t <= 1
                    else a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
                )
                matrix[i, min(max(j, 0), length - 1)] += w
        return matrix

    rows, columns = weights(image.shape[2], size[0]), weights(image.shape[3], size[1])
    return torch.einsum("ih,bdhw,jw->bijd", rows, image, columns).flatten(1, 2)
