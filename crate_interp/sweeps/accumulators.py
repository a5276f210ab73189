"""Gathers the numbers that probes return: every sample's, and mean and variance per head.

Each sample's mean over heads has its own mean and variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from crate_interp.probes import Probe

Key = tuple[str, str, int]  # probe, statistic, layer


@dataclass
class Moments:
    """Count, mean and sum of squared deviations, `[column]` in float64.

    They are merged batch by batch (Chan, Golub, LeVeque 1979).
    """

    n: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Returns the moments of `[batch, column]` values."""
        mean = values.mean(axis=0)
        return cls(len(values), mean, ((values - mean) ** 2).sum(axis=0))

    def merged(self, other: "Moments") -> "Moments":
        """Returns the moments of both sets of values together."""
        n = self.n + other.n
        step = other.mean - self.mean
        squares = self.squares + other.squares + step**2 * (self.n * other.n / n)
        return Moments(n, self.mean + step * (other.n / n), squares)


@dataclass
class Tally:
    """The numbers measured so far on n samples.

    A `[batch]` statistic is written into one array of length n, made at its first batch. Small
    arrays kept from every batch would fragment the memory between activations, so that it would
    grow with the data.
    """

    n: int
    start: int = 0  # number of the first sample
    samples: dict[Key, np.ndarray] = field(default_factory=dict)
    # a column for each head, then one for each sample's mean over heads
    heads: dict[Key, Moments] = field(default_factory=dict)
    # [n, head] for statistics in Probe.per_head
    head_samples: dict[Key, np.ndarray] = field(default_factory=dict)
    weights: dict[Key, np.ndarray] = field(default_factory=dict)
    # "probe.statistic": summed over samples and layers
    counts: dict[str, float] = field(default_factory=dict)
    # answers on the current batch: probe, layer, statistic, values, first sample
    waiting: list[tuple[Probe, int, str, Tensor, int]] = field(default_factory=list)

    def add(self, probe: Probe, layer: int, answer: dict[str, Tensor], start: int) -> None:
        """Takes a probe's numbers for a batch that begins at sample `start`; `flush` adds them."""
        self.waiting += [
            (probe, layer, statistic, value, start) for statistic, value in answer.items()
        ]

    def flush(self, probes: Sequence[Probe]) -> None:
        """Adds the numbers of a batch in the order of the probes.

        They are transferred together, because a transfer costs as much as a measurement. Raises
        ValueError, with layer and samples, if a number is not finite, except for NaN from a probe
        that is partial.
        """
        order = {probe.name: place for place, probe in enumerate(probes)}
        waiting, self.waiting = sorted(self.waiting, key=lambda item: order[item[0].name]), []
        if not waiting:
            return
        tables = _columns([value for *_, value, _ in waiting])
        finite = all(np.isfinite(table).all() for table in tables)
        for (probe, layer, statistic, tensor, start), values in zip(waiting, tables, strict=True):
            key = (probe.name, statistic, layer)
            if not finite:
                _refuse_nan(key, values, start, probe.partial)
            self._count(probe, key, values.reshape(tensor.shape), start)

    def _count(self, probe: Probe, key: Key, values: np.ndarray, start: int) -> None:
        """Adds `[batch]` or `[batch, head]` values of one statistic."""
        if key[1] in probe.counts:
            name = f"{key[0]}.{key[1]}"
            self.counts[name] = self.counts.get(name, 0.0) + float(values.sum())
        elif values.ndim == 1:
            self._keep(self.samples, key, values, start)
        else:
            if key[1] in probe.per_head:
                self._keep(self.head_samples, key, values, start)
            complete = values[~np.isnan(values).any(axis=1)] if probe.partial else values
            if len(complete):
                together = complete.mean(axis=1)
                self._merge(key, Moments.of(np.column_stack([complete, together])))

    def _keep(self, store: dict[Key, np.ndarray], key: Key, values: np.ndarray, start: int) -> None:
        """Writes a batch into the array of all samples, which begins as NaN."""
        if key not in store:
            store[key] = np.full((self.n, *values.shape[1:]), np.nan)
        _same_heads(key, store[key].shape[1:], values.shape[1:])
        first = start - self.start
        store[key][first : first + len(values)] = values

    def _merge(self, key: Key, moments: Moments) -> None:
        if key in self.heads:
            _same_heads(key, self.heads[key].mean[:-1].shape, moments.mean[:-1].shape)
            moments = self.heads[key].merged(moments)
        self.heads[key] = moments

    def totals(self) -> dict[str, int | float]:
        """Returns the totals of counted statistics, whole numbers as integers."""
        return {
            name: int(value) if value.is_integer() else value for name, value in self.counts.items()
        }

    def add_weights(self, probe: str, layer: int, answer: dict[str, Tensor]) -> None:
        """Takes the numbers of a layer's weights from a probe, `[]` or `[head]` each."""
        for statistic, tensor in answer.items():
            values = tensor.detach().double().cpu().numpy()
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{probe}.{statistic} of layer {layer} is NaN or Inf: "
                    "are the model's weights finite?"
                )
            self.weights[probe, statistic, layer] = values


def _columns(values: list[Tensor]) -> list[np.ndarray]:
    """Returns each tensor in float64, `[batch, 1 or head]`, by one transfer per dtype and batch."""
    groups: dict[tuple, list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault((value.dtype, len(value)), []).append(place)
    out: list[np.ndarray] = [np.empty(0)] * len(values)
    for places in groups.values():
        parts = [values[place].detach().reshape(len(values[place]), -1) for place in places]
        table = torch.cat(parts, dim=1).double().cpu().numpy()
        edges = np.cumsum([part.shape[1] for part in parts])[:-1]
        for place, columns in zip(places, np.split(table, edges, axis=1), strict=True):
            out[place] = columns
    return out


def _same_heads(key: Key, before: tuple[int, ...], now: tuple[int, ...]) -> None:
    if before != now:
        raise ValueError(
            f"{key[0]}.{key[1]} has {now[0]} heads in one batch, fewer or more before."
        )


def _refuse_nan(key: Key, values: np.ndarray, start: int, partial: bool) -> None:
    right = np.isfinite(values) | (np.isnan(values) & partial)
    if not right.all():
        good = right.reshape(len(values), -1).all(axis=1)
        bad = [int(index) + start for index in np.flatnonzero(~good)]
        shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        raise ValueError(
            f"{key[0]}.{key[1]} is NaN or Inf in layer {key[2]} for {len(bad)} samples: {shown}."
        )
