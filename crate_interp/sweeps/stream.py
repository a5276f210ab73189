"""One pass of a model over data: a fold over chunks of samples, in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from crate_hooks import full_name, read
from crate_interp import ranges
from crate_interp.bars import tqdm
from crate_interp.data import Data, Samples, open_data, open_text
from crate_interp.measures.checks import all_finite
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.hooked import HookedModel, check_hooked

Forward = Callable[[Any, Tensor], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Some samples on the model's device; `start` is the number of the first."""

    inputs: Tensor
    start: int

    @property
    def last(self) -> int:
        """Returns the number of the last sample."""
        return self.start + len(self.inputs) - 1


@dataclass(frozen=True)
class Reading:
    """Points of a layer that are read together, and the function that measures them.

    `measure(layer, acts, batch)` is called once a layer and batch, as soon as the last of the
    points has fired. `layers` None stands for all.
    """

    points: str | Sequence[str]
    measure: Callable[..., Any]
    layers: Sequence[int] | None = None


def run(model: HookedModel, batch: Tensor) -> None:
    """Runs every layer on every token of a batch: `model.full_forward(batch)`."""
    model.full_forward(batch)


@dataclass(frozen=True)
class Chunk:
    """Samples that are measured in one piece; their number fixes the batches, so the arithmetic."""

    model: HookedModel
    samples: Samples
    batch_size: int
    bar: Any
    blocks: str = "blocks"
    forward: Forward = run

    @property
    def range(self) -> dict[str, Any]:
        """Returns what the meta of a result holds about its samples: data and n_samples."""
        first, n = self.samples.start, self.samples.n
        return {"data": ranges.of(self.samples.fingerprint, first, first + n), "n_samples": n}

    def batches(self) -> Iterator[Batch]:
        """Yields the samples batch by batch.

        Raises ValueError if an image holds NaN or Inf.
        """
        stop = self.samples.start + self.samples.n
        for start in range(self.samples.start, stop, self.batch_size):
            inputs = self.samples.read(start, min(start + self.batch_size, stop))
            inputs = inputs.to(self.model.cfg.device)
            _check_finite(inputs, start)
            yield Batch(inputs, start)
            self.bar.update(len(inputs))

    def measure(self, batch: Batch, readings: Sequence[Reading]) -> None:
        """Runs the model on one batch while the readings read; without readings nothing runs."""
        if not readings:
            return
        with torch.no_grad(), ExitStack() as stack:
            for reading in readings:
                measure = partial(reading.measure, batch=batch)
                context = read(self.model, reading.points, measure, reading.layers, self.blocks)
                stack.enter_context(context)
            self.forward(self.model, batch.inputs)

    def measure_all(self, *readings: Reading) -> None:
        """Runs the model over the chunk, batch by batch, while the readings read."""
        for batch in self.batches():
            self.measure(batch, readings)


def fold(
    model: HookedModel,
    samples: Samples,
    of_chunk: Callable[[Chunk], T],
    merge: Callable[[T, T], T],
    *,
    batch_size: int,
    what: str,
    progress: bool = True,
    blocks: str = "blocks",
    forward: Forward = run,
) -> T:
    """Returns what a function makes of each chunk of the samples, merged in their order.

    `what` names the progress bar.
    """
    unit = model.unit.removesuffix("s")
    with tqdm(total=samples.n, desc=what, unit=unit, disable=not progress) as bar:
        parts = parts_of(samples)
        chunks = (Chunk(model, part, batch_size, bar, blocks, forward) for part in parts)
        return reduce(merge, map(of_chunk, chunks))


def parts_of(samples: Samples) -> list[Samples]:
    """Returns the chunks in which samples are measured: all of them in one, for now."""
    return [samples]


def check_model(model: HookedModel, blocks: str = "blocks") -> None:
    """Raises ValueError for anything but a hooked model with such layers and finite weights."""
    check_hooked(model)
    if model.towers:
        raise ValueError(
            "a CLIP is two models: measure its towers, "
            "model.visual on images and model.text on texts."
        )
    lists = [name for name in ("blocks", "decoder_blocks") if hasattr(model, name)]
    if blocks not in lists:
        raise ValueError(
            f"blocks={blocks!r}: this {type(model).__name__} has {' and '.join(lists)}."
        )
    for name, value in model.named_parameters():
        if not all_finite(value):
            raise ValueError(f"the weights hold NaN or Inf ({name}): nothing can be measured.")


def samples_of(model: HookedModel, data: Data, limit: int | None) -> Samples:
    """Returns the samples of `data` as this model takes them: images, or windows of tokens."""
    reader: Any = model  # has windows, or preprocess and preprocess_masks
    given: Any = data
    if model.unit == "windows":
        return open_text(given, reader.windows, limit)
    return open_data(given, reader.preprocess, limit, reader.preprocess_masks)


def last_point(model: HookedModel | DecoderView, blocks: str = "blocks") -> str:
    """Returns the name of the point that holds Z^L."""
    return full_name("hook_resid_post", len(getattr(model, blocks)) - 1, blocks)


def _check_finite(inputs: Tensor, start: int) -> None:
    if inputs.is_floating_point() and not all_finite(inputs):
        bad = [start + index for index, image in enumerate(inputs) if not all_finite(image)]
        raise ValueError(f"images hold NaN or Inf: samples {', '.join(map(str, bad[:8]))}.")
