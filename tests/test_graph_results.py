"""Graphs as results: how far they may be trusted, steering, bad input, files."""

import json

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm, refuses
from crate_hooks import full_name
from crate_interp.circuits.graphs.derivatives import CODE, values
from crate_interp.circuits.graphs.question import asked
from crate_interp.circuits.graphs.trust import (
    agreement,
    keeping,
    random_nodes,
    sufficiency,
    without,
)

IMAGE = torch.randn(1, 3, 6, 20, generator=torch.Generator().manual_seed(1))
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
NETWORKS = ("crate", "crate-alpha", "crate-lm", "nanochat-crate")


def network(name):
    if "lm" in name or "nanochat" in name:
        return make_lm(name).double(), TOKENS
    return make(name).double(), IMAGE.double()


def explained(name):
    model, sample = network(name)
    question = asked(model, model(sample), None, None)
    return values(model, sample, question, ())


@pytest.mark.parametrize("name", NETWORKS)
def test_ablations_are_forwards_with_a_code_of_zero(name):
    case = explained(name)
    for layer, code in enumerate(case.codes):
        nodes = code.nonzero()[::53]
        found = without(case, layer, nodes)
        for (pos, atom), target in zip(nodes.tolist(), found.tolist(), strict=True):

            def gone(value, hook, pos=pos, atom=atom):
                value = value.clone()
                value[:, pos, atom] = 0
                return value

            hooks = [(full_name(CODE, layer), gone)]
            logits = case.model.run_with_hooks(case.sample, fwd_hooks=hooks)
            assert target == pytest.approx(float(case.question.of(logits.detach())[0]), abs=1e-9)


@pytest.mark.parametrize("name", ["crate", "nanochat-crate"])
def test_without_an_embedding_its_token_is_zero(name):
    from crate_interp.circuits.graphs.derivatives import embedding_point

    case = explained(name)
    nodes = torch.tensor([[2, -1], [5, -1]])
    found = without(case, -1, nodes)
    for (pos, _), target in zip(nodes.tolist(), found.tolist(), strict=True):

        def gone(value, hook, pos=pos):
            value = value.clone()
            value[:, pos] = 0
            return value

        hooks = [(embedding_point(case.model), gone)]
        logits = case.model.run_with_hooks(case.sample, fwd_hooks=hooks).detach()
        assert target == pytest.approx(float(case.question.of(logits)[0]), abs=1e-9)


@pytest.mark.parametrize("name", NETWORKS[:3])
def test_what_stays_alone(name):
    """All nodes give the answer, all coordinates in other axes too, and none another one."""
    case = explained(name)
    every = [torch.arange(code.numel())[None] for code in case.codes]
    width = case.codes[0].shape[1]
    axes = [torch.linalg.qr(torch.randn(width, width).double())[0] for _ in every]
    assert float(keeping(case, every)[0]) == pytest.approx(case.target, abs=1e-9)
    turned = float(keeping(case, every, axes=axes)[0])
    assert turned == pytest.approx(case.target, abs=1e-7)
    none = float(keeping(case, every, others=True)[0])
    assert abs(none - case.target) > 1e-3
    nothing = [nodes[:, :0] for nodes in every]
    assert float(keeping(case, nothing)[0]) == pytest.approx(none, abs=1e-12)


def test_curves_of_sufficiency_repeat():
    table = sufficiency(explained("crate-lm"), seed=0)
    assert table["k"].is_monotonic_increasing and len(table) >= 4
    again = sufficiency(explained("crate-lm"), seed=0)
    np.testing.assert_array_equal(table, again)


