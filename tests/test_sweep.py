"""Probes and sweeps: each number against a direct computation, what writes, refusals."""

import dataclasses
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
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
    rows = table.query(f"probe == '{probe}' and statistic == '{statistic}' and layer == {layer}")
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
            assert_allclose(rows["mean"], heads.mean(0), rtol=2e-5)
            assert_allclose(rows["std"], heads.std(0, ddof=1), rtol=2e-3)
        codes = cache["u", layer, "attn"].transpose(1, 2).numpy()
        official = np.array([reference.official_coding_rate(c) for c in codes])
        rows = cell(result.heads(), "compression.official_rate_head", layer)
        assert_allclose(rows["mean"], official.mean(0), rtol=2e-5)
    final = [reference.coding_rate(z, 0.1) for z in cache["resid_post", -1].numpy()]
    assert_allclose(values(result, "compression.rate_pre", LAYERS), final, rtol=2e-5)
    last = result.samples().query(f"layer == {LAYERS}").filter(like=".")
    assert last.drop(columns="compression.rate_pre").isna().all(axis=None)


def test_sparsity_attention_and_alignment_numbers(model, data, result):
    (cache,) = caches(model, data, N)
    for layer in range(LAYERS):
        code = cache["post", layer].numpy()
        hoyer = np.array([[reference.hoyer(token) for token in sample] for sample in code]).mean(1)
        sparsity = {"zero_fraction": (code == 0).mean((1, 2)), "hoyer": hoyer}
        sparsity["l1"] = np.abs(code).sum(2).mean(1)
        for name, value in sparsity.items():
            assert_allclose(values(result, f"sparsity.{name}", layer), value, rtol=1e-5)
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
        heads = partial(cell, result.heads(), layer=layer)
        for name, value in expected.items():
            found = heads(f"attention.{name}")
            assert_allclose(found["mean"], value.mean(0), rtol=1e-5)
            assert_allclose(found["std"], value.std(0, ddof=1), rtol=1e-3)
        energy = heads("alignment.energy_head")["mean"]
        assert_allclose(energy, expected_energy.mean(0), rtol=1e-4)
        orthonormality = [np.linalg.norm(a.T @ a - np.eye(D_HEAD)) / D_HEAD**0.5 for a in u]
        assert_allclose(heads("alignment.orthonormality")["mean"], orthonormality, rtol=1e-5)
        gram = d.T @ d if d.shape[0] >= d.shape[1] else d @ d.T
        off = gram - np.trace(gram) / len(gram) * np.eye(len(gram))
        defect = np.linalg.norm(off) / len(gram) ** 0.5
        shape = cell(result.layers(), "alignment.dictionary_shape", layer).iloc[0]
        assert shape["mean"] == pytest.approx(defect / (np.trace(gram) / len(gram)), rel=1e-5)
        row = cell(result.layers(), "alignment.dictionary_defect", layer).iloc[0]
        assert row["mean"] == pytest.approx(defect, rel=1e-5)
        assert row["n"] == 1
        assert np.isnan(row["std"])


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
            assert_allclose(rows[["mean", "std"]], by_hand, rtol=1e-5)
            assert (rows["n"] == N).all()
            drawn = curve(result, f"attention.{name}")
            half = stats.t.ppf(0.975, N - 1) * by_hand["std"] / np.sqrt(N)
            assert_allclose((drawn.high - drawn.low) / 2, half, rtol=1e-4)


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
    assert_allclose(found, [0.0, wanted, wanted], rtol=1e-6)
    assert found.dtype == torch.float64


POINT = "hook_resid_mid"


def few(n=5):
    return torch.randn(n, 3, 6, 20, generator=torch.Generator().manual_seed(3))


def own(measure, name="own", **over):
    facts = {"points": (POINT,), "statistics": {"a": ("", None, None, "")}} | over
    return ci.Probe(name=name, measure=measure, **facts)


def mean_of(block, acts):
    return {"a": acts[POINT].mean((1, 2))}


WRITES = {
    "in place": lambda x: x.mul_(3),
    "through .data": lambda x: x.data.mul_(3),
    "through numpy": lambda x: np.multiply(x.numpy(), 3, out=x.numpy()),
    "through a view": lambda x: x[:, 1:].transpose(1, 2).fill_(7),
    "through its storage": lambda x: x.untyped_storage().fill_(1),
    "through set_": lambda x: x.set_(torch.zeros(2)),
    "through resize_": lambda x: x.resize_(1),
    "through DLPack": lambda x: torch.from_dlpack(x).zero_(),
}


