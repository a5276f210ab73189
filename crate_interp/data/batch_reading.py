"""Reads one batch. Samples that cannot be decoded split it into runs of the other samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from crate_interp.core.pictures import Undecodable
from crate_interp.data.picture_contents import Notes
from crate_interp.data.samples import Samples


@dataclass(frozen=True)
class Run:
    """Contiguous samples from number `start` on, with their masks if masks are read."""

    start: int
    inputs: Tensor
    masks: Tensor | None = None


@dataclass(frozen=True)
class Found:
    """The runs of samples that were decoded, and the samples that cannot be decoded.

    bad: the number of each sample that cannot be decoded -> the reason. notes: what the files held,
    if a worker has read them.
    """

    runs: list[Run]
    bad: dict[int, str]
    notes: Notes = field(default_factory=dict)


def read_runs(samples: Samples, start: int, stop: int, masks: bool = False) -> Found:
    """Reads the samples from `start` up to, not including, `stop`.

    Samples that cannot be decoded divide the others into contiguous runs, and so do changes of the
    number of tokens. masks: whether to read masks; a sample whose mask cannot be decoded is bad
    too. Raises ValueError if a sample can be decoded but not used.
    """
    try:
        return Found(
            [_run(samples, *ends, masks) for ends in _of_one_length(samples, start, stop)], {}
        )
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
    """Reads the sample that follows sample `number`; the first sample follows the last.

    read: takes start and stop, and reads the samples from start up to, not including, stop. of: the
    number of samples. skip_bad: whether to skip samples that cannot be decoded. Raises Undecodable
    if the following sample cannot be decoded or, with skip_bad, if no sample can be decoded.
    """
    for step in range(1, of + 1):
        following = (number + step) % of
        try:
            return read(following, following + 1)
        except Undecodable:
            if not skip_bad or step == of:
                raise
    raise ValueError(f"there is no sample after number {number}: the data has {of} samples.")


def _run(samples: Samples, start: int, stop: int, masks: bool) -> Run:
    inputs = samples.read(start, stop)
    if not masks or samples.masks is None:
        return Run(start, inputs)
    return Run(start, inputs, samples.masks(start, stop))


def _of_one_length(samples: Samples, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields start and stop of each run of samples that have equally many tokens."""
    lengths = samples.lengths
    for number in range(start + 1, stop if lengths else 0):
        assert lengths is not None
        if lengths[number] != lengths[number - 1]:
            yield start, number
            start = number
    yield start, stop


def _between(start: int, stop: int, bad: dict[int, str]) -> Iterator[tuple[int, int]]:
    """Yields start and stop of each run without a bad sample."""
    for end in (*sorted(bad), stop):
        if start < end:
            yield start, end
        start = end + 1
