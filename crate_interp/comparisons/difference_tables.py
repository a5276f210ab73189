"""The tables of a comparison: a row per statistic and layer, and the values of each network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.comparisons.sample_statistics import Statistic
from crate_interp.stats.contrasts import Difference, Spread, centre, contrast, paired, without_test
from crate_interp.stats.significance import LEVEL, holm

Statistics = Mapping[str, Statistic]
NETWORKS = ["side", "network", "trained", "probe", "statistic", "layer", "mean", "error", "n"]


@dataclass(frozen=True)
class Side:
    """The measurements of one side: of each network, and of each untrained one."""

    networks: Sequence[Statistics]
    twins: Sequence[Statistics]


@dataclass(frozen=True)
class Group:
    """One statistic of one side, at the layers that are compared.

    means, errors: each network's mean and its standard error, over n samples. twins: the mean of
    each untrained network.
    """

    means: Float[np.ndarray, "network layer"]
    errors: Float[np.ndarray, "network layer"]
    n: Float[np.ndarray, "network layer"]
    twins: Float[np.ndarray, "seed layer"]

    @property
    def single(self) -> bool:
        """Whether the side is a single network, so that the spread between trainings is unknown."""
        return len(self.means) == 1


def differences(
    a: Side, b: Side, names: Sequence[str], layers: Sequence[tuple[int, int]], same_twins: bool
) -> pd.DataFrame:
    """Returns a row for each statistic and pair of layers, as `Comparison` describes it.

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
                        place = (side, number, trained, *name.split("."))
                        rows += [(*place, *row) for row in network[name].numbers.itertuples()]
    return pd.DataFrame(rows, columns=NETWORKS).astype({"n": "int64"})


def _of_statistic(
    a: Side, b: Side, name: str, layers: Sequence[tuple[int, int]], same_twins: bool
) -> pd.DataFrame:
    first, second = a.networks[0][name], b.networks[0][name]
    known = (first.numbers.index, second.numbers.index)
    pairs = [pair for pair in layers if pair[0] in known[0] and pair[1] in known[1]]
    own, other = ([pair[place] for pair in pairs] for place in (0, 1))
    one, two = _group(a, name, own), _group(b, name, other)
    if same_twins:
        two = replace(two, twins=one.twins)
    means, n = (centre(one.means), centre(two.means)), np.ones(len(pairs), dtype=int)
    if not one.single or not two.single:
        difference = contrast(means[0] - means[1], *_over_networks(one, two))
        n *= len(one.means) + len(two.means)
    elif first.values is None or second.values is None:
        difference = without_test(means[0] - means[1], error=0.0)
    else:
        means, difference, n = _over_samples(
            first.values[own].to_numpy(float), second.values[other].to_numpy(float)
        )
    columns: dict[str, Any] = {"layer": own, "layer_b": other, "a": means[0], "b": means[1]}
    columns |= _numbers(difference) | {"n": n} | _beside(one, two, difference, n, same_twins)
    probe, statistic = name.split(".")
    return pd.DataFrame({"probe": probe, "statistic": statistic} | columns)


def _group(side: Side, name: str, layers: list[int]) -> Group:
    own, twins = (
        [network[name].by_layer(layers) for network in networks if name in network]
        for networks in (side.networks, side.twins)
    )
    means, errors, n = np.stack(own, axis=1)
    return Group(means, errors, n, np.array([twin[0] for twin in twins]).reshape(-1, len(layers)))


def _over_samples(
    a: Float[np.ndarray, "sample layer"], b: Float[np.ndarray, "sample layer"]
) -> tuple[tuple[np.ndarray, np.ndarray], Difference, np.ndarray]:
    """Returns both means, the paired difference and n, over the samples that both sides have."""
    there = ~np.isnan(a - b)
    n = there.sum(axis=0)
    sums = (np.where(there, each, 0.0).sum(axis=0) for each in (a, b))
    one, two = (np.divide(each, n, where=n > 0, out=np.full(n.shape, np.nan)) for each in sums)
    return (one, two), paired(a - b), n


def _over_networks(one: Group, two: Group) -> tuple[list[Spread], np.ndarray, np.ndarray]:
    """Returns the uncertainty of a difference over networks: their spreads, and samples.

    They are the spreads, variance and samples of `contrast`. A single network is compared with one
    more network of the other side, as `against_networks` does.
    """
    spreads, variance, samples = [], np.zeros(one.means.shape[1]), np.inf
    for own, other in ((one, two), (two, one)):
        if own.single:
            spreads.append(Spread(other.means, 1.0))
            variance, samples = own.errors[0] ** 2, own.n[0]
        else:
            spreads.append(Spread(own.means, 1 / len(own.means)))
    return spreads, variance, np.broadcast_to(samples, variance.shape)


def _numbers(difference: Difference) -> dict[str, np.ndarray]:
    p = holm(difference.p)
    holds = np.where(np.isnan(p), 1.0, p) <= LEVEL
    ends = {"low": difference.low, "high": difference.high}
    return {"difference": difference.value} | ends | {"p": p, "holds": holds}


def _beside(
    one: Group, two: Group, trained: Difference, n: np.ndarray, same_twins: bool
) -> dict[str, np.ndarray]:
    """Returns the columns of the untrained networks, and the difference of the differences."""
    blank = np.full(len(trained.value), np.nan)
    means = [centre(group.twins) if len(group.twins) else blank for group in (one, two)]
    untrained = means[0] - means[1]
    # the same networks on both sides always differ by 0
    shares = [0.0 if same_twins else 1 / max(len(group.twins), 1) for group in (one, two)]
    spreads = [Spread(group.twins, share) for group, share in zip((one, two), shares, strict=True)]
    beside = contrast(untrained, spreads)
    if one.single and two.single:
        # single networks do not show how such networks scatter: their twins' spread is used instead
        scatter, of_samples = [Spread(group.twins, 1.0) for group in (one, two)], trained.error**2
    else:
        scatter, of_samples, n = _over_networks(one, two)
    excess = contrast(trained.value - untrained, [*scatter, *spreads], of_samples, n)
    return {
        "untrained_a": means[0], "untrained_b": means[1], "untrained": untrained,
        "untrained_low": beside.low, "untrained_high": beside.high,
        "excess": excess.value, "excess_low": excess.low, "excess_high": excess.high,
        "excess_p": holm(excess.p),
    }  # fmt: skip
