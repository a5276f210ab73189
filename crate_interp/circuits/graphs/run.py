"""ci.graph: why a model gave one answer, in the nodes of its own codes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_interp.circuits.graphs.atom_names import AtomNames
from crate_interp.circuits.graphs.concepts import special_tokens
from crate_interp.circuits.graphs.derivatives import FREEZABLE, CutPass, Explained, values
from crate_interp.circuits.graphs.graph_tables import (
    answer_table,
    edge_rows,
    example_table,
    inside,
    labelled,
    layer_table,
    names_of,
    node_table,
    picture_table,
    place_table,
)
from crate_interp.circuits.graphs.question import (
    Question,
    Target,
    asked,
    check_model,
    one_sample,
    read_part,
    sample_digest,
)
from crate_interp.circuits.graphs.result import (
    MODEL,
    RIVAL,
    RIVAL_NODES,
    UNTRAINED,
    AttributionGraph,
)
from crate_interp.circuits.graphs.selection import Graph, edge_table, select
from crate_interp.circuits.graphs.trust import (
    DRAWS,
    DRAWS_UNTRAINED,
    ablations,
    agreement,
    alone_and_gone,
    sufficiency,
)
from crate_interp.core import checks
from crate_interp.core.progress import tqdm
from crate_interp.core.safe_text import visible
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.compat.offload import with_weights
from crate_interp.models.gradients import check_gradients
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.runs.batches import check_model as check_hooked_model
from crate_interp.sweeps.runs.provenance import model_meta
from crate_interp.sweeps.runs.untrained_twins import twin

_WAIT = 5.0  # a graph that takes longer shows how far it is


@dataclass(frozen=True)
class _Wanted:
    """The settings of `graph`."""

    freeze: tuple[str, ...]
    nodes: float
    edges: float
    most: int


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
) -> AttributionGraph:
    """Returns the attribution graph of one answer: which codes made it, and through which heads.

    A node is a code that is not 0, at a token; its attribution is `z d target / d z`. An edge is
    the direct effect of a code on the pre-threshold value of another, `z d pre / d z` along all
    paths that pass through no other code. Where the code replaces the stream (crate, crate-lm, cbt,
    tost-ista) edges run from each layer to the next; elsewhere they may skip layers. The nodes of
    plain MLPs (gpt-baseline, tost) are their neurons.

    inputs: one sample: an image, or token ids, or a text. target: a class or token by number or
    name, or a pair for the difference of two logits; None stands for the largest logit. A single
    logit is taken less the mean of all logits. position: the token of a text whose logits are read;
    None stands for the last. Later tokens of a causal model are left out. freeze: what is held
    constant for derivatives, "pattern", "norm" or both. With both, attributions add up exactly
    where a step has a ReLU; with nothing frozen (the default) they do not, but they predict real
    ablations better. The scale of the first norm is always held: the norm of an embedding does not
    change with its length. nodes, edges: the share of the influence that the kept nodes and edges
    hold, as in circuit-tracer. most: how many codes are looked at, an equal number in each layer.
    seed: draws random nodes and the untrained network. names: the result of
    `ci.circuits.atom_names`, whose names nodes then have.

    Unlike circuit-tracer (Ameisen et al. 2025, Circuit Tracing) it has no replacement model and no
    error nodes: every value is the model's own.

    Raises ValueError, before work starts, for a model without logits or codes, for several samples,
    and for a target, position or share that cannot be.
    """
    check_hooked_model(model)
    check_model(model)
    check_gradients("graph", model)
    wanted = _wanted(model, freeze, nodes, edges, most)
    _check_names(model, names)
    sample = one_sample(model, inputs)
    with torch.no_grad():
        question = asked(model, model(sample), target, position)
    sample = read_part(model, sample, question)
    tables, meta = _measured(model, sample, question, wanted, seed, names)
    result = AttributionGraph(tables, meta)
    object.__setattr__(result, "_case", (model, sample))
    return result


def _measured(
    model: HookedModel,
    sample: Tensor,
    question: Question,
    wanted: _Wanted,
    seed: int,
    names: AtomNames | None,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Returns the tables and the meta of a graph."""
    with torch.enable_grad(), tqdm(total=5, desc="graph", delay=_WAIT, leave=False) as bar:
        case, cut, chosen = _chosen(model, sample, question, wanted)
        bar.update()
        tables = _tables(case, cut, chosen, wanted.freeze, names)
        bar.update()
        own = _trust(case, chosen, DRAWS, seed)
        bar.update()
        drawn, beside = _untrained(model, sample, question.position, wanted, seed)
        bar.update()
        rival, table = _rival(case, wanted, seed)
        bar.update()
    tables |= {name: _beside(table, beside[name]) for name, table in own.items()}
    tables["whole"] = pd.concat([tables["whole"], table], ignore_index=True)
    meta = _meta(case, chosen, {**asdict(wanted), "seed": seed})
    return tables, meta | {"untrained": drawn} | rival


def _beside(own: pd.DataFrame, twin: pd.DataFrame) -> pd.DataFrame:
    both = [own.assign(network=MODEL), twin.assign(network=UNTRAINED)]
    return pd.concat(both, ignore_index=True)


