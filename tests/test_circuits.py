"""Composition, attribution, paths and circuits.

Against brute force, on a planted circuit, and on random weights.
"""

import math
import xml.etree.ElementTree as xml

import pytest
import torch
from numpy.testing import assert_allclose

import crate_interp as ci
from conftest import D_MODEL, HEADS, LAYERS, make
from crate_interp.circuits import Circuit, Edge, composition, evaluate, path_patch
from neighbours import TEXT, VISION, ready
from selection import few


def share(rows, u):
    """Of what rows hold, by projecting each on the span of u by least squares."""
    inside = total = 0.0
    for row in rows.double():
        fitted = u.double() @ torch.linalg.lstsq(u.double(), row[:, None]).solution
        inside, total = inside + fitted.square().sum().item(), total + row.square().sum().item()
    return inside / total


def brute_linear(model, row, start, stop):
    """A row of the stream after attention of layer `start` as layer `stop` takes it.

    By the Jacobian of a slow form.
    """
    for layer in range(start, stop):
        block = model.blocks[layer]
        mlp, y = block.mlp, row
        if isinstance(block.ln2, torch.nn.LayerNorm):
            y = (row - row.mean()) * block.ln2.weight
        d = mlp.D if hasattr(mlp, "D") else None
        if type(mlp).__name__ == "ISTA":
            out = y - mlp.eta * d.T @ (d @ y - y)
        elif type(mlp).__name__ == "OvercompleteODL":
            first = mlp.eta * d.T @ y
            out = mlp.W_out.T @ (first - mlp.eta * d.T @ (d @ first - y))
        else:
            out = mlp.W_out.T @ (mlp.W_in.T @ y)
        row = row + out if block.residual else out
    ln1 = model.blocks[stop].ln1
    return (row - row.mean()) * ln1.weight if isinstance(ln1, torch.nn.LayerNorm) else row


@pytest.mark.parametrize("through", ["direct", "linear"])
@pytest.mark.parametrize("name", VISION + TEXT)
def test_scores_of_weights_equal_brute_force(name, through):
    model, _ = ready(name)
    table = composition(model, through=through, role="k").table()
    assert len(table) == LAYERS * (LAYERS - 1) // 2 * HEADS**2
    assert table["score"].between(0, 1).all()
    with torch.no_grad():
        for row in table.sample(12, random_state=0).itertuples():
            written = model.blocks[row.from_layer].attn.W_O[row.from_head]
            start = row.to_layer if through == "direct" else row.from_layer
            arrived = torch.stack(
                [brute_linear(model, one, start, row.to_layer) for one in written]
            )
            wanted = share(arrived, model.blocks[row.to_layer].attn.W_K[row.to_head])
            assert row.score == pytest.approx(wanted, rel=1e-4)
            assert row.chance == pytest.approx(model.cfg.d_head / D_MODEL)


@pytest.mark.parametrize("name", few(VISION + TEXT, 3))
def test_scores_of_data_equal_finite_differences(name):
    """In float64: the stream moves a little along what a head wrote, attention stays."""
    model, inputs = ready(name)
    model = model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    table = composition(model, inputs, through="data", batch_size=1, progress=False).table()
    _, cache = model.run_with_cache(inputs)
    points = [f"blocks.{layer}.hook_attn_out" for layer in range(LAYERS)]
    for start, head, stop in ((0, 2, 1), (0, 4, 2), (1, 0, 2)):
        step = 1e-6 * torch.einsum(
            "bnp,pd->bnd", cache["z", start][:, :, head], model.blocks[start].attn.W_O[head]
        )
        arrived = []
        for sign in (1, -1):
            held = [
                (points[layer], lambda out, hook, name=points[layer]: cache[name])
                for layer in range(LAYERS)
            ]
            moved = cache[points[start]] + sign * step
            held[start] = (points[start], lambda out, hook, moved=moved: moved)
            with torch.no_grad(), model.hooks(held):
                arrived.append(
                    model.run_with_cache(inputs)[1][f"blocks.{stop}.ln1.hook_normalized"]
                )
        rows = (arrived[0] - arrived[1]).flatten(0, 1) / 2e-6
        for reader in (0, 3):
            found = table.query(
                "from_layer == @start and from_head == @head"
                " and to_layer == @stop and to_head == @reader"
            )
            wanted = share(rows, model.blocks[stop].attn.W_Q[reader].detach())
            assert found["score"].item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("through", ["direct", "linear", "data"])
