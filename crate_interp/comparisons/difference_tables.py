"""The tables of a comparison, and the choice of statistics and layers that both sides have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from crate_interp.stats.contrasts import (
    Difference,
    Spread,
    by_group,
    centre,
    contrast,
    mean_error,
    paired,
    without_test,
)
from crate_interp.stats.intervals import LEVEL, holm, max_t
from crate_interp.sweeps.moments import TOGETHER, moments_of
from crate_interp.sweeps.result import SweepResult

NETWORKS = ["side", "network", "trained", "probe", "statistic", "layer", "mean", "error", "n"]
_CHOSEN = "subspaces"  # setting: the map measured in place of U; may differ between sides


@dataclass(frozen=True)
class Statistic:
    """A statistic of one network.

    numbers: a row per layer with mean, error and n, over samples. error is the standard error: 0
    for statistics of the weights, NaN for a single sample. values: a row per sample and a column
    per layer; None if the sweep holds no values by sample: for weights, and for heads of which only
    the means were saved. groups: the group of each of these samples, or None if samples are
    independent; error and n are over groups then. per_head: whether the numbers are means over
    heads. of_weights: whether the statistic is of weights, not of samples.
    """

    numbers: pd.DataFrame
    values: pd.DataFrame | None = None
    groups: np.ndarray | None = None
    per_head: bool = False
    of_weights: bool = False

    def by_layer(self, layers: Sequence[int]) -> Float[np.ndarray, "number layer"]:
        """Returns mean, error and n of some layers, NaN for a layer that lacks the statistic."""
        return self.numbers.reindex(list(layers)).to_numpy(float).T


def statistics_of(result: SweepResult) -> dict[str, Statistic]:
    """Returns "probe.statistic" -> its numbers, in the order in which they were measured.

    A statistic per head is averaged over heads: for each sample if the sweep has every sample's
    numbers, else for all samples together. If a result was saved without the variance of the mean
    over heads, the mean of the heads' standard errors is used instead, which is an upper bound.
    """
    samples, heads = result.table("samples"), result.table("head_samples")
    keys, found = ["probe", "statistic"], {}
    weights, moments = (cast(Any, one) for one in (result.table("weights"), moments_of(result)))
    for (probe, statistic), own in weights.groupby(keys, sort=False):
        numbers = own.groupby("layer")[["value"]].mean().assign(error=0.0, n=1.0)
        per_head = bool(own["head"].notna().any())
        found[f"{probe}.{statistic}"] = Statistic(numbers, per_head=per_head, of_weights=True)
    for (probe, statistic), own in moments.groupby(keys, sort=False):
        together = own[own["head"] == TOGETHER]
        own = together if len(together) else own
        own = own.assign(n=own["independent"])
        numbers = own.groupby("layer")[["mean", "error", "n"]].mean()
        found[f"{probe}.{statistic}"] = Statistic(numbers, per_head=True)
    averaged, tables = set(result.meta.get("heads_averaged", [])), {}
    for name in heads.columns[3:]:
        by_sample: Any = heads.groupby(["sample", "layer"])[name]
        # NaN if some head has no value
        whole = by_sample.mean().where(by_sample.count() == by_sample.size())
        tables[name] = whole.unstack("layer")
    for name in samples.columns[3:]:
        tables[name] = samples.pivot(index="sample", columns="layer", values=name)
    for name, wide in tables.items():
        wide = wide.dropna(axis=1, how="all")
        groups = result.groups_at(wide.index)
        error, n = mean_error(by_group(wide.to_numpy(float), groups))
        numbers = pd.DataFrame({"mean": wide.mean(), "error": error, "n": n})
        per_head = name in averaged or name in heads.columns
        found[name] = Statistic(numbers, wide, groups, per_head)
    order = list(result.meta["statistics"])
    return {name: found[name] for name in order if name in found and len(found[name].numbers)}


Statistics = Mapping[str, Statistic]


@dataclass(frozen=True)
class Side:
    """The measurements of one side: of each network, and of each untrained twin."""

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
    adjusted, independent, untrained_p = None, n, np.full(len(pairs), np.nan)
    if not one.single or not two.single:
        difference = contrast(means[0] - means[1], *_over_networks(one, two))
        n *= len(one.means) + len(two.means)
    elif first.values is None or second.values is None:
        difference = without_test(means[0] - means[1], error=0.0)
    else:
        values = first.values[own].to_numpy(float), second.values[other].to_numpy(float)
        means, n = _means(*values)
        difference, adjusted, independent = _over_samples(*values, first.groups)
        # two untrained networks, compared in the same way
        pair = a.twins[:2] if same_twins else [*a.twins[:1], *b.twins[:1]]
        twins: list[Any] = [twin[name].values for twin in pair if name in twin]
        if len(twins) == 2 and all(table is not None for table in twins):
            tables = twins[0].reindex(columns=own), twins[1].reindex(columns=other)
            arrays = [table.to_numpy(float) for table in tables]
            untrained_p = _over_samples(arrays[0], arrays[1], pair[0][name].groups)[1]
    columns: dict[str, Any] = {"layer": own, "layer_b": other, "a": means[0], "b": means[1]}
    beside = _beside(one, two, difference, independent, same_twins)
    p = holm(difference.p) if adjusted is None else adjusted
    ends = {"difference": difference.value, "low": difference.low, "high": difference.high}
    columns |= ends | {"p": p, "holds": np.where(np.isnan(p), 1.0, p) <= LEVEL}
    columns |= {"n": n, "untrained_p": untrained_p} | beside
    probe, statistic = name.split(".")
    return pd.DataFrame({"probe": probe, "statistic": statistic} | columns)


def _group(side: Side, name: str, layers: list[int]) -> Group:
    own, twins = (
        [network[name].by_layer(layers) for network in networks if name in network]
        for networks in (side.networks, side.twins)
    )
    means, errors, n = np.stack(own, axis=1)
    return Group(means, errors, n, np.array([twin[0] for twin in twins]).reshape(-1, len(layers)))


def _means(
    a: Float[np.ndarray, "sample layer"], b: Float[np.ndarray, "sample layer"]
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Returns both means and n, over the samples that both sides have."""
    there = ~np.isnan(a - b)
    n = there.sum(axis=0)
    sums = (np.where(there, each, 0.0).sum(axis=0) for each in (a, b))
    one, two = (np.divide(each, n, where=n > 0, out=np.full(n.shape, np.nan)) for each in sums)
    return (one, two), n


