"""Samples read for one batch: contiguous runs between those that cannot be decoded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from crate_interp.core.pictures import Undecodable
from crate_interp.data.samples import Samples


@dataclass(frozen=True)
class Run:
    """Contiguous samples from number `start` on, with their masks if masks are read."""

    start: int
    inputs: Tensor
    masks: Tensor | None = None


@dataclass(frozen=True)
class Found:
    """The runs of some samples. bad: number of each other sample -> why it cannot be decoded."""

    runs: list[Run]
    bad: dict[int, str]


def read_runs(samples: Samples, start: int, stop: int, masks: bool = False) -> Found:
    """Returns the samples start to stop - 1 in contiguous runs of those that can be decoded.

    masks: whether to read masks; a sample whose mask cannot be decoded is bad too. Raises
    ValueError if samples can be decoded but not used.
    """
    try:
        return Found([_run(samples, start, stop, masks)], {})
    except Undecodable:
        bad = bad_ones(samples, start, stop, masks)
    runs = [_run(samples, *ends, masks) for ends in _between(start, stop, bad)]
    return Found(runs, bad)


def bad_ones(samples: Samples, start: int, stop: int, masks: bool) -> dict[int, str]:
    """Returns the numbers of samples that cannot be decoded, each with the reason."""
    bad: dict[int, str] = {}
    for number in range(start, stop):
        try:
            _run(samples, number, number + 1, masks)
        except Undecodable as error:
            bad[number] = str(error)
    return bad


def next_of(read: Callable[[int, int], Tensor], number: int, of: int, skip_bad: bool) -> Tensor:
    """Reads the sample after sample `number` of `of` samples; after the last comes the first.

    read: takes start and stop. skip_bad: whether samples that cannot be decoded are passed over.
    Raises Undecodable if the sample cannot be decoded, or, with skip_bad, if none can.
    """
    for step in range(1, of + 1):
        following = (number + step) % of
        try:
            return read(following, following + 1)
        except Undecodable:
            if not skip_bad or step == of:
                raise
    raise ValueError(f"there is no sample after number {number} of {of}.")


def _run(samples: Samples, start: int, stop: int, masks: bool) -> Run:
    inputs = samples.read(start, stop)
    if not masks or samples.masks is None:
        return Run(start, inputs)
    return Run(start, inputs, samples.masks(start, stop))


def _between(start: int, stop: int, bad: dict[int, str]) -> Iterator[tuple[int, int]]:
    """Yields start and stop of each run without a bad sample."""
    for end in (*sorted(bad), stop):
        if start < end:
            yield start, end
        start = end + 1