def test_on_random_weights_only_chance_exceeds_the_baseline(through):
    """Pairs that share a sender are not independent: twice the binomial deviation is allowed."""
    exceed = count = 0
    for seed in range(4):
        torch.manual_seed(seed)
        size = dict(d_model=37, n_layers=4, n_heads=7, d_head=5, n_classes=3)
        size |= dict(image_size=(6, 20), patch_size=(2, 5))
        model = ci.HookedCrate(
            ci.CrateConfig(family="crate", mean=[0.5] * 3, std=[0.5] * 3, **size)
        ).eval()
        data = torch.randn(3, 3, 6, 20) if through == "data" else None
        found = composition(model, data, through=through, progress=False)
        exceed, count = exceed + len(found.above()), count + len(found.table())
        assert found.table()["score"].mean() == pytest.approx(5 / 37, rel=0.05)
        assert found.table()["percentile_99"].gt(found.table()["chance"]).all()
    assert abs(exceed / count - 0.01) < 2 * 3 * math.sqrt(0.01 * 0.99 / count)


def planted():
    """Two layers in which head 1 reads what heads 2 and 4 of the layer before wrote.

    Nothing else composes. Spans are orthogonal; the sparse step has D = I and a bias before it that
    keeps every atom on, so that it only adds a constant, which LayerNorm takes out again; no span
    that heads write into holds anything of the image. The logits read head 1.
    """
    size = dict(d_model=67, d_head=3, n_heads=5, n_layers=2, n_classes=2, eta=0.1, lambd=0.0)
    model = make("crate", **size)
    # directions without mean, which LayerNorm keeps
    basis = torch.linalg.qr(
        torch.cat(
            [torch.ones(67, 1), torch.randn(67, 66, generator=torch.Generator().manual_seed(4))],
            dim=1,
        )
    )[0][:, 1:]
    spans = basis[:, : 3 * 20].T.reshape(20, 3, 67)
    with torch.no_grad():
        for block in model.blocks:
            for norm in (block.ln1, block.ln2):
                norm.weight.fill_(1.0), norm.bias.fill_(0.0)
            block.ln2.bias.fill_(9.0)
            block.mlp.D.copy_(torch.eye(67))
            block.attn.out_proj.bias.zero_()
        model.blocks[0].attn.u_proj.weight.copy_(spans[:5].reshape(15, 67))
        # little beside the stream
        model.blocks[0].attn.out_proj.weight.copy_(0.2 * spans[5:10].reshape(15, 67).T)
        reading = spans[10:15].clone()
        # what heads 2 and 4 write
        reading[1] = torch.stack([spans[7][0], spans[9][1], (spans[7][1] + spans[9][2]) / 2**0.5])
        model.blocks[1].attn.u_proj.weight.copy_(reading.reshape(15, 67))
        model.blocks[1].attn.out_proj.weight.copy_(spans[15:20].reshape(15, 67).T)
        model.ln_final.weight.fill_(1.0), model.ln_final.bias.zero_()
        model.unembed.weight.copy_(torch.stack([spans[16].sum(dim=0), -spans[16].sum(dim=0)]))
    written = spans[[5, 6, 7, 8, 9, 15, 16, 17, 18, 19]].transpose(1, 2)
    model.add_perma_hook("blocks.0.hook_resid_pre", ci.hooks.edit.project_out(written))
    return model