def test_agreement_is_pearsons_and_spearmans():
    import pandas as pd
    from scipy.stats import pearsonr, spearmanr

    x = np.random.default_rng(0).normal(size=23)
    y = x + np.random.default_rng(1).normal(size=23)
    table = pd.DataFrame({"layer": 0, "attribution": x, "effect": y})
    row = agreement(table).iloc[0]
    found = pearsonr(x, y)
    assert row["pearson"] == pytest.approx(found.statistic)
    interval = found.confidence_interval()
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-4)
    assert row["spearman"] == pytest.approx(spearmanr(x, y).statistic) and row["n"] == 23
    assert agreement(table.assign(effect=1.0)).iloc[0, 1:5].isna().all()


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
        nodes = torch.tensor([[row.pos, row.atom]])
        after = without(case, row.layer, nodes)
        assert row.effect == pytest.approx(case.target - float(after[0]), abs=1e-9)
    outside = graph.table("ablations").merge(codes, on=["layer", "pos", "atom"])
    assert outside[outside["network"] == "model"].empty
    names = set(table["node"])
    edges = graph.table("edges")
    assert set(edges["source"]) | set(edges["target"]) <= names
    networks = {"model", "untrained", "rival", "rival_nodes"}
    assert set(graph.table("whole")["network"]) == networks


def test_the_rival_is_the_graph_of_the_next_answer(graph):
    model, sample = network("crate")
    second = int(model(sample)[0].argsort(descending=True)[1])
    other = ci.graph(model, sample, target=second, most=40)
    rival = graph.meta["rival"]
    assert (rival["answer"], rival["logit"]) == (second, other.meta["target"]["logit"])
    own, same = graph.of("whole", "rival"), other.of("whole")
    assert own[["edit", "nodes"]].equals(same[["edit", "nodes"]])
    for column in ("logit", "largest"):
        assert own[column].tolist() == pytest.approx(same[column].tolist(), abs=1e-12)
    # a pair of answers is not its own rival
    first = graph.meta["target"]["answer"]
    pair = ci.graph(model, sample, target=(first, second), most=40)
    assert pair.meta["rival"]["answer"] not in (first, second)


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
    nodes = random_nodes(code, counts, 600, generator)
    masks = torch.zeros(600, 7 * 31, dtype=torch.bool).scatter_(1, nodes, True).view(600, 7, 31)
    assert (masks.sum(dim=-1) == counts).all() and not (masks & (code == 0)).any()
    assert len(masks.flatten(1).unique(dim=0)) > 590
    assert random_nodes(code, counts, 0, generator).shape == (0, 18)
    # each node that is not 0 is as likely as the others of its token
    many = masks.double()
    for pos in range(7):
        active = code[pos] != 0
        share = many[:, pos, active].mean(dim=0)
        chance = counts[pos] / active.sum()
        assert (share - chance).abs().max() <= 5 * (chance * (1 - chance) / len(many)).sqrt()


def test_headline_says_first_that_a_graph_is_not_faithful(graph):
    words = graph.headline()
    assert words.startswith(graph.warning()) and bool(graph.warning()) != graph.faithful()
    by_layer = graph.of("agreement")["pearson"].dropna()
    assert f"r = {by_layer.min():.2f} to {by_layer.max():.2f}, by layer" in words
    worse = graph.table("agreement").assign(pearson=0.3)
    bad = ci.AttributionGraph({**graph.stored, "agreement": worse}, graph.meta)
    assert "Do not rely on its attributions: they predict " in bad.warning()
    assert "ablations with r = 0.30" in bad.headline() and not bad.faithful()


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


BAD_EDITS = {
    "no node": ({"L9A0@0": 0}, "there is no code 'L9A0@0' to steer"),
    "a wrong name": ({"E@3": 0}, "there is no code 'E@3' to steer"),
    "no number": ({"L0A0": "off"}, "is no finite number"),
    "nothing": ({}, "give nodes"),
}


@pytest.mark.parametrize("case", BAD_EDITS)
def test_bad_edits(graph, case, unchecked):
    edits, words = BAD_EDITS[case]
    refuses(words, lambda: graph.steer(edits))


