"""The tables of a comparison, and the choice of statistics and layers that both sides have."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from crate_interp.stats import contrasts, intervals
from crate_interp.stats.contrasts import Difference, Spread, by_group, centre, contrast
from crate_interp.sweeps.moments import TOGETHER, moments_of
from crate_interp.sweeps.result import SweepResult

NETWORKS = ["side", "network", "trained", "probe", "statistic", "layer", "mean", "error", "n"]
_CHOSEN = "subspaces"  # setting: the map measured in place of U; may differ between sides


class Statistic(NamedTuple):
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


Statistics = Mapping[str, Statistic]


class Side(NamedTuple):
    """The measurements of one side: of each network, and of each untrained copy."""

    networks: Sequence[Statistics]
    twins: Sequence[Statistics]


class Group(NamedTuple):
    """One statistic of one side, at the layers that are compared.

    means, errors: each network's mean and its standard error, over n samples. twins: the means of
    the untrained networks.
    """

    means: Float[np.ndarray, "network layer"]
    errors: Float[np.ndarray, "network layer"]
    n: Float[np.ndarray, "network layer"]
    twins: Float[np.ndarray, "seed layer"]


def statistics_of(result: SweepResult) -> dict[str, Statistic]:
    """Returns "probe.statistic" -> its numbers, in the order in which they were measured.

    A statistic per head is averaged over heads: for each sample if the sweep has every sample's
    numbers, else for all samples together.
    """
    samples, heads = result.table("samples"), result.table("head_samples")
    keys, found = ["probe", "statistic"], {}
    weights: Any = result.table("weights")
    for name, own in weights.groupby(keys, sort=False):
        numbers = own.groupby("layer")[["value"]].mean().assign(error=0.0, n=1.0)
        per_head = bool(own["head"].notna().any())
        found[".".join(name)] = Statistic(numbers, per_head=per_head, of_weights=True)
    for name, own in moments_of(result).groupby(keys, sort=False):
        together = own[own["head"] == TOGETHER].assign(n=own["independent"])
        numbers = together.groupby("layer")[["mean", "error", "n"]].mean()
        found[".".join(name)] = Statistic(numbers, per_head=True)
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
        error, n = contrasts.mean_error(by_group(wide.to_numpy(float), groups))
        numbers = pd.DataFrame({"mean": wide.mean(), "error": error, "n": n})
        found[name] = Statistic(numbers, wide, groups, name in averaged or name in heads.columns)
    order = [name for name in result.meta["statistics"] if name in found]
    return {name: found[name] for name in order if len(found[name].numbers)}


def networks(a: Side, b: Side, names: Sequence[str]) -> pd.DataFrame:
    """Returns a row for each network, statistic and layer: mean, error and n over samples."""
    rows = [
        (side, number, group is own.networks, *name.split("."), *row)
        for side, own in (("a", a), ("b", b))
        for group in own
        for number, network in enumerate(group)
        for name in names
        if name in network
        for row in network[name].numbers.itertuples()
    ]
    return pd.DataFrame(rows, columns=NETWORKS).astype({"n": "int64"})


def differences(
    a: Side, b: Side, name: str, layers: Sequence[tuple[int, int]], same_twins: bool
) -> pd.DataFrame:
    """Returns a row for each pair of layers of a statistic, as `Comparison` describes it.

    same_twins: whether both sides have the same untrained networks.
    """
    first, second = a.networks[0][name], b.networks[0][name]
    known = (first.numbers.index, second.numbers.index)
    pairs = [pair for pair in layers if pair[0] in known[0] and pair[1] in known[1]]
    own, other = ([pair[place] for pair in pairs] for place in (0, 1))
    one, two = _group(a, name, own), _group(b, name, other)
    if same_twins:
        two = two._replace(twins=one.twins)
    means, n = (centre(one.means), centre(two.means)), np.ones(len(pairs), dtype=int)
    adjusted, independent, untrained_p = None, n, np.full(len(pairs), np.nan)
    if len(one.means) > 1 or len(two.means) > 1:
        difference = contrast(means[0] - means[1], *_over_networks(one, two))
        n *= len(one.means) + len(two.means)
    elif first.values is None or second.values is None:
        difference = contrasts.without_test(means[0] - means[1], error=0.0)
    else:
        values = first.values[own].to_numpy(float), second.values[other].to_numpy(float)
        there = ~np.isnan(values[0] - values[1])
        n, blank = there.sum(axis=0), np.full(len(pairs), np.nan)
        sums = (np.where(there, each, 0.0).sum(axis=0) for each in values)
        means = tuple(np.divide(each, n, where=n > 0, out=blank.copy()) for each in sums)
        difference, adjusted, independent = _over_samples(*values, first.groups)
        # two untrained networks, compared in the same way
        pair = a.twins[:2] if same_twins else [*a.twins[:1], *b.twins[:1]]
        twins: list[Any] = [twin[name].values for twin in pair if name in twin]
        if len(twins) == 2 and all(table is not None for table in twins):
            tables = twins[0].reindex(columns=own), twins[1].reindex(columns=other)
            arrays = [table.to_numpy(float) for table in tables]
            untrained_p = _over_samples(arrays[0], arrays[1], pair[0][name].groups)[1]
    p = intervals.holm(difference.p) if adjusted is None else adjusted
    probe, statistic = name.split(".")
    columns = {
        "probe": probe, "statistic": statistic, "layer": own, "layer_b": other,
        "a": means[0], "b": means[1], "difference": difference.value, "low": difference.low,
        "high": difference.high, "p": p, "holds": np.where(np.isnan(p), 1.0, p) <= intervals.LEVEL,
        "n": n, "untrained_p": untrained_p,
    }  # fmt: skip
    return pd.DataFrame(columns | _beside(one, two, difference, independent, same_twins))


def _group(side: Side, name: str, layers: list[int]) -> Group:
    own, twins = (
        [each[name].numbers.reindex(layers).to_numpy(float).T for each in networks if name in each]
        for networks in side
    )
    means, errors, n = np.stack(own, axis=1)
    return Group(means, errors, n, np.array([twin[0] for twin in twins]).reshape(-1, len(layers)))


def _over_samples(
    a: Float[np.ndarray, "sample layer"],
    b: Float[np.ndarray, "sample layer"],
    groups: Int[np.ndarray, "sample"] | None,
) -> tuple[Difference, np.ndarray, np.ndarray]:
    """Returns the paired difference, its p adjusted over layers, and over how many it is.

    They count independent samples, or groups of samples, that both sides have.
    """
    free = by_group(a - b, groups)
    difference = contrasts.paired(free)
    return difference, intervals.max_t(free, difference.p), (~np.isnan(free)).sum(axis=0)


def _over_networks(one: Group, two: Group) -> tuple[list[Spread], np.ndarray, np.ndarray]:
    """Returns arguments of `contrast` for a difference over networks: spreads, variance, samples.

    A single network is tested as if it were one more network of the other side, as in
    `against_networks`.
    """
    spreads, variance, samples = [], np.zeros(one.means.shape[1]), np.inf
    for own, other in ((one, two), (two, one)):
        if len(own.means) == 1:
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
    if len(one.means) == len(two.means) == 1:
        # single networks do not show how trainings scatter, so the spread of their twins is used
        scatter, of_samples = [Spread(group.twins, 1.0) for group in (one, two)], trained.error**2
    else:
        scatter, of_samples, n = _over_networks(one, two)
    excess = contrast(trained.value - untrained, [*scatter, *spreads], of_samples, n)
    return {
        "untrained_a": means[0], "untrained_b": means[1], "untrained": untrained,
        "untrained_low": beside.low, "untrained_high": beside.high,
        "excess": excess.value, "excess_low": excess.low, "excess_high": excess.high,
        "excess_p": intervals.holm(excess.p),
    }  # fmt: skip


def layer_pairs(a: int, b: int) -> list[tuple[int, int]]:
    """Returns the pairs of layers in which two networks are compared.

    The networks have a and b layers. If a = b, layers of the same number are compared. Otherwise
    let n be the smaller number and m the larger: layer l of the network of n layers is compared
    with layer l (m - 1) / (n - 1) of the other, rounded, halves upwards, so that first and last
    layers match. The streams after the last layers count as layers n and m, and are compared too.
    """
    few, many = sorted((a, b))
    steps = max(few - 1, 1)
    pairs = [(l, (2 * l * (many - 1) + steps) // (2 * steps)) for l in range(few)]  # noqa: E741
    pairs = [*([(0, many - 1)] if few == 1 else pairs), (few, many)]
    return pairs if a <= b else [(other, own) for own, other in pairs]


def not_shared(a: Side, b: Side, metas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns {"probe.statistic": reason} for the statistics that cannot be compared.

    metas: the meta of the first network of each side.
    """
    sides, both, found = {"a": a, "b": b}, [*a.networks, *b.networks], {}
    for name in dict.fromkeys(key for one in both for key in one):
        lacking = [s for s, own in sides.items() if any(name not in one for one in own.networks)]
        if lacking:
            found[name] = f"not every network of {lacking[0]} has it"
            continue
        units = [meta["statistics"][name][0] or "no unit" for meta in metas]
        one, two = (meta["probes"][name.partition(".")[0]]["settings"] for meta in metas)
        differ = [key for key in one if one[key] != two.get(key, one[key]) and key != _CHOSEN]
        every = [own[name] for own in both]
        if units[0] != units[1]:
            found[name] = f"a has it in {units[0]}, b in {units[1]}"
        elif differ:
            key = differ[0]
            found[name] = f"the probes differ: {key} = {one[key]} and {two[key]}"
        elif len({own.of_weights for own in every}) > 1:
            found[name] = "it is measured on weights in one and on samples in the other"
        elif len(both) == 2 and any(own.values is None and not own.of_weights for own in every):
            found[name] = "the sweep kept only the means of heads: compare the models instead"
    return found
