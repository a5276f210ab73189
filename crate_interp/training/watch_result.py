"""WatchResult: what probes measured during a training, with the training step as an axis."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.core import checks
from crate_interp.results.grouped_samples import counted
from crate_interp.results.result import Result, by, first
from crate_interp.stats.significance import LEVEL
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_tables import no_controls
from crate_interp.training.change_points import change_point

STORED = ("samples", "head_samples", "moments", "weights")
_KEYS = ["probe", "statistic", "layer", "head"]
_CHANGES = [*_KEYS, "step", "f", "p", "before", "after", "n"]


def _by_step(result: "WatchResult", name: str) -> pd.DataFrame:
    """Returns a derived table of the sweeps at all steps, with a first column `step`."""
    parts = [result.at(step).table(name) for step in result.steps]
    for step, part in zip(result.steps, parts, strict=True):
        part.insert(0, "step", step)
    return pd.concat(parts, ignore_index=True)


def _changes(result: "WatchResult") -> pd.DataFrame:
    rows = []
    for key, steps, means in result._series():
        even = _evenly_spaced(steps)
        slopes = np.diff(means)[:even] / np.diff(steps)[:even]
        change = change_point(slopes)
        found: tuple = (None, np.nan, np.nan, np.nan, np.nan)
        if change is not None:
            found = (steps[change.at], *change[1:])
        rows.append((*key, *found, len(slopes)))
    table = pd.DataFrame(rows, columns=_CHANGES)
    return table.astype({"head": "Int64", "step": "Int64"})


def _evenly_spaced(steps: np.ndarray) -> int:
    """Returns how many gaps between steps are equal, counted from the first gap.

    Only the last gap may differ, if the last step came early.
    """
    gaps = np.diff(steps)
    return len(gaps) - int(len(gaps) > 1 and gaps[-1] != gaps[-2])


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
        "layers": partial(_by_step, name="layers"),
        "heads": partial(_by_step, name="heads"),
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
            near = min(self.steps, key=lambda one: abs(one - step)) if checks.is_int(step) else ""
            raise ValueError(
                f"step={checks.shown(step)}: the model was measured at {len(self.steps)} steps, "
                f"{self.steps[0]} to {self.steps[-1]}. The nearest step is {near or self.steps[0]}."
            )
        tables: dict[str, Any] = {}
        for name in STORED:
            rows: Any = self._table(name)
            tables[name] = rows[rows["step"] == step].drop(columns="step").reset_index(drop=True)
        tables["controls"] = no_controls()
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
        better the series is fitted with the jump than by a smooth trend alone. p: against series
        without a jump that have the memory and the shocks of this one
        (crate_interp/training/change_points.py); NaN for fewer than 20 changes, and where the noise
        lies in a few of them. Each p is one of many: at most about 6 % of the series without a jump
        have a p of .05 or below. The samples are the same at every step, so p is about this one
        training.
        """
        return self.table("changes")

    def finding(self) -> str:
        """Returns what was measured at which steps, and how many series change their course."""
        meta, steps = self.meta, self.steps
        what = counted(len(meta["statistics"]), "statistics")
        where = (
            f"{what} of {meta['model'] or 'a model'} on {self.counted_samples()} "
            f"at {counted(len(steps), 'steps')}, {steps[0]:,} to {steps[-1]:,}"
        )
        missed = len(meta["not_measured"])
        more = f" {counted(missed, 'steps')} could not be measured." if missed else ""
        table: Any = self._table("changes")
        tested = table[table["p"].notna()]
        if not len(tested):
            return f"{where}: too few steps to tell where a series changes its course.{more}"
        found = tested[tested["p"] <= LEVEL]
        words = (
            f"{where}: {len(found)} of {len(tested)} series change their course (p at most "
            f"{LEVEL:g}; by chance at most {LEVEL * len(tested):.0f} would)"
        )
        if len(found):
            words += f", half of them by step {int(np.percentile(found['step'], 50)):,}"
        return f"{words}.{more}"

    def _series(self) -> Iterator[tuple[tuple, np.ndarray, np.ndarray]]:
        """Yields each series: (probe, statistic, layer, head or None), steps and means."""
        for name in ("layers", "heads"):
            table: Any = self._table(name)
            keys = _KEYS if name == "heads" else _KEYS[:3]
            for key, rows in table.groupby(keys, sort=False):
                whole = key if name == "heads" else (*key, None)
                yield whole, rows["step"].to_numpy(), rows["mean"].to_numpy()

    def _shown(self) -> pd.DataFrame:
        changes: Any = self._table("changes")
        return changes.sort_values("p", kind="stable").head(20)
