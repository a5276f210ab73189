"""The probe of the objective, against the measure and a slow form, in its three frames."""

import numpy as np
import pytest
import torch

import crate_interp as ci
import reference
from conftest import make
from crate_interp.measures import l1_norm, sparse_rate_reduction
from probing import sweep, values


@pytest.fixture(scope="module")
def measured():
    model = make()
    images = torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    result = sweep(model, images, ci.probes.objective(eps=0.3, lambd=0.02))
    return model, model.run_with_cache(images)[1], result


def seen(measured, statistic, layer=1):
    return values(measured[2], f"objective.{statistic}", layer)


def test_the_stream_is_what_the_measure_says(measured):
    model, cache, result = measured
    settings = {"eps": 0.3, "lambd": 0.02, "tokens": "all"}
    assert result.meta["probes"]["objective"]["settings"] == settings
    for layer in range(3):
        z, u = cache["resid_post", layer], model.blocks[layer].attn.U.detach()
        wanted = sparse_rate_reduction(z, u, 0.3, 0.02).numpy()
        np.testing.assert_allclose(seen(measured, "count_stream", layer), wanted, rtol=1e-5)
        wanted = sparse_rate_reduction(z, u, 0.3, 0.02, penalty=l1_norm).numpy()
        np.testing.assert_allclose(seen(measured, "l1_stream", layer), wanted, rtol=1e-5)


def test_frames_against_a_slow_form(measured):
    """Rates of the frame, the count of Z, and the sum of |Z| where Z is as long as the frame."""
    model, cache, _ = measured
    block = model.blocks[1]
    u = block.attn.U.detach().double().numpy()
    for sample, z in enumerate(cache["resid_post", 1].double().numpy()):
        centred = z - z.mean(axis=1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + block.ln1.eps)
        normal = normal * block.ln1.weight.detach().numpy() + block.ln1.bias.detach().numpy()
        frames = {"stream": z, "read": normal, "unit": z / np.sqrt((z**2).mean())}
        for name, shown in frames.items():
            rates = reference.subspace_coding_rate(shown, u, 0.3).sum()
            rates -= reference.coding_rate(shown, 0.3)
            count = 0.02 * np.count_nonzero(z)
            size = 0.02 * np.abs(z).sum() * np.linalg.norm(shown) / np.linalg.norm(z)
            assert seen(measured, f"count_{name}")[sample] == pytest.approx(count + rates, rel=1e-5)
            assert seen(measured, f"l1_{name}")[sample] == pytest.approx(size + rates, rel=1e-5)
    assert (z == 0).any() and not (normal == 0).any()


def test_the_unit_frame_does_not_see_the_scale_of_the_code():
    model = make()
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(2))
    both = []
    for scale in (1, 0.25):
        larger = lambda z, hook, scale=scale: z * scale  # noqa: E731
        with model.hooks([("blocks.2.hook_resid_post", larger)]):
            both.append(sweep(model, images, "objective"))
    for name in ("count_unit", "l1_unit"):
        pair = [values(one, f"objective.{name}", 2) for one in both]
        np.testing.assert_allclose(*pair, rtol=1e-5)
    pair = [values(one, "objective.l1_stream", 2) for one in both]
    assert (abs(pair[0] - pair[1]) > 1).all()
