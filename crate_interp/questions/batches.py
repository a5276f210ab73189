"""One pass of a model over a chunk of data, batch by batch, with readings of its activations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_hooks import full_name, read
from crate_interp.core import checks, device_waits
from crate_interp.core.pictures import Undecodable
from crate_interp.core.run_options import DEFAULTS, RunOptions
from crate_interp.data import Data, Samples, open_data, open_text, sources
from crate_interp.data.samples import Batch, Found, ImageReading, bad_ones, grouped, read_runs
from crate_interp.data.streams import Stream, image_stream, is_stream, text_stream
from crate_interp.measures.checks import all_finite
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.hooked import HookedModel, check_hooked
from crate_interp.models.preprocess import preprocess

Forward = Callable[[Any, Tensor], Any]
_SKIP = "skip_bad=True leaves such samples out, and the result lists them"
_DTYPES = {"bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Reading:
    """Points of a layer that are read together, and the function that measures them.

    `measure(layer, acts, batch)` is called once for each layer and batch, as soon as the last of
    the points has fired. `layers`: None means all.
    """

    points: str | Sequence[str]
    measure: Callable[..., Any]
    layers: Sequence[int] | None = None


def advised(error: Undecodable) -> str:
    """Returns a message that says what is wrong with a sample, and how to leave the sample out."""
    return f"{str(error).rstrip('.')}: {_SKIP}."


def ranges_of(samples: Samples, batch_size: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last + 1) of each batch of samples."""
    stop = samples.start + samples.n
    for start in range(samples.start, stop, batch_size):
        yield start, min(start + batch_size, stop)


def run_layers(model: HookedModel, batch: Tensor) -> None:
    """Runs every layer on every token of a batch: `model.full_forward(batch)`."""
    model.full_forward(batch)


def nobody(*numbers: int) -> None:
    """Returns None: nobody has read these samples ahead, or waits for a report of progress."""


@dataclass(frozen=True)
class Chunk:
    """Samples that are measured as one unit, in batches that depend only on these samples.

    number: the chunk's number, from 0, in the order of the data. once: values computed once for all
    chunks of a pass, by name. advance(n) reports that n more samples are done. masks: whether
    batches have masks. skip_bad: whether samples that cannot be decoded are left out. bad: sample
    number -> why the sample cannot be decoded, for each sample that `batches` left out.
    ahead(start, stop): returns the samples from `start` to `stop` - 1, with their masks, if a
    worker has read these samples, else None.
    """

    model: HookedModel
    samples: Samples
    batch_size: int
    blocks: str = "blocks"
    forward: Forward = run_layers
    number: int = 0
    once: dict[str, Any] = field(default_factory=dict)
    advance: Callable[[int], Any] = nobody
    masks: bool = False
    skip_bad: bool = False
    bad: dict[int, str] = field(default_factory=dict)
    ahead: Callable[[int, int], Found | None] = nobody

    def batches(self) -> Iterator[Batch]:
        """Yields the samples batch by batch.

        A batch has batch_size samples. If some of these are left out, each contiguous run of the
        remaining samples is a batch, so the batches depend only on the data. A chunk without
        decodable samples has no batch.

        Raises ValueError for images with NaN or Inf, for tokens that the vocabulary lacks, and for
        samples that cannot be decoded, unless skip_bad leaves them out.
        """
        for start, end in ranges_of(self.samples, self.batch_size):
            found = self.ahead(start, end) or read_runs(self.samples, start, end, self.masks)
            if found.bad and not self.skip_bad:
                first, stop = self.samples.start, self.samples.start + self.samples.n
                count = len(bad_ones(self.samples, first, stop, self.masks))
                raise ValueError(
                    f"{' '.join(text.rstrip('.') + '.' for text in found.bad.values())} {count} of "
                    f"the samples {first} to {stop - 1} cannot be decoded: {_SKIP}."
                )
            self.bad.update(found.bad)
            for piece in found.runs:
                inputs = device_waits.sent(piece.inputs, self.model.cfg.device)
                _check_values(self.model, inputs, piece.start)
                yield replace(piece, inputs=inputs)
            self.advance(end - start)

    def after(self, number: int, read: Callable[[int, int], Tensor]) -> Tensor:
        """Returns the result of `read` for the sample after sample `number`.

        After the last sample, this is the first sample. read: `samples.read` or `samples.masks`.
        With skip_bad, samples that `read` cannot decode are skipped.
        """
        of = self.samples.of
        for step in range(1, of if self.skip_bad else 1):
            following = (number + step) % of
            with suppress(Undecodable):
                return read(following, following + 1)
        following = number if self.skip_bad else (number + 1) % of
        try:
            return read(following, following + 1)
        except Undecodable as error:
            raise ValueError(advised(error)) from None

    def measure(self, batch: Batch, readings: Sequence[Reading]) -> None:
        """Runs the model on one batch with the readings, or does nothing without readings."""
        if not readings:
            return
        with torch.no_grad(), ExitStack() as stack:
            for reading in readings:
                measure = partial(reading.measure, batch=batch)
                context = read(self.model, reading.points, measure, reading.layers, self.blocks)
                stack.enter_context(context)
            self.forward(self.model, batch.inputs)

    def measure_all(self, *readings: Reading) -> None:
        """Runs the model over the chunk, batch by batch, with the readings."""
        for batch in self.batches():
            self.measure(batch, readings)


