"""Graphs as results: trust, steering, files, and what they are compared with."""

import json
import re

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm, refuses
from crate_hooks import edit, full_name
from crate_interp.circuits.graphs import trust
from crate_interp.circuits.graphs.derivatives import CODE, values
from crate_interp.circuits.graphs.question import ask_answer

IMAGE = torch.randn(1, 3, 6, 20, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
NETWORKS = ("crate", "crate-alpha", "crate-lm", "nanochat-crate")


def network(name):
    if "lm" in name or "nanochat" in name:
        return make_lm(name).double(), TOKENS
    return make(name).double(), IMAGE.double()


def explained(name):
    model, sample = network(name)
    question = ask_answer(model, model(sample), None, None)
    return values(model, sample, question, ())


@pytest.mark.parametrize("name", NETWORKS)
def test_ablations_are_forwards_with_a_code_of_zero(name):
    case = explained(name)
    for layer, code in enumerate(case.codes):
        nodes = code.nonzero()[::53]
        found = trust.without(case, layer, nodes)
        for (pos, atom), target in zip(nodes.tolist(), found.tolist(), strict=True):
            hooks = [(full_name(CODE, layer), edit.zero(positions=pos, atoms=atom))]
            logits = case.model.run_with_hooks(case.sample, fwd_hooks=hooks)
            assert target == pytest.approx(float(case.question.of(logits.detach())[0]), abs=1e-9)


@pytest.mark.parametrize("name", NETWORKS[:3])
def test_what_stays_alone(name):
    """All nodes give the answer, all coordinates in other axes too, and none another one."""
    case = explained(name)
    every = [torch.arange(code.numel())[None] for code in case.codes]
    width = case.codes[0].shape[1]
    axes = [torch.linalg.qr(torch.randn(width, width).double())[0] for _ in every]
    assert float(trust.keeping(case, every)[0]) == pytest.approx(case.target, abs=1e-9)
    turned = float(trust.keeping(case, every, axes=axes)[0])
    assert turned == pytest.approx(case.target, abs=1e-7)
    none = float(trust.keeping(case, every, others=True)[0])
    assert abs(none - case.target) > 1e-3
    nothing = [nodes[:, :0] for nodes in every]
    assert float(trust.keeping(case, nothing)[0]) == pytest.approx(none, abs=1e-12)


def test_agreement_is_pearsons_and_spearmans():
    import pandas as pd
    from scipy.stats import pearsonr, spearmanr

    x = np.random.default_rng(0).normal(size=23)
    y = x + np.random.default_rng(1).normal(size=23)
    table = pd.DataFrame({"layer": 0, "attribution": x, "effect": y})
    row = trust.agreement(table).iloc[0]
    found = pearsonr(x, y)
    assert row["pearson"] == pytest.approx(found.statistic)
    interval = found.confidence_interval()
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-4)
    assert row["spearman"] == pytest.approx(spearmanr(x, y).statistic) and row["n"] == 23
    assert trust.agreement(table.assign(effect=1.0)).iloc[0, 1:5].isna().all()


@pytest.fixture(scope="module")
def graph():
    model, sample = network("crate")
    return ci.graph(model, sample, most=40)


def test_nodes_hold_their_values_and_real_effects(graph):
    case = explained("crate")
    table = graph.table("nodes")
    codes = table[(table["atom"] >= 0)]
    assert len(codes) and (codes["value"] != 0).all() and (codes["influence"] > 0).all()
    for row in codes.itertuples():
        at = case.codes[row.layer][row.pos, row.atom]
        assert row.value == pytest.approx(float(at))
        wanted = case.attribution(row.layer)[row.pos, row.atom]
        assert row.attribution == pytest.approx(float(wanted), abs=1e-12)
        after = trust.without(case, row.layer, torch.tensor([[row.pos, row.atom]]))
        assert row.effect == pytest.approx(case.target - float(after[0]), abs=1e-9)
    outside = graph.table("ablations").merge(codes, on=["layer", "pos", "atom"])
    assert outside[outside["network"] == "model"].empty
    names = set(table["node"])
    edges = graph.table("edges")
    assert set(edges["source"]) | set(edges["target"]) <= names
    assert {*graph.table("whole")["network"]} == {"model", "untrained", "rival", "rival_nodes"}


