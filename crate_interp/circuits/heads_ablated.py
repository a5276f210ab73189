"""HeadAblation: how much worse a model answers without each head."""

import math
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.circuits.circuit import head_name
from crate_interp.results import Result, by, counted
from crate_interp.sweeps.bootstrap import CONFIDENCE, holm, studentised

_UNITS = {"loss": "nats of loss", "accuracy": "of accuracy"}
_AT_ONCE = 512  # columns of a bootstrap


def _heads(result: Result) -> pd.DataFrame:
    base = result.table("base").set_index("sample")["base"]
    wide: Any = result.table("samples").pivot(
        index="sample", columns=["layer", "head"], values="ablated"
    )
    worse = 1 if result.meta["settings"]["metric"] == "loss" else -1
    ablated, whole = wide.to_numpy(float), base.loc[wide.index].to_numpy(float)[:, None]
    drops = worse * (ablated - whole)
    rows: list[dict[str, Any]] = []
    for start in range(0, drops.shape[1], _AT_ONCE):
        found = studentised(drops[:, start : start + _AT_ONCE])
        low, high = found.interval()
        p = np.minimum(2 * np.minimum(found.above(0.0), found.below(0.0)), 1.0)
        p = np.where((found.error == 0) & (found.mean == 0), 1.0, p)
        p = np.where(np.isnan(found.error), np.nan, p)
        rows += [
            {"drop": found.mean[at], "low": low[at], "high": high[at], "p": p[at]}
            for at in range(len(p))
        ]
    table = pd.DataFrame(rows)
    places = pd.DataFrame(wide.columns.tolist(), columns=["layer", "head"])
    values = places.assign(base=whole.mean(), ablated=ablated.mean(axis=0))
    both = pd.concat([values, table], axis=1)
    return both.assign(p=holm(both["p"].to_numpy(float)), n=len(wide))


class HeadAblation(Result):
    """How much worse a model answers without each head.

    `table()` has a row per layer and head: base and ablated, the mean of the metric without and
    with the ablation; drop, how much worse it is, ablated - base of a loss and base - ablated of an
    accuracy, above 0 for a head that helps; its 95 % interval low to high, the bootstrap-t of the
    drops paired by sample; p, two-sided and adjusted over all heads (Holm); n samples.

    Stored tables: `samples` (sample, layer, head, ablated) and `base` (sample, base).
    """

    KIND = "head_ablation"
    META = {"settings": dict}
    MAIN = "heads"
    STORED = {"samples": by("sample", "layer", "head"), "base": by("sample")}
    DERIVED = {"heads": _heads}
    INTERVALS = True

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or nothing."""
        if self.meta["settings"]["how"] == "zero":
            return ""
        return (
            "the mean in a head's place is over all samples: run ci.ablate_heads on all of them, "
            "or with how='zero', which merges."
        )

    def heads(self) -> pd.DataFrame:
        """Returns a row per layer and head: layer, head, base, ablated, drop, low, high, p, n."""
        return self.table("heads")

    def legend(self) -> str:
        """Returns what the columns of `heads()` are, in words."""
        metric = self.meta["settings"]["metric"]
        return (
            f"base, ablated: the mean {metric} of n samples, of the whole model and without the "
            f"head ({self.meta['settings']['how']} ablation). drop: how much worse that is.\n"
            "low to high: its 95 % interval, of each head by itself. p: that the drop is 0, "
            "adjusted over all heads (Holm); an interval may leave out 0 where p is above 0.05."
        )

    @property
    def by_chance(self) -> float:
        """How many intervals would leave out 0 by chance, if no head did anything."""
        return (1 - CONFIDENCE) * len(self._table("heads"))

    def headline(self) -> str:
        """Returns how many heads matter, how many would seem to by chance, and the first of all."""
        table: Any = self._table("heads")
        settings, name = self.meta["settings"], self.meta["model"] or "the model"
        count = counted(len(table), "heads")
        best = table.loc[table["drop"].idxmax()]
        unit = _UNITS[settings["metric"]]
        out = int(((table["low"] > 0) | (table["high"] < 0)).sum())
        held = int((table["p"] <= 1 - CONFIDENCE + 1e-12).sum())
        ends = "" if np.isnan(best["low"]) else f" ({best['low']:+.3g} to {best['high']:+.3g})"
        return (
            f"Of {count} of {name} {held} matter at 95 %, adjusted over heads (intervals "
            f"that leave out 0: {out}, by chance {self.by_chance:.2g}); {settings['how']} ablation "
            f"of {head_name(int(best['layer']), int(best['head']))} costs the most, "
            f"{best['drop']:+.3g} {unit}{ends} beside {best['base']:.3g}."
        )

    def caution(self) -> str:
        """Returns a warning if there are few samples, or if answers are worse than chance."""
        metric, config = self.meta["settings"]["metric"], self.meta["config"]
        choices = config.get("n_classes") or config.get("d_vocab") or 1
        base = float(self._table("heads")["base"].mean())
        even = math.log(choices) if metric == "loss" else 1 / choices
        worse = base > even if metric == "loss" else base < even
        said = (
            f"The model answers worse than by chance: {metric} {base:.3g}, by chance {even:.3g}. "
            "Check that the labels are in the order of its outputs, and that pictures are prepared "
            "as in its training."
        )
        return f"{said} {super().caution()}".strip() if worse and choices > 1 else super().caution()

    def _check(self) -> None:
        super()._check()
        _UNITS[self.meta["settings"]["metric"]]
        self.alone.strip()

    def _shown(self) -> pd.DataFrame:
        table: Any = self._table("heads")
        return table.sort_values("drop", ascending=False, kind="stable").head(20)