@pytest.fixture(scope="module")
def alone():
    """The numbers of a good probe, without another; and those of the built-in ones."""
    model = make()
    good = [own(mean_of, "good", final=final_mean), "sparsity", "compression"]
    return model, good, ci.sweep(model, few(), probes=good, batch_size=5, progress=False)


def final_mean(z):
    return {"a": z.mean((1, 2))}


def same(result, wanted):
    """Whether the numbers of the good probes are those that they are alone, bit for bit."""
    for table in ("samples", "moments", "controls"):
        one, two = result.table(table), wanted.table(table)
        if "probe" in one:
            one = one[one["probe"] != "writing"].reset_index(drop=True)
        else:
            one = one[[name for name in one if not name.startswith("writing.")]]
        assert one.equals(two), table
    return True


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_changes_nothing_of_others(alone, write):
    model, good, wanted = alone

    def measure(block, acts):
        answer = mean_of(block, acts)
        write(acts[POINT])
        return answer

    def final(z):
        answer = final_mean(z)
        write(z)
        return answer

    writing = own(measure, "writing", final=final)
    options = dict(batch_size=5, progress=False)
    result = ci.sweep(model, few(), probes=[writing, *good], **options)
    assert same(result, wanted)
    samples = result.samples()
    assert samples["writing.a"].equals(samples["good.a"])
    _, cache = model.run_with_cache(few())
    before = {name: value.clone() for name, value in cache.items()}
    ci.probe(cache, writing)
    assert all(torch.equal(value, before[name]) for name, value in cache.items())


def writes_weights(block, acts):
    block.attn.u_proj.weight.data.mul_(1.5)
    return mean_of(block, acts)


@pytest.mark.parametrize("how", ["sweep", "probe"])
def test_a_probe_that_writes_into_weights(how):
    model = make()
    with pytest.raises(
        ValueError, match="(model's weights have changed|changed the model's weights)"
    ):
        if how == "sweep":
            ci.sweep(model, few(), probes=own(writes_weights), progress=False)
        else:
            ci.probe(model.run_with_cache(few())[1], own(writes_weights))


def less(answers):
    """A measure that gives these answers, one at each call, and goes on with the last."""
    calls = iter(answers)
    return lambda block, acts: next(calls)(mean_of(block, acts)["a"])


FULL = lambda value: {"a": value, "b": value}  # noqa: E731
LESS = {
    "None": (lambda value: None, "returned NoneType"),
    "a statistic less": (lambda value: {"a": value}, "other statistics in earlier layers"),
    "fewer rows": (lambda value: {"a": value[:-1], "b": value}, r"batch=\d, got shape"),
    "no tensor": (lambda value: {"a": 1.0, "b": value}, "got float"),
    "NaN": (lambda value: FULL(value * torch.nan), "NaN or Inf in layer 1"),
}


@pytest.mark.parametrize("which", LESS)
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("how", ["sweep", "probe"])
def test_a_probe_that_reports_less(which, batch, how):
    wrong, match = LESS[which]
    statistics = {name: ("", None, None, "") for name in "ab"}
    place = 1 + 3 * batch
    probe = own(less([FULL] * place + [wrong] + [FULL] * 9), "lazy", statistics=statistics)
    model = make()
    where = "" if which == "NaN" else "lazy in layer 1, samples "
    if how == "sweep":
        where += {"": "", "lazy in layer 1, samples ": f"{3 * batch} to {2 + 2 * batch}: "}[where]
        with pytest.raises(ValueError, match=f"{where}.*{match}"):
            ci.sweep(model, few(), probes=probe, batch_size=3, controls=0, progress=False)
    elif not batch:
        refuses(f"{where}.*{match}", lambda: ci.probe(model.run_with_cache(few())[1], probe))


FORWARDS = {
    "not at all": lambda model, batch: model(batch, stop_at_layer=2),
    "more than once": lambda model, batch: [model(batch) for _ in range(2)],
}


@pytest.mark.parametrize("often", FORWARDS)
def test_a_forward_that_does_not_run_every_layer_once(often):
    layer = 2 if often == "not at all" else 0
    with pytest.raises(ValueError, match=f"layer {layer} ran {often} on samples 0 to 4"):
        ci.sweep(make(), few(), probes="sparsity", forward=FORWARDS[often], progress=False)
