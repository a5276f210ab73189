"""Gathers the numbers of a sweep batch by batch, makes tables of them, and merges tables.

A statistic per sample is kept for every sample. For a statistic per head, each head's mean and
variance over samples are kept, and also the mean and variance of each sample's mean over heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from crate_interp.core.device_waits import fetched
from crate_interp.probes import Probe
from crate_interp.results.result import Result, Table
from crate_interp.sweeps.moments import STATISTIC, TOGETHER, Moments, both_moments, moments_of

Key = tuple[str, str, int]  # probe, statistic, layer
Numbers = dict[Key, Tensor]  # of one batch
CONTROLS = ["control", "probe", "statistic", "layer", "control_mean", "model_mean", "n", "lower"]
_NUMBERS = ["mean", "std", "n"]


@dataclass
class Tally:
    """The numbers measured so far, in a pass over n samples in all.

    A `[batch]` statistic is written into one array of length n, which is made at the first batch.
    Small arrays kept from every batch would lie between the activations and fragment the memory.
    The memory would then grow with the data.
    """

    n: int
    start: int = 0  # number of the first sample
    groups: np.ndarray | None = None  # of each sample; None if samples are independent
    samples: dict[Key, np.ndarray] = field(default_factory=dict)
    # a column for each head, then a column for the mean over heads; by statistic and group
    heads: dict[tuple[Key, int], Moments] = field(default_factory=dict)
    # [n, head] for statistics in Probe.per_head
    head_samples: dict[Key, np.ndarray] = field(default_factory=dict)
    weights: dict[Key, np.ndarray] = field(default_factory=dict)
    # "probe.statistic" -> its sum over samples and layers
    counts: dict[str, float] = field(default_factory=dict)
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)  # of one sample

    def add(self, numbers: Numbers, probes: Sequence[Probe], start: int) -> None:
        """Adds the numbers of a batch that begins at sample `start`.

        The numbers go to the CPU together, because each transfer costs as much as a measurement.
        Raises ValueError, with layer and samples, if a number is not finite; NaN is allowed from a
        probe with partial=True.
        """
        of_name = {probe.name: probe for probe in probes}
        first = start - self.start
        for key, tensor in zip(numbers, fetched(list(numbers.values())), strict=True):
            values, probe, name = tensor.numpy(), of_name[key[0]], f"{key[0]}.{key[1]}"
            wrong = ~np.isfinite(values) & ~(np.isnan(values) & probe.partial)
            if wrong.any():
                bad = numbered(wrong, start)
                raise ValueError(f"{name} is NaN or Inf in layer {key[2]}: samples {bad}.")
            if self.shapes.setdefault(key, values.shape[1:]) != values.shape[1:]:
                raise ValueError(f"{name} has another number of heads than in an earlier batch.")
            if key[1] in probe.counts:
                self.counts[name] = self.counts.get(name, 0.0) + float(values.sum())
                continue
            if values.ndim > 1:
                self._add_heads(key, values, first, probe.partial)
            if values.ndim == 1 or key[1] in probe.per_head:
                kept = self.samples if values.ndim == 1 else self.head_samples
                if key not in kept:
                    kept[key] = np.full((self.n, *values.shape[1:]), np.nan)
                kept[key][first : first + len(values)] = values

    def _add_heads(self, key: Key, values: np.ndarray, first: int, partial: bool) -> None:
        """Adds the `[batch, head]` values of the samples from place `first` on."""
        every = np.zeros(self.n, dtype=int) if self.groups is None else self.groups
        groups = every[first : first + len(values)]
        if partial:
            complete = ~np.isnan(values).any(axis=1)
            values, groups = values[complete], groups[complete]
        together = np.column_stack([values, values.mean(axis=1)])
        for group in sorted(set(groups.tolist())):
            own, place = together[groups == group], (key, group)
            mean = own.mean(axis=0)
            moments = (len(own), mean, ((own - mean) ** 2).sum(axis=0))
            earlier = self.heads.get(place)
            self.heads[place] = moments if earlier is None else both_moments(earlier, moments)

    def totals(self) -> dict[str, int | float]:
        """Returns the totals of counted statistics, whole numbers as integers."""
        pairs = self.counts.items()
        return {name: int(value) if value.is_integer() else value for name, value in pairs}

    def add_weights(self, probe: str, layer: int, answer: dict[str, Tensor]) -> None:
        """Adds a probe's numbers for a layer's weights, tensors of shape `[]` or `[head]`."""
        for statistic, tensor in answer.items():
            values = tensor.detach().double().cpu().numpy()
            if not np.isfinite(values).all():
                raise ValueError(f"{probe}.{statistic} of layer {layer} is NaN or Inf.")
            self.weights[probe, statistic, layer] = values


def numbered(wrong: np.ndarray, start: int) -> str:
    """Returns the numbers of samples with a true value, at most 8; start: of the first sample."""
    bad = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1)) + start
    return ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")


def no_controls() -> pd.DataFrame:
    """Returns an empty table of controls."""
    return pd.DataFrame({name: np.array([], dtype=object) for name in CONTROLS})


def tables_of(tally: Tally, labels: list[Any] | None, n_layers: int) -> dict[str, Any]:
    """Returns the stored tables of the measured numbers; the table of controls is empty."""
    moments = [
        (*key, TOGETHER if head == len(means) - 1 else head, n, mean, square, group)
        for (key, group), (n, means, squares) in tally.heads.items()
        for head, (mean, square) in enumerate(zip(means, squares, strict=True))
    ]
    columns = [*STATISTIC, "head", "n", "mean", "squares", "group"]
    by_group: Any = pd.DataFrame(moments, columns=columns)
    weights = [
        (*key, head, float(value))
        for key, values in tally.weights.items()
        for head, value in (enumerate(values) if values.ndim else [(None, values)])
    ]
    of_weights = pd.DataFrame(weights, columns=[*STATISTIC, "head", "value"])
    return {
        "samples": _sample_table(tally, labels, n_layers),
        "head_samples": _head_sample_table(tally),
        "moments": by_group if tally.groups is not None else by_group.drop(columns="group"),
        "weights": of_weights.astype({"head": "Int64"}),
        "controls": no_controls(),
    }


def _sample_table(tally: Tally, labels: list[Any] | None, n_layers: int) -> pd.DataFrame:
    n, start, values = tally.n, tally.start, tally.samples
    count = max([n_layers, *(layer + 1 for _, _, layer in values)])
    columns: dict[str, Any] = {
        "sample": np.repeat(np.arange(start, start + n), count),
        # labels may be lists, which NumPy would turn into an array
        "label": [label for label in (labels or [None] * n) for _ in range(count)],
        "layer": np.tile(np.arange(count), n),
    }
    for probe, statistic in dict.fromkeys((probe, statistic) for probe, statistic, _ in values):
        blank = np.full(n, np.nan)
        layers = [values.get((probe, statistic, layer), blank) for layer in range(count)]
        columns[f"{probe}.{statistic}"] = np.stack(layers, axis=1).reshape(-1)  # [n * count]
    return pd.DataFrame(columns).infer_objects()


def _head_sample_table(tally: Tally) -> pd.DataFrame:
    """Returns a row per sample, layer and head, for every layer and head of any statistic.

    A statistic that lacks the layer or the head of a row is NaN there.
    """
    keys, columns = ["sample", "layer", "head"], {}
    for probe, statistic in dict.fromkeys(key[:2] for key in tally.head_samples):
        layers = sorted(key[2] for key in tally.head_samples if key[:2] == (probe, statistic))
        wide = np.stack([tally.head_samples[probe, statistic, layer] for layer in layers], axis=1)
        places = [range(tally.start, tally.start + tally.n), layers, range(wide.shape[2])]
        index = pd.MultiIndex.from_product(places, names=keys)
        columns[f"{probe}.{statistic}"] = pd.Series(wide.reshape(-1), index)
    if not columns:
        return pd.DataFrame({key: np.array([], dtype=np.int64) for key in keys})
    return pd.concat(columns, axis=1).sort_index().reset_index()


def layers(result: Result) -> pd.DataFrame:
    """Returns mean, std and n, over samples, for each statistic and layer."""
    samples = result.stored["samples"]  # column by column, so that the table is not copied
    of_row = samples["layer"].to_numpy()
    rows_of = {layer: np.flatnonzero(of_row == layer) for layer in np.unique(of_row)}
    rows: list[tuple] = []
    for column in samples.columns[3:]:
        probe, statistic = column.split(".")
        every = samples[column].to_numpy()
        for layer, own in rows_of.items():
            values = every[own]
            values = values[~np.isnan(values)]
            if len(values):
                std = values.std(ddof=1) if len(values) > 1 else np.nan
                rows.append((probe, statistic, layer, values.mean(), std, len(values)))
    weights: Any = result.table("weights").itertuples()
    for row in weights:
        if pd.isna(row.head):
            rows.append((row.probe, row.statistic, row.layer, row.value, np.nan, 1))
    return _in_order(pd.DataFrame(rows, columns=[*STATISTIC, *_NUMBERS]))


def heads(result: Result) -> pd.DataFrame:
    """Returns mean, std and n, over samples, for each statistic, layer and head."""
    moments: Any = moments_of(result)
    weights: Any = result.table("weights")
    measured = moments.loc[moments["head"] != TOGETHER, [*STATISTIC, "head", *_NUMBERS]]
    own = weights[weights["head"].notna()].rename(columns={"value": "mean"})
    own = own.assign(std=np.nan, n=1).astype({"head": "int64"})[[*STATISTIC, "head", *_NUMBERS]]
    parts = [table for table in (measured, own) if len(table)] or [measured]
    return _in_order(pd.concat(parts, ignore_index=True))


def mean_of_heads(result: Result) -> pd.DataFrame:
    """Returns mean, std and n of each sample's mean over heads, for each statistic and layer.

    std is NaN for weights.
    """
    both: Any = result.table("heads").groupby(STATISTIC, sort=False, as_index=False)
    means = both.agg(mean=("mean", "mean"), n=("n", "first"))
    moments = moments_of(result)
    known = moments.loc[moments["head"] == TOGETHER, [*STATISTIC, "std"]]
    return means.merge(known, on=STATISTIC, how="left")[[*STATISTIC, *_NUMBERS]]


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows by statistic, in the order of first measurement, then by layer and head."""
    keys = ["place", "layer", *(["head"] if "head" in table else [])]
    placed: Any = table.assign(place=table.groupby(STATISTIC[:2], sort=False).ngroup())
    return placed.sort_values(keys, ignore_index=True).drop(columns="place")


def merged_controls(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
    """Returns the means over the controlled samples of both tables."""
    if not len(mine) or not len(theirs):
        return mine if len(mine) else theirs
    both: Any = pd.concat([mine, theirs], ignore_index=True)
    means = ["control_mean", "model_mean"]
    both[means] = both[means].astype(float).mul(both["n"].astype(float), axis=0)
    total: Any = both.groupby(CONTROLS[:4], sort=False, as_index=False)[CONTROLS[4:]].sum()
    return total.assign(**{name: total[name] / total["n"] for name in means})
