"""How well a circuit explains a model: scores, compared with random circuits of the same size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import edit, full_name
from crate_interp.circuits.circuit import Circuit, head_name
from crate_interp.circuits.patching import Head, check_heads, metric_values
from crate_interp.core import checks, run_options
from crate_interp.data.samples import group_numbers
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel, check_hooked
from crate_interp.questions.provenance import model_meta
from crate_interp.results import sample_ranges
from crate_interp.results.result import Result, first
from crate_interp.results.sample_ranges import counted
from crate_interp.stats.bootstrap import CONFIDENCE, RESAMPLES, Studentised, studentised
from crate_interp.stats.contrasts import by_group
from crate_interp.stats.intervals import linearised_ratio

ABLATIONS = ("mean", "zero")
_COLUMNS = ["measure", "value", "low", "high"]
_COLUMNS += ["random_mean", "random_low", "random_high", "share_as_good"]
Heads = frozenset[Head]
# how far a score is from the best score: faithfulness 1, completeness 0, high minimality
_DISTANCES: dict[str, Callable[[float], float]] = {
    "faithfulness": lambda value: abs(value - 1),
    "completeness": abs,
    "minimality": lambda value: -value,
}


class CircuitScores(Result):
    """The scores of a circuit of heads, compared with the scores of random circuits.

    `table()` has the columns measure, value, low, high (95 % interval over inputs; NaN if the
    metric was one number for all inputs), random_mean, random_low, random_high (the middle 95 % of
    random circuits) and share_as_good. If n random circuits of the same size were scored and k of
    them do at least as well, share_as_good is `(1 + k) / (1 + n)`. The best scores are faithfulness
    1, completeness 0 and a high minimality. `table("heads")`: the cost of removing each head from
    the circuit (minimality), with low and high. meta: `whole`, the metric with all heads, and
    `none`, the metric with every head ablated. If `whole` and `none` are close, the scores are
    noisy: look at both numbers, and at other inputs. The intervals ignore how the circuit was
    chosen, so evaluate it on inputs that did not help to choose it.
    """

    KIND = "circuit_scores"
    MAIN = "scores"
    STORED = {"scores": first, "heads": first}
    ALONE = (
        "circuit scores are ratios of a metric on one set of inputs: evaluate the circuit on all "
        "inputs at once."
    )

    def finding(self) -> str:
        """Returns the scores, random circuits' scores, and the metric with all heads and none."""
        words = [
            f"{row.measure} {row.value:.3f} ({row.low:.3f} to {row.high:.3f}; random "
            f"{row.random_mean:.3f})"
            for row in self._table("scores").itertuples()
        ]
        scores = ", ".join(words).replace("nan to nan; ", "").replace("; random nan", "")
        return (
            f"A circuit of {counted(len(self._table('heads')), 'heads')} has {scores}; the metric "
            f"is {self.meta['whole']:.3g} with all heads and {self.meta['none']:.3g} with none."
        )


