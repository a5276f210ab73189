"""The networks of a comparison: allowed arguments, sweeps of models, and untrained twins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.progress import tqdm
from crate_interp.core.run_options import RunOptions
from crate_interp.data import Data, Samples
from crate_interp.models.hooked import HookedModel, check_hooked
from crate_interp.probes import Probe
from crate_interp.questions.batches import check_model, samples_of
from crate_interp.questions.provenance import data_meta, probes_meta
from crate_interp.questions.untrained_twins import twin
from crate_interp.results import sample_ranges
from crate_interp.results.result_files import META
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import Probes, check_masks, fitting, sweep

Network = SweepResult | HookedModel
Compared = Network | Sequence[Network]
_SAME = ("model_digest", "config", "data", "dtype", "probes", "statistics", "versions")


@dataclass(frozen=True)
class Measuring:
    """How models are swept. options.out: where each sweep is saved once it is done, or None."""

    data: Data | None
    probes: Probes
    options: RunOptions

    def samples(self, model: HookedModel) -> Samples:
        """Returns the samples in the form that a model takes."""
        assert self.data is not None
        return samples_of(model, self.data, self.options)


def listed(name: str, given: object) -> list[Network]:
    """Returns the networks of one side, models and results, as a list.

    Raises ValueError for an empty list, and for anything but results and hooked models.
    """
    many: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    wrong = [one for one in many if not isinstance(one, (SweepResult, HookedModel))]
    for one in wrong:
        if hasattr(one, "parameters"):
            check_hooked(one)
    if wrong or not many:
        raise ValueError(
            f"{name} is {checks.shown(given)}: give a model such as ci.load(...) returns, a result "
            "such as ci.sweep(...) returns (SweepResult.load reads a saved one), or a list of them "
            "for seeds."
        )
    return many


def check_models(sides: Sequence[list[Network]], how: Measuring) -> None:
    """Raises ValueError, before work starts, if the models cannot be swept on the same samples.

    Also raises it if a given result was measured on other samples than the models will be.
    """
    results = [one for side in sides for one in side if isinstance(one, SweepResult)]
    prints: dict[str, Samples] = {}
    for model in (one for side in sides for one in side if isinstance(one, HookedModel)):
        check_model(model)
        samples = how.samples(model)
        check_masks(fitting(how.probes, model, "blocks"), samples)
        prints.setdefault(samples.fingerprint, samples)
    if not prints:
        return
    if len(prints) > 1:
        raise ValueError(
            f"the models read the data as different samples ({' and '.join(prints)}): windows of "
            "tokens are the same only with the same tokenizer and n_ctx. Give tokens [n, pos]."
        )
    own = next(iter(prints.values()))
    given = sample_ranges.of(own.fingerprint, own.start, own.start + own.n)
    if not all(sample_ranges.same(one.meta["data"], given) for one in results):
        raise ValueError(
            f"data has {own.n} samples of {own.fingerprint}, but a result is of other samples: "
            "give the data and the limit that the result had, or its model instead of the result."
        )


def swept(sides: Sequence[list[Network]], how: Measuring) -> list[list[SweepResult]]:
    """Returns the results of both sides; each model is swept, and given results are kept."""
    count = sum(isinstance(one, HookedModel) for side in sides for one in side)
    results: list[list[SweepResult]] = []
    hidden = not how.options.progress or count < 2
    with tqdm(total=count, desc="networks", leave=False, disable=hidden) as bar:
        for name, side in zip("ab", sides, strict=True):
            results.append([])
            for number, one in enumerate(side):
                if isinstance(one, HookedModel):
                    one = _measured(one, how, f"{name}-{number}")
                    bar.update()
                results[-1].append(one)
    return results


def twins_of(
    sides: Sequence[list[Network]], count: int, how: Measuring
) -> tuple[list[SweepResult], list[SweepResult]]:
    """Returns the results of the untrained twins of both sides, seeds 0 to count - 1.

    A side without models has no twins, because the models of results are unknown. Sides of the same
    architecture share twins.
    """
    models = [next((one for one in side if isinstance(one, HookedModel)), None) for side in sides]
    kinds = ["" if model is None else architecture(model.cfg.to_dict()) for model in models]
    twins: dict[str, list[SweepResult]] = {kind: [] for kind in kinds}
    todo = [
        (name, model, kind, seed)
        for name, model, kind in zip("ab", models, kinds, strict=True)
        if model is not None and (name == "a" or kinds[0] != kind)
        for seed in range(count)
    ]
    hidden = not how.options.progress or not todo
    bar = tqdm(todo, desc="untrained twins", leave=False, disable=hidden)
    for name, model, kind, seed in bar:
        twins[kind].append(_measured(twin(model, seed), how, f"{name}-untrained-{seed}"))
    return twins[kinds[0]], twins[kinds[1]]


def architecture(config: Mapping[str, Any]) -> str:
    """Returns a config's fields as one text, without the model's name and whether sizes are known.

    A size that was guessed and the same size when given make the same network.
    """
    left_out = ("model_name", "grid_guessed", "assumed")
    return repr(sorted((key, value) for key, value in config.items() if key not in left_out))


def _measured(model: HookedModel, how: Measuring, name: str) -> SweepResult:
    """Sweeps a model with heads averaged for each sample, or loads this sweep if it is saved.

    Averaging gives one number per sample, so that samples can be paired.
    """
    samples = how.samples(model)
    chosen = fitting(how.probes, model, "blocks")
    seen: dict[str, None] = {}
    probes = [_averaging(probe, seen) for probe in chosen]
    options = how.options
    place = None if options.out is None else options.out / "sweeps" / name
    # nothing in the folder tells whether a saved sweep used the caller's own probe as it is now
    own = how.probes if isinstance(how.probes, (list, tuple)) else [how.probes]
    own = any(isinstance(one, Probe) for one in own)
    if place is not None and not own and (place / META).is_file():
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


def _averaging(probe: Probe, seen: dict[str, None]) -> Probe:
    """Returns a probe that averages statistics per head over heads.

    seen: collects the names of these statistics. A sample that lacks a value in some head gets NaN.
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
        seen.update({f"{probe.name}.{name}": None for name in heads})
        return {
            name: value.double().mean(dim=-1) if name in heads else value
            for name, value in answer.items()
        }

    weights = probe.weights and partial(averaged, probe.weights, 1)
    axes = 2 if probe.points else 1
    measure = partial(averaged, probe.measure, axes)
    return replace(probe, measure=measure, weights=weights, per_head=())
