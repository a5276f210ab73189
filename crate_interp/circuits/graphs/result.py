"""AttributionGraph: the nodes and edges that carry one answer, and how far they may be trusted."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.circuits.attention_reasons_result import piece_name
from crate_interp.circuits.graphs.question import Question, one_sample, read_part, sample_digest
from crate_interp.circuits.graphs.steering import Steering, steered, steering_hooks
from crate_interp.config.families import FAMILIES
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import plain
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel, check_gradients, check_hooked
from crate_interp.questions.provenance import model_meta
from crate_interp.results.result import Result, first
from crate_interp.results.sample_ranges import counted

FAITHFUL = 0.5  # a graph is called faithful if it keeps this share of the answer, and predicts
EMBEDDING, BIAS, TARGET = -1, -2, -3  # in place of the number of an atom
CLEAR = 0.05  # a set of codes is called better than another from this share of the answer on
SINGLE = 0.1  # an answer rests on single codes if one of them has this share of it
ONE_INPUT = "This is one input: on others the largest codes may do as well."
MODEL, UNTRAINED, RIVAL, RIVAL_NODES = "model", "untrained", "rival", "rival_nodes"


def node_name(layer: int, pos: int, atom: int) -> str:
    """Returns the id of a node: "L3A12@5", "E@5", "B3" for the biases of a layer, or "logit"."""
    if atom >= 0:
        return f"L{layer}A{atom}@{pos}"
    return {EMBEDDING: f"E@{pos}", BIAS: f"B{layer}", TARGET: "logit"}[atom]


class AttributionGraph(Result):
    """Why a model gave one answer: its nodes, the effects between them, and how far to trust them.

    The target is the logit of an answer minus the mean of all logits, or the difference of two
    logits. A node is a code that is not 0, at a token; an embedding ("E@5"); the biases of a layer
    ("B3"); or the target ("logit").

    nodes: node, layer, pos, atom, value, attribution, influence, effect, label. attribution: value
    times the derivative of the target through all layers above. effect: the target minus the target
    of a real forward in which the node is 0; NaN for minor nodes of a large network, which were not
    removed. influence: as in circuit-tracer (selection.py). edges: source, target, weight, head:
    the direct effect of the source on the target's pre-threshold value, its value times a
    derivative that passes through no other code. head -1 is the skip connection; an edge over
    several layers, and an edge to the target, is not split. layers: layer, active, attribution,
    bias, error: attribution is the sum over all nodes of the layer. bias is the target of a forward
    without these nodes, with the same things frozen (and the same codes on). error is what both
    lack of the target. ablations: network, layer, pos, atom, attribution, effect, of nodes outside
    the graph. agreement: network, layer, pearson, low, high, spearman, n, of these ablations.
    sufficiency: network, k, logit, largest, random_mean, rotated: the target if only k nodes of
    each layer stay (trust.py). whole: network, edit, logit, largest, random_mean, random_q025,
    random_q975, draws, nodes: the target if only the graph's nodes stay ("keep"), and without them
    ("remove"); largest and random_mean: the same with equally many of the largest codes, or of
    random codes, at each token of each layer. random_q025, random_q975: the middle 95 % of `draws`
    draws. network: "model", or "untrained" for a network with random weights and its own graph of
    its own answer. `whole` also has two baselines without random draws, made from the graph of the
    likeliest other answer (`meta["rival"]` has its name and logit). "rival" is what that graph's
    nodes give the other answer, "rival_nodes" what they give the answer that was asked about.
    answers: answer, name, logit (less the mean of all), probability. places: layer, pos,
    attribution, summed over all nodes of a token; layer -1 is the input. picture: webp, rows,
    columns: the picture and its patches; no row for a text. examples: layer, atom, value, words,
    webp: where the atoms are largest on the data that named them; no row without names. looks:
    layer, head, query, key, attention, score, query_layer, query_atom, key_layer, key_atom,
    query_value, key_value, part: of the heads' looks that carry most of the edges (from token query
    to token key), the pairs of atoms with the largest parts of the score, as in
    `ci.circuits.why_attends`, but without biases of the key, which are the same for all keys.
    """

    KIND = "graph"
    MAIN = "nodes"
    STORED = dict.fromkeys(
        "nodes edges layers ablations agreement sufficiency whole answers places picture "
        "examples looks".split(),
        first,
    )
    ALONE = "a graph explains one answer of one sample, and graphs do not merge."

    def of(self, name: str, network: str = MODEL) -> pd.DataFrame:
        """Returns the rows of a table that belong to the model, or to the untrained network."""
        table: Any = self._table(name)
        return table[table["network"] == network].drop(columns="network").reset_index(drop=True)

    @property
    def answer(self) -> str:
        """Returns the name of the answer; for a difference, of both answers."""
        target = self.meta["target"]
        name = f"\u201c{plain(target['name'])}\u201d"
        other = f"\u201c{plain(target['versus_name'])}\u201d"
        return name if target["versus"] is None else f"{name} over {other}"

    @property
    def question(self) -> str:
        """Returns what was asked: why an answer was given, or what speaks for another one."""
        table: Any = self._table("answers")
        best = table.loc[table["logit"].idxmax()]
        if self.meta["target"]["answer"] == best["answer"]:
            return f"why {self.answer}"
        return f"how much speaks for {self.answer} (it answers \u201c{plain(best['name'])}\u201d)"

    @property
    def slope_agreement(self) -> float:
        """Returns Pearson's r of the attributions and the effects of the graph's own codes."""
        table: Any = self._table("nodes")
        pairs = table[table["atom"] >= 0][["attribution", "effect"]].dropna()
        varied = len(pairs) > 3 and bool((pairs.nunique() > 1).all())
        return float(pairs.corr().iloc[0, 1]) if varied else np.nan

    @property
    def predicts(self) -> float:
        """Returns how well attributions predict ablations: Pearson's r, mean over layers."""
        table: Any = self.of("agreement")
        return float(table["pearson"].mean())

    @property
    def kept(self) -> float:
        """Returns the share of the target that the graph's nodes alone give."""
        whole: Any = self.of("whole").set_index("edit")
        return float(whole.loc["keep", "logit"]) / self.meta["target"]["logit"]

    @property
    def beyond_size(self) -> tuple[float, float]:
        """Returns what the graph's codes do beyond the largest codes at the same tokens and layers.

        The first number is how much more of the answer they give alone. The second is how much less
        is left without them. Both are shares of the answer.
        """
        whole: Any = self.of("whole").set_index("edit")
        more = (whole["logit"] - whole["largest"]) / self.meta["target"]["logit"]
        return float(more["keep"]), -float(more["remove"])

    def faithful(self) -> bool:
        """Tells whether the graph does more than chance and size, keeps half, and predicts.

        It does more than chance if what it keeps lies outside the middle 95 % of random draws.
        It does more than size if one number of `beyond_size` is .05 or more. It must predict
        ablations with r of .5 or more, also those of its own codes if they were measured.
        """
        return not self.warnings()

    def warnings(self) -> dict[str, str]:
        """Returns what is wrong with a graph that is not faithful: a sentence for each kind.

        Kinds: "chance", "signs", "size", "untested", "few", "prediction", "half".
        """
        keep: Any = self.of("whole").set_index("edit").loc["keep"]
        tested, slopes = len(self.of("agreement")) > 0, self.slope_agreement
        codes: Any = self._table("nodes").query("atom >= 0").dropna(subset=["effect"])
        wrong = int((codes["attribution"] * codes["effect"] < 0).sum())
        signs = f"on {wrong} of {counted(len(codes), 'codes')} (r = {slopes:.2f})"
        chance = keep["random_q025"] <= keep["logit"] <= keep["random_q975"]
        size = max(self.beyond_size) < CLEAR and keep["nodes"] > 0
        few = tested and np.isnan(self.predicts)
        wrongs = (
            ("chance", chance, "We can't tell the graph's codes from random ones."),
            ("signs", slopes < FAITHFUL, f"Trust effects: attributions are wrong in sign {signs}."),
            ("size", size, "The graph does no better than the largest codes."),
            ("untested", not tested, "Attributions were not tested: leave out tests=False."),
            ("few", few, "Too few codes are on to test attributions."),
            ("prediction", self.predicts < FAITHFUL, "Attributions predict ablations badly."),
            ("half", not self.kept >= FAITHFUL, "These codes are not enough for the answer."),
        )
        return {kind: words for kind, holds, words in wrongs if holds}

    def place(self, pos: int) -> str:
        """Returns the name of a token: its words, "CLS", or "patch (row, column)"."""
        tokens, special = self.meta["tokens"], self.meta["special"] or 0
        for columns in self._table("picture")["columns"]:  # none for a text
            patch = divmod(pos - special, int(columns))
            return "CLS" if pos < special else f"patch {patch}"
        words = plain(tokens[pos]).strip() if tokens else ""
        return f"\u201c{words}\u201d" if words else f"token {pos}"

    def cause(self) -> str:
        """Returns what the answer loses most without: one to three codes, or one or two inputs.

        The codes are those of half of the largest effect or more. Inputs are named if no code has a
        tenth of the answer.
        """
        table: Any = self._table("nodes")
        order = table[table["effect"] > 0].sort_values("effect", ascending=False)
        codes, target = order[order["atom"] >= 0], self.meta["target"]
        if codes.empty:
            return f"No code that we took away raises {self.answer}."
        largest, least = codes["effect"].iloc[0], SINGLE * abs(target["logit"])
        inputs = order[(order["atom"] == EMBEDDING) & (order["pos"] >= (self.meta["special"] or 0))]
        inputs = inputs[inputs["effect"] >= least].head(2 if self.meta["tokens"] else 1)
        causes, rests = codes[codes["effect"] >= largest / 2].head(3), "most on"
        if largest < least:
            causes, rests = inputs, "on no single code, but on"
        if causes.empty:
            causes, rests = codes.head(1), "on no single code, at most on"
        places = list(dict.fromkeys(self.place(pos) for pos in causes["pos"]))
        codes = causes[causes["atom"] >= 0]
        names = list(map(piece_name, codes["layer"], codes["atom"])) or places
        named = f"{', '.join(names[:-1])} and {names[-1]}".removeprefix(" and ")
        named += f" at {places[0]}" if len(codes) and len(places) == 1 else ""
        ends = dict.fromkeys(f"{causes['effect'].agg(end):.2g}" for end in ("min", "max"))
        logit = "its logit" if target["versus"] is None else "the difference"
        falls, it = f"{logit} falls by {' to '.join(ends)}", "each" if len(causes) > 1 else "it"
        return f"{self.answer} rests {rests} {named}: without {it} {falls}."

    def sentences(self) -> list[str]:
        """Returns what the answer rests on, what the graph's codes give alone, and the doubts."""
        target, whole = self.meta["target"], self.of("whole").set_index("edit")
        keep, gone, slopes = whole.loc["keep"], whole.loc["remove"], self.slope_agreement
        amounts = (
            *keep[["random_q025", "random_q975", "logit", "largest"]],
            *gone[["logit", "largest"]],
        )
        *ends, part, size, rest, other = (
            f"{100 * one / target['logit']:.0f}\u00a0%" for one in amounts
        )
        low, high = ends if target["logit"] > 0 else ends[::-1]
        logit = "logit" if target["versus"] is None else "difference"
        codes, s = counted(int(keep["nodes"]), "codes"), "s" * int(keep["nodes"] == 1)
        keeps = f"keep{s} {part} of this {logit} ({target['logit']:.2f})"
        doubts, table = list(self.warnings().values()), self.of("agreement")
        if (
            self.beyond_size[0] >= CLEAR
            and self.kept >= FAITHFUL
            and "chance" not in self.warnings()
        ):
            doubts.insert(0, ONE_INPUT)
        layers = [str(layer) for layer in table["layer"][table["high"] < 0]]
        if layers:
            where = f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"
            doubts.append(f"Attributions of other nodes point the other way in {where}.")
        random = f"Random codes there give {low} to {high}. " * bool(keep["draws"])
        cfg, at = self.meta["config"], target["position"]
        after = FAMILIES[cfg["family"]].get("causal") or cfg.get("attention_mask") == "causal"
        where = "" if at is None else f" {'after' if after else 'at'} token {at}"
        above = f"{abs(target['logit']):.2f} {'above' if target['logit'] >= 0 else 'below'}"
        less = "the mean of all logits" if target["versus"] is None else "the other answer"
        known, others = table["pearson"].dropna(), self.of("ablations")["effect"]
        span = f"{known.min():.2f} in the worst layer, {known.max():.2f} in the best"
        tested = f"Attributions predict real ablations of other nodes with r = {span}. "
        tested += "" if np.isnan(slopes) else f"On the graph's codes r is {slopes:.2f}. "
        most = f"the largest effect of {counted(len(others), 'codes')} is {others.max():.2g}"
        return [
            self.cause(),
            f"The graph's {codes} alone {keeps}, the largest at these tokens {size}.",
            *doubts,
            f"{random}Without the graph's codes {rest} is left, without the largest {other}.",
            f"{plain(self.meta['model'] or 'The model')}{where}, {self.question}: {above} {less}.",
            *([f"{tested}Outside the graph {most}."] if len(known) else []),
        ]

    def looks(self) -> dict[tuple[int, int, int, int], list[tuple[str, str, float]]]:
        """Returns the strongest pairs of each look, by layer, head, query and key.

        A pair is the atom of the token that looks, that of the other, and the part of the score.
        """
        table: Any = self.table("looks")
        found: dict[tuple[int, int, int, int], list[tuple[str, str, float]]] = {}
        for row in table.itertuples():
            here = piece_name(row.query_layer, row.query_atom)
            pair = (here, piece_name(row.key_layer, row.key_atom), float(row.part))
            found.setdefault((row.layer, row.head, row.query, row.key), []).append(pair)
        return found

    def _notebook_table(self) -> pd.DataFrame:
        table: Any = self._table("nodes")
        order = table["influence"].sort_values(ascending=False, kind="stable").index
        return table.loc[order].head(20)

    def legend(self) -> str:
        """Returns the meaning of the columns of the table of nodes."""
        return (
            "value: the code. attribution: the code times the derivative of the target. influence: "
            "the sum over all paths to the target of the shares along the path. effect: the target "
            "minus the target of a real forward without the node."
        )

    @in_full_precision
    def steer(
        self,
        edits: Mapping[str, float | int],
        *,
        how: str = "scale",
        model: HookedModel | None = None,
        inputs: object = None,
    ) -> Steering:
        """Returns what the answers become if nodes are edited, beside what was predicted.

        The prediction is that of derivatives, with nothing frozen.

        Args:
            edits: {"L2A17@5": 0} takes an atom away at token 5, {"L2A17": 2} doubles it at every
                token.
            how: "scale" multiplies the code by the number, "set" replaces the code by it, "add"
                adds it.
            model: The graph's model, needed if the graph was loaded.
            inputs: The graph's inputs, needed if the graph was loaded.

        Raises:
            ValueError: For another model, edited weights, other inputs, and nodes that do not
                exist.
        """
        first_model, sample = self.__dict__.get("_case", (None, None))
        network = first_model if model is None else model
        if network is None or (inputs is None and sample is None):
            raise ValueError("a saved graph holds no model: give model= and inputs=.")
        check_hooked(network)
        if model_meta(network, 1)["model_digest"] != self.meta["model_digest"]:
            raise ValueError("this graph has another model or other weights: give its model.")
        target = self.meta["target"]
        question = Question(target["answer"], target["versus"], target["position"])
        if inputs is not None:
            sample = read_part(network, one_sample(network, inputs), question)
        # a graph of an earlier version does not say which sample it is of
        if self.meta.get("sample", sample_digest(sample)) != sample_digest(sample):
            raise ValueError("inputs are not the sample of this graph: give that sample.")
        check_gradients("steer", network)
        names = self.table("answers")["name"].tolist()
        hooks = self.hooks(edits, how=how)
        return steered(network, sample, question, hooks, names)

    def hooks(self, edits: Mapping[str, float | int], *, how: str = "scale") -> list[Any]:
        """Returns the hooks of the same edits, for `model.hooks(fwd_hooks=...)`."""
        return steering_hooks(edits, how, self.meta["settings"]["shape"])

    def to_circuit_tracer(self, path: str | Path) -> Path:
        """Writes the graph as JSON that circuit-tracer's page reads, and returns the path.

        Codes are written as "cross layer transcoder" features, since the page knows no other name.
        There are no error nodes, and biases are left out. Edges are summed over heads; the
        "heads" of a link say what each carries (-1 is the skip connection), its "pairs" which atoms
        of the two tokens match where a head looks: atom of the query, of the key, part of the
        score. Their page does not draw these two.
        """
        write_text(Path(path), json.dumps(circuit_tracer_json(self), allow_nan=False))
        return Path(path)


