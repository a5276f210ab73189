"""What probes measured during a training, and where a series takes its largest step."""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.core import checks
from crate_interp.results.result import Result, by, first
from crate_interp.stats.intervals import LEVEL
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_tables import no_controls

STORED = ("samples", "head_samples", "moments", "weights")
_KEYS = ["probe", "statistic", "layer", "head"]
_CHANGES = [*_KEYS, "step", "f", "p", "before", "after", "n"]


FEWEST = 20  # values of a series; with fewer, only huge steps could be told from noise
SIMULATIONS, BATCH = 399, 57  # series without a step; so many at once, until p is surely large
LONGEST = 128  # longer series are averaged in blocks
LEAST_SPREAD = 4  # of `spread`; below, a series is noisy in too few places to tell a step
_ENOUGH = 10  # series as large as the own one, after which no more are drawn
_SHORTEST = 3  # the fewest values before and after a step
_CUTS = 100  # at most so many places of a step are tried
# of an exponential trend, in lengths of the series
_DECAYS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
_MEMORIES = np.linspace(-0.5, 0.95, 30)  # of simulated noise: phi in x_t = phi x_(t-1) + e_t


class Change(NamedTuple):
    """Where a series has its largest step: `at` is the index of the first value after it.

    f: how much better the series is fitted with the step. p: see `change_point`. before, after: the
    means of the values on both sides.
    """

    at: int
    f: float
    p: float
    before: float
    after: float


class Fit(NamedTuple):
    """Series fitted with a smooth trend alone, and with a step besides.

    rest: what the trend alone leaves, `[series, n]`. leverage: the share of each value's own noise
    that the trend takes with it, `[series, n]`. f: `[series]`. at: the places of the steps.
    """

    rest: np.ndarray
    leverage: np.ndarray
    f: np.ndarray
    at: np.ndarray