def check_model(model: HookedModel, blocks: str = "blocks") -> None:
    """Raises ValueError unless this is a hooked model with these `blocks` and finite weights."""
    check_hooked(model)
    if model.towers:
        raise ValueError("a CLIP is two models: measure its towers, model.visual and model.text.")
    lists = [name for name in ("blocks", "decoder_blocks") if hasattr(model, name)]
    if blocks not in lists:
        raise ValueError(f"blocks={blocks!r}: this model has {' and '.join(lists)}.")
    for name, value in model.named_parameters():
        if not all_finite(value):
            raise ValueError(f"the weights hold NaN or Inf ({name}): nothing can be measured.")


def samples_of(model: HookedModel, data: Data, options: RunOptions = DEFAULTS) -> Samples:
    """Returns the samples of `data` as this model takes them: images, or windows of tokens.

    If `data` is a datasets.IterableDataset, its first `limit` samples are kept in memory. Samples
    are on the CPU, whatever the model's device.
    """
    if is_store(data):
        raise ValueError("only ci.sweep and ci.linear_probe take a store: give the store's data.")
    reader: Any = model  # has windows, or preprocess and preprocess_masks
    if model.unit == "windows":
        if is_stream(data):
            samples = text_stream(data, reader.window_rows, options.limit).first_samples()
        else:
            samples = open_text(data, reader.window_rows, options.limit, reader.to_tokens)
        for start, stop in ranges_of(samples, options.chunk_size):
            for run in read_runs(samples, start, stop).runs:
                _check_values(model, run.inputs, run.start)
        return with_groups(samples, data, options)
    try:
        samples = open_data(
            data, on_cpu(model), options.limit, reader.preprocess_masks,
            skip_bad=options.skip_bad,
        )  # fmt: skip
    except Undecodable as error:
        raise ValueError(advised(error)) from None
    return with_groups(samples, data, options)


def is_store(data: object) -> bool:
    """Tells whether data is a dataset from `ci.open_store`."""
    text = getattr(getattr(data, "info", None), "description", None)
    return isinstance(text, str) and text.startswith('{\n "crate_interp": "store"')


def with_groups(samples: Samples, data: Data, options: RunOptions) -> Samples:
    """Returns samples with the groups of the option `groups`, if it was given."""
    if options.groups is None:
        return samples
    table = sources.table_named(data) if isinstance(options.groups, str) else None
    return grouped(samples, options.groups, table)


def check_one_length(samples: Samples, what: str) -> None:
    """Raises ValueError for texts of several lengths; what: the measurement that needs one."""
    if len(set((samples.lengths or ())[samples.start : samples.start + samples.n])) > 1:
        raise ValueError(f"{what} compares tokens, and needs texts of one length, in tokens.")


def data_of(model: HookedModel, data: Data, options: RunOptions = DEFAULTS) -> Samples | Stream:
    """Returns the samples of `data` as `samples_of` does, except that a stream stays a stream.

    A stream is a datasets.IterableDataset, a DataLoader or another iterable of batches. It is for
    verbs that read each sample only once.
    """
    if not is_stream(data):
        return samples_of(model, data, options)
    if options.groups is not None:
        raise ValueError("groups= needs data with a length, but this is a stream.")
    if model.unit == "windows":
        return text_stream(data, model.window_rows, options.limit)
    return image_stream(data, ImageReading(on_cpu(model), limit=options.limit))


def on_cpu(model: HookedModel) -> Callable[[Any], Tensor]:
    """Returns the model's `preprocess`, changed so that images stay on the CPU.

    Worker processes cannot reach an accelerator. Each batch is moved to the accelerator before it
    is measured.
    """
    if torch.device(model.cfg.device).type == "cpu":
        return model.preprocess
    return lambda pictures: preprocess(model.cfg, pictures).to(model.cfg.dtype)


def last_point(model: HookedModel | DecoderView, blocks: str = "blocks") -> str:
    """Returns the name of the point that holds Z^L."""
    return full_name("hook_resid_post", len(getattr(model, blocks)) - 1, blocks)


def _check_values(model: HookedModel, inputs: Tensor, start: int) -> None:
    """Raises ValueError, naming samples, for NaN and Inf, and ids that the vocabulary lacks."""
    if inputs.is_floating_point() and not all_finite(inputs):
        bad = [start + index for index, image in enumerate(inputs) if not all_finite(image)]
        raise ValueError(f"images hold NaN or Inf: samples {', '.join(map(str, bad[:8]))}.")
    if model.unit == "windows" and not inputs.is_floating_point():
        outside = (inputs < 0) | (inputs >= model.cfg.d_vocab)
        if outside.any():
            row, place = outside.nonzero()[0].tolist()
            token = f"the token {int(inputs[row, place])}, beyond the vocabulary"
            raise ValueError(f"sample {start + row} has {token} of {model.cfg.d_vocab}.")


def in_precision(precision: str | None, forward: Forward) -> Forward:
    """Returns a forward that runs under torch.autocast, or `forward` if `precision` is None.

    Raises ValueError for anything but None and "bfloat16".
    """
    if precision is None:
        return forward
    checks.one_of("precision", precision, tuple(_DTYPES))
    return partial(_autocast, forward=forward, dtype=_DTYPES[precision])


def _autocast(model: HookedModel, batch: Tensor, forward: Forward, dtype: torch.dtype) -> None:
    with torch.autocast(batch.device.type, dtype=dtype):
        forward(model, batch)


@contextmanager
def measuring(acts: dict[str, Tensor], device: str) -> Iterator[dict[str, Tensor]]:
    """If autocast is on, turns it off and yields 16-bit activations as float32 for the probes."""
    if not torch.is_autocast_enabled(device):
        yield acts
        return
    half = (torch.bfloat16, torch.float16)
    with torch.autocast(device, enabled=False):
        yield {name: x.float() if x.dtype in half else x for name, x in acts.items()}