BAD = {
    "two samples": (dict(inputs=IMAGE.double().repeat(2, 1, 1, 1)), "give one sample"),
    "another size": (dict(inputs=IMAGE[..., :10].double()), "image"),
    "nan": (dict(inputs=IMAGE.double() * torch.nan), "NaN or Inf"),
    "no such class": (dict(target=99), "target=99"),
    "a name": (dict(target="shoe"), "no class 'shoe'"),
    "a pair of one": (dict(target=(2, 2)), "two different"),
    "three targets": (dict(target=(1, 2, 3)), "two different"),
    "a position": (dict(position=2), "leave out position"),
    "freeze": (dict(freeze=("heads",)), 'give "pattern", "norm"'),
    "a share": (dict(nodes=1.5), "nodes=1.5"),
    "no edges": (dict(edges=0), "edges=0"),
    "too few": (dict(most=1), "most=1"),
    "no number": (dict(most="all"), "most"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, unchecked):
    settings, words = BAD[case]
    inputs = settings.pop("inputs", IMAGE.double())
    refuses(words, lambda: ci.graph(network("crate")[0], inputs, **settings))


def test_models_and_texts_without_a_graph(unchecked):
    square = torch.randn(1, 3, 6, 20)
    refuses("attention alone", lambda: ci.graph(make("aot"), square))
    refuses("no logits", lambda: ci.graph(make("crate", n_classes=0), square))
    mae = ci.HookedCrateMAE(
        ci.CrateConfig(
            family="crate-mae", d_model=12, n_layers=2, n_heads=3, image_size=(6, 20),
            patch_size=(2, 5), decoder_n_layers=1, decoder_n_heads=3,
        )
    ).eval()  # fmt: skip
    refuses("no logits", lambda: ci.graph(mae, square))
    lm = make_lm()
    refuses("give one sample", lambda: ci.graph(lm, TOKENS.repeat(2, 1)))
    refuses("tokens 0 to 6", lambda: ci.graph(lm, TOKENS, position=7))
    refuses("a text or token ids", lambda: ci.graph(lm, 5))


def test_it_runs_without_gradients_and_refuses_half_precision():
    model, sample = network("crate")
    with torch.no_grad():
        found = ci.graph(model, sample, most=40)
    assert found.digest() == ci.graph(model, sample, most=40).digest()
    with torch.inference_mode(), pytest.raises(ValueError, match="needs gradients"):
        ci.graph(model, sample)
    refuses("lost in rounding", lambda: ci.graph(model.bfloat16(), sample))


def test_without_codes_nothing_is_claimed():
    graph = ci.graph(make("crate", lambd=1e4), IMAGE)
    assert graph.headline().startswith("Too few codes are on to test attributions.")


def test_more_nodes_than_there_are_is_all_of_them():
    model, sample = make_lm(d_mlp=11).double(), TOKENS
    graph = ci.graph(model, sample, most=10**6, nodes=1.0, edges=1.0)
    nodes = graph.table("nodes")
    counts = nodes[nodes["atom"] >= 0].groupby("layer").size()
    active = graph.table("layers").set_index("layer")["active"]
    assert (counts <= active).all() and graph.meta["scores"]["completeness"] > 0.999


# the fields of circuit-tracer's pydantic models (frontend/graph_models.py)
FIELDS = {
    "metadata": "slug scan transcoder_list prompt_tokens prompt node_threshold schema_version",
    "qParams": "pinnedIds supernodes linkType clickedId sg_pos",
    "nodes": "node_id feature layer ctx_idx feature_type token_prob is_target_logit run_idx "
    "reverse_ctx_idx jsNodeId clerp influence activation",
    "links": "source target weight",
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
    refuses("name of a .json file", lambda: graph.to_circuit_tracer(tmp_path / "graph"))


# mean over layers of Pearson's r that the embedded models reach
LEAST = {"crate-tiny-lm": 0.85, "crate-tiny-induction": 0.85, "crate-tiny-fashion": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_attributions_predict_ablations_of_the_embedded_models(name):
    model = ci.load(name)
    for number in range(3):
        if name == "crate-tiny-fashion":
            found = ci.graph(
                model,
                ci.data.open_data("embedded:fashion", model.preprocess).read(number, number + 1),
            )
        elif name == "crate-tiny-lm":
            text = ci.data.embedded("held-out-text")[number]["text"]
            found = ci.graph(model, model.to_tokens(text[:200])[:, :48])
        else:
            generator = torch.Generator().manual_seed(number)
            half = torch.randint(model.cfg.d_vocab, (1, 24), generator=generator)
            found = ci.graph(model, torch.cat([half, half], dim=1)[:, :-3])
        assert found.predicts >= LEAST[name], (number, found.headline())