def fitted(values: Float[np.ndarray, "series n"]) -> Fit:
    """Fits each series with `a + b t + c exp(-t / (tau n))`, then with a step besides.

    F = (n - 5) (W_0 - W_1) / W_1, with W_0 and W_1 the least sums of squares without and with the
    step, over seven tau from .03 to 2 and over the places of the step. F is infinite if the step
    leaves nothing and the trend does, and 0 if the trend leaves nothing.
    """
    n = values.shape[-1]
    trends, steps, cuts = _designs(n)
    rest, leverage = np.empty_like(values), np.empty_like(values)
    least, stepped = np.full((2, len(values)), np.inf)
    at = np.zeros(len(values), dtype=int)
    for trend, step in zip(trends, steps, strict=True):
        left = values - (values @ trend) @ trend.T
        squares = (left**2).sum(axis=-1)
        gains = (left @ step.T) ** 2
        place = gains.argmax(axis=-1)
        with_step = squares - gains[np.arange(len(values)), place]
        better = squares < least
        rest[better], least = left[better], np.where(better, squares, least)
        leverage[better] = (trend**2).sum(axis=-1)
        at = np.where(with_step < stepped, cuts[place], at)
        stepped = np.minimum(with_step, stepped)
    total = (values**2).sum(axis=-1)
    least = np.where(least > 1e-20 * total, least, 0.0)  # below, it is rounding error
    stepped = np.where(stepped > 1e-20 * total, stepped, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        f = np.where(least > 0, (n - 5) * (least - stepped) / stepped, 0.0)
    return Fit(rest, leverage, f, at)


def change_point(values: Float[np.ndarray, "n"]) -> Change | None:
    """Returns the largest step of a series beyond a smooth trend, or None with too little data.

    There is too little data in fewer than 20 values, and if `spread` is below 4: the noise then
    lies in too few values to distinguish it from a step. p compares F with those of 399 series
    without a step: (1 + the number of F at least as large) / 400; fewer series are drawn once 10
    are as large. These series have the shocks of the measured series at the same places, each with
    a random sign (a wild bootstrap), and its memory. A shock is e_t = x_t - phi x_(t-1), with x_t
    the rest over sqrt(1 - leverage). phi is the smallest of 30 values up to .95 with which
    simulated rests are in half of the cases as like their neighbours as this rest. So neither a
    drift, nor a decay, nor slow noise, nor noise that fades with the learning rate counts as a
    step. tests/benchmarks/bench_change_points.py prints how often p is at most .05 without a step,
    and how often a step is found. A series of more than 128 values is averaged in blocks.
    """
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    starts = np.unique(np.linspace(0, len(values), min(len(values), LONGEST) + 1).astype(int))
    means = np.add.reduceat(values, starts[:-1]) / np.diff(starts)
    fit = fitted(means[None])
    (f,), at = fit.f, starts[fit.at[0]]
    if f and spread(fit.rest)[0] < LEAST_SPREAD:
        return None
    p = _p_value(fit) if f else 1.0
    return Change(int(at), float(f), p, values[:at].mean(), values[at:].mean())


def _p_value(fit: Fit) -> float:
    """Returns p: one F beside the F of series with the same memory and shocks, and random signs."""
    (rest,) = fit.rest / np.sqrt(np.maximum(1 - fit.leverage, 0.05))
    n = len(rest)
    memory = np.searchsorted(_halves(n), likeness(fit.rest)[0])
    phi = _MEMORIES[min(memory, len(_MEMORIES) - 1)]
    shocks = np.concatenate([rest[:1], rest[1:] - phi * rest[:-1]])
    random, drawn, as_large = np.random.default_rng(n), 0, 0
    while drawn < SIMULATIONS and as_large < _ENOUGH:
        signs = random.choice([-1.0, 1.0], size=(BATCH, n))
        found = fitted(remembering(phi, signs * shocks)).f
        drawn, as_large = drawn + BATCH, as_large + int((found >= fit.f[0] * (1 - 1e-9)).sum())
    return (1 + as_large) / (1 + drawn)


def spread(rest: Float[np.ndarray, "series n"]) -> Float[np.ndarray, "series"]:
    """Returns over how many values a series spreads, `(sum x^2)^2 / sum x^4`.

    It is 1 if only one value is not 0, n if all values have the same size, and about n / 3 for even
    noise.
    """
    return (rest**2).sum(axis=-1) ** 2 / (rest**4).sum(axis=-1)


def likeness(rest: Float[np.ndarray, "series n"]) -> Float[np.ndarray, "series"]:
    """Returns how like its neighbour each value is, `sum x_t x_(t-1) / sum x_t^2`."""
    return (rest[:, 1:] * rest[:, :-1]).sum(axis=-1) / (rest**2).sum(axis=-1)


def remembering(phi: float, shocks: Float[np.ndarray, "series n"]) -> Float[np.ndarray, "series n"]:
    """Returns the series `x_t = phi x_(t-1) + e_t` that begin with their first shocks."""
    found = shocks.copy()
    for t in range(1, shocks.shape[1]):
        found[:, t] += phi * found[:, t - 1]
    return found


def noise(phi: float, series: int, n: int, random: np.random.Generator) -> np.ndarray:
    """Returns series of even noise with a memory, `[series, n]`."""
    shocks = random.normal(size=(series, n))
    shocks[:, 0] /= (1 - phi**2) ** 0.5
    return remembering(phi, shocks)


@lru_cache(maxsize=8)
def _designs(n: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Returns orthonormal trends `[n, 3]` and, for each, unit steps `[cut, n]` beside it."""
    t = np.arange(n) / n
    cuts = np.arange(_SHORTEST, n - _SHORTEST + 1)
    cuts = cuts[np.unique(np.linspace(0, len(cuts) - 1, min(len(cuts), _CUTS)).astype(int))]
    step = (np.arange(n) >= cuts[:, None]).astype(float)
    trends, steps = [], []
    for decay in _DECAYS:
        trend = np.linalg.qr(np.stack([np.ones(n), t, np.exp(-t / decay)], axis=1))[0]
        beside = step - (step @ trend) @ trend.T
        size = np.linalg.norm(beside, axis=-1, keepdims=True)
        trends.append(trend)
        # where a trend is almost the step itself, they cannot be told apart
        steps.append(np.where(size > 0.03, beside / np.maximum(size, 0.03), 0.0))
    return trends, steps, cuts


@lru_cache(maxsize=8)
def _halves(n: int) -> np.ndarray:
    """Returns the median likeness of the rests of even noise, for each memory."""
    random = np.random.default_rng(n)
    rests = (fitted(noise(phi, SIMULATIONS, n, random)).rest for phi in _MEMORIES)
    return np.maximum.accumulate([np.median(likeness(rest)) for rest in rests])


def by_step(tables: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """Returns the tables of all steps as one, with a first column `step`."""
    every: Any = pd.concat({**tables}, names=["step", "row"])  # pyright: ignore
    return every.reset_index("step").reset_index(drop=True)


def _derived(result: "WatchResult", name: str) -> pd.DataFrame:
    return by_step({step: result.at(step).table(name) for step in result.steps})


def _changes(result: "WatchResult") -> pd.DataFrame:
    rows, both = [], cast(Any, pd.concat([result._table("layers"), result._table("heads")]))
    for key, own in both.groupby(_KEYS, sort=False, dropna=False):
        steps, means = own["step"].to_numpy(int), own["mean"].to_numpy(float)
        gaps = np.diff(steps)
        # only the last gap may differ, if the last step came early
        even = len(gaps) - int(len(gaps) > 1 and gaps[-1] != gaps[-2])
        slopes = np.diff(means)[:even] / gaps[:even]
        change = change_point(slopes)
        found = (None, *[np.nan] * 4) if change is None else (steps[change.at], *change[1:])
        rows.append((*key, *found, len(slopes)))
    return pd.DataFrame(rows, columns=_CHANGES).astype({"head": "Int64", "step": "Int64"})


class WatchResult(Result):
    """What probes measured on the same samples at several steps of a training.

    Stored tables: those of a sweep, with a first column `step`, the number of updates so far.
    Derived tables: `layers`, `heads` and `changes`. `result.at(step)` is the SweepResult of one
    step.
    """

    KIND = "watch"
    MAIN = "layers"
    STORED = {
        "samples": by("step", "sample", "layer"),
        "head_samples": by("step", "sample", "layer", "head"),
        "moments": first,
        "weights": first,
    }
    DERIVED = {
        "layers": partial(_derived, name="layers"),
        "heads": partial(_derived, name="heads"),
        "changes": _changes,
    }
    ALONE = "results of a watch do not merge: watch all samples in one training."

    @property
    def steps(self) -> list[int]:
        """Returns the steps at which the model was measured, in order."""
        return list(self.meta["steps"])

    def at(self, step: int) -> SweepResult:
        """Returns what was measured at one step, as `ci.sweep` would return it.

        Raises ValueError if the model was not measured at this step.
        """
        if step not in self.steps:
            known = ", ".join(map(str, self.steps[:20]))
            raise ValueError(f"step={checks.quote(step)}: the model was measured at steps {known}.")
        every: dict[str, Any] = {name: self._table(name) for name in STORED}
        tables = {
            name: table[table["step"] == step].drop(columns="step").reset_index(drop=True)
            for name, table in every.items()
        } | {"controls": no_controls()}
        own = {"format", "result", "steps", "not_measured"}
        meta = {name: value for name, value in self.meta.items() if name not in own}
        return SweepResult(tables, meta | {"step": step, "controls": 0})

    def layers(self) -> pd.DataFrame:
        """Returns a row per step, statistic and layer: step, probe, statistic, layer, mean, std, n.

        mean and std are over n samples, as in `SweepResult.layers`.
        """
        return self.table("layers")

    def heads(self) -> pd.DataFrame:
        """Returns a row per step, statistic, layer and head: the columns of `layers()` and head."""
        return self.table("heads")

    def changes(self) -> pd.DataFrame:
        """Returns where each mean changes its course most: one row per statistic, layer and head.

        The series is the change of the mean per update, from step to step. step: the first step
        after its largest jump. before, after: the mean change per update on both sides. f: how much
        better the series is fitted with the jump than by a smooth trend alone. p: compares f with
        series without a jump that have the memory and the shocks of this series
        (crate_interp/training/watch_result.py). p is NaN for fewer than 20 changes, and if the
        noise lies in a few changes. Each p is one of many: at most about 6 % of the series without
        a jump have a p of .05 or below. The samples are the same at every step, so p is about this
        one training.
        """
        return self.table("changes")

    def finding(self) -> str:
        """Returns what was measured at which steps, and how many series change their course."""
        p, steps = self._table("changes")["p"].dropna(), self.steps
        missed = self.meta["not_measured"]
        words = "too few steps to tell where a series changes its course"
        if len(p):
            words = f"{(p <= LEVEL).sum()} of {len(p)} series change their course (p at most "
            words += f"{LEVEL:g}; at most {LEVEL * len(p):.0f} would by chance)"
        where = f"{self.counted_samples()}, step {steps[0]:,} to {steps[-1]:,}"
        lost = f" Not measured: step {', '.join(missed)}." if missed else ""
        return f"{self.meta['model'] or 'a model'} on {where}: {words}.{lost}"

    def _notebook_table(self) -> pd.DataFrame:
        return self._table("changes").sort_values("p", kind="stable").head(20)
