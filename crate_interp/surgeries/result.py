"""SurgeryResult: slopes compared with random directions, and answers at each mix."""

from typing import Any

import numpy as np
import pandas as pd

from crate_interp.results.result import Result, by, sums
from crate_interp.results.result_files import near_chance
from crate_interp.stats.contrasts import against_networks
from crate_interp.stats.intervals import mean_interval

LADDER_ONLY = "ladder_only"  # the step that takes means over all samples
ALL = -1  # the layer number of rows in which all layers take the step at once
_PLACE = ["replacement", "layer"]


def _slopes(result: Result) -> pd.DataFrame:
    keys, slopes = _wide(result, "samples", "slope", _PLACE)
    _, added = _wide(result, "samples", "added", _PLACE)
    samples, random = result.table("unchanged")["sample"], result.table("random")
    low, high = mean_interval(result.by_group(slopes, samples))
    added_low, added_high = mean_interval(result.by_group(added, samples))
    drawn: Any = random.assign(mean=random["slope"] / random["n"]).groupby(_PLACE)["mean"]
    null = np.array([_another(drawn.get_group(key).to_numpy()) for key in keys]).T
    means, falls = np.array([own.mean() for own in slopes.T]), high < 0
    return pd.DataFrame(keys, columns=_PLACE).assign(
        slope=means, slope_low=low, slope_high=high,
        random=null[0], random_low=null[1], random_high=null[2],
        falls=falls, better=falls & (means < null[1]),
        added=[own.mean() for own in added.T], added_low=added_low, added_high=added_high,
        n=len(slopes),
    )  # fmt: skip


def _another(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the mean of values, and an interval that covers one further value at 95 %.

    The interval is `mean +- t sd sqrt(1 + 1 / n)`, with t of n - 1 degrees of freedom.
    """
    nothing = np.zeros(1)  # the further value is subtracted from this 0
    less = against_networks(nothing, nothing, values[:, None])
    return -float(less.value[0]), -float(less.high[0]), -float(less.low[0])


def _mixes(result: Result) -> pd.DataFrame:
    own, columns = result.table("unchanged"), {}
    for name, column in (("loss", "loss"), ("right", "accuracy")):
        keys, values = _wide(result, "answers", name, [*_PLACE, "mix"])
        paired = values - own[name].to_numpy()[:, None]
        low, high = result.mean_change(paired, own["sample"], column).ends
        columns |= {column: values.mean(axis=0), f"{column}_change": paired.mean(axis=0)}
        columns |= {f"{column}_low": low, f"{column}_high": high}
    keys, change = _wide(result, "answers", "change", [*_PLACE, "mix"])
    columns |= {"change": change.mean(axis=0), "n": len(own)}
    return pd.DataFrame(keys, columns=[*_PLACE, "mix"]).assign(**columns)


def _wide(
    result: Result, table: str, value: str, by_what: list[str]
) -> tuple[list[tuple], np.ndarray]:
    """Returns the keys of columns, in the order of the settings, and values `[sample, column]`."""
    wide: Any = result.table(table).pivot(index="sample", columns=by_what, values=value)
    order = {name: place for place, name in enumerate(result.meta["settings"]["replacements"])}
    # all layers at once come after the single layers
    keys = sorted(wide.columns, key=lambda key: (order[key[0]], key[1] % (2**31), *key[2:]))
    return keys, wide[keys].to_numpy() if keys else np.zeros((len(result.table("unchanged")), 0))


class SurgeryResult(Result):
    """How answers change when layers take the steps that they were derived from.

    `table()`, also "slopes": a row per replacement and layer; layer -1 is all layers at once.
    slope: d loss / d t at t = 0, where the step begins to replace the layer's own, in nats; mean
    over samples. slope_low, slope_high: the slope's 95 % bootstrap interval over samples. random:
    the mean slope over samples and random directions. random_low, random_high: an interval that
    covers the mean slope of one further random direction at 95 %, mean +- t sd sqrt(1 + 1 / n) for
    n directions.

    falls: whether slope_high is below 0. better: whether the slope is also below random_low. This
    compares the slope itself, not its interval: the random directions see the same samples, so the
    interval would count the spread of samples twice. added: the slope if the step is added and the
    layer's own step stays. Each interval is for one row: of 40 rows without any effect, about one
    seems to fall.

    `table("mixes")`: a row per replacement, layer and mix t: loss, accuracy, and their changes,
    paired by sample, with 95 % intervals (Tango's score interval for the accuracy of images,
    bootstrap-t for the rest); change: |Z^L' - Z^L| / |Z^L|.

    Stored tables: `unchanged` (loss and right, for each sample), `samples` (slope and added, for
    each sample, replacement and layer), `random` (sums of slopes over n samples, by direction),
    `answers` (loss, right and change, for each sample, replacement, layer and mix).
    """

    KIND = "surgery"
    MAIN = "slopes"
    INTERVALS = True
    STORED = {
        "unchanged": by("sample"),
        "samples": by("sample", "replacement", "layer"),
        "random": sums("replacement", "layer", "direction"),
        "answers": by("sample", "replacement", "layer", "mix"),
    }
    DERIVED = {"slopes": _slopes, "mixes": _mixes}

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or "" if it does."""
        if LADDER_ONLY not in self.meta["settings"]["replacements"]:
            return ""
        return f"{LADDER_ONLY} takes the mean norms over all samples: use all samples at once."

    def caution(self) -> str:
        """Returns `Result.caution`, and whether an accuracy near chance may be that of settings."""
        right: Any = self._table("unchanged")["right"]
        return f"{super().caution()} {near_chance(self.meta, float(right.mean()))}".strip()

    def finding(self) -> str:
        """Returns in how many layers the loss falls, and falls more than in random directions."""
        table: Any = self._table("slopes")
        single = table[table["layer"] != ALL]
        better = single[single["better"]]
        names = [f"{row.replacement} in layer {row.layer}" for row in better.itertuples()]
        return (
            f"Of {len(single)} replacements of a layer's step of {self.meta['model'] or 'a model'} "
            f"on {self.counted_samples()}, {single['falls'].sum()} begin to lower the loss and "
            f"{(single['slope_low'] > 0).sum()} to raise it. Replacements that lower it more than "
            f"random directions do: {', '.join(names) or 'none'}."
        )
