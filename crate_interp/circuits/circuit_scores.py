"""How well a circuit explains a model: scores beside those of random circuits of the same size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import edit, full_name
from crate_interp.circuits.circuit import Circuit, head_name
from crate_interp.circuits.patching_arguments import Head, MetricBySample, as_values, heads_of
from crate_interp.core import checks
from crate_interp.core.progress import tqdm
from crate_interp.models.hooked import HookedModel, check_hooked
from crate_interp.results.result import Result, counted, first
from crate_interp.sweeps.runs.provenance import model_meta

ABLATIONS = ("mean", "zero")
_COLUMNS = ["measure", "value", "low", "high"]
_COLUMNS += ["random_mean", "random_low", "random_high", "share_as_good"]
_RESAMPLES = 2000
Heads = frozenset[Head]
Values = Float[np.ndarray, "_"]  # of all inputs, then of each resample of them
Ablation = Callable[[list[int]], edit.Edit]  # some heads of a layer -> the edit that ablates them
# how far a score is from its best: faithfulness 1, completeness 0, minimality high
_DISTANCES: dict[str, Callable[[float], float]] = {
    "faithfulness": lambda value: abs(value - 1),
    "completeness": abs,
    "minimality": lambda value: -value,
}


class CircuitScores(Result):
    """What a metric keeps with a circuit's heads alone and without them, beside random circuits.

    `table()`: measure, value, low, high (95 %, over the inputs; NaN if the metric was one number
    for all), random_mean, random_low, random_high (the middle 95 % of random circuits) and
    share_as_good, `(1 + k) / (1 + n)` if k of n random circuits of as many heads do as well. Best
    are faithfulness 1, completeness 0, and a high minimality. `table("heads")`: what taking each
    head out of the circuit costs (minimality), with low and high. meta: `whole` and `none`, the
    metric with all heads and with every head ablated. If the two are close, the ratios scatter:
    look at both, and at other inputs. The intervals do not know how the circuit was chosen: judge
    it on inputs that did not choose it.
    """

    KIND = "circuit_scores"
    META = {"settings": dict, "whole": float, "none": float}
    MAIN = "scores"
    STORED = {"scores": first, "heads": first}
    ALONE = (
        "circuit scores are ratios of a metric on one set of inputs: evaluate the circuit on all."
    )

    def headline(self) -> str:
        """Returns the scores beside those of random circuits, and the metric they are ratios of."""
        rows: Any = self._table("scores").itertuples()
        words = [f"{row.measure} {row.value:.3f}{_beside(row)}" for row in rows]
        heads = counted(len(self._table("heads")), "heads")
        return (
            f"A circuit of {heads} has {', '.join(words)}; the metric is "
            f"{self.meta['whole']:.3g} with all heads and {self.meta['none']:.3g} with none."
        )


def _beside(row: Any) -> str:
    """Returns the interval of a score and the random circuits', as far as they are there."""
    interval = "" if np.isnan(row.low) else f"{row.low:.3f} to {row.high:.3f}"
    random = "" if np.isnan(row.random_mean) else f"random {row.random_mean:.3f}"
    words = "; ".join(filter(None, (interval, random)))
    return f" ({words})" if words else ""


