"""Attribution graphs: edges against closed forms, finite differences and sums over all paths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import crate_interp as ci
from conftest import make, make_lm
from crate_hooks import full_name
from crate_interp.circuits.graphs import derivatives
from crate_interp.circuits.graphs.question import ask_answer
from crate_interp.circuits.graphs.selection import among, edge_table, influences, prune, select
from selection import few

LAYERS = 3
BOTH = ("pattern", "norm")
IMAGES = ("crate", "crate-alpha", "tost-ista", "cbt")
TEXTS = ("crate-lm", "crate-lm vanilla", "gpt-baseline")
SQUARE = dict(image_size=(16, 16), patch_size=2)  # CBSA needs a square of tokens


def network(name, **over):
    if name in (*TEXTS, "nanochat-crate"):
        model = make_lm(name, n_layers=LAYERS, **over)
        sample = torch.randint(47, (1, 7), generator=torch.Generator().manual_seed(2))
        return model.double(), sample
    more = SQUARE if name in ("cbt", "tost-ista") else {}
    model = make(name, n_layers=LAYERS, **{**more, **over}).double()
    height, width = model.cfg.image_size
    sample = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))
    return model, sample.double()


def explained(name, freeze=(), **over):
    model, sample = network(name, **over)
    question = ask_answer(model, model(sample), None, None)
    found = derivatives.values(model, sample, question, freeze)
    return model, sample, question, found, derivatives.CutPass(found)


def active(found, layer):
    return found.codes[layer].flatten().nonzero()[:, 0]


def linear_norm(norm, scale):
    """The matrix of a LayerNorm whose scale is held, for rows: x @ matrix."""
    width = len(norm.weight)
    centred = torch.eye(width).double() - 1 / width
    return centred / scale * norm.weight


def test_edges_of_a_crate_are_those_of_its_matrices():
    """With patterns and norms held, an edge is a product of the layer's matrices."""
    model, sample, _, found, cut = explained("crate", BOTH)
    _, cache = model.run_with_cache(sample)
    layer, eta = 2, model.cfg.eta
    block, d = model.blocks[layer], model.blocks[layer].mlp.D
    step = torch.eye(len(d)).double() + eta * (d - d.T @ d)  # rows: y @ step
    pattern = cache[full_name("attn.hook_pattern", layer)][0]
    scales = [cache[full_name(f"{ln}.hook_scale", layer)][0, :, 0] for ln in ("ln1", "ln2")]
    nodes = active(found, layer)[::29]
    effects, _ = cut.effects(layer, nodes)
    width, heads = found.codes[layer].shape[1], model.cfg.n_heads
    sources = active(found, layer - 1)[::17]
    places = torch.stack([sources // width, sources % width], dim=1)
    change = derivatives.through_heads(found, layer, places)
    for node, row in zip(nodes.tolist(), effects[layer - 1], strict=True):
        q, i = divmod(node, width)
        after = linear_norm(block.ln2, scales[1][q]) @ step
        for place, (p, j) in enumerate(places.tolist()):
            before = linear_norm(block.ln1, scales[0][p])
            parts = [
                pattern[h, q, p] * before @ block.attn.U[h] @ block.attn.W_O[h]
                for h in range(heads)
            ]
            value = found.codes[layer - 1][p, j]
            wanted = value * ((p == q) * torch.eye(width) + sum(parts)) @ after
            assert_close(row[p, j], wanted[j, i], rtol=1e-9, atol=1e-12)
            for h, part in enumerate(parts):
                carried = change[place, q, h] @ block.attn.W_O[h] @ after
                assert_close(carried[i], value * (part @ after)[j, i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", few([*IMAGES, *TEXTS, "nanochat-crate"], count=4))
def test_edges_are_finite_differences_with_other_codes_held(name):
    model, sample, _, found, cut = explained(name)
    top = LAYERS - 1
    nodes = active(found, top)[3::97]
    effects, _ = cut.effects(top, nodes)
    assert set(effects) == ({top - 1} if not model.cfg.residual else set(range(-1, top)))

    first = full_name("ln1.hook_scale", 0)
    scale = model.run_with_cache(sample, names_filter=first)[1][first]

    def before(layer, change):
        kept = []

        def held(code, hook, own):
            return (found.codes[own] + (change if own == layer else 0))[None]

        hooks = [
            (full_name(derivatives.CODE, n), lambda code, hook, own=n: held(code, hook, own))
            for n in range(LAYERS)
        ]
        if layer < 0:  # the scale of the first norm is held
            hooks.append((derivatives.embedding_point(model), lambda value, hook: value + change))
            hooks.append((first, lambda value, hook: scale))
        hooks.append(
            (full_name(derivatives.PRE, top), lambda value, hook: kept.append(value[0].flatten()))
        )
        model.run_with_hooks(sample, fwd_hooks=hooks)
        return kept[0][nodes]

    for layer, rows in effects.items():
        if layer < 0:
            step = 1e-6 * found.embedded[2] * (torch.arange(len(found.embedded)) == 2)[:, None]
            wanted = (before(layer, step) - before(layer, -step)) / 2e-6
            assert_close(rows[:, 2, 0], wanted, rtol=1e-5, atol=1e-8)
            continue
        for place in active(found, layer)[5::151].tolist():
            p, j = divmod(place, found.codes[layer].shape[1])
            step = torch.zeros_like(found.codes[layer])
            step[p, j] = 1e-6 * found.codes[layer][p, j]
            wanted = (before(layer, step) - before(layer, -step)) / 2e-6
            assert_close(rows[:, p, j], wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("freeze", [(), BOTH], ids=["jacobian", "frozen"])
@pytest.mark.parametrize("name", ["crate", "crate-alpha", "crate-lm"])
def test_attributions_are_sums_over_all_paths(name, freeze):
    """From the top down: the derivative is that of every reader, times the effect on it."""
    model, _, _, found, cut = explained(name, freeze)
    total = {layer: torch.zeros_like(found.attribution(layer)) for layer in range(-1, LAYERS)}
    for reader in reversed(range(LAYERS + 1)):
        if reader == LAYERS:
            nodes, weights = torch.zeros(1).long(), torch.ones(1).double()
        else:
            nodes = active(found, reader)
            # the effects on a node times its own derivative: total of z dtarget/dz, over z
            weights = total[reader].flatten()[nodes] / found.codes[reader].flatten()[nodes]
        for group, own in zip(nodes.split(64), weights.split(64), strict=True):
            effects, _ = cut.effects(reader, group)
            for source, rows in effects.items():
                total[source] += torch.einsum("n,npa->pa", own, rows.double())
    for layer in range(-1, LAYERS):
        assert_close(total[layer], found.attribution(layer), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", few([*IMAGES, *TEXTS], count=4))
def test_what_is_frozen_adds_up(name):
    model, sample = network(name)
    graph = ci.graph(model, sample, freeze=BOTH)
    layers = graph.table("layers")
    for total in layers["attribution"] + layers["bias"]:
        assert total == pytest.approx(graph.meta["target"]["logit"], abs=1e-9)
    assert layers["error"].abs().max() <= 1e-10 * max(1, layers["attribution"].abs().max())
    single = sample.float() if sample.is_floating_point() else sample
    found = ci.graph(model.float(), single, freeze=BOTH).table("layers")
    assert found["error"].abs().max() <= 1e-5 * max(1, found["attribution"].abs().max())


def test_parts_of_heads_add_up_to_the_edge():
    model, _, _, found, cut = explained("crate")
    graph = select(cut, 1.0, 1.0, 60)
    edges = edge_table(found, graph)
    sums = {}
    for source, target, weight, _ in edges:
        sums[source, target] = sums.get((source, target), 0) + weight
    assert {head for *_, head in edges} == set(range(-1, model.cfg.n_heads))
    for (source, target), weight in sums.items():
        assert weight == pytest.approx(float(graph.effects[target, source]), abs=1e-12)
    table = graph.nodes.tolist()  # nothing goes to another token without a head
    direct = [
        (table[source], table[target], weight) for source, target, weight, n in edges if n < 0
    ]
    across = [abs(w) for here, to, w in direct if to[0] < LAYERS and here[1] != to[1]]
    assert across and max(across) < 1e-12


def paths(shares, node, weight=1.0):
    """Yields (node, weight) of every path down from a node."""
    for source, share in enumerate(shares[node].tolist()):
        if share:
            yield source, weight * share
            yield from paths(shares, source, weight * share)


@given(st.integers(0, 2**16), st.integers(2, 7), st.integers(2, 4))
def test_influence_is_a_sum_over_paths(seed, width, depth):
    generator = torch.Generator().manual_seed(seed)
    size = width * depth + 1
    effects = torch.zeros(size, size).double()
    for layer in range(1, depth):
        own = slice(layer * width, (layer + 1) * width)
        below = slice((layer - 1) * width, layer * width)
        effects[own, below] = torch.randn(width, width, generator=generator).double()
    effects[-1, -1 - width : -1] = torch.randn(width, generator=generator).double()
    start = torch.zeros(size).double()
    start[-1] = 1
    shares = among(effects)
    wanted = torch.zeros(size).double()
    for node, weight in paths(shares, size - 1):
        wanted[node] += weight
    found = influences(shares, start)
    assert_close(found, wanted)
    # every layer passes all of the influence on
    assert_close(found[:-1].view(depth, width).sum(dim=1), torch.ones(depth).double())
    inputs = torch.arange(size) < width
    kept = prune(effects, effects.abs().sum(dim=1), inputs, 0.8, 0.98)
    for node in (kept.nodes & ~inputs).nonzero()[:-1, 0].tolist():
        assert kept.edges[node].any() and kept.edges[:, node].any()
    assert not kept.edges[~kept.nodes].any() and not kept.edges[:, ~kept.nodes].any()
    whole = prune(effects, effects.abs().sum(dim=1), inputs, 1.0, 1.0)
    assert whole.nodes.all() and whole.completeness == pytest.approx(1)
    assert whole.replacement == pytest.approx(1)
