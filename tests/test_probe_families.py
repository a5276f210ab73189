"""The probes on every family, at every half step, and with each of their options."""

import math

import datasets
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import crate_interp as ci
import reference
from conftest import LMS, make, make_lm, refuses
from crate_interp.data import open_text
from crate_interp.measures import l1_norm, sparse_rate_reduction
from crate_interp.measures.checks import qr
from probing import sweep, values
from selection import few
from texts import Words

SOME = torch.zeros(2, 5).long()


@pytest.fixture(scope="module")
def images():
    return torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 47, (5, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", few(LMS, 2))
def test_language_models(name, tokens):
    lm = make_lm(name)
    result = sweep(lm, tokens)
    _, cache = lm.run_with_cache(tokens)
    tied = name != "gpt-baseline"
    assert ("alignment" in result.meta["probes"]) == tied
    assert ("compression.subspace_rate_mid" in result.samples()) == tied
    assert "attention.top1_cls" not in result.meta["statistics"] or "attention" not in set(
        result.heads().query("statistic == 'top1_cls'")["probe"]
    )
    for layer in range(3):
        mid = cache["resid_mid", layer].numpy()
        wanted = [reference.coding_rate(z, 0.1) for z in mid]
        assert_allclose(values(result, "compression.rate_mid", layer), wanted, rtol=1e-5)
        if tied:
            u = lm.blocks[layer].attn.U.detach().numpy()
            wanted = [reference.subspace_coding_rate(z, u, 0.1).sum() for z in mid]
            assert_allclose(
                values(result, "compression.subspace_rate_mid", layer), wanted, rtol=1e-5
            )
    probed = ci.probe(cache)
    assert probed.meta["probes"].keys() == result.meta["probes"].keys()
    assert_allclose(
        probed.layers()["mean"].to_numpy(), result.layers()["mean"].to_numpy(), rtol=1e-5, atol=1e-6
    )


def test_uniform_causal_attention_is_what_it_is_compared_with(tokens):
    lm = make_lm()
    uniform = lambda scores, hook: scores.where(scores == -torch.inf, 0.0)  # noqa: E731
    with lm.hooks([(lambda name: name.endswith("hook_attn_scores"), uniform)]):
        result = sweep(lm, tokens, "attention")
    wanted = sum(math.log(i) for i in range(1, 14)) / 13
    heads = result.heads()
    assert heads["mean"].to_numpy() == pytest.approx(wanted, rel=1e-5)
    assert values(result, "attention.entropy_uniform", 0) == pytest.approx(wanted, rel=1e-6)
    windowed = values(
        sweep(make_lm("nanochat-crate"), tokens, "attention"), "attention.entropy_uniform", 0
    )
    assert windowed == pytest.approx(sum(math.log(min(i, 7)) for i in range(1, 14)) / 13, rel=1e-6)


def test_positions(tokens):
    lm = make_lm()
    result = sweep(lm, tokens, ci.probes.attention(tokens=[0, -1]), ci.probes.sparsity(tokens=[4]))
    assert values(result, "attention.entropy_uniform", 0) == pytest.approx(math.log(13) / 2)
    _, cache = lm.run_with_cache(tokens)
    zeros = (cache["post", 1][:, 4] == 0).float().mean(dim=-1)
    assert_allclose(values(result, "sparsity.zero_fraction", 1), zeros.numpy(), rtol=1e-6)
    for wrong, match in (([13], "from 0 to 12"), ([0, -13], "each once")):
        with pytest.raises(ValueError, match=match):
            sweep(lm, tokens, ci.probes.sparsity(tokens=wrong))
    with pytest.raises(ValueError, match="is for models of images"):
        sweep(lm, tokens, ci.probes.compression(tokens="patches"))


@pytest.mark.parametrize("family", ["crate", "crate-alpha"])
@pytest.mark.parametrize("norm", few([False, True]))
@pytest.mark.parametrize("tokens", ["all", "patches", [2, 0, -3]])
@pytest.mark.parametrize("basis", few(["stored", "orthonormal"]))
def test_options_of_compression(family, norm, tokens, basis, images):
    model = make(family)
    at = ("post", "pre", "mid")
    probe = ci.probes.compression(eps=0.3, at=at, norm=norm, tokens=tokens, basis=basis, name="c")
    result = sweep(model, images, probe)
    assert result.meta["probes"]["c"]["settings"] == {
        "eps": 0.3, "at": list(at), "norm": norm, "tokens": tokens, "basis": basis
    }  # fmt: skip
    _, cache = model.run_with_cache(images)
    rows = {"all": slice(None), "patches": slice(1, None)}.get(str(tokens), tokens)
    u = model.blocks[1].attn.U.detach()
    u = (u if basis == "stored" else qr(u)[0]).double().numpy()
    for place in at:
        z = cache[f"resid_{place}", 1].numpy()[:, rows]
        z = layer_norm(z, model.blocks[1].ln1) if norm else z
        rates = [reference.coding_rate(one, 0.3) for one in z]
        inner = [reference.subspace_coding_rate(one, u, 0.3).sum() for one in z]
        assert_allclose(values(result, f"c.rate_{place}", 1), rates, rtol=1e-5)
        assert_allclose(values(result, f"c.subspace_rate_{place}", 1), inner, rtol=1e-5)
        difference = np.array(rates) - np.array(inner)
        assert_allclose(
            values(result, f"c.reduction_{place}", 1), difference, atol=1e-5 * max(rates + inner)
        )
    codes = cache["blocks.1.attn.hook_u"].numpy()[:, rows].swapaxes(1, 2)
    official = [reference.official_coding_rate(one).sum() for one in codes]
    assert_allclose(values(result, "c.official_rate", 1), official, rtol=1e-5)
    final = values(result, "c.rate_pre", 3)  # Z^L as layer n_layers
    assert len(final) == (0 if norm else 5) and np.isfinite(final).all()


def layer_norm(z, norm):
    z = z.astype(float)
    z = z - z.mean(axis=-1, keepdims=True)
    z = z / np.sqrt((z**2).mean(axis=-1, keepdims=True) + norm.eps)
    return z * norm.weight.detach().numpy() + norm.bias.detach().numpy()


def test_text_is_cut_into_windows(monkeypatch):
    lm = make_lm("crate-lm")
    lm.tokenizer = Words()
    texts = [" ".join(str(i) for i in range(20)), "", " ".join(str(i) for i in range(30, 38))]
    joined = [*range(20), 46, 46, *range(30, 38)]
    wanted = torch.tensor([joined[:13], joined[13:26]])
    assert torch.equal(lm.windows(texts), wanted)
    samples = open_text(texts, lm.windows)
    assert samples.n == 2 and torch.equal(samples.read(0, 2), wanted) and samples.labels is None
    data = datasets.Dataset.from_dict({"n": [1, 2, 3], "words": texts})
    assert torch.equal(open_text(data, lm.windows).read(0, 2), wanted)
    same = sweep(lm, texts), sweep(lm, wanted)
    assert same[0].meta["data"] == same[1].meta["data"]
    assert same[0].samples().equals(same[1].samples())
    chat = make_lm("nanochat-crate")
    chat.tokenizer = Words()
    assert torch.equal(
        chat.windows(texts), torch.tensor([[46, *joined[:12]], [46, *joined[12:24]]])
    )
    monkeypatch.setattr(Words, "bos", None)
    refuses("tokenizer has no separator", lambda: lm.windows(texts))


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
        assert_allclose(seen(measured, "count_stream", layer), wanted, rtol=1e-5)
        wanted = sparse_rate_reduction(z, u, 0.3, 0.02, penalty=l1_norm).numpy()
        assert_allclose(seen(measured, "l1_stream", layer), wanted, rtol=1e-5)


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
        assert_allclose(*pair, rtol=1e-5)
    pair = [values(one, "objective.l1_stream", 2) for one in both]
    assert (abs(pair[0] - pair[1]) > 1).all()


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.2])
def test_drift_is_the_angle_by_which_weights_were_turned(images, angle):
    """Axes, turned towards others; basis, scale and the sign of a span count for nothing."""
    before, after = make(), make()
    u, d = (one.blocks[1].attn.u_proj.weight for one in (before, after))
    eye, p = torch.eye(before.cfg.d_model), before.cfg.d_head
    turned = math.cos(angle) * eye[:p] + math.sin(angle) * eye[p : 2 * p]
    with torch.no_grad():
        u.copy_(eye[:p].repeat(before.cfg.n_heads, 1))
        d.copy_(torch.randn(p, p).mm(turned).repeat(before.cfg.n_heads, 1))
        before.blocks[1].mlp.D.copy_(eye[:1].T.expand(eye.shape))
        after.blocks[1].mlp.D.copy_(3 * turned[:1].T.expand(eye.shape))
    result = ci.sweep(after, images, probes=[ci.probes.drift(before)], controls=1, progress=False)
    found = result.table("weights").groupby(["layer", "statistic"])["value"].mean()
    for name in ("subspace", "atoms"):
        assert found[1, name] == pytest.approx(math.degrees(angle), abs=0.05)
        assert found[0, name] == pytest.approx(0, abs=0.05)
    other = make(d_head=before.cfg.d_head - 1)
    refuses("before=", lambda: ci.sweep(other, images, probes=[ci.probes.drift(before)]))
    plain = ci.probes.drift(make_lm("gpt-baseline"))
    refuses("neither", lambda: ci.sweep(make_lm("gpt-baseline"), SOME, probes=[plain]))