def test_tokens_after_the_answer_are_no_part_of_a_graph():
    """They cannot have made it, and random nodes among them would be too weak a null."""
    model, sample = network("crate-lm")
    whole = ci.graph(model, sample, position=3, most=40)
    short = ci.graph(model, sample[:, :4], most=40)
    assert whole.meta == short.meta
    for name, table in whole.stored.items():
        assert table.equals(short.stored[name]), name
    places = whole.table("ablations")["pos"]
    assert places.max() <= 3 and len(whole.meta["tokens"]) == 4
    node = whole.table("nodes").query("atom >= 0")["node"].iloc[0]
    # steering a loaded graph on the whole text gives the same
    again = whole.steer({node: 0}, model=model, inputs=sample)
    assert again.after == pytest.approx(whole.steer({node: 0}).after, abs=1e-9)


def test_random_nodes_are_as_many_at_each_token():
    generator = torch.Generator().manual_seed(0)
    code = torch.randn(7, 31, generator=generator).relu()
    counts = torch.tensor([3, 0, 5, 1, 0, 2, 7])
    nodes = trust.random_nodes(code, counts, 600, generator)
    masks = torch.zeros(600, 7 * 31, dtype=torch.bool).scatter_(1, nodes, True).view(600, 7, 31)
    assert (masks.sum(dim=-1) == counts).all() and not (masks & (code == 0)).any()
    assert len(masks.flatten(1).unique(dim=0)) > 590
    assert trust.random_nodes(code, counts, 0, generator).shape == (0, 18)
    # each node that is not 0 is as likely as the others of its token
    many = masks.double()
    for pos in range(7):
        active = code[pos] != 0
        share = many[:, pos, active].mean(dim=0)
        chance = counts[pos] / active.sum()
        assert (share - chance).abs().max() <= 5 * (chance * (1 - chance) / len(many)).sqrt()


@pytest.mark.parametrize("how, amount", [("scale", 0.0), ("set", 0.7), ("add", -0.2)])
def test_steering_is_a_forward_with_edited_codes(graph, how, amount):
    model, sample = network("crate")
    table = graph.table("nodes")
    node = table[table["atom"] >= 0].iloc[0]
    found = graph.steer({node["node"]: amount}, how=how)

    def edit(value, hook):
        value = value.clone()
        old = value[:, node["pos"], node["atom"]]
        new = {"scale": old * amount, "set": old * 0 + amount, "add": old + amount}[how]
        value[:, node["pos"], node["atom"]] = new
        return value

    logits = model.run_with_hooks(sample, fwd_hooks=[(full_name(CODE, int(node["layer"])), edit)])
    logits = logits.detach()
    target = float(logits[0, graph.meta["target"]["answer"]] - logits[0].mean())
    assert found.after == pytest.approx(target, abs=1e-9)
    assert found.before == pytest.approx(graph.meta["target"]["logit"])
    after = {"scale": node["value"] * amount, "set": amount, "add": node["value"] + amount}[how]
    slope = node["attribution"] / node["value"]
    assert found.predicted == pytest.approx(slope * (after - node["value"]), abs=1e-9)
    with model.hooks(fwd_hooks=graph.hooks({node["node"]: amount}, how=how)):
        torch.testing.assert_close(model(sample), logits)
    others = found.table.iloc[1:]
    assert found.moved == (others["change"].abs() >= abs(found.after - found.before) / 2).sum()
    everywhere = graph.steer({node["node"].split("@")[0]: amount}, how=how)
    assert "was predicted" in everywhere.headline()


def test_a_loaded_graph_steers_if_it_is_given_the_model(graph, tmp_path):
    model, sample = network("crate")
    graph.save(tmp_path / "graph")
    loaded = ci.AttributionGraph.load(tmp_path / "graph")
    assert loaded.headline() == graph.headline() and loaded.digest() == graph.digest()
    node = graph.table("nodes").query("atom >= 0")["node"].iloc[0]
    refuses("holds no model: give model= and inputs=", lambda: loaded.steer({node: 0}))
    found = loaded.steer({node: 0}, model=model, inputs=sample)
    assert found.after == graph.steer({node: 0}).after
    refuses("graphs do not merge", lambda: graph.merge(loaded))


def test_it_runs_without_gradients_or_tests_and_refuses_half_precision(graph, tmp_path):
    model, sample = network("crate")
    with torch.no_grad():
        assert graph.digest() == ci.graph(model, sample, most=40).digest()
    ci.graph(model, sample, most=40, tests=False).save(tmp_path)
    bare = type(graph).load(tmp_path)
    same = [name for name in graph.STORED if bare.table(name).equals(graph.table(name))]
    assert same == "nodes edges layers answers places picture examples looks".split()
    assert bare.kept == graph.kept and not len(bare.of("ablations")) and not bare.faithful()
    assert "nan" not in str(ci.viz.graph(bare).said) + bare.finding()
    with torch.inference_mode(), pytest.raises(ValueError, match="needs gradients"):
        ci.graph(model, sample)
    refuses("lost in rounding", lambda: ci.graph(model.bfloat16(), sample))