def evaluate(
    model: HookedModel,
    circuit: Circuit | Sequence[Head],
    inputs: Tensor,
    metric: MetricBySample,
    *,
    reference: Tensor | None = None,
    ablation: str = "mean",
    random: int = 20,
    subsets: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> CircuitScores:
    """Scores the heads of a circuit by ablating heads (arXiv 2211.00593, section 4).

    F is the metric, M all heads, C those of the circuit. Faithfulness is
    `(F(C) - F(none)) / (F(M) - F(none))`, 1 if the circuit alone does what the model does.
    Completeness is `max_K |F(C without K) - F(M without K)| / |F(M) - F(none)|` over C itself and
    `subsets` random subsets K of C, 0 if nothing outside the circuit does its work. Minimality is
    `min_v |F(C) - F(C without v)| / |F(M) - F(none)|`, above 0 if every head counts.

    circuit: a Circuit, or (layer, head) pairs. metric(logits) -> a number, or a tensor of one
    number for each input, `[batch]`: F is its mean, and the scores get intervals, the middle 95 %
    of 2,000 resamples of the inputs. ablation: "mean" puts each head's mean over `reference` (None:
    inputs) in its place, position by position; "zero" puts 0 there. Sparse steps stay on: they
    belong to no head. random: how many circuits of the same number of heads, drawn from all heads,
    to compare with.

    Raises ValueError for inputs that are no tensor, or a reference of another shape; for a circuit
    that has no head, all heads, or heads that the model does not have; for a metric that returns
    neither one finite number nor one for each input; and for one that does not change if every head
    is ablated.
    """
    check_hooked(model)
    checks.one_of("ablation", ablation, ABLATIONS)
    random = checks.count("random", random, least=0)
    subsets = checks.count("subsets", subsets, least=0)
    seed = checks.count("seed", seed, least=0)
    source = _source(inputs, reference, ablation)
    own, every = _own_and_every(model, circuit)
    runs = _Runs(model, inputs, metric, _ablations(model, source, ablation), every)
    whole, none = (float(runs.kept(one).mean()) for one in (frozenset(every), frozenset()))
    if abs(whole - none) <= 1e-9 * max(abs(whole), abs(none), 1e-30):
        raise ValueError(
            f"the metric is {whole:.4g} with all heads and with none: it does not depend on any "
            "head."
        )
    circuits = [own, *_drawn(every, len(own), random, seed)]
    bar = tqdm(circuits, desc="circuits", disable=not progress)
    found = [_scores(runs, one, _subsets(one, subsets, seed), one is own, seed) for one in bar]
    settings = {"ablation": ablation, "random": random, "subsets": subsets, "seed": seed}
    meta = model_meta(model, len(inputs)) | {"settings": settings, "whole": whole, "none": none}
    costs = [
        (head_name(*head), cost[0], *_interval(cost)) for head, cost in sorted(found[0][1].items())
    ]
    heads = pd.DataFrame(costs, columns=["head", "cost", "low", "high"])
    return CircuitScores({"scores": _table([values for values, _ in found]), "heads": heads}, meta)


def _source(inputs: Tensor, reference: Tensor | None, ablation: str) -> Tensor:
    """Returns what the means are taken over; raises ValueError if it or the inputs do not fit."""
    source = inputs if reference is None else reference
    for name, given in (("inputs", inputs), ("reference", source)):
        if not isinstance(given, Tensor) or given.shape[1:] != inputs.shape[1:]:
            got = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"{name} is {got}: give a tensor of preprocessed images or tokens, both of one "
                "shape but for the number of samples."
            )
    if ablation == "mean" and len(source) < 2:
        raise ValueError(
            "the mean over one input is that input: give reference=, several inputs, or "
            "ablation='zero'."
        )
    return source


def _own_and_every(
    model: HookedModel, circuit: Circuit | Sequence[Head]
) -> tuple[Heads, list[Head]]:
    """Returns the heads of the circuit, and all heads of the model in order."""
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    pairs = circuit.heads() if isinstance(circuit, Circuit) else circuit
    own = frozenset(heads_of("circuit", pairs, layers, heads))
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    if len(own) == len(every):
        raise ValueError(
            "the circuit has every head of the model, so that there is nothing to compare it with: "
            "give fewer heads."
        )
    return own, every


def _drawn(every: list[Head], size: int, count: int, seed: int) -> list[Heads]:
    """Returns random sets of heads."""
    generator = np.random.default_rng(seed)
    return [
        frozenset(every[place] for place in generator.permutation(len(every))[:size])
        for _ in range(count)
    ]


