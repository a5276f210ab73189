"""ci.graph: why a model gave one answer, in the nodes of its own codes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.circuits.attention_reasons import strongest_pairs
from crate_interp.circuits.excerpts import sample_picture, special_tokens, token_words
from crate_interp.circuits.graphs import question as questions
from crate_interp.circuits.graphs import result, trust
from crate_interp.circuits.graphs.atom_names import AtomNames
from crate_interp.circuits.graphs.derivatives import FREEZABLE, CutPass, Explained, values
from crate_interp.circuits.graphs.question import Question, Target
from crate_interp.circuits.graphs.result import AttributionGraph, node_name
from crate_interp.circuits.graphs.selection import SKIP, Graph, edge_table, select
from crate_interp.circuits.logits import answer_names
from crate_interp.core import checks
from crate_interp.core.run_options import tqdm
from crate_interp.core.safe_text import visible
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hook_points import PATTERNLESS
from crate_interp.models.hooked import HookedModel, check_gradients
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.edited_runs import joined
from crate_interp.questions.provenance import model_meta
from crate_interp.questions.untrained_twins import twin

# of so many nodes the effect is measured at least; of as many more as forwards of a tiny network,
# in tokens times parameters, make half a minute
_EFFECTS, _WORK = 24, 2**34
_LOOKS, _PAIRS = 24, 5  # of so many looks of heads the strongest pairs of atoms are kept
_WAIT = 5.0  # a graph that takes longer shows how far it is


@with_weights
@in_full_precision
def graph(
    model: HookedModel,
    inputs: object,
    *,
    target: Target = None,
    position: int | None = None,
    freeze: Sequence[str] = (),
    nodes: float = 0.8,
    edges: float = 0.98,
    most: int = 200,
    seed: int = 0,
    names: AtomNames | None = None,
    tests: bool = True,
) -> AttributionGraph:
    """Returns the attribution graph of one answer: which codes made it, and through which heads.

    A node is a code that is not 0, at a token; its attribution is `z d target / d z`. An edge is
    the direct effect of a code on the pre-threshold value of another, `z d pre / d z` along all
    paths that pass through no other code. Where the code replaces the stream (crate, crate-lm, cbt,
    tost-ista) edges run from each layer to the next; elsewhere they may skip layers. The nodes of
    plain MLPs (gpt-baseline, tost) are their neurons.

    If "pattern" and "norm" are both frozen, attributions add up exactly in models whose step has a
    ReLU. With nothing frozen (the default) they do not add up, but predict real ablations better.
    The scale of the first norm is always held: the norm of an embedding does not change with its
    length.

    Unlike circuit-tracer (Ameisen et al. 2025, Circuit Tracing) it has no replacement model and no
    error nodes: every value is the model's own.

    Args:
        model: A hooked model with logits.
        inputs: One sample: an image, or token ids, or a text.
        target: A class or token, by number or name; two for the difference of their logits. From a
            single logit the mean of all logits is subtracted. Default: the largest logit.
        position: The token of a text after which the answer comes; later tokens of a causal model
            are left out. In crate-bert it is the token that is asked for, such as a masked one, and
            must be given. Default: the last.
        freeze: What is held constant for derivatives: pattern, norm or both.
        nodes: The share of the influence that the kept nodes hold, as in circuit-tracer.
        edges: The share of the influence that the kept edges hold.
        most: How many codes to look at, an equal number in each layer.
        seed: Draws random nodes and the untrained network.
        names: The result of `ci.circuits.atom_names`, whose names nodes then have.
        tests: Test the attributions on nodes outside the graph, draw random nodes, and make the
            graphs of an untrained copy and of the next answer. Without tests a graph has the
            effects of its nodes, and what they give alone; it takes a seventh of the time.

    Returns:
        The graph: its nodes, its edges, and how well it predicts real ablations.

    Raises:
        ValueError: Before work starts, for a model without logits or codes, for several samples,
            and for an invalid target, position or share.
    """
    questions.check_model(model)
    check_gradients("graph", model)
    frozen = freeze if isinstance(freeze, (tuple, list)) else (freeze,)
    if not set(frozen) <= set(FREEZABLE):
        raise ValueError(f'freeze={checks.quote(freeze)}: give "pattern", "norm", both, or ().')
    for name, share in (("nodes", nodes), ("edges", edges)):
        if not checks.is_number(share) or not 0 < share <= 1:
            raise ValueError(f"{name}={checks.quote(share)}: give a share above 0 and at most 1.")
    settings = {"freeze": tuple(name for name in FREEZABLE if name in frozen)}
    most = checks.count("most", most, least=model.cfg.n_layers)  # one in each layer
    tests = checks.flag("tests", tests)
    settings |= {"nodes": float(nodes), "edges": float(edges), "most": most}
    digest = model_meta(model, 1)["model_digest"]
    if names is not None and getattr(names, "meta", {}).get("model_digest") != digest:
        raise ValueError("names: give names of this model, ci.circuits.atom_names(model, data).")
    sample = questions.one_sample(model, inputs)
    with torch.no_grad():
        question = questions.ask_answer(model, model(sample), target, position)
    sample = questions.read_part(model, sample, question)
    found = AttributionGraph(*_measured(model, sample, question, settings, seed, names, tests))
    object.__setattr__(found, "_case", (model, sample))
    return found


def _measured(
    model: HookedModel,
    sample: Tensor,
    question: Question,
    settings: dict[str, Any],
    seed: int,
    names: AtomNames | None,
    tests: bool,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Returns the tables and the meta of a graph."""
    more: dict[str, Any] = {}
    with (
        torch.enable_grad(),
        tqdm(total=5 if tests else 3, desc="graph", delay=_WAIT, leave=False) as bar,
    ):
        cut, chosen = _chosen(model, sample, question, settings)
        case, kept = cut.case, chosen.kept
        bar.update()
        tables = graph_tables(cut, chosen, names)
        tables["looks"] = _looks(case, tables["nodes"], tables["edges"])
        bar.update()
        trusted = [_trust(case, chosen, trust.DRAWS if tests else 0, seed, result.MODEL)]
        bar.update()
        if tests:
            other: Any = twin(model, seed)
            with torch.no_grad():
                own_answer = questions.ask_answer(other, other(sample), None, question.position)
            untrained, drawn = _chosen(other, sample, own_answer, settings)
            beside = _trust(untrained.case, drawn, trust.DRAWS_UNTRAINED, seed, result.UNTRAINED)
            bar.update()
            rival, table = _rival(case, settings, seed)
            more = {"untrained": untrained.case.target} | rival
            trusted += [beside, {"whole": table}]
            bar.update()
    tables |= joined(
        {name: [some[name] for some in trusted if name in some] for name in trusted[0]}
    )
    answers = names_of(model)
    target = {
        "answer": question.answer, "versus": question.versus, "position": question.position,
        "name": answers[question.answer], "logit": case.target,
        "versus_name": "" if question.versus is None else answers[question.versus],
    }  # fmt: skip
    return tables, model_meta(model, 1) | {
        "settings": settings | {"seed": seed, "shape": [len(case.codes), *case.codes[0].shape]},
        "target": target, "sample": questions.sample_digest(sample),
        "scores": {"completeness": kept.completeness, "replacement": kept.replacement},
        "tokens": token_words(model, sample), "special": special_tokens(model),
    } | more  # fmt: skip