def circuit_tracer_json(graph: "AttributionGraph") -> dict[str, Any]:
    """Returns the graph in circuit-tracer's words: metadata, qParams, nodes and links.

    A code is a "cross layer transcoder" feature. A feature's influence is cumulative: the share of
    the influence that it and all stronger nodes hold together. Embeddings and the target are nodes
    of other types. Biases are left out, because circuit-tracer's page has no type for them.
    """
    table: Any = graph.table("nodes")
    table = table[table["atom"] != BIAS]
    meta = graph.meta
    count, tokens, _ = meta["settings"]["shape"]
    words = meta["tokens"] or [str(n) for n in range(tokens)]
    place = meta["target"]["position"]
    place = tokens - 1 if place is None else place
    order = table["influence"].to_numpy().argsort()[::-1]
    sums = np.cumsum(table["influence"].to_numpy()[order])
    share = np.empty(len(table))
    share[order] = sums / sums[-1]
    chances: Any = graph.table("answers").set_index("answer")["probability"]
    ids, nodes = {}, []
    for row, influence in zip(table.itertuples(), share.tolist(), strict=True):
        node = _node(row, count, place, meta["target"], words)
        ids[row.node] = node["node_id"]
        if row.atom == TARGET:
            node["token_prob"] = float(chances.get(meta["target"]["answer"], 0.0))
        value = None if np.isnan(row.value) else float(row.value)
        nodes.append(node | {"influence": influence, "activation": value})
    edges: Any = graph.table("edges")
    edges = edges[edges["source"].isin(ids) & edges["target"].isin(ids)]
    spots = {row.node: (row.layer, row.pos) for row in table.itertuples()}
    looks, links = graph.looks(), []
    for (source, target), rows in edges.groupby(["source", "target"]):
        (layer, query), (_, key) = spots[target], spots[source]
        heads = {str(int(head)): part for head, part in rows[["head", "weight"]].values}
        pairs = {head: looks.get((layer, int(head), query, key), []) for head in heads}
        links.append(
            {
                "source": ids[source], "target": ids[target], "weight": float(rows["weight"].sum()),
                "heads": heads, "pairs": {head: found for head, found in pairs.items() if found},
            }
        )  # fmt: skip
    name = plain(meta["model"] or meta["config"]["family"])
    # their page puts it into the name of a file
    slug = re.sub("[^a-z0-9]+", "-", f"{name}-{meta['target']['name']}".lower()).strip("-")
    return {
        "metadata": {
            "slug": slug[:60] or "graph", "scan": name,
            "transcoder_list": [], "prompt_tokens": [str(word) for word in words],
            "prompt": "".join(str(word) for word in words),
            "node_threshold": meta["settings"]["nodes"], "schema_version": 1,
        },
        "qParams": {
            "pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": "",
        },
        "nodes": nodes,
        "links": links,
    }  # fmt: skip