@pytest.mark.parametrize("through", ["direct", "linear"])
def test_a_planted_circuit_ranks_first_and_path_patching_confirms_it(through):
    model = planted()
    found = composition(model, through=through)
    top = found.top(3)
    assert set(zip(top["from_head"][:2], top["to_head"][:2], strict=True)) == {(2, 1), (4, 1)}
    assert top["score"][1] > 0.45 and top["score"][2] < 1e-9
    assert {(edge.source, edge.target) for edge in found.circuit(2).edges} == {
        ("L0H2", "L1H1"),
        ("L0H4", "L1H1"),
    }
    generator = torch.Generator().manual_seed(7)
    source, base = torch.randn(2, 4, 3, 6, 20, generator=generator)
    before = model(base)
    moved = path_patch(
        model,
        source,
        base,
        lambda out: (out - before).abs().mean(),
        receivers=[(1, 1)],
        progress=False,
    )[0]
    # all that is left for the others is the scale of the norms, which every head changes
    assert set(moved.argsort(descending=True)[:2].tolist()) == {2, 4}
    assert moved.sort().values[-2] > 5 * moved.sort().values[2]


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["mean", "zero"])
def test_scores_of_a_circuit_equal_a_slow_form(ablation):
    model, inputs = ready("crate-alpha")
    metric = lambda logits: logits[:, 2].mean()  # noqa: E731
    circuit = Circuit((Edge("L0H1", "L2H3", 1.0), Edge("L1H0", "L2H3", 0.5)))
    found = evaluate(
        model, circuit, inputs, metric, ablation=ablation, random=3, subsets=4, progress=False
    )
    _, cache = model.run_with_cache(inputs)
    heads = [(0, 1), (1, 0), (2, 3)]
    every = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]

    def f(kept):
        hooks = []
        for layer in range(LAYERS):
            z = (
                cache["z", layer].mean(dim=0, keepdim=True)
                if ablation == "mean"
                else 0 * cache["z", layer][:1]
            )

            def put(out, hook, layer=layer, z=z):
                out = out.clone()
                for head in range(HEADS):
                    if (layer, head) not in kept:
                        out[:, :, head] = z[:, :, head]
                return out

            hooks.append((f"blocks.{layer}.attn.hook_z", put))
        return metric(model.run_with_hooks(inputs, fwd_hooks=hooks)).item()

    span = f(every) - f([])
    rows = found.table().set_index("measure")["value"]
    assert rows["faithfulness"] == pytest.approx((f(heads) - f([])) / span, rel=1e-4)
    costs = {
        head: abs(f(heads) - f([other for other in heads if other != head])) / abs(span)
        for head in heads
    }
    assert rows["minimality"] == pytest.approx(min(costs.values()), rel=1e-3, abs=1e-5)
    assert_allclose(found.table("heads")["cost"], list(costs.values()), rtol=1e-3, atol=1e-5)
    gone = abs(f([]) - f([head for head in every if head not in heads])) / abs(span)
    assert rows["completeness"] >= gone - 1e-5
    assert found.table()["share_as_good"].between(0, 1).all()
    assert "faithfulness" in repr(found)
    assert "<table" in found._repr_html_()
    again = evaluate(
        model, circuit, inputs, metric, ablation=ablation, random=3, subsets=4, progress=False
    )
    assert again.table().equals(found.table())


def test_the_planted_circuit_is_faithful_and_random_ones_are_not():
    model = planted()
    inputs = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(7))
    metric = lambda out: (out[:, 0] - out[:, 1]).abs().mean()  # noqa: E731
    heads = [(0, 2), (0, 4), (1, 1)]
    found = evaluate(model, heads, inputs, metric, ablation="zero", random=30, progress=False)
    row = found.table().set_index("measure").loc["faithfulness"]
    assert abs(row["value"] - 1) < 0.25
    assert row["share_as_good"] < 0.35
    assert abs(row["random_mean"] - 1) > 0.5


def test_circuits_are_saved_drawn_and_handed_to_networkx(tmp_path):
    edges = (
        Edge("embed", "L0H1", 0.5),
        Edge("L0H1", "L0A12", -0.25),
        Edge("L0H1", "logits", 2.0),
        Edge("L0A12", "L1H0", 1.0),
    )
    circuit = Circuit(edges, note="<a & b>", meta={"seed": 3})
    assert circuit.nodes() == ["embed", "L0H1", "L0A12", "L1H0", "logits"]
    assert circuit.heads() == [(0, 1), (1, 0)]
    loaded = Circuit.load(circuit.save(tmp_path / "new" / "c.json"))
    assert loaded == circuit and loaded.meta == {"seed": 3} and loaded.note == "<a & b>"
    graph = circuit.to_networkx()
    assert graph.edges["L0H1", "L0A12"]["weight"] == -0.25 and graph.nodes["L1H0"]["layer"] == 1
    svg = circuit._repr_html_()
    assert "&lt;a" in svg and "<a" not in svg.replace("<a &", "<a")
    assert xml.fromstring(svg).tag.endswith("svg") and Circuit(())._repr_html_() is None
