"""The class Probe, and checks of the numbers that a probe returns."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from crate_interp.core import checks
from crate_interp.probes.layer_reading import Block, LayerActs, check_tokens
from crate_interp.results.statistic import Facts, Statistic, described

Acts = Mapping[str, Tensor]
_CHECKS = {"eps": checks.positive, "lambd": checks.non_negative, "tokens": check_tokens}
MASKS = ("masks", "other_masks", "sample")  # further activations of a probe that needs masks


@dataclass(frozen=True)
class Probe:
    """A measure applied to a model: what it reads, what it returns, and how to read the numbers.

    Args:
        name: The first half of "probe.statistic".
        points: Hook points inside a block. The activations at all points of a layer are passed
            together when the last point has fired, as copies.
        measure: `measure(block, acts)` returns {statistic: `[batch]` or `[batch, head]`}, the same
            statistics in every layer; with points=() it measures weights alone and returns
            {statistic: `[]` or `[head]`}.
        statistics: {statistic: record}, from which titles, captions, axes and tables are made. A
            record is a `ci.probes.Statistic`, or a tuple (unit, lowest, highest, how to read it),
            with None for a bound that does not exist; the title of a tuple is the statistic's name.
        final: `final(z)` returns {statistic: `[batch]`} for Z^L `[batch, pos, d_model]`, reported
            as layer n_layers.
        weights: `weights(block)` returns {statistic: `[]` or `[head]`} and runs once.
        settings: Names with JSON values, which are written into the result.
        optional: Points to read if the model has them.
        counts: Statistics `[batch]` that are summed over samples and layers into the result's meta
            and get no table.
        per_head: Statistics `[batch, head]` that are kept for every sample
            (`result.head_samples()`), not only as mean and variance.
        masks: The probe needs data with masks, and `measure` also gets acts["masks"], uint8
            `[batch, height, width]` as `Samples.masks` returns them; acts["other_masks"], which
            holds for each sample the mask of the next sample (the first sample follows the last);
            and acts["sample"] `[batch]`, the numbers of the samples.
        partial: A sample may lack a value (NaN), in any head, and is then left out of the
            statistic's means.
        final_block: `final` is `final(z, block)` and gets the last block too.
        subspaces: The probe uses U; for a black box the result's settings say what was used in its
            place.
        heading: The heading above the probe's statistics on pages; "" means its name.
    """

    name: str
    points: Sequence[str]
    measure: Callable[..., Mapping[str, Tensor]]
    statistics: Mapping[str, Statistic | Facts]
    final: Callable[..., Mapping[str, Tensor]] | None = None
    weights: Callable[..., Mapping[str, Tensor]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ()
    counts: Sequence[str] = ()
    per_head: Sequence[str] = ()
    masks: bool = False
    partial: bool = False
    final_block: bool = False
    subspaces: bool = False
    heading: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.points, str) or any(p.startswith("blocks.") for p in self.points):
            raise ValueError(f"points={self.points!r}: give names inside a block, in a tuple.")
        object.__setattr__(self, "points", tuple(self.points))
        if not isinstance(self.statistics, Mapping) or not self.statistics:
            raise ValueError(f"the probe {self.name!r} has no statistics: give a dict of them.")
        for name in (*self.counts, *self.per_head):
            checks.one_of("counts or per_head", name, self.statistics)
        for name in (self.name, *self.statistics):
            if not isinstance(name, str) or not name or set(name) & set("./\\"):
                raise ValueError(f"the name {name!r}: give a text without dots and slashes.")
        _ = self.records  # raises for a record that is none
        try:
            json.dumps(dict(self.settings))
        except (TypeError, ValueError):
            raise ValueError(f"settings={self.settings!r}: give names with JSON values.") from None

    @property
    def records(self) -> dict[str, Statistic]:
        """Returns the record of each statistic, whether it was given as a record or as a tuple."""
        pairs = self.statistics.items()
        return {name: described(f"{self.name}.{name}", facts) for name, facts in pairs}


def with_settings(
    measure: Callable[..., Mapping[str, Tensor]], settings: dict[str, Any], **fields: object
) -> Probe:
    """Returns a built-in probe, whose settings are further arguments of `measure`.

    Raises ValueError for eps <= 0, lambd < 0, and invalid tokens (`check_tokens`).
    """
    for name, check in _CHECKS.items():
        if name in settings:
            settings[name] = check(name, settings[name])
    more: Any = fields
    return Probe(measure=partial(measure, **settings), settings=settings, **more)


def on_weights(probe: Probe, block: Block) -> dict[str, Tensor]:
    """Returns a probe's statistics of a block's weights, `[]` or `[head]` each.

    Most probes measure no weights.
    """
    measure = probe.weights or (lambda block: {})
    answer = measure(block) if probe.points else probe.measure(block, {})
    return _checked_answer(probe, answer, (0, 1), None)


def is_ours(function: object) -> bool:
    """Tells whether a probe's function is one of this library's, which only read activations."""
    function = getattr(function, "func", function)  # of a functools.partial
    module = str(getattr(function, "__module__", ""))
    if not module.startswith("crate_interp.probes."):
        return False
    # a wrapper that a user made with functools.wraps has the module's name, too
    name = str(getattr(function, "__name__", ""))
    return getattr(sys.modules.get(module), name, None) is function


def on_activations(probe: Probe, block: Block, acts: LayerActs) -> dict[str, Tensor]:
    """Returns a probe's statistics of a layer's activations, `[batch]` or `[batch, head]` each.

    The probe sees only its own points, and a user's probe a copy of them: a write, even through
    NumPy, changes neither the model nor other probes. Raises ValueError if the probe returns a
    shape or name that it did not declare.
    """
    masks = MASKS if probe.masks else ()
    batch, seen = len(acts[probe.points[0]]), acts.only((*probe.points, *probe.optional, *masks))
    axes = {size for act in seen.values() for size in act.shape[1:]}
    if not is_ours(probe.measure):
        seen = LayerActs({name: value.clone() for name, value in seen.items()}, {})
    answer = _checked_answer(probe, probe.measure(block, seen), (1, 2), batch)
    # an axis of tokens or atoms in place of heads: a mean was forgotten
    cfg: Any = getattr(block, "cfg", None) or getattr(getattr(block, "attn", None), "cfg", None)
    heads: set[int] = {getattr(cfg, name, 0) for name in ("n_heads", "value_heads")} - {0}
    for name, value in answer.items():
        if heads and value.ndim == 2 and value.shape[1] in axes - heads:
            form = f"[batch], or [batch, head] with {' or '.join(map(str, sorted(heads)))} heads"
            raise ValueError(f"{probe.name}.{name} has shape {list(value.shape)}: return {form}.")
    return answer


def on_final(probe: Probe, z: Tensor, block: Block) -> dict[str, Tensor]:
    """Returns a probe's statistics of Z^L, `[batch]` each; most probes have none."""
    if probe.final is None:
        return {}
    batch, z = len(z), z if is_ours(probe.final) else z.clone()
    answer = probe.final(z, block) if probe.final_block else probe.final(z)
    return _checked_answer(probe, answer, (1,), batch)


def _checked_answer(
    probe: Probe, answer: Any, axes: tuple[int, ...], batch: int | None
) -> dict[str, Tensor]:
    if not isinstance(answer, Mapping):
        kind = type(answer).__name__
        raise ValueError(f"{probe.name!r} returned {kind}: return {{statistic: tensor}}.")
    for name, value in answer.items():
        if name not in probe.statistics:
            known = ", ".join(probe.statistics)
            raise ValueError(f"{probe.name!r} returned {name!r}, which is none of {known}.")
        is_real = isinstance(value, Tensor) and not value.is_complex()
        if not is_real or value.ndim not in axes or batch not in (None, *value.shape[:1]):
            shape = f"[batch] or [batch, head] with batch={batch}" if batch else "[] or [head]"
            got = f"shape {list(value.shape)}" if is_real else type(value).__name__
            raise ValueError(f"{probe.name}.{name} must be a tensor {shape}, got {got}.")
    # copies, because a probe may write the next layer's numbers into the same tensor
    return {name: value.detach().clone() for name, value in answer.items()}