def _over_samples(
    a: Float[np.ndarray, "sample layer"],
    b: Float[np.ndarray, "sample layer"],
    groups: Int[np.ndarray, "sample"] | None,
) -> tuple[Difference, np.ndarray, np.ndarray]:
    """Returns the paired difference, its p adjusted over layers, and over how many it is.

    These are the independent samples, or groups of samples, that both sides have.
    """
    free = by_group(a - b, groups)
    difference = paired(free)
    return difference, max_t(free, difference.p), (~np.isnan(free)).sum(axis=0)


def _over_networks(one: Group, two: Group) -> tuple[list[Spread], np.ndarray, np.ndarray]:
    """Returns arguments of `contrast` for a difference over networks: spreads, variance, samples.

    A single network is tested as if it were one more network of the other side, as in
    `against_networks`.
    """
    spreads, variance, samples = [], np.zeros(one.means.shape[1]), np.inf
    for own, other in ((one, two), (two, one)):
        if own.single:
            spreads.append(Spread(other.means, 1.0))
            variance, samples = own.errors[0] ** 2, own.n[0]
        else:
            spreads.append(Spread(own.means, 1 / len(own.means)))
    return spreads, variance, np.broadcast_to(samples, variance.shape)


def _beside(
    one: Group, two: Group, trained: Difference, n: np.ndarray, same_twins: bool
) -> dict[str, np.ndarray]:
    """Returns the columns of the untrained networks, and of the excess: trained minus untrained."""
    blank = np.full(len(trained.value), np.nan)
    means = [centre(group.twins) if len(group.twins) else blank for group in (one, two)]
    untrained = means[0] - means[1]
    # if both sides have the same untrained networks, the difference is always 0
    shares = [0.0 if same_twins else 1 / max(len(group.twins), 1) for group in (one, two)]
    spreads = [Spread(group.twins, share) for group, share in zip((one, two), shares, strict=True)]
    beside = contrast(untrained, spreads)
    if one.single and two.single:
        # single networks do not show how trainings scatter, so the spread of their twins is used
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