def _ablations(model: HookedModel, source: Tensor, ablation: str) -> list[Ablation]:
    """Returns for each layer the function that makes the edit that ablates some of its heads."""
    layers = range(model.cfg.n_layers)
    if ablation == "zero":
        return [lambda gone: edit.zero(heads=gone)] * len(layers)
    names = [full_name("attn.hook_z", layer) for layer in layers]
    with torch.no_grad():
        _, cache = model.run_with_cache(source, names_filter=names)
    return [lambda gone, name=name: edit.mean(cache[name], heads=gone) for name in names]


@dataclass(frozen=True)
class _Runs:
    """The metric of a model with some of its heads ablated; each set of heads runs once.

    It has a value for each input, or one for all.
    """

    model: HookedModel
    inputs: Tensor
    metric: MetricBySample
    ablations: list[Ablation]
    every: list[Head]
    known: dict[Heads, np.ndarray] = field(default_factory=dict)

    def kept(self, heads: Heads) -> Float[np.ndarray, "sample"]:
        """Returns the metric if only these heads are not ablated."""
        if heads not in self.known:
            hooks = []
            for layer, ablation in enumerate(self.ablations):
                own = [head for head in self.every if head[0] == layer and head not in heads]
                if own:
                    change = ablation([number for _, number in own])
                    hooks.append((full_name("attn.hook_z", layer), change))
            with torch.no_grad():
                out = self.model.run_with_hooks(self.inputs, fwd_hooks=hooks)
                self.known[heads] = as_values(self.metric(out), len(self.inputs))
        return self.known[heads]


def _subsets(chosen: Heads, count: int, seed: int) -> list[Heads]:
    """Returns the heads, and random subsets of them that keep each head with probability 1/2."""
    generator, heads = np.random.default_rng(seed), sorted(chosen)
    subsets = [chosen]
    for _ in range(count):
        on = generator.random(len(heads)) < 0.5
        subsets.append(frozenset(head for head, there in zip(heads, on, strict=True) if there))
    return subsets


def _scores(
    runs: _Runs, chosen: Heads, subsets: list[Heads], resample: bool, seed: int
) -> tuple[dict[str, Values], dict[Head, Values]]:
    """Returns the three scores of a set of heads, and what taking each head out of it costs.

    With `resample` the first value of each is followed by those of resampled inputs.
    """
    every = frozenset(runs.every)
    count = len(runs.kept(every))
    weights = np.full((1, count), 1 / count)
    if resample and count > 1:
        drawn = np.random.default_rng(seed).multinomial(count, weights[0], size=_RESAMPLES)
        weights = np.concatenate([weights, drawn / count])

    def f(heads: Heads) -> Values:
        return weights @ runs.kept(heads)

    none, span = f(frozenset()), f(every) - f(frozenset())
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have no span
        gaps = [abs(f(chosen - some) - f(every - some)) / abs(span) for some in subsets]
        costs = {head: abs(f(chosen) - f(chosen - {head})) / abs(span) for head in sorted(chosen)}
        values = {
            "faithfulness": (f(chosen) - none) / span,
            "completeness": np.max(gaps, axis=0),
            "minimality": np.min(list(costs.values()), axis=0),
        }
    return values, costs


def _interval(values: Values) -> tuple[float, float]:
    """Returns the middle 95 % of resamples; NaN if there are none."""
    if len(values) == 1:
        return np.nan, np.nan
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return float(low), float(high)


def _table(scored: list[dict[str, Values]]) -> pd.DataFrame:
    """Returns the scores of the first set of heads beside those of the others."""
    rows: list[tuple] = []
    for name, values in scored[0].items():
        value, interval = values[0], _interval(values)
        others = np.array([values[name][0] for values in scored[1:]])
        if not len(others):
            rows.append((name, value, *interval, np.nan, np.nan, np.nan, np.nan))
            continue
        low, high = np.quantile(others, [0.025, 0.975])
        distance = _DISTANCES[name]
        as_good = sum(distance(other) <= distance(value) for other in others)
        share = (1 + as_good) / (1 + len(others))
        rows.append((name, value, *interval, others.mean(), low, high, share))
    return pd.DataFrame(rows, columns=_COLUMNS)