def _tables(
    case: Explained, cut: CutPass, chosen: Graph, freeze: tuple[str, ...], names: AtomNames | None
) -> dict[str, pd.DataFrame]:
    """Returns the tables of the graph itself."""
    links = edge_table(cut, case.values, chosen, freeze)
    return {
        "nodes": labelled(node_table(case, chosen, cut), names),
        "edges": edge_rows(chosen, links),
        "layers": layer_table(case, freeze),
        "answers": answer_table(case.model, case.values),
        "places": place_table(case.values),
        "picture": picture_table(case.model, case.sample),
        "examples": example_table(chosen, names),
    }


def _wanted(
    model: HookedModel, freeze: Sequence[str], nodes: float, edges: float, most: int
) -> _Wanted:
    """Returns the settings; raises ValueError for those that cannot be used."""
    given = (freeze,) if isinstance(freeze, str) else freeze
    if not isinstance(given, (tuple, list)) or not set(given) <= set(FREEZABLE):
        raise ValueError(f'freeze={checks.shown(freeze)}: give "pattern", "norm", both, or ().')
    for name, share in (("nodes", nodes), ("edges", edges)):
        if not checks.is_number(share) or not 0 < share <= 1:
            raise ValueError(f"{name}={checks.shown(share)}: give a share above 0 and at most 1.")
    most = checks.count("most", most)
    if most < model.cfg.n_layers:
        raise ValueError(f"most={most}: give at least one node a layer, {model.cfg.n_layers}.")
    frozen = tuple(name for name in FREEZABLE if name in given)
    return _Wanted(frozen, float(nodes), float(edges), most)


def _check_names(model: HookedModel, names: AtomNames | None) -> None:
    if names is None:
        return
    if not isinstance(names, AtomNames):
        raise ValueError(f"names is {checks.shown(names)}: give ci.circuits.atom_names(...).")
    if names.meta["model_digest"] != model_meta(model, 1)["model_digest"]:
        raise ValueError("names are those of another model: name the atoms of this one.")


def _chosen(
    model: HookedModel, sample: Tensor, question: Question, wanted: _Wanted
) -> tuple[Explained, CutPass, Graph]:
    """Returns a sample with its values, a forward that gives effects, and the graph."""
    own = values(model, sample, question, wanted.freeze)
    cut = CutPass(model, sample, question, wanted.freeze)
    chosen = select(cut, own, wanted.nodes, wanted.edges, wanted.most)
    return Explained(model, sample, question, own), cut, chosen


def _untrained(
    model: HookedModel, sample: Tensor, position: int | None, wanted: _Wanted, seed: int
) -> tuple[float, dict[str, pd.DataFrame]]:
    """Returns the target of an untrained network, for its own answer, and its tables of trust."""
    other: Any = twin(model, seed)
    with torch.no_grad():
        question = asked(other, other(sample), None, position)
    case, _, chosen = _chosen(other, sample, question, wanted)
    return case.values.target, _trust(case, chosen, DRAWS_UNTRAINED, seed)


def _rival(case: Explained, wanted: _Wanted, seed: int) -> tuple[dict[str, Any], pd.DataFrame]:
    """Returns the likeliest other answer, and what the nodes of its own graph give both answers.

    They are chosen as those of the answer are. Without another answer both are empty.
    """
    question, logits = case.question, case.values.logits
    own = (question.answer, question.versus)
    others = [number for number in logits.argsort(descending=True).tolist() if number not in own]
    if not others:
        return {}, pd.DataFrame()
    asked_too = Question(others[0], None, question.position)
    rival, _, chosen = _chosen(case.model, case.sample, asked_too, wanted)
    nodes = inside(rival, chosen)
    tables = [
        alone_and_gone(one, nodes, 0, seed).assign(network=name)
        for name, one in ((RIVAL, rival), (RIVAL_NODES, case))
    ]
    name = names_of(case.model)[others[0]]
    found = {"answer": others[0], "name": name, "logit": rival.values.target}
    return {"rival": found}, pd.concat(tables)


def _trust(case: Explained, chosen: Graph, draws: int, seed: int) -> dict[str, pd.DataFrame]:
    """Returns the tables that say how far a graph may be trusted."""
    masks = inside(case, chosen)
    tests = ablations(case, masks, seed)
    return {
        "ablations": tests,
        "agreement": agreement(tests),
        "sufficiency": sufficiency(case, seed),
        "whole": alone_and_gone(case, masks, draws, seed),
    }


def _meta(case: Explained, chosen: Graph, settings: dict[str, Any]) -> dict[str, Any]:
    model, question, own = case.model, case.question, case.values
    names = names_of(model)
    target = {
        "answer": question.answer, "versus": question.versus, "position": question.position,
        "name": names[question.answer], "logit": own.target,
        "versus_name": "" if question.versus is None else names[question.versus],
    }  # fmt: skip
    net: Any = model
    sample = case.sample[0]
    words = net.to_str_tokens(sample) if _has_text(net) else sample.flatten().tolist()
    tokens = [] if model.cfg.kind != "text" else [visible(str(word)) for word in words]
    scores = {"completeness": chosen.kept.completeness, "replacement": chosen.kept.replacement}
    return model_meta(model, 1) | {
        "settings": settings | {"shape": [len(own.codes), *own.codes[0].shape]},
        "target": target, "sample": sample_digest(case.sample), "scores": scores,
        "tokens": tokens, "special": special_tokens(model),
    }  # fmt: skip


def _has_text(model: HookedModel) -> bool:
    if model.cfg.kind != "text":
        return False
    try:
        model.to_single_str_token(0)
    except ValueError:  # there is no tokenizer
        return False
    return True
