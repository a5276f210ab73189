"""ci.compare: two networks, or two groups of networks, on the same samples."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from crate_interp.comparisons import difference_tables, networks
from crate_interp.comparisons.difference_tables import Side, statistics_of
from crate_interp.comparisons.networks import Measuring, Network
from crate_interp.comparisons.result import Comparison
from crate_interp.core import checks
from crate_interp.core.folders import locked
from crate_interp.core.run_options import Pass, run_options
from crate_interp.core.safe_text import plain
from crate_interp.data import Data
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.results import sample_ranges
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import Probes

Twins = int | tuple[Sequence[SweepResult], Sequence[SweepResult]] | None
Names = tuple[str, str] | None
SEEDS = 5  # untrained twins of each side by default
_NAME = 80  # characters


@in_full_precision
def compare(
    a: networks.Compared,
    b: networks.Compared,
    data: Data | None = None,
    *,
    probes: Probes = None,
    untrained: Twins = None,
    names: Names = None,
    out: str | Path | None = None,
    **run: Unpack[Pass],
) -> Comparison:
    """Returns how two networks, or two groups of networks, differ in each statistic and layer.

    Models are swept on `data`; results must be of the same samples. Statistics per head are
    averaged over heads.

    If each side is one network, a - b is paired by sample, and the mean has a bootstrap-t interval,
    for these two networks; other seeds may differ. If a side is a list, networks are the unit, and
    their means are compared by Welch's t; a single network is then tested as if it were one more
    network of the other side. p is two-sided and adjusted over the layers of a statistic: paired by
    sample by the largest t of all layers (crate_interp/stats/intervals.py), over networks by
    Holm's method. It is not adjusted over statistics; the headline says how many would differ by
    chance, and leads with how many exceed the spread between untrained networks.

    An untrained twin has the same architecture, with the official random initialisation and seed
    0, 1, ... `excess` is the trained difference minus the untrained difference, with an interval
    over networks; a single network is taken to scatter as its twins do.

    Networks of different depths are compared at the same relative depth (`layer_pairs` in
    crate_interp/comparisons/difference_tables.py). Statistics that only one side has are in
    meta["not_compared"], with the reason.

    Args:
        a: A hooked model, a SweepResult, or a list of them, such as the seeds of one training.
        b: The other side.
        data: As in `ci.sweep`; None if both sides are results.
        probes: Names of probes, Probe objects, or both. Default: those of `ci.sweep`.
        untrained: How many untrained twins of each side to measure; for sides that are results,
            the results of their twins as `([...], [...])`. Default: 5 if there are models.
        names: Names of the two sides.
        out: A folder for the result and, under `sweeps`, for each sweep as soon as it is done.
            Repeating the call reuses these sweeps, unless you give probes of your own.
        run: As in `ci.sweep`.

    Returns:
        A row for each statistic and layer: both sides, the difference, its interval and p.

    Raises:
        ValueError: Before work starts, for anything but models and results, models without data,
            results with data or of different samples, and a list of different architectures; also
            if the sides have no statistic in common.
    """
    options = run_options(compare, run, Pass, out=out)
    sides = [networks.listed("a", a), networks.listed("b", b)]
    models = [one for side in sides for one in side if isinstance(one, HookedModel)]
    how = Measuring(data, probes, options)
    _check_asked(bool(models), how, names)
    count, given = _twins_asked(untrained, bool(models))
    _check_results(sides, given)
    networks.check_models(sides, how)
    with ExitStack() as stack:
        if options.out is not None:
            stack.enter_context(locked(options.out))
            Comparison.check_folder(options.out)
        result = _measured(sides, how, count, given, names)
        if options.out is not None:
            result.save(options.out)
    return result


def _measured(
    sides: Sequence[list[Network]], how: Measuring, count: int, given: Any, names: Names
) -> Comparison:
    """Sweeps the models and compares the sides, with `count` new twins each or `given` results."""
    started = time.perf_counter()
    results = networks.swept(sides, how)
    _check_samples([one for side in results for one in side])
    twins = networks.twins_of(sides, count, how) if given is None else given
    result = _compared(results, twins, names)
    result.meta["seconds"] = round(time.perf_counter() - started, 3)
    return result


def _check_asked(models: bool, how: Measuring, names: Names) -> None:
    if names is not None and (len(names) != 2 or not all(isinstance(one, str) for one in names)):
        raise ValueError(f"names={names!r}: give two texts, for a and for b.")
    if models and how.data is None:
        raise ValueError(
            "models are compared on data, but none is given: call ci.compare(a, b, data) with "
            'data such as "embedded:fashion" or "imagefolder:DIR".'
        )
    if not models and any(one is not None for one in (how.data, how.probes, how.options.limit)):
        raise ValueError(
            "data, probes and limit are for models, but a and b are results, already measured: "
            "leave them out, or give the models."
        )


def _twins_asked(untrained: Any, models: bool) -> tuple[int, Any]:
    """Returns how many twins to measure, and the given results of twins, or None."""
    if untrained is None:
        return (SEEDS if models else 0), None
    if checks.is_int(untrained) and (models or not untrained):
        return checks.count("untrained", untrained, least=0), None
    pair = untrained if isinstance(untrained, (tuple, list)) else ()
    groups = [list(group) if isinstance(group, (list, tuple)) else [group] for group in pair]
    right = all(isinstance(one, SweepResult) for group in groups for one in group)
    if len(groups) != 2 or not right:
        raise ValueError(
            f"untrained={checks.shown(untrained)}: give a number of twins to make of models, or "
            "([...], [...]) with the results of the untrained twins of a and of b."
        )
    return 0, (groups[0], groups[1])


def _check_results(sides: Sequence[list[Network]], twins: Any) -> None:
    """Raises ValueError if the given results cannot be compared."""
    given = [[one for one in side if isinstance(one, SweepResult)] for side in sides]
    extra = [] if twins is None else [*twins[0], *twins[1]]
    _check_samples([*given[0], *given[1], *extra])
    for name, side in zip("ab", sides, strict=True):
        configs = [
            one.cfg.to_dict() if isinstance(one, HookedModel) else one.meta["config"]
            for one in side
        ]
        if len({networks.architecture(config) for config in configs}) > 1:
            raise ValueError(
                f"{name} is a list of networks of different architectures: a list stands for "
                "networks that differ in their seeds or their training. Compare them one by one."
            )


def _check_samples(results: Sequence[SweepResult]) -> None:
    """Raises ValueError unless all results are of the same samples of known data."""
    for one in results:
        if any(entry["fingerprint"] is None for entry in one.meta["data"]):
            raise ValueError(
                "a result was measured on a cache, so its samples are unknown: use ci.sweep on "
                "data."
            )
    for one in results[1:]:
        mine, theirs = results[0].meta, one.meta
        if sample_ranges.same(mine["data"], theirs["data"]) and mine["unit"] == theirs["unit"]:
            continue
        said = [
            ", ".join(
                f"{plain(entry['fingerprint'], 60)} samples {entry['start']} to {entry['stop'] - 1}"
                for entry in meta["data"]
            )
            for meta in (mine, theirs)
        ]
        raise ValueError(
            f"the results are of different samples, {said[0]} and {said[1]} (where these are the "
            "same, the files held other pictures): sweep both on the same data, with the same "
            "limit, or give the models and data."
        )


def _compared(
    results: Sequence[list[SweepResult]], twins: Sequence[Sequence[SweepResult]], names: Names
) -> Comparison:
    """Returns the comparison of sweeps."""
    a, b = (
        Side([statistics_of(one) for one in own], [statistics_of(one) for one in random])
        for own, random in zip(results, twins, strict=True)
    )
    metas = (results[0][0].meta, results[1][0].meta)
    single = len(results[0]) == len(results[1]) == 1
    chosen, left = difference_tables.shared(a.networks, b.networks, metas, single)
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:4])
        raise ValueError(f"a and b have no statistic in common. {reasons}.")
    pairs = difference_tables.layer_pairs(metas[0]["n_layers"], metas[1]["n_layers"])
    digests = [[one.meta["model_digest"] for one in random] for random in twins]
    same = bool(digests[0]) and digests[0] == digests[1]
    tables = {
        "differences": difference_tables.differences(a, b, chosen, pairs, same),
        "networks": difference_tables.networks(a, b, chosen),
    }
    heads = [name for name in chosen if a.networks[0][name].per_head]
    probes = dict.fromkeys(name.partition(".")[0] for name in chosen)
    about = {
        "layers": pairs,
        "not_compared": left,
        "noted": difference_tables.noted(metas),
        "heads_averaged": heads,
        "statistics": {name: metas[0]["statistics"][name] for name in chosen},
        "probes": {name: metas[0]["probes"][name] for name in probes},
        "of_weights": [name for name in chosen if a.networks[0][name].of_weights],
    }
    return Comparison(tables, _meta(results, twins, names) | about)


def _meta(
    results: Sequence[list[SweepResult]], twins: Sequence[Sequence[SweepResult]], names: Names
) -> dict[str, Any]:
    """Returns the meta: the origin of both sides, and the entries that every result has."""
    metas = [own[0].meta for own in results]
    called = _names(metas, names)
    sides = {
        side: {
            "name": name,
            "networks": [one.meta["model_digest"] for one in own],
            "untrained": [one.meta["model_digest"] for one in random],
            "n_layers": own[0].meta["n_layers"],
            "versions": own[0].meta["versions"],
        }
        for side, name, own, random in zip("ab", called, results, twins, strict=True)
    }
    both = {
        key: " and ".join(dict.fromkeys(str(meta[key]) for meta in metas))
        for key in ("dtype", "device")
    }
    digests = (", ".join(side["networks"]) for side in sides.values())
    return sides | both | {
        "model": f"{called[0]} against {called[1]}",
        "model_digest": " against ".join(digests),
        "config": {side: meta["config"] for side, meta in zip("ab", metas, strict=True)},
        "n_layers": min(meta["n_layers"] for meta in metas),
        **{key: metas[0][key] for key in ("data", "n_samples", "unit", "versions")},
    }  # fmt: skip


def _names(metas: Sequence[dict[str, Any]], names: Names) -> list[str]:
    """Returns the names of the sides; if they are equal, (a) and (b) are added."""
    models = [meta["model"] or f"{meta['config'].get('family', 'a')} model" for meta in metas]
    called = [plain(name, _NAME) for name in (models if names is None else names)]
    if called[0] == called[1]:
        called = [f"{name} ({side})" for name, side in zip(called, "ab", strict=True)]
    return called
