"""Negative controls of the probes, lines of chance, and the frames of compression."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

import crate_interp as ci
import reference
from conftest import LAYERS, make
from crate_interp.questions.untrained_twins import shuffled, twin
from crate_interp.sweeps.findings import strip
from crate_interp.sweeps.layer_curves import an_eighth
from probing import sweep, values


@pytest.fixture(scope="module")
def images():
    return torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("period", range(2, 13))
def test_they_see_each_of_some_classes_that_come_in_turn(period):
    """A fixed step would see one class of 2, 4 or 8 alone. An even share is 8 samples a class."""
    many = [start + place for start in range(0, 64 * period, 32) for place in an_eighth(start, 32)]
    counts = np.bincount([number % period for number in many], minlength=period)
    assert 3 <= counts.min() and counts.max() <= 13
    assert len(many) == pytest.approx(8 * period, abs=2)


def test_a_tight_frame_has_the_rate_of_its_energy(images):
    """13 tokens of width 31: R = 13/2 ln(1 + d c / (N eps^2)), c = |Z|^2 / 13.

    The spectrum is flat, with 13 directions.
    """
    model = make()
    table = sweep(model, images[:1]).controls()
    _, cache = model.run_with_cache(images[:1])
    energy = cache["resid_pre", 2].double().square().sum(dim=(1, 2)) / 13
    wanted = 6.5 * torch.log1p(31 * energy / (13 * 0.01)).mean()
    row = table.query("control == 'tight frame' and statistic == 'rate_pre' and layer == 2").iloc[0]
    assert row["control_mean"] == pytest.approx(float(wanted), rel=1e-5)
    assert row["control_mean"] > row["model_mean"]  # nothing of this energy costs more


def test_permuted_heads_are_written_by_the_map_of_the_head_before(images):
    model = make()
    table = sweep(model, images[:1]).controls()
    _, cache = model.run_with_cache(images[:1])
    block = model.blocks[0]
    written = (
        sum(cache["z", 0][:, :, k] @ block.attn.W_O[(k - 1) % 5] for k in range(5)) + block.attn.b_O
    )
    z = (cache["resid_pre", 0] + written).detach().numpy()
    row = table.query(
        "control == 'permuted heads' and statistic == 'rate_mid' and layer == 0"
    ).iloc[0]
    assert row["control_mean"] == pytest.approx(
        np.mean([reference.coding_rate(one, 0.1) for one in z]), rel=1e-5
    )


def test_random_weights_are_the_official_initialisation(images):
    model = make()
    table = sweep(model, images[:2]).controls()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random = ci.HookedCrate(model.cfg).eval()
    wanted = values(sweep(random, images[:2], "compression"), "compression.official_rate", 2).mean()
    row = table.query(
        "control == 'random weights' and statistic == 'official_rate' and layer == 2"
    ).iloc[0]
    assert row["control_mean"] == pytest.approx(wanted, rel=1e-6)


def test_chance_is_dotted(model):
    images = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(3))
    result, cfg = ci.sweep(model, images, progress=False), model.cfg
    levels = {
        "attention.entropy": np.log(13),
        "attention.entropy_cls": np.log(13),
        "attention.entropy_patches": np.log(12),
        "attention.support_cls": 13,
        "alignment.head_overlap": cfg.d_head / cfg.d_model,
        "alignment.dictionary_shape": (min(cfg.d_model, cfg.d_mlp) / max(cfg.d_model, cfg.d_mlp))
        ** 0.5,
        "sparsity.zero_fraction": 0.5,
    }
    for name, level in levels.items():
        (dotted,) = [
            line
            for line in ci.viz.layers(result, name).axes[0].lines
            if line.get_linestyle() == ":"
        ]
        np.testing.assert_allclose(dotted.get_ydata(), [level] * LAYERS, rtol=1e-6)
    assert "(even attention: 2.565 nats)" in result.sharpest().splitlines()[0]


@pytest.fixture(scope="module")
def three():
    return torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))


def test_stream_and_read_are_what_compression_measures(three):
    model = make()
    for frame, norm in (("stream", False), ("read", True)):
        probes = [ci.probes.frames(eps=0.3), ci.probes.compression(eps=0.3, norm=norm)]
        result = ci.sweep(model, three, probes=probes, controls=0, progress=False)
        for layer in range(3):
            rates = [
                values(result, f"compression.subspace_rate_{at}", layer) for at in ("mid", "pre")
            ]
            got = values(result, f"frames.change_{frame}", layer)
            np.testing.assert_allclose(got, rates[0] - rates[1], rtol=1e-4, atol=1e-4)


def test_the_unit_frame_against_a_slow_form(three):
    model = make()
    result = sweep(model, three, ci.probes.frames(eps=0.3))
    cache = model.run_with_cache(three)[1]
    u = model.blocks[1].attn.U.detach().double().numpy()
    for sample in range(3):
        rates = []
        for at in ("mid", "pre"):
            z = cache[f"resid_{at}", 1][sample].double().numpy()
            unit = z / np.sqrt((z**2).mean())
            rates.append(reference.subspace_coding_rate(unit, u, 0.3).sum())
        got = values(result, "frames.change_unit", 1)[sample]
        assert got == pytest.approx(rates[0] - rates[1], rel=1e-4)


SEEDS, SHARE = 5, 0.05
RUN = {"limit": 16, "progress": False}


def small_positions(model):
    """torch's defaults, but small positions, as DeiT draws them."""
    torch.nn.init.normal_(model.pos_embed, std=0.02)
    torch.nn.init.normal_(model.cls_token, std=0.02)


def truncated(model):
    """All matrices with a standard deviation of .02, as a ViT draws them."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.trunc_normal_(weight, std=0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)


def xavier(model):
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.xavier_uniform_(weight)


def random_network(number):
    model = twin(ci.load("crate-tiny-fashion"), 100 + number)
    torch.manual_seed(number)
    with torch.no_grad():
        (small_positions, truncated, xavier)[number % 3](model)
    return model


def swept(network):
    return ci.sweep(network, "embedded:fashion", controls=0, **RUN)


@cache
def drawn_anew():
    """Of every network alike: they have one config."""
    return [swept(twin(ci.load("crate-tiny-fashion"), seed)) for seed in range(SEEDS)]


def counted(numbers):
    """Cells of a report that compare with random weights, and pluses, by the baselines used."""
    found, drawn = Counter(), drawn_anew()
    for number in numbers:
        model = random_network(number)
        own, *mixed = (swept(m) for m in (model, *(shuffled(model, s) for s in range(SEEDS))))
        for row in strip(own, drawn, mixed):
            found["of all"] += sum(sign.mark != "." for sign in row.signs)
            found["unringed"] += sum(sign.mark == "+" and not sign.ringed for sign in row.signs)
            if "random weights" in row.title:
                found["cells"] += len(row.signs)
                found["both"] += sum(sign.mark == "+" for sign in row.signs)
        for row in strip(own, drawn):
            if "random weights" in row.title:
                found["drawn"] += sum(sign.mark == "+" for sign in row.signs)
    return found


@pytest.mark.parametrize("numbers", [range(3), pytest.param(range(10), marks=pytest.mark.slow)])
def test_another_initialisation_gets_a_plus_in_few_cells(numbers):
    """With the official initialisation as the only baseline, a third of the cells get one."""
    found = counted(numbers)
    assert found["cells"] == 24 * len(numbers)
    assert found["both"] <= SHARE * found["cells"]
    assert found["unringed"] <= SHARE * found["of all"]
    assert found["drawn"] > 0.2 * found["cells"]
