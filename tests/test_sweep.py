"""Probes and sweeps: every number against a direct computation, provenance, refusals."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import crate_interp as ci
import reference
from conftest import D_HEAD, LAYERS, make, refuses
from crate_interp.sweeps.layer_curves import curve
from probing import values

N = 7


@pytest.fixture
def data():
    return torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(3))


SWEPT = {}


@pytest.fixture
def result(model, data):
    family = model.cfg.family
    if family not in SWEPT:
        SWEPT[family] = ci.sweep(model, data, batch_size=3, progress=False)
    return SWEPT[family]


def caches(model, data, size):
    for part in data.split(size):
        with torch.no_grad():
            yield model.run_with_cache(part)[1]


def among_patches(row):
    """Entropy [batch, head] of attention [batch, head, key] without CLS, divided anew: by hand."""
    shares = row[..., 1:] / (1 - row[..., :1])
    return -(shares * np.log(shares)).sum(-1)


def cell(table, name, layer, head=None):
    probe, statistic = name.split(".")
    rows = table[
        (table["probe"] == probe) & (table["statistic"] == statistic) & (table["layer"] == layer)
    ]
    return rows if head is None else rows[rows["head"] == head].iloc[0]


def test_a_sweep_equals_full_caches_number_for_number(model, data, result):
    parts = [ci.probe(cache) for cache in caches(model, data, 3)]
    swept = result.samples().drop(columns=["sample", "label"])
    cached = pd.concat([part.samples() for part in parts], ignore_index=True).drop(
        columns=["sample", "label"]
    )
    pd.testing.assert_frame_equal(swept, cached, check_exact=True)
    (whole,) = caches(model, data, N)
    at_once = ci.probe(whole)
    # other batches, other bits
    pd.testing.assert_frame_equal(result.heads(), at_once.heads(), rtol=2e-5, atol=1e-7)
    pd.testing.assert_frame_equal(result.layers(), at_once.layers(), rtol=2e-5, atol=1e-6)


def test_compression_of_each_head_and_of_the_last_stream(model, data, result):
    """Rates of all heads together: test_probe_families.py."""
    (cache,) = caches(model, data, N)
    for layer in range(LAYERS):
        u = model.blocks[layer].attn.U.detach().numpy()
        for half in ("pre", "mid"):
            stream = cache[f"resid_{half}", layer].numpy()
            heads = np.array([reference.subspace_coding_rate(z, u, 0.1) for z in stream])
            rows = cell(result.heads(), f"compression.subspace_rate_{half}_head", layer)
            np.testing.assert_allclose(rows["mean"], heads.mean(0), rtol=2e-5)
            np.testing.assert_allclose(rows["std"], heads.std(0, ddof=1), rtol=2e-3)
        codes = cache["u", layer, "attn"].transpose(1, 2).numpy()
        official = np.array([reference.official_coding_rate(c) for c in codes])
        rows = cell(result.heads(), "compression.official_rate_head", layer)
        np.testing.assert_allclose(rows["mean"], official.mean(0), rtol=2e-5)
    final = [reference.coding_rate(z, 0.1) for z in cache["resid_post", -1].numpy()]
    np.testing.assert_allclose(values(result, "compression.rate_pre", LAYERS), final, rtol=2e-5)
    last = result.samples().query(f"layer == {LAYERS}").filter(like=".")
    assert last.drop(columns="compression.rate_pre").isna().all(axis=None)


def test_sparsity_attention_and_alignment_numbers(model, data, result):
    (cache,) = caches(model, data, N)
    for layer in range(LAYERS):
        code = cache["post", layer].numpy()
        np.testing.assert_allclose(
            values(result, "sparsity.zero_fraction", layer), (code == 0).mean((1, 2)), rtol=1e-6
        )
        np.testing.assert_allclose(
            values(result, "sparsity.l1", layer), np.abs(code).sum(2).mean(1), rtol=1e-5
        )
        hoyer = np.array([[reference.hoyer(token) for token in sample] for sample in code]).mean(1)
        np.testing.assert_allclose(values(result, "sparsity.hoyer", layer), hoyer, rtol=1e-5)
        pattern = cache["pattern", layer].numpy().astype(np.float64)  # [batch, head, query, key]
        entropy = -(pattern * np.log(pattern)).sum(-1)
        top = np.sort(pattern[:, :, 0], axis=-1)
        expected = {
            "entropy": entropy.mean(-1), "entropy_cls": entropy[:, :, 0], "top1_cls": top[..., -1],
            "top5_cls": top[..., -5:].sum(-1), "support_cls": 1 / (pattern[:, :, 0] ** 2).sum(-1),
            "self_cls": pattern[:, :, 0, 0], "entropy_patches": among_patches(pattern[:, :, 0]),
        }  # fmt: skip
        block = model.blocks[layer]
        u, d = block.attn.U.detach().numpy(), block.mlp.D.detach().numpy()
        mid = cache["resid_mid", layer].numpy()
        frames = np.linalg.qr(u.astype(np.float64))[0]
        inside = (np.einsum("btd,kdp->btkp", mid, frames) ** 2).sum(3)
        expected_energy = (inside / (mid**2).sum(2)[..., None]).mean(1)
        for name, value in {f"attention.{k}": v for k, v in expected.items()}.items():
            np.testing.assert_allclose(
                cell(result.heads(), name, layer)["mean"], value.mean(0), rtol=1e-5
            )
            np.testing.assert_allclose(
                cell(result.heads(), name, layer)["std"], value.std(0, ddof=1), rtol=1e-3
            )
        np.testing.assert_allclose(
            cell(result.heads(), "alignment.energy_head", layer)["mean"],
            expected_energy.mean(0),
            rtol=1e-4,
        )
        orthonormality = [np.linalg.norm(a.T @ a - np.eye(D_HEAD)) / D_HEAD**0.5 for a in u]
        np.testing.assert_allclose(
            cell(result.heads(), "alignment.orthonormality", layer)["mean"],
            orthonormality,
            rtol=1e-5,
        )
        gram = d.T @ d if d.shape[0] >= d.shape[1] else d @ d.T
        defect = (
            np.linalg.norm(gram - np.trace(gram) / len(gram) * np.eye(len(gram))) / len(gram) ** 0.5
        )
        shape = cell(result.layers(), "alignment.dictionary_shape", layer).iloc[0]
        assert shape["mean"] == pytest.approx(defect / (np.trace(gram) / len(gram)), rel=1e-5)
        row = cell(result.layers(), "alignment.dictionary_defect", layer).iloc[0]
        assert (
            row["mean"] == pytest.approx(defect, rel=1e-5)
            and row["n"] == 1
            and np.isnan(row["std"])
        )


def test_the_model_runs_in_bfloat16_and_probes_measure_in_float32(data, tmp_path):
    seen, own = set(), make()

    def measure(block, acts):
        seen.add((acts["attn.hook_u"].dtype, torch.is_autocast_enabled("cpu")))
        return {"first": acts["attn.hook_u"][:, 0, 0, 0]}

    probe = ci.Probe("mine", ("attn.hook_u",), measure, {"first": ("", None, None, "")})

    def swept(**more):
        return ci.sweep(own, data, probes=["compression", probe], progress=False, **more)

    mixed, plain = swept(precision="bfloat16"), swept()
    assert seen == {(torch.float32, False)}
    held, exact = (one.samples()["mine.first"].dropna().to_numpy() for one in (mixed, plain))
    assert (torch.tensor(held).bfloat16().double() == torch.tensor(held)).all()
    assert 0 < abs(held - exact).max() < 0.02 * abs(exact).max()
    assert mixed.meta["precision"] == "bfloat16" and "precision" not in plain.meta
    ci.sweep(own, data, precision="bfloat16", out=tmp_path, progress=False)
    refuses("precision", lambda: ci.sweep(own, data, out=tmp_path, progress=False))
    refuses("precision='float8'", lambda: swept(precision="float8"))


def test_the_mean_over_heads_has_the_deviation_of_a_mean(model, data, tmp_path):
    kept = dataclasses.replace(ci.probes.attention(), per_head=("entropy", "entropy_cls"))
    whole = ci.sweep(model, data, probes=kept, progress=False, controls=0)
    samples = ci.data.open_data(data, model.preprocess)
    parts = [
        ci.sweep(model, ci.data.part(samples, *ends), probes=kept, progress=False, controls=0)
        for ends in ((0, 2), (2, N))
    ]
    for result in (whole, parts[0].merge(parts[1])):
        for name in ("entropy", "entropy_cls"):
            each = result.head_samples().groupby(["layer", "sample"])[f"attention.{name}"].mean()
            by_hand = each.groupby("layer").agg(["mean", "std"])
            rows = result.layers().query("statistic == @name and over == 'heads'")
            np.testing.assert_allclose(rows[["mean", "std"]], by_hand, rtol=1e-5)
            assert (rows["n"] == N).all()
            drawn = curve(result, f"attention.{name}")
            half = stats.t.ppf(0.975, N - 1) * by_hand["std"] / np.sqrt(N)
            np.testing.assert_allclose((drawn.high - drawn.low) / 2, half, rtol=1e-4)


def test_cls_that_looks_at_itself_alone_divides_nothing_among_patches(model):
    """And a whole of a millionth is divided as one of a half."""
    left = torch.tensor([0.0, 1e-6, 0.5])
    shares = torch.tensor([0.7, 0.2, 0.1]) * left[:, None]
    rows = torch.cat([1 - left[:, None], shares], dim=1)  # [sample, key]
    pattern = rows[:, None, None].expand(-1, 5, 4, -1)  # [sample, head, query, key]
    found = ci.probes.attention().measure(model.blocks[0], {"attn.hook_pattern": pattern})
    found = found["entropy_patches"][:, 0]
    even = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    wanted = -(even * even.log()).sum()
    np.testing.assert_allclose(found, [0.0, wanted, wanted], rtol=1e-6)
    assert found.dtype == torch.float64