@pytest.mark.parametrize("name", ["crate", "crate-lm", "nanochat-crate"])
def test_sinks_by_hand(name, images, tokens):
    model, inputs = (make(), images) if name == "crate" else (make_lm(name), tokens)
    share, layer = 0.17, 1
    result = ci.sweep(model, inputs, probes=[ci.probes.sinks(share)], controls=0, progress=False)
    pattern = model.run_with_cache(inputs)[1]["pattern", layer].double().numpy()
    batch, heads, count, _ = pattern.shape
    k = max(1, int(share * count))
    got = pattern.sum(axis=2) / count
    strongest = [[set(np.argsort(-row)[:k]) for row in sample] for sample in got]
    table = result.samples()
    found = table[table["layer"] == layer].set_index("sample")
    means = result.heads().set_index(["statistic", "layer", "head"])["mean"]
    for head in range(heads):
        mass = np.mean([np.sort(got[i, head])[::-1][:k].sum() for i in range(batch)])
        assert means["mass", layer, head] == pytest.approx(mass, rel=1e-5)
        assert means["first", layer, head] == pytest.approx(got[:, head, 0].mean(), rel=1e-5)
    for i, sets in enumerate(strongest):
        pairs = [len(a & b) / k for n, a in enumerate(sets) for m, b in enumerate(sets) if n != m]
        assert found.loc[i, "sinks.same"] == pytest.approx(np.mean(pairs), abs=1e-6)
    even = (pattern[0].max(axis=0) > 0) / (pattern[0].max(axis=0) > 0).sum(axis=1)[:, None]
    wanted = np.sort(even.mean(axis=0))[::-1][:k].sum()
    assert found["sinks.even_mass"].to_numpy() == pytest.approx(wanted, rel=1e-5)
    refuses("share=", lambda: ci.probes.sinks(0.0))
