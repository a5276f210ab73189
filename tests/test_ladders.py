"""The norm ladder in models: surgery of norms against hooks, the probe by hand, and the figure."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

import crate_interp as ci
from conftest import BATCH, make, make_lm
from crate_interp import measures
from crate_interp.surgeries.norms import mean_norms
from crate_interp.surgeries.steps import any_step
from test_surgery import LAYER, MODELS, QUIET, inputs_of, labels_of, loss_at

NORMS = ["flat_norms", "ladder_only", "permuted_norms", "masked_diagonal"]
FAMILIES = MODELS | {"gpt-baseline": lambda: make_lm("gpt-baseline")}


@pytest.fixture(scope="module", params=list(FAMILIES))
def network(request):
    return FAMILIES[request.param]().double()


def edits_of(name, model, layers, inputs, seed=0):
    """Hooks on queries, keys and scores that make the same attention: the model does the rest."""
    points = ("attn.hook_q", "attn.hook_k")
    with torch.no_grad():
        _, clean = model.run_with_cache(inputs)

    def rescale(codes, hook):
        norms = codes.norm(dim=-1)  # [batch, pos, head]
        count = norms.shape[1]
        if name == "ladder_only":
            wanted = clean[hook.name].norm(dim=-1).mean(dim=0, keepdim=True)
        elif name == "permuted_norms":
            wanted = norms[:, np.random.default_rng([seed, count]).permutation(count)]
        else:
            wanted = norms.mean(dim=1, keepdim=True)
        return codes / norms[..., None] * wanted[..., None]

    def mask(scores, hook):
        scores = scores.clone()
        for p in range(scores.shape[-1]):
            others = scores[0, 0, p].isfinite().sum() > 1
            if others:
                scores[:, :, p, p] = -torch.inf
        return scores

    if name == "masked_diagonal":
        return [(f"blocks.{layer}.attn.hook_attn_scores", mask) for layer in layers]
    return [(f"blocks.{layer}.{point}", rescale) for layer in layers for point in points]


@pytest.mark.parametrize("name", [name for name in NORMS if name != "ladder_only"])
def test_replaced_norms_are_those_of_hooks_on_queries_and_keys(network, name):
    inputs = inputs_of(network, BATCH)
    with torch.no_grad(), network.hooks(edits_of(name, network, [LAYER], inputs)):
        _, wanted = network.run_with_cache(inputs)
    with torch.no_grad(), ci.surgeries.replaced(network, attention=name, layers=[LAYER]):
        logits, cache = network.run_with_cache(inputs)
    point = f"blocks.{LAYER}.hook_attn_out"
    torch.testing.assert_close(cache[point], wanted[point], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(logits, network(inputs), rtol=1e-9)


def test_surgery_measures_the_ladder_first(network):
    inputs, labels = inputs_of(network), labels_of(network)
    result = ci.surgery(
        network, inputs, labels=labels, replacements=NORMS, mixes=(1.0,), directions=2, seed=3,
        **QUIET,
    )  # fmt: skip
    answers = result.table("answers").set_index(["replacement", "layer"])["loss"]
    for name in NORMS:
        for layer, layers in ((LAYER, [LAYER]), (-1, range(3))):
            hooks = edits_of(name, network, layers, inputs, seed=3)
            with torch.no_grad(), network.hooks(hooks):
                wanted = loss_at(network, any_step("plus"), [], 0.0, inputs, labels)
            np.testing.assert_allclose(answers[name, layer], wanted, rtol=1e-8)
    with pytest.raises(ValueError, match="ladder_only"):
        result.merge(result)


def test_norms_know_no_padding_and_no_earlier_tokens():
    lm = make_lm().double()
    tokens = inputs_of(lm, BATCH)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for name in ("flat_norms", "masked_diagonal"):
        with ci.surgeries.replaced(lm, attention=name):
            with pytest.raises(ValueError, match="padding"):
                lm(tokens, attention_mask=mask)
            with pytest.raises(ValueError, match="use_past_kv_cache=False"):
                lm.generate(tokens[:, :5], max_new_tokens=3, stop_at_eos=False, verbose=False)
            options = dict(max_new_tokens=3, stop_at_eos=False, verbose=False)
            lm.generate(tokens[:, :5], use_past_kv_cache=False, **options)


def test_norms_that_are_refused():
    with pytest.raises(ValueError, match="needs the mean norms of data: use ci.surgery"):
        with ci.surgeries.replaced(make(), attention="ladder_only"):
            pass
    tost = make_lm("tost-lm")
    with pytest.raises(ValueError, match="no queries and keys"):
        ci.surgery(tost, inputs_of(tost), replacements=["flat_norms"], **QUIET)
    table = pd.DataFrame({"layer": 0, "pos": [5, 7], "n": 1, "sums": b""})
    with pytest.raises(ValueError, match="one length"):
        mean_norms(table, tost)


def test_the_probe_by_hand(network):
    inputs = inputs_of(network, BATCH)
    if not network.cfg.tied:
        with pytest.raises(ValueError, match="query and key are one code"):
            ci.sweep(network, inputs, probes=["ladder"], controls=0, **QUIET)
        return
    result = ci.sweep(network, inputs, probes=["ladder"], controls=0, **QUIET)
    table = result.heads().set_index(["statistic", "layer", "head"])["mean"]
    _, cache = network.run_with_cache(inputs)
    codes, pattern = cache["q", LAYER].transpose(1, 2), cache["pattern", LAYER]
    norms, count = codes.norm(dim=-1), codes.shape[2]
    visible = pattern[0, 0] > 0
    steps = measures.norm_ladder(codes, visible)
    apart = pattern - torch.diag_embed(pattern.diagonal(dim1=-2, dim2=-1))
    elsewhere = apart.sum((-1, -2))
    seen_by = visible.sum(0) - 1
    head, got = 3, pattern.sum(2) - pattern.diagonal(dim1=-2, dim2=-1)
    sinks = [spearmanr(n[seen_by > 0], (g / seen_by)[seen_by > 0])[0]
             for n, g in zip(norms[:, head], got[:, head], strict=True)]  # fmt: skip
    hand = {
        "norm": norms.mean(-1), "self_share": steps.self_share.mean(-1),
        "upward_share": steps.upward_share.sum(-1) / elsewhere,
        "rise": steps.rise.sum(-1) / elsewhere, "distance": steps.distance.sum(-1) / elsewhere,
        "flat_share": steps.flat_share.mean(-1),
    }  # fmt: skip
    for name, values in hand.items():
        assert table[name, LAYER, head] == pytest.approx(values[:, head].mean().item(), abs=1e-9)
    if network.cfg.family == "nanochat-crate":  # its norms differ by rounding
        assert not table[["sinks", "order", "upward_share"]].any()
        return
    assert table["sinks", LAYER, head] == pytest.approx(np.mean(sinks), abs=1e-9)
    if network.cfg.causal:
        assert "cls_height" not in table.index.levels[0]
        order = [spearmanr(n, range(count))[0] for n in norms[:, head]]
        assert table["order", LAYER, head] == pytest.approx(np.mean(order), abs=1e-9)
        return
    shorter = (norms[..., 1:] < norms[..., :1]).double().mean(-1)[:, head].mean()
    assert table["cls_height", LAYER, head] == pytest.approx(shorter.item())
    climbs = steps.upward_share[..., 0] / apart[..., 0, :].sum(-1)
    assert table["cls_upward", LAYER, head] == pytest.approx(climbs[:, head].mean().item())


def test_the_probe_of_peaked_heads_half_precision_and_one_token():
    peaked = make_lm().double()
    for block in peaked.blocks:
        block.attn.u_proj.weight.data.mul_(30)
    for inputs in (inputs_of(peaked), inputs_of(peaked)[:, :1]):
        options = dict(probes=["ladder"], controls=0, progress=False)
        tables = [ci.sweep(peaked, inputs, batch_size=size, **options).heads() for size in (1, 5)]
        table = tables[0].set_index("statistic")["mean"]
        np.testing.assert_allclose(tables[1]["mean"], tables[0]["mean"], rtol=1e-6, atol=1e-9)
        assert 0 <= table["upward_share"].min() <= table["upward_share"].max() <= 1
        assert 0 <= table["distance"].min() and table["distance"].max() < 1e7
    half = make_lm().half()
    tables = [
        ci.sweep(half, inputs_of(half), batch_size=size, **options).heads() for size in (1, 5)
    ]
    np.testing.assert_allclose(tables[1]["mean"], tables[0]["mean"], rtol=2e-2, atol=2e-3)


def test_a_figure_has_an_arrow_for_each_token_that_looks_elsewhere_and_none_at_equal_norms():
    lm = make_lm().double()
    tokens = inputs_of(lm, BATCH)
    _, cache = lm.run_with_cache(tokens)
    scores = cache["attn_scores", 1][1, 2]
    wanted = int((scores.argmax(-1) != torch.arange(len(scores))).sum())
    figure = ci.viz.norm_ladder(cache, 1, 2, sample=1, tokens=[f"t{n}" for n in range(13)])
    left, right = figure.axes
    assert len([one for one in left.texts if one.arrow_patch]) == wanted > 0
    assert not right.texts and str(wanted) in left.get_title()
    assert [one.get_text() for one in left.get_xticklabels()][:2] == ["t0", "t1"]
    for arrow in left.texts:
        assert arrow.xy[1] > arrow.xyann[1]
    with pytest.raises(ValueError, match="head=7"):
        ci.viz.norm_ladder(cache, 1, 7)
    with pytest.raises(ValueError, match="query and key are one code"):
        ci.viz.norm_ladder(make_lm("gpt-baseline").run_with_cache(tokens)[1], 0, 0)
