"""The probes on a black box are those of what transformers itself returns."""

import math
import re

import numpy as np
import pytest
import torch

import crate_interp as ci
from foreign import HEADS, IMAGES, KINDS, LAYERS, SOME, inputs, inside, outputs, pair, role_weight

CLOSE = dict(rtol=1e-5, atol=1e-7)
EPS = 0.1


def sweep(kind, *probes, **more):
    options = dict(probes=list(probes) or None, progress=False, batch_size=2, controls=0)
    return ci.sweep(pair(kind)[1], inputs(kind), **options | more)


def by_sample(result, name, layer):
    table = result.samples()
    return table[table["layer"] == layer][name].to_numpy()


def by_head(result, name, layer):
    """Means over samples of each head."""
    probe, statistic = name.split(".")
    rows = result.heads()
    rows = rows[(rows["probe"] == probe) & (rows["statistic"] == statistic)]
    return rows[rows["layer"] == layer].sort_values("head")["mean"].to_numpy()


def rate(rows, width):
    """1/2 logdet(I + width / (N eps^2) C^T C) by its definition, one sample."""
    count = rows.shape[1]
    gram = np.eye(count) + width / (len(rows) * EPS**2) * rows.T @ rows
    return 0.5 * np.linalg.slogdet(gram)[1]


@pytest.mark.parametrize("kind", SOME)
def test_attention(kind):
    result = sweep(kind, "attention")
    for layer, pattern in enumerate(outputs(kind).attentions):
        a = pattern.double().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(a > 0, a * np.log(a), 0).sum(-1)  # [batch, head, query]
        np.testing.assert_allclose(
            by_head(result, "attention.entropy", layer), entropy.mean(axis=(0, 2)), **CLOSE
        )
        n = a.shape[-1]
        even = math.log(n) if kind in IMAGES else np.mean([math.log(q + 1) for q in range(n)])
        uniform = by_sample(result, "attention.entropy_uniform", layer)
        np.testing.assert_allclose(uniform, even, **CLOSE)
        known = set(result.heads()["statistic"])
        assert ("entropy_cls" in known) == (kind in IMAGES)
        if kind in IMAGES:
            cls = np.sort(a[:, :, 0], axis=-1)[..., ::-1]
            patches = a[:, :, 0, KINDS[kind][3] :]  # without CLS and what stands beside it
            patches = patches / patches.sum(axis=-1, keepdims=True)
            among = -(patches * np.log(patches)).sum(axis=-1)
            for name, wanted in (
                ("entropy_cls", entropy[:, :, 0]),
                ("top1_cls", cls[..., 0]),
                ("top5_cls", cls[..., :5].sum(-1)),
                ("support_cls", 1 / (cls**2).sum(-1)),
                ("self_cls", a[:, :, 0, 0]),
                ("entropy_patches", among),
            ):
                found = by_head(result, f"attention.{name}", layer)
                np.testing.assert_allclose(found, wanted.mean(axis=0), **CLOSE)


@pytest.mark.parametrize("kind", SOME)
def test_compression_and_alignment(kind):
    tokens = "patches" if kind in IMAGES else "all"
    special = KINDS[kind][3]
    probes = ci.probes.compression(tokens=tokens), ci.probes.alignment(tokens=tokens)
    result = sweep(kind, *probes)
    plain, _ = pair(kind)
    for layer in range(LAYERS):
        u = role_weight(kind, plain, layer, "v").numpy()
        streams = {"pre": outputs(kind).hidden_states[layer], "mid": inside(kind)[layer][0]}
        for place, stream in streams.items():
            z = stream[:, special:].numpy()
            whole = np.array([rate(one, z.shape[-1]) for one in z])
            heads = np.array([[rate(one @ base, base.shape[1]) for base in u] for one in z])
            for name, wanted in (
                (f"rate_{place}", whole),
                (f"subspace_rate_{place}", heads.sum(axis=1)),
                (f"reduction_{place}", whole - heads.sum(axis=1)),
            ):
                found = by_sample(result, f"compression.{name}", layer)
                np.testing.assert_allclose(found, wanted, **CLOSE)
            name = f"compression.subspace_rate_{place}_head"
            np.testing.assert_allclose(by_head(result, name, layer), heads.mean(axis=0), **CLOSE)
        basis = np.linalg.qr(u)[0]
        energy = ((z[:, None] @ basis) ** 2).sum(-1) / (z**2).sum(-1)[:, None]
        found = by_head(result, "alignment.energy_head", layer)
        np.testing.assert_allclose(found, energy.mean(axis=(0, 2)), **CLOSE)
        defect = [np.linalg.norm(one.T @ one - np.eye(one.shape[1])) for one in u]
        found = by_head(result, "alignment.orthonormality", layer)
        np.testing.assert_allclose(found, np.array(defect) / u.shape[2] ** 0.5, **CLOSE)
    last = inside_last(kind)[:, special:].numpy()
    final = np.array([rate(one, last.shape[-1]) for one in last])
    np.testing.assert_allclose(by_sample(result, "compression.rate_pre", LAYERS), final, **CLOSE)
    assert "dictionary_defect" not in set(result.layers()["statistic"])


