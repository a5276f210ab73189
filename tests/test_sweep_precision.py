"""precision="bfloat16": what runs in which dtype, and what the result says of it."""

import pandas as pd
import pytest
import torch

import crate_interp as ci

_SEEN: list[tuple] = []


def model():
    torch.manual_seed(0)
    cfg = ci.CrateConfig(
        family="crate", d_model=15, n_layers=2, n_heads=3, image_size=14, patch_size=7, channels=1
    )
    return ci.HookedCrate(cfg).eval()


def test_the_model_runs_in_bfloat16_and_probes_measure_in_float32(tmp_path):
    own, images = model(), torch.randn(5, 1, 14, 14)

    def measure(block, acts):
        _SEEN.append((acts["attn.hook_u"].dtype, torch.is_autocast_enabled("cpu")))
        return {"first": acts["attn.hook_u"][:, 0, 0, 0]}

    probe = ci.Probe("mine", ("attn.hook_u",), measure, {"first": ("", None, None, "")})
    given = {"probes": ["compression", probe], "progress": False, "batch_size": 2}
    mixed = ci.sweep(own, images, precision="bfloat16", out=tmp_path, **given)
    assert set(_SEEN) == {(torch.float32, False)}
    _SEEN.clear()  # what a probe reads is a setting of the run
    held = mixed.samples()["mine.first"].dropna().to_numpy()
    assert (torch.tensor(held).bfloat16().double() == torch.tensor(held)).all()
    plain = ci.sweep(own, images, **given)
    _SEEN.clear()
    assert mixed.meta["precision"] == "bfloat16" and "precision" not in plain.meta
    exact = plain.samples()["mine.first"].dropna().to_numpy()
    assert 0 < abs(held - exact).max() < 0.02 * abs(exact).max()
    again = ci.sweep(own, images, precision="bfloat16", out=tmp_path, **given)
    pd.testing.assert_frame_equal(again.samples(), mixed.samples())
    _SEEN.clear()
    with pytest.raises(ValueError, match="precision"):
        ci.sweep(own, images, out=tmp_path, **given)
    with pytest.raises(ValueError, match="precision='float8'"):
        ci.sweep(own, images, precision="float8", **given)
