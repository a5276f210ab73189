"""Is a circuit what the model does? Faithfulness, completeness and minimality, beside random circuits of the same size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import edit, full_name
from crate_interp import checks
from crate_interp.circuits.circuit import Circuit, head_name
from crate_interp.circuits.paths import Head, as_number, heads_of
from crate_interp.results import Result, first
from crate_interp.sweeps.provenance import model_meta

_ABLATIONS = ("mean", "zero")


class CircuitScores(Result):
    """What a metric keeps with the circuit's heads alone and without them, beside random circuits.

    `table()`: measure, value, random_mean, random_low, random_high (the middle 95 %) and
    share_as_good, `(1 + k) / (1 + n)` where k of n random circuits of as many heads do as well.
    Best are faithfulness 1, completeness 0, minimality high. `table("heads")`: what taking each
    head out of the circuit costs (minimality). meta: `whole` and `none`, the metric with all heads
    and with every head ablated. All are of one set of inputs: if the two metrics are close the
    ratios scatter, so look at them, and at other inputs.
    """

    KIND = "circuit_scores"
    MAIN = "scores"
    STORED = {"scores": first, "heads": first}
    ALONE = (
        "circuit scores are ratios of a metric on one set of inputs: evaluate the circuit on all."
    )

    def headline(self) -> str:
        """Returns the scores beside those of random circuits, and the metric they are ratios of."""
        rows: Any = self._table("scores").itertuples()
        words = [f"{row.measure} {row.value:.3f} (random {row.random_mean:.3f})" for row in rows]
        return (
            f"A circuit of {len(self._table('heads'))} heads has {', '.join(words)}; the metric is "
            f"{self.meta['whole']:.3g} with all heads and {self.meta['none']:.3g} with none."
        )


def evaluate(
    model: Any,
    circuit: Any,
    inputs: Tensor,
    metric: Callable[[Tensor], Any],
    *,
    reference: Tensor | None = None,
    ablation: str = "mean",
    random: Any = 20,
    subsets: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> CircuitScores:
    """Scores a circuit's heads by ablating heads (arXiv 2211.00593, section 4), F the metric, M all heads, C the circuit's:

    faithfulness `(F(C) - F(none)) / (F(M) - F(none))`, 1 where the circuit alone does what the
    model does; completeness `max_K |F(C without K) - F(M without K)| / |F(M) - F(none)|` over C
    itself and random subsets K of C, 0 where nothing outside the circuit does its work; minimality
    `min_v |F(C) - F(C without v)| / |F(M) - F(none)|`, above 0 where every head counts.

    ablation: "mean" puts each head's mean over `reference` (None: inputs) in its place, position by
    position; "zero" nothing. Sparse steps stay on: they belong to no head. random: how many
    circuits of the same number of heads, from all heads, to compare with. Raises ValueError for a
    circuit without heads or with all, heads there are not, a metric that is no number, and one that
    ablating every head does not change.
    """
    if ablation not in _ABLATIONS:
        raise ValueError(f"ablation={ablation!r}: give 'mean' or 'zero'.")
    for name, count in (("random", random), ("subsets", subsets)):
        if not checks.is_int(count) or count < 0:
            raise ValueError(f"{name}={count!r}: give a whole number of at least 0.")
    if ablation == "mean" and len(inputs if reference is None else reference) < 2:
        raise ValueError(
            "the mean over one input is that input: give reference=, several inputs, or ablation='zero'."
        )
    pairs = circuit.heads() if isinstance(circuit, Circuit) else circuit
    own = frozenset(heads_of("circuit", pairs, model.cfg.n_layers, model.cfg.n_heads))
    every = [
        (layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)
    ]
    if len(own) == len(every):
        raise ValueError(
            "the circuit has every head of the model: there is nothing to compare it with."
        )
    f = _metric_of(model, inputs, metric, every, reference, ablation)
    whole, none = f(frozenset(every)), f(frozenset())
    if abs(whole - none) <= 1e-9 * max(abs(whole), abs(none), 1e-30):
        raise ValueError(
            f"the metric is {whole:.4g} with all heads and with none: it does not depend on any head."
        )
    generator = np.random.default_rng(seed)
    others = [
        frozenset(every[place] for place in generator.permutation(len(every))[: len(own)])
        for _ in range(random)
    ]
    scored = []
    for chosen in tqdm([own, *others], desc="circuits", disable=not progress):
        scored.append(
            _scores(f, chosen, frozenset(every), whole, none, subsets, np.random.default_rng(seed))
        )
    heads = pd.DataFrame(
        [(head_name(*head), cost) for head, cost in sorted(scored[0][1].items())],
        columns=["head", "cost"],
    )
    settings = {"ablation": ablation, "random": random, "subsets": subsets, "seed": seed}
    meta = model_meta(model, len(inputs)) | {"settings": settings, "whole": whole, "none": none}
    table = _table([values for values, _ in scored])
    return CircuitScores({"scores": table, "heads": heads}, meta)


def _metric_of(
    model: Any,
    inputs: Tensor,
    metric: Callable[[Tensor], Any],
    every: list[Head],
    reference: Tensor | None,
    ablation: str,
) -> Callable[[frozenset[Head]], float]:
    """The metric with some heads kept and all others ablated, each set once."""
    layers = range(model.cfg.n_layers)
    names = [full_name("attn.hook_z", layer) for layer in layers]
    with torch.no_grad():
        _, cache = model.run_with_cache(
            inputs if reference is None else reference, names_filter=names
        )
    known: dict[frozenset[Head], float] = {}

    def run(kept: frozenset[Head]) -> float:
        if kept not in known:
            hooks = []
            for layer in layers:
                gone = [head for own, head in every if own == layer and (own, head) not in kept]
                if gone:
                    change = (
                        edit.zero(heads=gone)
                        if ablation == "zero"
                        else edit.mean(cache[names[layer]], heads=gone)
                    )
                    hooks.append((names[layer], change))
            with torch.no_grad():
                known[kept] = as_number(metric(model.run_with_hooks(inputs, fwd_hooks=hooks)))
        return known[kept]

    return run


def _scores(
    f: Callable[[frozenset[Head]], float],
    chosen: frozenset[Head],
    every: frozenset[Head],
    whole: float,
    none: float,
    subsets: int,
    generator: np.random.Generator,
) -> tuple[dict[str, float], dict[Head, float]]:
    span, heads = whole - none, sorted(chosen)
    tried = [chosen]
    for _ in range(subsets):
        on = generator.random(len(heads)) < 0.5
        tried.append(frozenset(head for head, there in zip(heads, on, strict=True) if there))
    gaps = [abs(f(chosen - some) - f(every - some)) / abs(span) for some in tried]
    costs = {head: abs(f(chosen) - f(chosen - {head})) / abs(span) for head in heads}
    values = {
        "faithfulness": (f(chosen) - none) / span,
        "completeness": max(gaps),
        "minimality": min(costs.values()),
    }
    return values, costs


def _table(scored: list[dict[str, float]]) -> pd.DataFrame:
    rows = []
    for name, value in scored[0].items():
        others = np.array([values[name] for values in scored[1:]])
        low, high = np.quantile(others, [0.025, 0.975]) if len(others) else (np.nan, np.nan)
        # near 1 is good for faithfulness, near 0 for completeness, high for minimality
        bad = {
            "faithfulness": lambda x: abs(x - 1),
            "completeness": abs,
            "minimality": lambda x: -x,
        }[name]
        good = (
            (1 + sum(bad(other) <= bad(value) for other in others)) / (1 + len(others))
            if len(others)
            else np.nan
        )
        rows.append((name, value, others.mean() if len(others) else np.nan, low, high, good))
    return pd.DataFrame(
        rows,
        columns=["measure", "value", "random_mean", "random_low", "random_high", "share_as_good"],
    )