def inside_last(kind):
    """Z^L of the network that was never bridged."""
    from foreign import layers_of

    plain, _ = pair(kind)
    kept = []
    last = layers_of(kind, plain)[-1]
    handle = last.register_forward_hook(lambda module, given, out: kept.append(out))
    plain(inputs(kind))
    handle.remove()
    return kept[0][0] if isinstance(kept[0], tuple) else kept[0]


@pytest.mark.parametrize("kind", SOME)
def test_ranks_and_activity(kind):
    result = sweep(kind, "ranks", "activity", "sparsity")
    for layer in range(LAYERS):
        z, a = outputs(kind).hidden_states[layer].numpy(), outputs(kind).attentions[layer].numpy()
        code = inside(kind)[layer][1].numpy()
        for name, given in (("stream", z), ("code", code)):
            values = np.linalg.svd(given, compute_uv=False)
            share = values / values.sum(-1, keepdims=True)
            wanted = np.exp(-(share * np.log(share)).sum(-1))
            np.testing.assert_allclose(by_sample(result, f"ranks.{name}", layer), wanted, **CLOSE)
        values = np.linalg.svd(a.astype(float), compute_uv=False)
        stable = (values**2).sum(-1) / values[..., 0] ** 2
        found = by_head(result, "ranks.pattern", layer)
        np.testing.assert_allclose(found, stable.mean(axis=0), **CLOSE)
        size = np.abs(code)
        n = size.shape[-1]
        apart = np.abs(size[..., :, None] - size[..., None, :]).sum((-1, -2))
        gini = apart / (2 * n * size.sum(-1))
        near = (size <= 0.01 * size.max(-1, keepdims=True)).mean(-1)
        squares = np.sort(size**2, axis=-1)[..., ::-1].cumsum(-1)
        few = ((squares < 0.9 * squares[..., -1:]).sum(-1) + 1) / n
        for name, wanted in (("gini", gini), ("near_zero", near), ("energy_support", few)):
            found = by_sample(result, f"activity.{name}", layer)
            np.testing.assert_allclose(found, wanted.mean(-1), **CLOSE)
        pos = a.shape[-1]
        seen = pos if kind in IMAGES else np.arange(1, pos + 1)
        spread = 1 / (a.astype(float) ** 2).sum(-1) / seen
        found = by_head(result, "activity.attention_support", layer)
        np.testing.assert_allclose(found, spread.mean(axis=(0, 2)), **CLOSE)
    weights = result.heads()
    assert {"stable_u", "stable_out"} <= set(weights["statistic"])
    first = pair(kind)[1].blocks[0]
    values = np.linalg.svd(first.attn.U.detach().numpy(), compute_uv=False)
    wanted = (values**2).sum(-1) / values[:, 0] ** 2
    np.testing.assert_allclose(by_head(result, "ranks.stable_u", 0), wanted, **CLOSE)


def test_noise_has_the_levels_that_the_statistics_name():
    noise = torch.randn(1, 400, 768, generator=torch.Generator().manual_seed(0))
    said = ci.probes.activity().statistics
    for code, place in ((noise, 0), (noise.relu(), 1)):
        acts = {"mlp.hook_post": code, "attn.hook_pattern": torch.ones(1, 1, 3, 3) / 3}
        block = pair("vit")[1].blocks[0]
        found = ci.probes.activity().measure(block, acts)
        for name in ("gini", "near_zero"):
            wanted = float(re.findall(r"0\.\d+", said[name].how)[place])
            assert abs(float(found[name]) - wanted) < 0.01, (name, place)
        share = 0.44 / (1 + place)
        assert "0.44" in said["energy_support"].how
        assert abs(float(found["energy_support"]) - share) < 0.01
        assert float(found["attention_support"]) == pytest.approx(1)