@in_full_precision
def evaluate(
    model: HookedModel,
    circuit: Circuit | Sequence[Head],
    inputs: Tensor,
    metric: Callable[[Tensor], Tensor | float],
    *,
    reference: Tensor | None = None,
    ablation: str = "mean",
    random: int = 20,
    subsets: int = 10,
    seed: int = 0,
    groups: Sequence[int | str] | None = None,
    progress: bool = True,
) -> CircuitScores:
    """Scores the heads of a circuit by ablating heads (arXiv 2211.00593, section 4).

    F(S) is the metric if all heads outside the set S are ablated. M is the set of all heads, C the
    set of the circuit's heads, and F(none) has every head ablated. Faithfulness is
    `(F(C) - F(none)) / (F(M) - F(none))`; it is 1 if the circuit alone does what the model does.
    Completeness is `max_K |F(C without K) - F(M without K)| / |F(M) - F(none)|`, where K is C
    itself or one of `subsets` random subsets of C; it is 0 if nothing outside does its work.
    Minimality is `min_v |F(C) - F(C without v)| / |F(M) - F(none)|` over the heads v of C.

    Completeness is the largest of several ratios, and minimality the least. Their intervals hold
    for all ratios at once.

    Args:
        model: A hooked model.
        circuit: A Circuit, or (layer, head) pairs.
        inputs: What the model runs on, a tensor with the batch first.
        metric: A function of the logits that returns one number, or one for each input, `[batch]`;
            F is then their mean, and the scores get intervals over inputs (bootstrap-t of
            linearised ratios).
        reference: The inputs of the means. Default: `inputs`.
        ablation: "mean" replaces each head's output by its mean over `reference`, position by
            position; "zero" replaces it by 0.
        random: How many random circuits of equal size to compare with.
        subsets: How many random subsets of C completeness tries.
        seed: The seed of the random circuits and subsets.
        groups: As in `ci.sweep`.
        progress: Show a progress bar.

    Returns:
        The scores of the circuit and of random circuits.

    Raises:
        ValueError: For inputs that are not a tensor, or a reference of another shape; for a circuit
            that has no head, all heads, or heads that the model does not have; and for a metric
            that returns neither one finite number nor one for each input, or does not depend on
            heads.
    """
    check_hooked(model)
    checks.one_of("ablation", ablation, ABLATIONS)
    random, subsets = checks.count("random", random, 0), checks.count("subsets", subsets, 0)
    seed = checks.count("seed", seed, least=0)
    size = model.cfg.n_layers, model.cfg.n_heads
    pairs = circuit.heads() if isinstance(circuit, Circuit) else circuit
    own = frozenset(check_heads("circuit", pairs, *size))
    every = list(np.ndindex(size))
    if len(own) == len(every):
        raise ValueError("the circuit has every head of the model: give fewer heads.")
    whose = None if groups is None else np.array(group_numbers(groups, len(inputs)))
    kept = _runs(model, inputs, inputs if reference is None else reference, metric, ablation)
    whole, none = (float(kept(one).mean()) for one in (frozenset(every), frozenset()))
    if abs(whole - none) <= 1e-9 * max(abs(whole), abs(none), 1e-30):
        raise ValueError(f"the metric is always {whole:.4g}: it does not depend on any head.")
    draws = np.random.default_rng(seed)
    places = [draws.permutation(len(every))[: len(own)] for _ in range(random)]
    drawn = [frozenset(every[place] for place in chosen) for chosen in places]
    bar = run_options.tqdm([own, *drawn], desc="circuits", disable=not progress)
    parts = [_parts(kept, every, one, _subsets(one, subsets, seed), whose) for one in bar]
    settings = {"ablation": ablation, "random": random, "subsets": subsets, "seed": seed}
    meta = model_meta(model, len(inputs)) | {"settings": settings, "whole": whole, "none": none}
    meta["data"][0] |= {} if whose is None else sample_ranges.grouped(whose.tolist())
    low, high = _sizes(parts[0].ratios("minimality"))
    heads = pd.DataFrame({"head": [head_name(*head) for head in sorted(own)]})
    heads = heads.assign(cost=parts[0].sizes("minimality"), low=low, high=high)
    return CircuitScores({"scores": _table(parts), "heads": heads}, meta)


def _runs(
    model: HookedModel, inputs: Tensor, source: Tensor, metric: Callable[..., Any], ablation: str
) -> Callable[[Heads], np.ndarray]:
    """Returns a function from heads to the metric with all others ablated, run once for each."""
    shapes = [list(getattr(one, "shape", [])) for one in (inputs, source)]
    if not shapes[0] or shapes[0][1:] != shapes[1][1:] or ablation == "mean" and shapes[1][0] < 2:
        got = f"inputs and reference have the shapes {shapes[0]} and {shapes[1]}"
        raise ValueError(f"{got}: give samples of one shape, and at least two samples for a mean.")
    names = [full_name("attn.hook_z", layer) for layer in range(model.cfg.n_layers)]
    known: dict[Heads, np.ndarray] = {}
    with torch.no_grad():
        cache = model.run_with_cache(source, names_filter=names)[1] if ablation == "mean" else {}

    def score_of(heads: Heads) -> Float[np.ndarray, "sample"]:
        if heads not in known:
            hooks: list[Any] = []
            for layer, name in enumerate(names):
                gone = [head for head in range(model.cfg.n_heads) if (layer, head) not in heads]
                if gone:
                    mean = edit.mean(cache[name], heads=gone) if name in cache else None
                    hooks.append((name, mean or edit.zero(heads=gone)))
            with torch.no_grad():
                logits = model.run_with_hooks(inputs, fwd_hooks=hooks)
                known[heads] = metric_values(metric(logits), len(inputs))
        return known[heads]

    return score_of