# the fields of circuit-tracer's pydantic models (frontend/graph_models.py)
FIELDS = {
    "metadata": "slug scan transcoder_list prompt_tokens prompt node_threshold schema_version",
    "qParams": "pinnedIds supernodes linkType clickedId sg_pos",
    "nodes": "node_id feature layer ctx_idx feature_type token_prob is_target_logit run_idx "
    "reverse_ctx_idx jsNodeId clerp influence activation",
    "links": "source target weight heads pairs",
}


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_circuit_tracers_json(name, tmp_path):
    model, sample = network(name)
    graph = ci.graph(model, sample, most=40)
    found = json.loads(graph.to_circuit_tracer(tmp_path / "graph.json").read_text())
    assert set(found) == set(FIELDS)
    for part, fields in FIELDS.items():
        for one in found[part] if isinstance(found[part], list) else [found[part]]:
            assert set(one) == set(fields.split()), part
    ids = [node["node_id"] for node in found["nodes"]]
    assert len(set(ids)) == len(ids)
    assert all({link["source"], link["target"]} <= set(ids) for link in found["links"])
    kinds = {node["feature_type"] for node in found["nodes"]}
    assert kinds == {"cross layer transcoder", "embedding", "logit"}
    (logit,) = [node for node in found["nodes"] if node["is_target_logit"]]
    edges = graph.table("edges")
    edges = edges[~edges["source"].str.startswith("B")]
    into = edges[edges["target"] == "logit"]["weight"].sum()
    given = sum(one["weight"] for one in found["links"] if one["target"] == logit["node_id"])
    assert given == pytest.approx(into)
    for link in found["links"]:
        assert sum(link["heads"].values()) == pytest.approx(link["weight"], abs=1e-9)
        assert set(link["pairs"]) <= set(link["heads"]) - {"-1"}


def test_a_graph_whose_edges_are_no_looks_of_heads_has_none():
    """CBT's heads look from representatives; nanochat's later layers read the embedding again."""
    square = make("cbt", image_size=(16, 16), patch_size=2), torch.rand(1, 3, 16, 16)
    for model, sample in (square, network("nanochat-crate")):
        assert ci.graph(model, sample, most=40, tests=False).looks() == {}


@pytest.mark.parametrize("name", NETWORKS[:3])
def test_a_graph_says_why_its_heads_look_there(name):
    """The pairs of a look are those of why_attends."""
    model, sample = network(name)
    looks = ci.graph(model, sample, most=40, tests=False).table("looks")
    assert looks["layer"].min() > 0
    for place, rows in looks.groupby(["layer", "head", "query", "key"]):
        reason = ci.circuits.why_attends(model, sample, *place)
        pairs = reason.table()[reason.table()["key_atom"] >= -1].head(5)
        assert rows["score"].iloc[0] == pytest.approx(reason.meta["score"], abs=1e-12)
        assert rows["attention"].iloc[0] == pytest.approx(reason.meta["attention"], abs=1e-12)
        for column in pairs.columns:
            np.testing.assert_allclose(rows[column], pairs[column], atol=1e-12)


def planted(place):
    """Returns a graph of a model whose answer reads one code: that of rank `place` by size.

    The answer is this code less one that is 0, after the last norm.
    """
    model, sample = make("crate", n_layers=1).double(), IMAGE.double()
    code = model.run_with_cache(sample)[1][full_name(CODE, 0)][0, 0].detach()
    active = code.argsort(descending=True)[: int((code != 0).sum())]
    weight = torch.zeros_like(model.unembed.weight)
    weight[0, active[place]], weight[0, (code == 0).nonzero()[0]] = 5.0, -5.0
    plain = {"unembed.weight": weight, "unembed.bias": torch.zeros(len(weight))}
    plain["ln_final.weight"] = torch.ones_like(model.ln_final.weight)
    plain["ln_final.bias"] = torch.zeros_like(model.ln_final.bias)
    model.load_state_dict(model.state_dict() | plain)
    return ci.graph(model, sample, target=0, nodes=0.3, freeze="norm"), int(active[place])


