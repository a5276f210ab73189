"""ci.compare: two networks, or two groups of networks, on the same samples."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
from torch import Tensor

from crate_interp.comparisons import difference_tables
from crate_interp.comparisons.difference_tables import Side, statistics_of
from crate_interp.comparisons.result import Comparison
from crate_interp.core import checks, folders
from crate_interp.core.run_options import Pass, RunOptions, run_options, tqdm
from crate_interp.core.safe_text import plain
from crate_interp.data import Data
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.probes import Probe
from crate_interp.questions.batches import check_model, samples_of
from crate_interp.questions.provenance import data_meta, probes_meta
from crate_interp.questions.untrained_twins import twin
from crate_interp.results import result_files, sample_ranges
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import Probes, check_masks, fitting, sweep

Network = SweepResult | HookedModel
Results = Sequence[list[SweepResult]]  # of side a, of side b
Twins = int | tuple[Sequence[SweepResult], Sequence[SweepResult]] | None
Names = tuple[str, str] | None
SEEDS = 5  # untrained twins of each side by default
_NAME = 80  # characters
_SAME = ("model_digest", "config", "data", "dtype", "probes", "statistics", "versions")


@in_full_precision
def compare(
    a: Network | Sequence[Network],
    b: Network | Sequence[Network],
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
    sides = [_listed("a", a), _listed("b", b)]
    models = [one for side in sides for one in side if isinstance(one, HookedModel)]
    if names is not None and (len(names) != 2 or not all(isinstance(one, str) for one in names)):
        raise ValueError(f"names={names!r}: give two texts, for a and for b.")
    if models and data is None:
        raise ValueError("models are compared on data: give it, such as 'embedded:fashion'.")
    if not models and any(one is not None for one in (data, probes, options.limit)):
        raise ValueError("data, probes and limit are for models, but a and b are results.")
    count, twins = _count_twins(untrained, bool(models))
    places = []
    for model in models:
        assert data is not None
        check_model(model)
        samples = samples_of(model, data, options)
        check_masks(fitting(probes, model, "blocks"), samples)
        stop = samples.start + samples.n
        places.append((sample_ranges.of(samples.fingerprint, samples.start, stop), model.unit))
    given = [one for side in (*sides, *twins) for one in side if isinstance(one, SweepResult)]
    _check_samples(given, places)
    with nullcontext() if options.out is None else folders.locked(options.out):
        if options.out is not None:
            Comparison.check_folder(options.out)
        started = time.perf_counter()
        measure = partial(_swept, data=data, chosen=probes, options=options)
        swept, new = _measured(sides, count, options.progress, measure)
        _check_samples(sum(swept, []))
        result = _compared(swept, new if count else twins, names)
        result.meta["seconds"] = round(time.perf_counter() - started, 3)
        if options.out is not None:
            result.save(options.out)
    return result


def _listed(name: str, names: object) -> list[Network]:
    """Returns the networks of one side as a list.

    Raises ValueError for anything but results and hooked models of one architecture.
    """
    many: list[Any] = list(names) if isinstance(names, (list, tuple)) else [names]
    if not many or not all(isinstance(one, (SweepResult, HookedModel)) for one in many):
        raise ValueError(f"{name} is {checks.quote(names)}: give models, or results of ci.sweep.")
    if len({_architecture(one) for one in many}) > 1:
        raise ValueError(f"{name} is a list of networks of different architectures: give one.")
    return many


def _architecture(one: Network) -> str:
    """Returns a config's fields as one text, without the model's name and whether sizes are known.

    A size that was guessed and the same size when given make the same network.
    """
    config = one.cfg.to_dict() if isinstance(one, HookedModel) else one.meta["config"]
    left_out = ("model_name", "grid_guessed", "assumed")
    return repr(sorted((key, value) for key, value in config.items() if key not in left_out))


def _count_twins(untrained: Any, models: bool) -> tuple[int, Results]:
    """Returns how many twins to measure, and the given results of twins."""
    if untrained is None:
        return (SEEDS if models else 0), [[], []]
    if checks.is_int(untrained) and (models or not untrained):
        return checks.count("untrained", untrained, least=0), [[], []]
    pair = untrained if isinstance(untrained, (tuple, list)) else ()
    groups = [list(group) if isinstance(group, (list, tuple)) else [group] for group in pair]
    if len(groups) != 2 or not all(isinstance(one, SweepResult) for one in sum(groups, [])):
        words = "give how many untrained copies to make, or ([...], [...]) with their results"
        raise ValueError(f"untrained={checks.quote(untrained)}: {words}, for a and for b.")
    return 0, groups


def _check_samples(results: Sequence[SweepResult], of_models: Sequence[tuple] = ()) -> None:
    """Raises ValueError unless all results are of the same, known samples.

    of_models: the samples of models, as a result's meta has them: data and unit.
    """
    places = [*((one.meta["data"], one.meta["unit"]) for one in results), *of_models]
    if any(entry["fingerprint"] is None for data, _ in places for entry in data):
        raise ValueError("the samples of a cache's result are unknown: use ci.sweep on data.")
    for data, unit in places[1:]:
        if not sample_ranges.same(places[0][0], data) or places[0][1] != unit:
            words = "sweep all on the same data, with the same limit, tokenizer and n_ctx"
            raise ValueError(f"the networks saw different samples: {words}.")


def _measured(
    sides: Sequence[list[Network]], count: int, progress: bool, measure: Callable[..., SweepResult]
) -> tuple[Results, Results]:
    """Returns the results of both sides and of `count` untrained twins of each, seeds 0, 1, ...

    Given results are kept. A side of results has no new twins, because its models are unknown.
    Sides of the same architecture share twins.
    """
    models = [next((one for one in side if isinstance(one, HookedModel)), None) for side in sides]
    kinds = ["" if model is None else _architecture(model) for model in models]
    total = sum(isinstance(one, HookedModel) for side in sides for one in side)
    total += count * len({*kinds} - {""})
    bar = tqdm(desc="networks", total=total, leave=False, disable=not progress or total < 2)

    def measured(one: Network, name: str) -> SweepResult:
        if isinstance(one, SweepResult):
            return one
        result = measure(one, name)
        bar.update()
        return result

    with bar:
        results = [
            [measured(one, f"{name}-{number}") for number, one in enumerate(side)]
            for name, side in zip("ab", sides, strict=True)
        ]
        twins: dict[str, list[SweepResult]] = {"": []}  # by architecture
        for name, model, kind in zip("ab", models, kinds, strict=True):
            if model is not None and kind not in twins:
                seeds = range(count)
                twins[kind] = [measured(twin(model, n), f"{name}-untrained-{n}") for n in seeds]
    return results, [twins[kind] for kind in kinds]


def _swept(
    model: HookedModel, name: str, data: Any, chosen: Probes, options: RunOptions
) -> SweepResult:
    """Sweeps a model with heads averaged for each sample, or loads this sweep if it is saved.

    Averaging gives one number per sample, so that samples can be paired.
    """
    samples, seen = samples_of(model, data, options), dict[str, None]()
    probes = [_averaging(probe, seen) for probe in fitting(chosen, model, "blocks")]
    place = None if options.out is None else options.out / "sweeps" / name
    # nothing in the folder tells whether a saved sweep used the caller's own probe as it is now
    own = chosen if isinstance(chosen, (list, tuple)) else [chosen]
    own = any(isinstance(one, Probe) for one in own)
    if place is not None and not own and (place / result_files.META).is_file():
        found = SweepResult.load(place)
        meta = data_meta(model, samples, options.batch_size) | probes_meta(probes, model)
        wanted = SweepResult(found.stored, meta)
        if all(found.meta.get(name) == wanted.meta[name] for name in _SAME):
            return found
    result = sweep(model, samples, probes=probes, controls=0, **options.of_a_pass())
    result.meta["heads_averaged"] = list(seen)
    if place is not None:
        result.save(place)
    return result


def _averaging(probe: Probe, names: dict[str, None]) -> Probe:
    """Returns a probe that averages statistics per head over heads.

    names: collects the names of these statistics. A sample without a value in some head gets
    NaN.
    """

    def averaged(measure: Callable[..., Any], axes: int, *args: Any) -> Any:
        answer = measure(*args)
        if not isinstance(answer, Mapping):
            return answer
        heads = {
            name
            for name, value in answer.items()
            if isinstance(value, Tensor) and value.ndim == axes and name not in probe.counts
        }
        names.update({f"{probe.name}.{name}": None for name in heads})
        return {**answer, **{name: answer[name].double().mean(dim=-1) for name in heads}}

    weights = probe.weights and partial(averaged, probe.weights, 1)
    measure = partial(averaged, probe.measure, 2 if probe.points else 1)
    return replace(probe, measure=measure, weights=weights, per_head=())


def _compared(results: Results, twins: Results, names: Names) -> Comparison:
    """Returns the comparison of sweeps."""
    a, b = (
        Side([statistics_of(one) for one in own], [statistics_of(one) for one in random])
        for own, random in zip(results, twins, strict=True)
    )
    metas = [own[0].meta for own in results]
    left = difference_tables.not_shared(a, b, metas)
    chosen = [name for name in a.networks[0] if name not in left]
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:4])
        raise ValueError(f"a and b have no statistic in common. {reasons}.")
    pairs = difference_tables.layer_pairs(metas[0]["n_layers"], metas[1]["n_layers"])
    digests = [[one.meta["model_digest"] for one in random] for random in twins]
    same = bool(digests[0]) and digests[0] == digests[1]
    parts = [difference_tables.differences(a, b, name, pairs, same) for name in chosen]
    tables = {"differences": pd.concat(parts, ignore_index=True)}
    tables["networks"] = difference_tables.networks(a, b, chosen)
    models = [meta["model"] or f"{meta['config'].get('family', 'a')} model" for meta in metas]
    called = [plain(name, _NAME) for name in (models if names is None else names)]
    if called[0] == called[1]:
        called = [f"{called[0]} (a)", f"{called[1]} (b)"]
    sides = {}
    for side, name, own, random in zip("ab", called, results, digests, strict=True):
        networks = [one.meta["model_digest"] for one in own]
        same_in_all = {key: own[0].meta[key] for key in ("n_layers", "versions")}
        sides[side] = {"name": name, "networks": networks, "untrained": random, **same_in_all}
    probes = dict.fromkeys(name.partition(".")[0] for name in chosen)
    maps = [meta["config"].get("subspaces") or "its own U" for meta in metas]
    both = {
        key: " and ".join(dict.fromkeys(str(meta[key]) for meta in metas))
        for key in ("dtype", "device")
    }
    return Comparison(tables, sides | both | {
        "model": f"{called[0]} against {called[1]}",
        "model_digest": " against ".join(", ".join(side["networks"]) for side in sides.values()),
        "config": {side: meta["config"] for side, meta in zip("ab", metas, strict=True)},
        "n_layers": min(meta["n_layers"] for meta in metas),
        **{key: metas[0][key] for key in ("data", "n_samples", "unit", "versions")},
        "layers": pairs,
        "not_compared": left,
        "noted": {} if maps[0] == maps[1] else {"subspaces": f"{maps[0]} in a, {maps[1]} in b"},
        "heads_averaged": [name for name in chosen if a.networks[0][name].per_head],
        "statistics": {name: metas[0]["statistics"][name] for name in chosen},
        "probes": {name: metas[0]["probes"][name] for name in probes},
        "of_weights": [name for name in chosen if a.networks[0][name].of_weights],
    })  # fmt: skip