def _node(row: Any, count: int, place: int, target: Any, words: list[str]) -> dict[str, Any]:
    """Returns a node without its numbers. Their ids are LAYER_FEATURE_POSITION, "E" for layer."""
    if row.atom == TARGET:
        layer, feature, pos, kind = str(count + 1), int(target["answer"]), place, "logit"
        words_of = f"Output {target['name']}"
    elif row.atom == EMBEDDING:
        layer, feature, pos, kind = "E", int(row.pos), int(row.pos), "embedding"
        words_of = f"Emb: {words[row.pos]}"
    else:
        layer, feature, pos = str(row.layer), int(row.atom), int(row.pos)
        kind, words_of = "cross layer transcoder", str(row.label)
    name, paired = f"{layer}_{feature}_{pos}", feature
    if row.atom >= 0:  # their page knows an atom by one number for layer and atom
        paired = (row.layer + feature) * (row.layer + feature + 1) // 2 + feature
    return {
        "node_id": name, "feature": paired, "layer": layer, "ctx_idx": pos,
        "feature_type": kind, "token_prob": 0.0, "is_target_logit": kind == "logit",
        "run_idx": 0, "reverse_ctx_idx": 0, "jsNodeId": f"{layer}_{feature}-0",
        "clerp": plain(words_of),
    }  # fmt: skip
