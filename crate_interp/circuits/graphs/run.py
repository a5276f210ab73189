"""ci.graph: why a model gave one answer, in the nodes of its own codes."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_interp.circuits.graphs import trust
from crate_interp.circuits.graphs.atom_names import AtomNames
from crate_interp.circuits.graphs.concepts import special_tokens
from crate_interp.circuits.graphs.derivatives import FREEZABLE, CutPass, Explained, values
from crate_interp.circuits.graphs.graph_tables import graph_tables, inside, names_of
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
from crate_interp.circuits.graphs.selection import Graph, select
from crate_interp.core import checks
from crate_interp.core.progress import tqdm
from crate_interp.core.safe_text import visible
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.compat.offload import with_weights
from crate_interp.models.gradients import check_gradients
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.provenance import model_meta
from crate_interp.questions.untrained_twins import twin

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
) -> AttributionGraph:
    """Returns the attribution graph of one answer: which codes made it, and through which heads.

    A node is a code that is not 0, at a token; its attribution is `z d target / d z`. An edge is
    the direct effect of a code on the pre-threshold value of another, `z d pre / d z` along all
    paths that pass through no other code. Where the code replaces the stream (crate, crate-lm, cbt,
    tost-ista) edges run from each layer to the next; elsewhere they may skip layers. The nodes of
    plain MLPs (gpt-baseline, tost) are their neurons.

    With both of "pattern" and "norm" frozen, attributions add up exactly where a step has a ReLU;
    with nothing frozen (the default) they do not, but they predict real ablations better. The scale
    of the first norm is always held: the norm of an embedding does not change with its length.

    Unlike circuit-tracer (Ameisen et al. 2025, Circuit Tracing) it has no replacement model and no
    error nodes: every value is the model's own.

    Args:
        model: A hooked model with logits.
        inputs: One sample: an image, or token ids, or a text.
        target: A class or token, by number or name; two for the difference of their logits. A
            single logit is taken less the mean of all logits. Default: the largest logit.
        position: The token of a text after which the answer comes; later tokens of a causal model
            are left out. Default: the last.
        freeze: What is held constant for derivatives: pattern, norm or both.
        nodes: The share of the influence that the kept nodes hold, as in circuit-tracer.
        edges: The share of the influence that the kept edges hold.
        most: How many codes to look at, an equal number in each layer.
        seed: Draws random nodes and the untrained network.
        names: The result of `ci.circuits.atom_names`, whose names nodes then have.

    Returns:
        The graph: its nodes, its edges, and how well it predicts real ablations.

    Raises:
        ValueError: Before work starts, for a model without logits or codes, for several samples,
            and for a target, position or share that cannot be.
    """
    check_model(model)
    check_gradients("graph", model)
    frozen = freeze if isinstance(freeze, (tuple, list)) else (freeze,)
    if not set(frozen) <= set(FREEZABLE):
        raise ValueError(f'freeze={checks.shown(freeze)}: give "pattern", "norm", both, or ().')
    for name, share in (("nodes", nodes), ("edges", edges)):
        if not checks.is_number(share) or not 0 < share <= 1:
            raise ValueError(f"{name}={checks.shown(share)}: give a share above 0 and at most 1.")
    settings = {"freeze": tuple(name for name in FREEZABLE if name in frozen)}
    most = checks.count("most", most, least=model.cfg.n_layers)  # one in each layer
    settings |= {"nodes": float(nodes), "edges": float(edges), "most": most}
    digest = model_meta(model, 1)["model_digest"]
    if names is not None and getattr(names, "meta", {}).get("model_digest") != digest:
        raise ValueError("names: give those of this model, ci.circuits.atom_names(model, data).")
    sample = one_sample(model, inputs)
    with torch.no_grad():
        question = asked(model, model(sample), target, position)
    sample = read_part(model, sample, question)
    result = AttributionGraph(*_measured(model, sample, question, settings, seed, names))
    object.__setattr__(result, "_case", (model, sample))
    return result


def _measured(
    model: HookedModel,
    sample: Tensor,
    question: Question,
    settings: dict[str, Any],
    seed: int,
    names: AtomNames | None,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Returns the tables and the meta of a graph."""
    with torch.enable_grad(), tqdm(total=5, desc="graph", delay=_WAIT, leave=False) as bar:
        case, cut, chosen = _chosen(model, sample, question, settings)
        bar.update()
        tables = graph_tables(case, cut, chosen, settings["freeze"], names)
        bar.update()
        own = _trust(case, chosen, trust.DRAWS, seed)
        bar.update()
        other: Any = twin(model, seed)
        with torch.no_grad():
            own_answer = asked(other, other(sample), None, question.position)
        untrained, _, drawn = _chosen(other, sample, own_answer, settings)
        beside = _trust(untrained, drawn, trust.DRAWS_UNTRAINED, seed)
        bar.update()
        rival, table = _rival(case, settings, seed)
        bar.update()
    for name in own:
        both = [own[name].assign(network=MODEL), beside[name].assign(network=UNTRAINED)]
        tables[name] = pd.concat(both, ignore_index=True)
    tables["whole"] = pd.concat([tables["whole"], table], ignore_index=True)
    answers = names_of(model)
    target = {
        "answer": question.answer, "versus": question.versus, "position": question.position,
        "name": answers[question.answer], "logit": case.values.target,
        "versus_name": "" if question.versus is None else answers[question.versus],
    }  # fmt: skip
    words: list[Any] = []
    if model.cfg.kind == "text":
        net: Any = model
        words = sample[0].tolist()
        try:
            words = net.to_str_tokens(sample[0])
        except ValueError:  # there is no tokenizer
            pass
    codes, kept = case.values.codes, chosen.kept
    return tables, model_meta(model, 1) | {
        "settings": settings | {"seed": seed, "shape": [len(codes), *codes[0].shape]},
        "target": target, "sample": sample_digest(sample),
        "scores": {"completeness": kept.completeness, "replacement": kept.replacement},
        "tokens": [visible(str(word)) for word in words], "special": special_tokens(model),
        "untrained": untrained.values.target,
    } | rival  # fmt: skip