def _chosen(
    model: HookedModel, sample: Tensor, question: Question, settings: dict[str, Any]
) -> tuple[CutPass, Graph]:
    """Returns a forward that gives effects, with the values of a sample, and the graph."""
    cut = CutPass(values(model, sample, question, settings["freeze"]))
    return cut, select(cut, settings["nodes"], settings["edges"], settings["most"])


def _rival(
    case: Explained, settings: dict[str, Any], seed: int
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Returns the likeliest other answer, and what the nodes of its own graph give both answers.

    These nodes are chosen as the answer's nodes are. Without another answer both are empty.
    """
    question, logits = case.question, case.logits
    own = (question.answer, question.versus)
    others = [number for number in logits.argsort(descending=True).tolist() if number not in own]
    if not others:
        return {}, pd.DataFrame()
    other = Question(others[0], None, question.position)
    cut, chosen = _chosen(case.model, case.sample, other, settings)
    nodes = inside(cut.case, chosen)
    tables = [
        trust.alone_and_gone(one, nodes, 0, seed).assign(network=name)
        for name, one in ((result.RIVAL, cut.case), (result.RIVAL_NODES, case))
    ]
    name = names_of(case.model)[others[0]]
    found = {"answer": others[0], "name": name, "logit": cut.case.target}
    return {"rival": found}, pd.concat(tables)


def _trust(
    case: Explained, chosen: Graph, draws: int, seed: int, network: str
) -> dict[str, pd.DataFrame]:
    """Returns the tables that say how far a graph may be trusted; without draws only "whole"."""
    masks, tested = inside(case, chosen), bool(draws)
    ablated = trust.ablations(case, masks, seed, trust.ABLATED * tested)
    tables = {
        "ablations": ablated,
        "agreement": trust.agreement(ablated),
        "sufficiency": trust.sufficiency(case, seed, trust.KEPT * tested),
        "whole": trust.alone_and_gone(case, masks, draws, seed),
    }
    return {name: rows.assign(network=network) for name, rows in tables.items()}


def graph_tables(cut: CutPass, chosen: Graph, names: AtomNames | None) -> dict[str, pd.DataFrame]:
    """Returns the tables of the graph itself; "picture" is empty for a text."""
    case, model = cut.case, cut.case.model
    nodes, edges = _nodes_and_edges(cut, chosen)
    places, layers = [], []
    for layer, bias in enumerate([0.0, *trust.baselines(case)], -1):
        attribution = case.attribution(layer)
        sums = attribution.sum(dim=1).cpu().numpy()
        places.append(pd.DataFrame({"layer": layer, "pos": range(len(sums)), "attribution": sums}))
        if layer >= 0:
            total, active = float(attribution.sum()), int((case.codes[layer] != 0).sum())
            layers.append((layer, active, total, bias, case.target - total - bias))
    logits = case.logits.double().cpu()
    answers = pd.DataFrame({"name": names_of(model), "logit": logits - logits.mean()})
    answers = answers.assign(probability=logits.softmax(dim=0).numpy()).rename_axis("answer")
    examples = []
    if names is not None:
        labels = [
            (names.name_of(layer, atom) or "no name") if atom >= 0 else ""
            for layer, atom in nodes[["layer", "atom"]].itertuples(index=False)
        ]
        nodes = nodes.assign(label=labels)
        kept = chosen.nodes[chosen.kept.nodes].tolist()
        for layer, atom in sorted({(layer, atom) for layer, _, atom in kept if atom >= 0}):
            for one in names.examples(layer, atom):
                examples.append((layer, atom, one["value"], one["words"], one["webp"]))
    return {
        "nodes": nodes,
        "edges": edges,
        "layers": pd.DataFrame(layers, columns=["layer", "active", "attribution", "bias", "error"]),
        "answers": answers.reset_index().astype({"logit": float}),
        "places": pd.concat(places, ignore_index=True),
        "picture": sample_picture(model, case.sample),
        "examples": pd.DataFrame(examples, columns=["layer", "atom", "value", "words", "webp"]),
    }


def _nodes_and_edges(cut: CutPass, chosen: Graph) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the tables "nodes" and "edges".

    Nodes are kept codes, embeddings with an edge, the target, and biases of each layer; edges of
    biases come last.
    """
    case, count = cut.case, len(cut.case.codes)
    linked = chosen.kept.edges.any(dim=0) | (chosen.nodes[:, 0] >= 0)
    kept = (chosen.kept.nodes & linked).nonzero()[:, 0].tolist()
    names = [
        node_name(layer, pos, result.TARGET if layer == count else atom)
        for layer, pos, atom in chosen.nodes.tolist()
    ]
    nodes: list[tuple] = []
    edges = [(names[s], names[t], *more) for s, t, *more in edge_table(case, chosen)]
    for number in kept:
        (layer, pos, atom), rest = chosen.nodes[number].tolist(), float(chosen.rest[number])
        if layer == count:
            numbers = (result.TARGET, case.target, case.target, 1.0)
        else:
            value = float(case.codes[layer][pos, atom]) if layer >= 0 else np.nan
            attribution = float(case.attribution(layer)[pos, max(atom, 0)])
            numbers = (atom, value, attribution, float(chosen.kept.influence[number]))
        nodes.append((names[number], layer, pos, *numbers))
        if layer >= 0 and rest:
            edges.append((node_name(layer, -1, result.BIAS), names[number], rest, SKIP))
    for layer in range(count + 1):
        added = float(chosen.rest[-1])
        if layer < count:
            slope = case.slopes_before[layer]
            whole = float((case.before[layer].double() * slope.double()).sum())
            added = whole - cut.carried(layer, slope)
        nodes.append(
            (node_name(layer, -1, result.BIAS), layer, -1, result.BIAS, np.nan, added, 0.0)
        )
    columns = ["node", "layer", "pos", "atom", "value", "attribution", "influence"]
    table: Any = pd.DataFrame(nodes, columns=columns).assign(effect=np.nan, label="")
    # real forwards without each node; in a large network without those of the largest influence
    real = table[(table["atom"] >= result.EMBEDDING) & (table["layer"] < count)]
    work = len(case.embedded) * case.model.n_params_total
    for layer, rows in real.nlargest(max(_EFFECTS, _WORK // work), "influence").groupby("layer"):
        after = trust.without(case, int(layer), torch.tensor(rows[["pos", "atom"]].to_numpy()))
        table.loc[rows.index, "effect"] = case.target - after.numpy()
    table = table.sort_values(["layer", "pos", "atom"], ignore_index=True)
    return table, pd.DataFrame(edges, columns=["source", "target", "weight", "head"])


def _looks(case: Explained, nodes: pd.DataFrame, edges: pd.DataFrame) -> pd.DataFrame:
    """Returns why heads look where they carry most of the edges: the strongest pairs of atoms.

    Layer 0 reads no codes, CBT's and ToST's heads do not look from a token at a token, and the
    edges of nanochat-crate are not split over heads.
    """
    if case.model.cfg.facts["attention"] in PATTERNLESS:
        return pd.DataFrame()
    place: Any = nodes.set_index("node")[["layer", "pos"]]
    split: Any = edges[edges["head"] >= 0]
    to, source = (place.loc[split[side]] for side in ("target", "source"))
    layer, query, key = to["layer"].to_numpy(), to["pos"].to_numpy(), source["pos"].to_numpy()
    split = split.assign(layer=layer, query=query, key=key, weight=split["weight"].abs())
    found = split[split["layer"] > 0].groupby(["layer", "head", "query", "key"])["weight"].sum()
    with torch.no_grad():
        at = found.nlargest(_LOOKS).index.tolist()
        return strongest_pairs(case.model, case.sample, at, _PAIRS)


def inside(case: Explained, chosen: Graph) -> list[Tensor]:
    """Returns for each layer which codes `[pos, atom]` are nodes of the graph."""
    masks = [torch.zeros(code.shape, dtype=torch.bool) for code in case.codes]
    for layer, pos, atom in chosen.nodes[chosen.kept.nodes].tolist():
        if 0 <= layer < len(masks):
            masks[layer][pos, atom] = True
    return masks


def names_of(model: HookedModel) -> list[str]:
    """Returns the names of the answers; characters that could harm a page are escaped."""
    return [visible(name) for name in answer_names(model)]