def test_ranks_and_activity_of_a_crate():
    from conftest import make

    model = make()
    images = torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(0))
    options = dict(probes=["ranks", "activity"], progress=False)
    result = ci.sweep(model, images, **options)
    assert {"stream", "code", "pattern", "gini"} <= set(result.layers()["statistic"]) | set(
        result.heads()["statistic"]
    )
    rows = result.layers()
    d = rows[(rows["statistic"] == "stable_in_mlp") & (rows["layer"] == 0)]["mean"].item()
    values = torch.linalg.svdvals(model.blocks[0].mlp.D.detach().double())
    assert d == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-5)
    assert "stable_out_mlp" not in set(rows["statistic"])  # the code is the stream


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("vit", "deit", "dinov2"))
def test_segmentation(kind):
    from crate_interp.measures import top_mask

    _, model = pair(kind)
    special = KINDS[kind][3]
    samples = ci.data.open_data("embedded:pictures", model.preprocess, 5, model.preprocess_masks)
    result = ci.segment(model, "embedded:pictures", limit=5, untrained=1, progress=False)
    images, masks = samples.read(0, 5), samples.masks(0, 5)
    plain, _ = pair(kind)
    theirs = plain(pixel_values=images, output_attentions=True).attentions
    for layer in range(LAYERS):
        kept = top_mask(theirs[layer][:, :, 0, special:], 0.6)  # [batch, head, patch]
        rows = result.table("head_samples")
        for image in range(5):
            on = (masks[image] != 0).unfold(0, 5, 5).unfold(1, 5, 5).flatten(2).sum(-1).flatten()
            target = 2 * on > 25
            target = target if target.any() else on == on.max()
            for head in range(HEADS):
                mine = rows[(rows["sample"] == image) & (rows["layer"] == layer)]
                found = mine[mine["head"] == head]["segmentation.top_token"].item()
                both = (kept[image, head] & target).sum() / (kept[image, head] | target).sum()
                assert found == pytest.approx(float(both), rel=1e-6)
    assert len(result.table("examples")) and result.headline()


def test_an_audit_without_its_grid():
    _, model = pair("vit")
    result = ci.audit(model, inputs("vit"), untrained=0, grid=False, progress=False)
    assert set(result.claims()["verdict"]) == {"not applicable"}
    assert set(result.claims()["reason"]) > {"the layer has an MLP, no dictionary"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("vit", "dinov2", "gpt2", "llama"))
def test_an_audit_says_that_nothing_applies(kind, tmp_path):
    _, model = pair(kind)
    result = ci.audit(model, inputs(kind), untrained=1, progress=False)
    claims = result.claims()
    assert set(claims["verdict"]) == {"not applicable"} and len(claims) == 13 * LAYERS
    assert set(claims["reason"]) <= {
        "queries, keys and values are three codes: the layer has no subspaces U",
        "the layer has an MLP, no dictionary",
        "there is no dictionary",
    }
    assert result.headline().startswith("No claim of the papers applies to the layers")
    page = ci.viz.audit_page(result, tmp_path / "audit")
    assert "No claim of the papers applies" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("deit", "llama"))
def test_a_report_names_what_stands_in_for_u(kind, tmp_path):
    _, model = pair(kind)
    path = ci.report(
        model, inputs(kind), tmp_path / "out", untrained=1, audit=True, progress=False,
        probes=["compression", "alignment", "attention", "sparsity", "ranks", "activity"],
    )  # fmt: skip
    page = re.sub(r"<[^>]*>", "", path.read_text())
    whose = "group of heads" if kind == "llama" else "head"
    assert f"Uk is the value map of each {whose}: a choice" in page
    assert "subspaces = value" in page and (tmp_path / "out/audit/audit.html").exists()
    again = ci.SweepResult.load(tmp_path / "out")
    assert again.meta["config"]["subspaces"] == "value"
    controls = set(again.controls()["control"])
    assert controls == {"random weights", "random subspaces", "permuted heads", "tight frame"}
    if kind == "llama":  # permuting heads changes nothing that these statistics do not see
        rows = again.controls()
        seen = rows.groupby("control")["n"].unique().str[0].to_dict()
        assert seen.pop("random weights") == 3 and set(seen.values()) == {1}
