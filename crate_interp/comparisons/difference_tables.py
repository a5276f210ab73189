"""The tables of a comparison: a row per statistic and layer, and what each network has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.comparisons.sample_statistics import Statistic
from crate_interp.stats.bootstrap import holm
from crate_interp.stats.contrasts import (
    LEVEL,
    Difference,
    Spread,
    centre,
    certain,
    contrast,
    paired,
)

Statistics = Mapping[str, Statistic]
NETWORKS = ["side", "network", "trained", "probe", "statistic", "layer", "mean", "error", "n"]


@dataclass(frozen=True)
class Side:
    """What was measured of one side: of each network, and of each untrained one."""

    networks: Sequence[Statistics]
    twins: Sequence[Statistics]


@dataclass(frozen=True)
class Group:
    """One statistic of one side at the layers that are compared.

    means, errors: of each network, over samples. twins: the mean of each untrained network.
    """

    means: Float[np.ndarray, "network layer"]
    errors: Float[np.ndarray, "network layer"]
    twins: Float[np.ndarray, "seed layer"]

    @property
    def single(self) -> bool:
        """Whether the side is a single network, whose own scatter nobody measured."""
        return len(self.means) == 1


def differences(
    a: Side, b: Side, names: Sequence[str], layers: Sequence[tuple[int, int]], same_twins: bool
) -> pd.DataFrame:
    """Returns a row for each statistic and pair of layers; `Comparison` says what is in it.

    same_twins: whether both sides have the same untrained networks.
    """
    tables = [_of_statistic(a, b, name, layers, same_twins) for name in names]
    return pd.concat(tables, ignore_index=True)


def networks(a: Side, b: Side, names: Sequence[str]) -> pd.DataFrame:
    """Returns a row for each network, statistic and layer: mean, error and n over samples."""
    rows: list[tuple] = []
    for side, own in (("a", a), ("b", b)):
        for trained, group in ((True, own.networks), (False, own.twins)):
            for number, network in enumerate(group):
                for name in names:
                    if name in network:
                        one = network[name]
                        numbers = zip(one.layers, one.mean, one.error, one.n, strict=True)
                        place = (side, number, trained, *name.split("."))
                        rows += [(*place, *values) for values in numbers]
    return pd.DataFrame(rows, columns=NETWORKS).astype({"n": "int64"})


def _of_statistic(
    a: Side, b: Side, name: str, layers: Sequence[tuple[int, int]], same_twins: bool
) -> pd.DataFrame:
    first, second = a.networks[0][name], b.networks[0][name]
    pairs = [(l, m) for l, m in layers if l in first.layers and m in second.layers]  # noqa: E741
    own, other = ([pair[place] for pair in pairs] for place in (0, 1))
    one, two = _group(a, name, own), _group(b, name, other)
    if same_twins:
        two = replace(two, twins=one.twins)
    means, n = (centre(one.means), centre(two.means)), len(one.means) + len(two.means)
    if not one.single or not two.single:
        found = contrast(means[0] - means[1], *_over_networks(one, two))
        counts = np.full(len(pairs), n)
    elif first.values is None or second.values is None:
        found, counts = certain(means[0] - means[1]), np.ones(len(pairs), dtype=int)
    else:
        means, found, counts = _over_samples(_at(first, own), _at(second, other))
    columns: dict[str, Any] = {"layer": own, "layer_b": other, "a": means[0], "b": means[1]}
    columns |= _numbers(found) | {"n": counts} | _beside(one, two, found, same_twins)
    probe, statistic = name.split(".")
    return pd.DataFrame({"probe": probe, "statistic": statistic} | columns)


def _group(side: Side, name: str, layers: list[int]) -> Group:
    own, twins = (
        [one[name] for one in group if name in one] for group in (side.networks, side.twins)
    )
    means = np.stack([_of(one, one.mean, layers) for one in own])
    errors = np.stack([_of(one, one.error, layers) for one in own])
    random = [_of(one, one.mean, layers) for one in twins]
    return Group(means, errors, np.stack(random) if random else np.zeros((0, len(layers))))


def _of(one: Statistic, numbers: np.ndarray, layers: list[int]) -> np.ndarray:
    """Returns the numbers of some layers, NaN for a layer that lacks the statistic."""
    at = dict(zip(one.layers, numbers.tolist(), strict=True))
    return np.array([at.get(layer, np.nan) for layer in layers], dtype=float)


def _at(one: Statistic, layers: list[int]) -> np.ndarray:
    assert one.values is not None
    return one.values[:, [one.layers.index(layer) for layer in layers]]


def _over_samples(
    a: Float[np.ndarray, "sample layer"], b: Float[np.ndarray, "sample layer"]
) -> tuple[tuple[np.ndarray, np.ndarray], Difference, np.ndarray]:
    """Returns both means, the paired difference and n, over the samples that both have."""
    there = ~np.isnan(a - b)
    n = there.sum(axis=0)
    sums = (np.where(there, each, 0.0).sum(axis=0) for each in (a, b))
    one, two = (np.divide(each, n, where=n > 0, out=np.full(n.shape, np.nan)) for each in sums)
    return (one, two), paired(a - b), n


def _over_networks(one: Group, two: Group) -> tuple[list[Spread], np.ndarray]:
    """Returns what makes a difference over networks uncertain: their scatter, and samples.

    A single network is compared with one more network of the other side, as
    `bootstrap.against_networks` does.
    """
    spreads, variance = [], np.zeros(one.means.shape[1])
    for own, other in ((one, two), (two, one)):
        if own.single:
            spreads.append(Spread(other.means, 1.0))
            variance = variance + own.errors[0] ** 2
        else:
            spreads.append(Spread(own.means, 1 / len(own.means)))
    return spreads, variance


def _numbers(found: Difference) -> dict[str, np.ndarray]:
    p = holm(found.p)
    holds = np.where(np.isnan(p), 1.0, p) <= LEVEL
    return {
        "difference": found.value, "low": found.low, "high": found.high, "p": p, "holds": holds,
    }  # fmt: skip


def _beside(one: Group, two: Group, found: Difference, same_twins: bool) -> dict[str, np.ndarray]:
    """Returns the columns of the untrained networks, and the difference of the differences."""
    blank = np.full(len(found.value), np.nan)
    means = [centre(group.twins) if len(group.twins) else blank for group in (one, two)]
    untrained = means[0] - means[1]
    # the same networks on both sides differ by 0, whatever they have
    shares = [0.0 if same_twins else 1 / max(len(group.twins), 1) for group in (one, two)]
    spreads = [Spread(group.twins, share) for group, share in zip((one, two), shares, strict=True)]
    beside = contrast(untrained, spreads)
    if one.single and two.single:
        # single networks tell nothing of how such networks scatter: their twins stand for that
        trained, variance = [Spread(group.twins, 1.0) for group in (one, two)], found.error**2
    else:
        trained, variance = _over_networks(one, two)
    excess = contrast(found.value - untrained, [*trained, *spreads], variance)
    return {
        "untrained_a": means[0], "untrained_b": means[1], "untrained": untrained,
        "untrained_low": beside.low, "untrained_high": beside.high,
        "excess": excess.value, "excess_low": excess.low, "excess_high": excess.high,
        "excess_p": holm(excess.p),
    }  # fmt: skip
