"""Passes stored activations to hooks instead of running the model; hooks see the same numbers."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core.run_options import RunOptions
from crate_interp.data import Data, Samples
from crate_interp.data.samples import first
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.models.weight_cache import model_digest
from crate_interp.probes import Probe
from crate_interp.questions.batches import Forward, run_layers, samples_of, with_groups
from crate_interp.results.sample_ranges import groups_of
from crate_interp.sweeps.stores import arrow_files
from crate_interp.sweeps.stores.activation_store import facts_of

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Replay:
    """A forward that hands stored activations to the model's hook points; no layer runs.

    The input of this forward is a tensor of sample numbers. stored: the result of
    `ci.open_store`. shapes: point -> shape of one sample, in the order in which points fire. start:
    the number of the store's first sample.
    """

    stored: "datasets.Dataset"
    shapes: dict[str, tuple[int, ...]]
    start: int

    def __call__(self, model: HookedModel, numbers: Tensor) -> None:
        """Passes the stored activations of samples to the hooks, as a forward would."""
        begin, cfg = int(numbers[0]) - self.start, model.cfg
        for name, shape in self.shapes.items():
            column = arrow_files.rows_of(self.stored, begin, begin + len(numbers), [name])[name]
            value = arrow_files.tensor_of(column, shape).to(cfg.device, cfg.dtype)
            model.hook_dict[name](value)

    def input_digests(self, numbers: Tensor) -> list[str]:
        """Returns the SHA-256 of the model's input for each sample."""
        begin = int(numbers[0]) - self.start
        rows = arrow_files.rows_of(self.stored, begin, begin + len(numbers), [arrow_files.INPUT])
        return rows[arrow_files.INPUT].to_pylist()

    def check_points(self, names: Sequence[str]) -> None:
        """Raises KeyError if the store lacks one of the points with these full names."""
        missing = [name for name in dict.fromkeys(names) if name not in self.shapes]
        if missing:
            shown = ", ".join(missing[:4]) + (", ..." if missing[4:] else "")
            held = ", ".join(list(self.shapes)[:4]) + (", ..." if len(self.shapes) > 4 else "")
            raise KeyError(
                f"the store lacks {len(missing)} hook points that are needed: {shown}. It holds "
                f"{held}. Write another store with ci.store(points=...)."
            )

    @property
    def meta(self) -> dict[str, Any]:
        """Returns the store's entry in a result's meta: the index's hash and the stored dtype."""
        facts = facts_of(self.stored) or {}
        return {"store": {"hash": facts.get("hash"), "dtype": facts.get("stored")}}


def digests_of(forward: Forward, inputs: Tensor) -> list[str]:
    """Returns the SHA-256 of the model's input for each sample of a batch."""
    if isinstance(forward, Replay):
        return forward.input_digests(inputs)
    return list(arrow_files.input_digests(inputs))


def readable(
    probes: list[Probe], forward: Forward, model: HookedModel, blocks: str, *, some: bool = False
) -> list[Probe]:
    """Returns the probes that can be measured with a forward; a store may lack some points.

    some: whether to leave out probes that read a missing point; if every probe reads a missing
    point, all probes are kept. Raises KeyError if the store lacks a point of a probe that is kept.
    """
    if not isinstance(forward, Replay):
        return probes
    layers, has = range(len(getattr(model, blocks))), forward.shapes
    wanted = {item.name: _points(item, layers, blocks) for item in probes}
    if some:
        kept = [item for item in probes if all(name in has for name in wanted[item.name])]
        probes = kept or probes
    forward.check_points([name for item in probes for name in wanted[item.name]])

    def stored(point: str) -> bool:
        return all(full_name(point, layer, blocks) in has for layer in layers)

    return [
        dataclasses.replace(item, optional=tuple(filter(stored, item.optional))) for item in probes
    ]


def _points(probe: Probe, layers: Sequence[int], blocks: str) -> list[str]:
    """Returns the full names of the points that a probe reads."""
    names = [full_name(point, layer, blocks) for layer in layers for point in probe.points]
    return [*names, full_name("hook_resid_post", layers[-1], blocks)] if probe.final else names


def opened(
    model: HookedModel,
    data: Data,
    options: RunOptions,
    forward: Forward = run_layers,
    find: Callable[[HookedModel, Data, RunOptions], Samples | Stream] = samples_of,
) -> tuple[Samples | Stream, Forward]:
    """Returns the samples of `data`, and the forward that passes activations to the model's hooks.

    For the result of `ci.open_store`, the forward is a `Replay`. Other data is opened by `find`,
    and its forward is `forward`.

    Raises ValueError for a store of another model, for a part of a store, and for a store together
    with a user's forward.
    """
    facts = facts_of(data)
    if facts is None:
        return find(model, data, options), forward
    if forward is not run_layers:
        raise ValueError("a store is not run through the model. Leave out forward=.")
    if facts["model_digest"] != model_digest(model):
        raise ValueError(
            f"the store is of {facts['model']!r} ({facts['model_digest'][:19]}...), but this model "
            f"is {model.cfg.model_name!r} ({model_digest(model)[:19]}...). Give the model with "
            "which the store was written, with the same weights and config."
        )
    stored: Any = data
    ours, n = facts["data"][0], len(stored)
    numbers = stored.with_format("numpy", columns=[arrow_files.SAMPLE])[:][arrow_files.SAMPLE]
    if not np.array_equal(numbers, np.arange(ours["start"], ours["stop"])):
        raise ValueError(
            "the data is a part of a store, or a store in another order. Give the result of "
            "ci.open_store unchanged, with limit=n for the first n samples."
        )
    labels = (
        stored.with_format(None)[arrow_files.LABEL][:]
        if arrow_files.LABEL in stored.features
        else None
    )
    known = groups_of([ours])
    groups = None if known is None else tuple(known[:, 1].tolist())
    samples = Samples(
        n, labels, ours["fingerprint"], torch.arange, start=ours["start"], groups=groups
    )
    shapes = {name: tuple(shape) for name, shape in facts["points"].items()}
    chosen = with_groups(first(samples, options.limit), data, options)
    return chosen, Replay(stored, shapes, ours["start"])
