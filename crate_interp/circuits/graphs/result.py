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

FAITHFUL = 0.5  # a graph is called faithful if it keeps this share of the answer, and predicts
EMBEDDING, BIAS, TARGET = -1, -2, -3  # in place of the number of an atom
ENOUGH = 0.9  # codes are called enough for an answer if alone they give this share of it
CLEAR = 0.05  # a set of codes is called better than another from this share of the answer on
CHANCE = "We can't tell the graph's codes from random ones."
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
        return name if target["versus"] is None else f"{name} less {other}"

    @property
    def top(self) -> int:
        """Returns the number of the answer that the model gives."""
        table: Any = self._table("answers")
        return int(table["answer"].loc[table["logit"].idxmax()])

    @property
    def question(self) -> str:
        """Returns what was asked: why an answer was given, or what speaks for another one."""
        target = self.meta["target"]
        if target["answer"] == self.top:
            return f"why {self.answer}"
        name = f"\u201c{plain(target['name'])}\u201d"
        if target["versus"] is not None:
            name += f" over \u201c{plain(target['versus_name'])}\u201d"
        answers: Any = self._table("answers").set_index("answer")["name"]
        return f"how much speaks for {name} (it answers \u201c{plain(answers[self.top])}\u201d)"

    @property
    def amounts(self) -> pd.Series:
        """Returns what each node adds to the target: its effect, or its slope if not measured."""
        table: Any = self._table("nodes")
        return table["effect"].fillna(table["attribution"])

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

    def warnings(self) -> list[str]:
        """Returns what is wrong with a graph that is not faithful, a sentence each."""
        keep: Any = self.of("whole").set_index("edit").loc["keep"]
        small = max(self.beyond_size) < CLEAR and keep["nodes"] > 0
        slopes, gain = self.slope_agreement, self.beyond_size[0]
        rival = gain <= -CLEAR and gain < self.kept < 1  # the largest codes give some of the answer
        way = f"{'point the other way' if slopes < 0 else 'differ'} on the graph's codes"
        tested = len(self.of("agreement")) > 0
        reasons = {
            CHANCE: keep["random_q025"] <= keep["logit"] <= keep["random_q975"],
            f"The largest codes at the same tokens do {'better' if rival else 'as well'}.": small,
            f"Trust effects, not attributions: attributions {way}.": slopes < FAITHFUL,
            "Attributions were not tested on other nodes: leave out tests=False.": not tested,
            "Too few codes are on to test attributions.": tested and np.isnan(self.predicts),
            "Do not trust the attributions: they predict ablations badly.": self.predicts
            < FAITHFUL,
            "These codes alone do not give half of the answer.": not self.kept >= FAITHFUL,
        }
        return [words for words, holds in reasons.items() if holds]

    def _opposite(self) -> str:
        """Returns " in layer 5" for layers where attributions predict the opposite, or ""."""
        table: Any = self.of("agreement")
        layers = [str(layer) for layer in table["layer"][table["high"] < 0]]
        words = " and ".join(filter(None, (", ".join(layers[:-1]), *layers[-1:])))
        return f" in layer{'s' * (len(layers) > 1)} {words}" if layers else ""

    def sentences(self) -> list[str]:
        """Returns what the graph's codes give alone, what other codes give, and the numbers."""
        target, whole = self.meta["target"], self.of("whole").set_index("edit")
        keep, gone = whole.loc["keep"], whole.loc["remove"]
        count, share = int(keep["nodes"]), self.kept
        part = f"{100 * share:.0f}\u00a0%"
        codes, give, be = (
            (f"{count} codes", "give", "are") if count != 1 else ("1 code", "gives", "is")
        )
        lead = f"The graph's {codes} alone {give} {part} of the logit of {self.answer}."
        if share >= ENOUGH:
            lead = f"{codes} alone {be} enough for {self.answer}: {part} of its logit."
        elif share < FAITHFUL:
            lead = f"The graph explains little of {self.answer}: {codes} {give} {part} of it."
        if share < 0:
            lead = f"The graph does not explain {self.answer}: its {codes} {give} the opposite."
        shares = keep[["largest", "random_q025", "random_q975"]] / target["logit"]
        size, *ends = (f"{100 * one:.0f}\u00a0%" for one in shares)
        low, high = ends if target["logit"] > 0 else ends[::-1]
        random = f", random codes give {low} to {high}" * bool(keep["draws"])
        start = [lead, f"The largest {codes} {give} {size}{random}."]
        worse = next((one for one in self.warnings() if one.startswith("The largest codes")), "")
        if worse and share >= FAITHFUL:
            than = "worse" if "better" in worse else "no better"
            lead = f"The graph's {codes} do {than} than the {count} largest: {part} and {size}"
            start = [f"{lead} of the logit of {self.answer}."]
            start += [f"{random[2:].capitalize()}."] * bool(random)
        if CHANCE in self.warnings():
            words = f"The {codes} alone {give} {part} of the answer's logit{random}"
            start = [CHANCE, f"{words}, the largest {size}."]
        # the sentences above have what warnings that begin with "The" say, or "We"
        warnings = [one for one in self.warnings() if not one.startswith(("The", "We"))]
        rest = gone["logit"] / target["logit"]
        enough, needed = (gain >= CLEAR for gain in self.beyond_size)
        claims = {"what is enough": enough and share >= FAITHFUL}
        claims["what is needed"] = needed and rest < FAITHFUL
        left = "nothing" if rest <= 0 else "all" if rest >= 1 else f"{100 * rest:.0f}\u00a0%"
        better = " and ".join(words for words, holds in claims.items() if holds)
        cfg, at = self.meta["config"], target["position"]
        after = FAMILIES[cfg["family"]].get("causal") or cfg.get("attention_mask") == "causal"
        where = "" if at is None else f" {'after' if after else 'at'} token {at}"
        begin = f"{plain(self.meta['model'] or 'The model')}{where}: {self.question}:"
        if target["answer"] == self.top:
            begin = f"{plain(self.meta['model'] or 'The model')} answers {self.answer}{where},"
        less = "the mean of all logits" if target["versus"] is None else "the other answer"
        known = self.of("agreement")["pearson"].dropna()
        span = f"{known.min():.2f} in the worst layer, {known.max():.2f} in the best"
        tested = f" Attributions predict real ablations of other nodes with r = {span}."
        slopes, opposite = self.slope_agreement, self._opposite()
        warnings += [f"Attributions of other nodes point the other way{opposite}."] * bool(opposite)
        tested += "" if np.isnan(slopes) else f" On the graph's codes r is {slopes:.2f}."
        return [
            *start,
            f"Without the graph's codes {left} of the logit is left.",
            *warnings,
            f"{begin} {abs(target['logit']):.2f} {'above' if target['logit'] >= 0 else 'below'} "
            f"{less}." + f" Attributions choose {better} better than size does." * bool(better)
            + tested * bool(len(known)),
        ]  # fmt: skip

    @property
    def rival_rank(self) -> str:
        """Returns which of the model's answers the rival is; "" for a graph made without tests."""
        if "rival" not in self.meta:
            return ""
        table: Any = self._table("answers").set_index("answer")["logit"]
        above = int((table > table[self.meta["rival"]["answer"]]).sum())
        words = {0: "the model's answer", 1: "the next answer"}
        return words.get(above, "the likeliest other answer")

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
