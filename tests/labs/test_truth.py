"""The bench of planted circuits: what was written is what works, and scores are what they say."""

from itertools import product

import numpy as np
import pytest
import torch
import truth
from planted_circuits import HEADS, induction, modular_addition

COUNT = 17  # texts


@pytest.fixture(scope="module", params=[(6.0, 1), (12.0, 1), (6.0, 2)])
def network(request):
    margin, copies = request.param
    return induction(3, margin=margin, copies=copies, count=COUNT)


@pytest.fixture(scope="module")
def sums():
    return modular_addition(3, count=COUNT)


def right(net, texts, hooks=()):
    """The share of texts whose last token the model says after the one before."""
    said = net.model.run_with_hooks(texts, fwd_hooks=hooks)[:, -2].argmax(dim=-1)
    return (said == texts[:, -1]).double().mean().item()


def without(heads):
    def hook(z, hook):
        z = z.clone()
        z[:, :, [head for layer, head in heads if layer == hook.layer()]] = 0
        return z

    return [(f"blocks.{layer}.attn.hook_z", hook) for layer in {layer for layer, _ in heads}]


def test_networks_are_right_and_by_their_heads_alone(network, sums):
    for net in (network, sums):
        assert right(net, net.tokens) == right(net, net.other) == 1.0
        assert bool((net.tokens[:, -1] != net.other[:, -1]).all())
        every = set(product(range(net.model.cfg.n_layers), range(HEADS)))
        assert right(net, net.tokens, without(every - net.heads)) == 1.0
        for layer in range(net.model.cfg.n_layers):
            assert right(net, net.tokens, without([h for h in net.heads if h[0] == layer])) < 0.5
    with torch.no_grad():
        pairs = torch.cartesian_prod(torch.arange(7), torch.arange(7))
        texts = torch.cat([pairs, torch.full((49, 1), 7)], dim=1)
        assert sums.model(texts)[:, -1].argmax(dim=-1).tolist() == (pairs.sum(dim=1) % 7).tolist()


def test_heads_look_where_they_were_told_to(network):
    _, cache = network.model.run_with_cache(network.tokens)
    rows, query = torch.arange(COUNT), network.tokens.shape[1] - 2
    for layer, head in network.heads:
        pattern, place = cache["pattern", layer][:, head], network.sources + layer
        assert pattern[rows, query, place].min() > (0.999 if layer == 0 else 0.95)
        assert pattern[:, 3:query, 0].min() > 0.9  # a sink: these tokens have no copy


def test_only_the_planted_codes_matter():
    """The truth that finders are scored against: no code besides it changes the answer by 5 %."""
    net = induction(5, count=3)
    graph, why = truth.of_codes(net, "induction")
    text, answer = net.tokens[:1, :-1], net.tokens[0, -1]
    _, cache = net.model.run_with_cache(net.tokens[: truth.FEW, :-1])

    def centred(logits):
        return (logits[0, -1, answer] - logits[0, -1].mean()).item()

    whole, effects = centred(net.model(text)), []
    for layer in range(2):
        code = cache["post", layer][:1]
        for place in code[0].nonzero().tolist():
            edited = code.clone()
            edited[0, place[0], place[1]] = 0
            hooks = [(f"blocks.{layer}.mlp.hook_post", lambda code, hook, edited=edited: edited)]
            logits = net.model.run_with_hooks(text, fwd_hooks=hooks)
            effects.append(1 - centred(logits) / whole)
    planted = np.array(graph[1])[: len(effects)]  # the first text comes first
    effects = np.abs(effects)
    assert planted.sum() == 5 and sum(why[1]) == truth.FEW
    assert effects[planted].min() > 0.5 and effects[~planted].max() < 0.05


def test_scores_by_hand():
    units, yes = np.array([True, False, True, False, False]), [1, 1, 0, 0, 0]
    case = (units, [5.0, 4.0, 4.0, 1.0, 0.0], lambda change: ([0.9, 0.5, 0.5, np.nan, 0.1], yes))
    rows = {(key, who): x for key, who, *_, x in truth.scored(0, "one", *case)}
    assert rows["auroc", "one, finder"] == rows["auroc", "one, size"] == pytest.approx(5.5 / 6)
    assert rows["recall", "one, finder"] == rows["precision", "one, finder"] == 0.5
    assert rows["recall", "one, size"] == 1.0


def test_a_seed_in_small(monkeypatch):
    monkeypatch.setattr(truth, "TEXTS", COUNT)
    monkeypatch.setattr(truth, "LAYERS", 5)
    soft, sums = (make(7, count=COUNT) for make in (induction, modular_addition))
    cases = [*truth.of_heads(soft, "induction"), *truth.of_heads(sums, "sum"), *truth.of_layers(7)]
    rows = [row for case in cases for row in truth.scored(7, *case)]
    table = truth.table_of(rows)
    for name in ("ablate_heads, induction", "patching, sum", "audit (along), weights"):
        assert table.loc[name, "finder"].startswith("1.00") and table.loc[name, "recall"] == 1.0