def _chosen(
    model: HookedModel, sample: Tensor, question: Question, settings: dict[str, Any]
) -> tuple[Explained, CutPass, Graph]:
    """Returns a sample with its values, a forward that gives effects, and the graph."""
    own = values(model, sample, question, settings["freeze"])
    cut = CutPass(model, sample, question, settings["freeze"])
    chosen = select(cut, own, settings["nodes"], settings["edges"], settings["most"])
    return Explained(model, sample, question, own), cut, chosen


def _rival(
    case: Explained, settings: dict[str, Any], seed: int
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Returns the likeliest other answer, and what the nodes of its own graph give both answers.

    They are chosen as those of the answer are. Without another answer both are empty.
    """
    question, logits = case.question, case.values.logits
    own = (question.answer, question.versus)
    others = [number for number in logits.argsort(descending=True).tolist() if number not in own]
    if not others:
        return {}, pd.DataFrame()
    asked_too = Question(others[0], None, question.position)
    rival, _, chosen = _chosen(case.model, case.sample, asked_too, settings)
    nodes = inside(rival, chosen)
    tables = [
        trust.alone_and_gone(one, nodes, 0, seed).assign(network=name)
        for name, one in ((RIVAL, rival), (RIVAL_NODES, case))
    ]
    name = names_of(case.model)[others[0]]
    found = {"answer": others[0], "name": name, "logit": rival.values.target}
    return {"rival": found}, pd.concat(tables)


def _trust(case: Explained, chosen: Graph, draws: int, seed: int) -> dict[str, pd.DataFrame]:
    """Returns the tables that say how far a graph may be trusted."""
    masks = inside(case, chosen)
    tests = trust.ablations(case, masks, seed)
    return {
        "ablations": tests,
        "agreement": trust.agreement(tests),
        "sufficiency": trust.sufficiency(case, seed),
        "whole": trust.alone_and_gone(case, masks, draws, seed),
    }