@dataclass(frozen=True)
class _Parts:
    """Differences of the metric; their ratios are a circuit's scores.

    There is a row for each input, or one row for all inputs. In the symbols of `evaluate`, span is
    `F(M) - F(none)`. above: for faithfulness `F(C) - F(none)`; for completeness `F(C without K) -
    F(M without K)` for each subset K; for minimality `F(C) - F(C without v)` for each head v of
    the circuit.
    """

    span: Float[np.ndarray, "sample 1"]
    above: dict[str, Float[np.ndarray, "sample _number"]]
    groups: Int[np.ndarray, "sample"] | None = None

    def ratios(self, measure: str) -> Studentised:
        """Returns the bootstrap-t of the differences divided by the span."""
        return studentised(by_group(linearised_ratio(self.above[measure], self.span), self.groups))

    def scores(self) -> dict[str, float]:
        """Returns the scores: of several ratios the largest for completeness, or the least."""
        whole = float(self.above["faithfulness"].mean() / self.span.mean())
        gaps, costs = (self.sizes(measure) for measure in ("completeness", "minimality"))
        return dict(zip(_DISTANCES, (whole, float(gaps.max()), float(costs.min())), strict=True))

    def sizes(self, measure: str) -> Float[np.ndarray, "c"]:
        """Returns the absolute values of the mean differences, divided by the mean span."""
        return np.abs(self.above[measure].mean(axis=0) / self.span.mean())


def _parts(
    score: Callable[[Heads], np.ndarray],
    heads: list[Head],
    circuit: Heads,
    subsets: list[Heads],
    groups: Int[np.ndarray, "sample"] | None,
) -> _Parts:
    """Returns the differences whose ratios are a circuit's scores."""
    every, none = frozenset(heads), frozenset()
    gaps = [score(circuit - some) - score(every - some) for some in subsets]
    costs = [score(circuit) - score(circuit - {head}) for head in sorted(circuit)]
    span = (score(every) - score(none))[:, None]
    above = ([score(circuit) - score(none)], gaps, costs)
    of_measure = {name: np.stack(x, 1) for name, x in zip(_DISTANCES, above, strict=True)}
    # a metric may be one number for all inputs
    return _Parts(span, of_measure, groups if len(span) > 1 else None)


def _subsets(chosen: Heads, count: int, seed: int) -> list[Heads]:
    """Returns the set of heads, and random subsets that keep each head with probability 1/2."""
    generator, heads = np.random.default_rng(seed), sorted(chosen)
    subsets = [chosen]
    for _ in range(count):
        on = generator.random(len(heads)) < 0.5
        subsets.append(frozenset(head for head, there in zip(heads, on, strict=True) if there))
    return subsets


def _intervals(parts: _Parts) -> dict[str, tuple[float, float]]:
    """Returns the ends of the intervals of the scores.

    Completeness is the largest of several ratios. Each ratio has its own interval, and a joint
    interval that holds for all ratios at once. The upper end for completeness is the largest upper
    end of the own intervals, the lower end is the largest lower end of the joint intervals.
    Minimality is the least of several ratios. The lower end for it is the least lower end of the
    own intervals, the upper end is the least upper end of the joint intervals.
    """
    (low,), (high,) = parts.ratios("faithfulness").interval()
    ends = []
    for measure in ("completeness", "minimality"):
        ratios = parts.ratios(measure)
        # Bonferroni, if RESAMPLES allow it
        joint = 1 - max((1 - CONFIDENCE) / len(ratios.mean), 2 / RESAMPLES)
        # a ratio that is equal in all samples, such as that of a head without an effect, is known
        same = (ratios.error == 0) & (ratios.error > 0).any()
        for level in (CONFIDENCE, joint):
            ends.append([np.where(same, np.abs(ratios.mean), end) for end in _sizes(ratios, level)])
    (_, gap_high), (gap_low, _), (cost_low, _), (_, cost_high) = ends
    ends = ((low, high), (gap_low.max(), gap_high.max()), (cost_low.min(), cost_high.min()))
    return dict(zip(_DISTANCES, ends, strict=True))


def _sizes(ratios: Studentised, level: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of intervals of absolute ratios."""
    low, high = ratios.interval(level)
    near, far = (of(np.abs(low), np.abs(high)) for of in (np.minimum, np.maximum))
    return np.where((low <= 0) & (high >= 0), 0.0, near), far


def _table(parts: list[_Parts]) -> pd.DataFrame:
    """Returns the first circuit's scores, next to the scores of the random circuits."""
    own, *drawn = [one.scores() for one in parts]
    rows: list[tuple] = []
    for name, ends in _intervals(parts[0]).items():
        others, beside = np.array([one[name] for one in drawn]), (np.nan,) * 4
        if drawn:
            distance = _DISTANCES[name]
            as_good = sum(distance(other) <= distance(own[name]) for other in others.tolist())
            middle = np.quantile(others, [0.025, 0.975])
            beside = (others.mean(), *middle, (1 + as_good) / (1 + len(drawn)))
        rows.append((name, own[name], *ends, *beside))
    return pd.DataFrame(rows, columns=_COLUMNS)