def layer_pairs(a: int, b: int) -> list[tuple[int, int]]:
    """Returns the pairs of layers in which two networks are compared.

    The networks have a and b layers. If a = b, layers of the same number are compared. Otherwise
    let n be the smaller number and m the larger: layer l of the network of n layers is compared
    with layer l (m - 1) / (n - 1) of the other, rounded, halves upwards, so that first and last
    layers match. The streams after the last layers count as layers n and m, and are compared too.
    """
    few, many = min(a, b), max(a, b)
    steps = max(few - 1, 1)
    pairs = [(l, (2 * l * (many - 1) + steps) // (2 * steps)) for l in range(few)]  # noqa: E741
    if few == 1:
        pairs = [(0, many - 1)] if many > 1 else [(0, 0)]
    pairs.append((few, many))
    return pairs if a <= b else [(other, own) for own, other in pairs]


def shared(
    a: Sequence[Statistics],
    b: Sequence[Statistics],
    metas: tuple[Mapping[str, Any], Mapping[str, Any]],
    paired: bool,
) -> tuple[list[str], dict[str, str]]:
    """Returns the statistics to compare, and {"probe.statistic": reason} for those left out.

    a, b: the statistics of each network of the two sides. metas: the meta of the first network of
    each side. paired: whether the values of every sample are needed.
    """
    left: dict[str, str] = {}
    names = list(dict.fromkeys(key for one in (*a, *b) for key in one))
    for name in names:
        lacking = {side: sum(name not in one for one in own) for side, own in (("a", a), ("b", b))}
        lacking = [s for s, own in sides.items() if any(name not in one for one in own.networks)]
        if lacking:
            found[name] = f"not every network of {lacking[0]} has it"
            continue
        units = [meta["statistics"][name][0] or "no unit" for meta in metas]
        probe, both = name.partition(".")[0], [one[name] for one in (*a, *b)]
        one, two = (meta["probes"][probe]["settings"] for meta in metas)
        differ = [key for key in one if one[key] != two.get(key, one[key]) and key != _CHOSEN]
        if units[0] != units[1]:
            left[name] = f"a has it in {units[0]}, b in {units[1]}"
        elif differ:
            values = f"{differ[0]} = {one[differ[0]]} and {two[differ[0]]}"
            left[name] = f"the settings of its probe differ: {values}"
        elif len({one.of_weights for one in both}) > 1:
            left[name] = "it is measured on weights in one and on samples in the other"
        elif paired and not both[0].of_weights and any(one.values is None for one in both):
            left[name] = (
                "it is per head, and the sweep kept only the means of heads: compare the models, "
                "whose heads are then averaged for each sample"
            )
    return [name for name in names if name not in left], left


def noted(metas: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, str]:
    """Returns harmless differences in the settings of probes: "probe.setting" -> how they differ.

    These are the choice of the map measured in place of U, and settings that only one side has.
    """
    found: dict[str, str] = {}
    chosen = [str(meta["config"].get(_CHOSEN) or "its own U") for meta in metas]
    if chosen[0] != chosen[1]:
        found[_CHOSEN] = f"{chosen[0]} in a, {chosen[1]} in b"
    for probe in metas[0]["probes"]:
        if probe not in metas[1]["probes"]:
            continue
        one, other = (meta["probes"][probe]["settings"] for meta in metas)
        for key in dict.fromkeys((*one, *other)):
            words = [str(each.get(key, "not set")) for each in (one, other)]
            if words[0] != words[1] and key != _CHOSEN:
                found[f"{probe}.{key}"] = f"{words[0]} in a, {words[1]} in b"
    return found