def test_an_answer_that_hangs_on_a_small_code_is_not_a_matter_of_size():
    found, atom = planted(-1)
    nodes = found.table("nodes").query("atom >= 0")
    assert nodes["atom"].tolist() == [atom] and nodes["pos"].tolist() == [0]
    assert min(found.beyond_size) > 0.5
    assert "size" not in found.warnings() and f"rests most on L0A{atom} at CLS" in found.cause()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_finding_names_the_largest_effects_and_every_warning(name):
    found = ci.graph(*network(name), most=40)
    assert {*found.warnings().values()} <= {*found.sentences()}
    effects = found.table("nodes").query("atom >= 0").set_index("node")["effect"].dropna()
    best = effects[effects >= effects.max() / 2].nlargest(3)
    large = effects.max() >= 0.1 * abs(found.meta["target"]["logit"])
    assert ("no single code" in found.cause()) != large
    if large:
        named = re.findall(r"L\d+A\d+", found.cause())
        assert named == [node.split("@")[0] for node in best.index]
        assert f"{best.min():.2g}" in found.cause() and f"{best.max():.2g}" in found.cause()


def by_hand(case, kept, others=False):
    """Returns the target if the codes (layer, pos, atom) stay, or all others; one forward."""

    def edit(code, hook):
        layer = int(hook.name.split(".")[1])
        new = code.clone() if others else torch.zeros_like(code)
        for at, pos, atom in kept:
            if at == layer:
                new[:, pos, atom] = 0 if others else code[:, pos, atom]
        return new

    hooks = [(full_name(CODE, layer), edit) for layer in range(len(case.codes))]
    logits = case.model.run_with_hooks(case.sample, fwd_hooks=hooks).detach()
    return float(case.question.of(logits)[0])


def as_places(case, nodes):
    width = case.codes[0].shape[1]
    return [(n, *divmod(int(one), width)) for n, own in enumerate(nodes) for one in own]


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_the_largest_and_random_codes_beside_a_graph(name):
    case, rng = explained(name), np.random.default_rng(0)
    inside = [(code != 0) & torch.tensor(rng.random(code.shape) < 0.1) for code in case.codes]
    inside[0][1] = False  # a token without a node
    table = trust.alone_and_gone(case, inside, trust.DRAWS, seed=3)
    assert table["edit"].tolist() == ["keep", "remove"] and (table["draws"] == trust.DRAWS).all()
    assert trust.DRAWS >= 40 and (table["nodes"] == sum(int(own.sum()) for own in inside)).all()
    largest = []
    for layer, (code, own) in enumerate(zip(case.codes, inside, strict=True)):
        for pos, row in enumerate(code.tolist()):
            order = sorted(range(len(row)), key=lambda atom, row=row: -abs(row[atom]))
            largest += [(layer, pos, atom) for atom in order[: int(own[pos].sum())]]
    generator = torch.Generator().manual_seed(3)
    drawn = [
        trust.random_nodes(code, own.sum(dim=1), trust.DRAWS, generator)
        for code, own in zip(case.codes, inside, strict=True)
    ]
    chosen = as_places(case, [own.flatten().nonzero()[:, 0] for own in inside])
    draws = [as_places(case, [layer[n] for layer in drawn]) for n in range(trust.DRAWS)]
    assert len(set(map(tuple, draws))) == trust.DRAWS
    for row, others in zip(table.itertuples(), (False, True), strict=True):
        assert row.logit == pytest.approx(by_hand(case, chosen, others), abs=1e-9)
        assert row.largest == pytest.approx(by_hand(case, largest, others), abs=1e-9)
        targets = sorted(by_hand(case, one, others) for one in draws)
        assert row.random_mean == pytest.approx(sum(targets) / trust.DRAWS, abs=1e-9)
        for at, share in ((row.random_q025, 0.025), (row.random_q975, 0.975)):
            below = int(share * (trust.DRAWS - 1))
            part = share * (trust.DRAWS - 1) - below
            end = (1 - part) * targets[below] + part * targets[below + 1]
            assert at == pytest.approx(end, abs=1e-9)
    other = trust.alone_and_gone(case, inside, 0, seed=3)["largest"].tolist()
    assert other == pytest.approx(table["largest"].tolist(), abs=1e-9)


def test_k_codes_at_any_token_by_attribution_and_by_size():
    case = explained("crate-lm")
    row = trust.sufficiency(case, seed=0).set_index("k").loc[3]
    sizes = {"logit": [case.attribution(n) for n in range(len(case.codes))], "largest": case.codes}
    for column, each in sizes.items():
        best = [np.argsort(-own.abs().flatten().numpy())[:3] for own in each]
        assert row[column] == pytest.approx(by_hand(case, as_places(case, best)), abs=1e-9)
