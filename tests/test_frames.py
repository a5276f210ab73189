"""The probe of frames: against the probe of compression, a slow form, and what scale it sees."""

import numpy as np
import pytest
import torch

import crate_interp as ci
import reference
from conftest import make, make_lm
from probing import sweep, values


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))


def test_stream_and_read_are_what_compression_measures(images):
    model = make()
    for frame, norm in (("stream", False), ("read", True)):
        probes = [ci.probes.frames(eps=0.3), ci.probes.compression(eps=0.3, norm=norm)]
        result = ci.sweep(model, images, probes=probes, controls=0, progress=False)
        for layer in range(3):
            rates = [
                values(result, f"compression.subspace_rate_{at}", layer) for at in ("mid", "pre")
            ]
            got = values(result, f"frames.change_{frame}", layer)
            np.testing.assert_allclose(got, rates[0] - rates[1], rtol=1e-4, atol=1e-4)


def test_the_unit_frame_against_a_slow_form(images):
    model = make()
    result = sweep(model, images, ci.probes.frames(eps=0.3))
    cache = model.run_with_cache(images)[1]
    u = model.blocks[1].attn.U.detach().double().numpy()
    for sample in range(3):
        rates = []
        for at in ("mid", "pre"):
            z = cache[f"resid_{at}", 1][sample].double().numpy()
            unit = z / np.sqrt((z**2).mean())
            rates.append(reference.subspace_coding_rate(unit, u, 0.3).sum())
        got = values(result, "frames.change_unit", 1)[sample]
        assert got == pytest.approx(rates[0] - rates[1], rel=1e-4)


def test_models_without_subspaces_and_settings(images):
    assert "frames" in ci.probes.available() and "frames" not in ci.probes.DEFAULT
    with pytest.raises(ValueError, match="eps=0"):
        ci.probes.frames(eps=0.0)
    tokens = torch.randint(0, 47, (2, 13), generator=torch.Generator().manual_seed(0))
    lm = make_lm("gpt-baseline")
    result = ci.sweep(lm, tokens, probes=["frames", "attention"], controls=0, progress=False)
    assert not (result.layers()["probe"] == "frames").any()
