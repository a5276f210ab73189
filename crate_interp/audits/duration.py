"""How long an audit will take, estimated before it starts."""

import time
from collections.abc import Sequence

from crate_interp.core.progress import note
from crate_interp.data import Samples, part
from crate_interp.results.result import counted
from crate_interp.sweeps.runs.chunked_pass import Stage, Task

_TIMED = 5  # samples to time
_LONG = 600  # seconds, above which the note says how to take less time


def announce(left: Sequence[int], timed: Stage, nulls: int) -> None:
    """Times a few samples, and prints about how long the audit will take.

    left: how many samples of each stage remain, the stage of the model itself first; if none
    remain, nothing is timed or printed. timed: the stage to time, which is the model's without
    its limits, because only the first samples have limits. nulls: how many nulls each sample
    has; a twin has none, so its samples take 1 / (1 + nulls) of the time.
    """
    if not any(left):
        return
    assert isinstance(timed.samples, Samples)  # the samples of an audit can be read twice
    seconds, few = [], min(_TIMED, timed.samples.n)
    for count in (1, few):
        begin = time.perf_counter()
        samples = part(timed.samples, timed.samples.start, timed.samples.start + count)
        timed.measured(Task(1, samples), lambda count: None)
        seconds.append(time.perf_counter() - begin)
    each = max(0.0, seconds[1] - seconds[0]) / max(1, few - 1)
    total = each * (left[0] + sum(left[1:]) / (1 + nulls)) + seconds[0] * sum(map(bool, left))
    took = f"about {total:.0f} s"
    if total > _LONG:
        took = (
            f"about {total / 60:.0f} min on one process. Fewer samples (limit=n), more processes "
            "(shard='i/n', engine='ray') or grid=False shorten it"
        )
    note(f"audit: {_words(left, timed.model.unit)}, {took}")


def _words(left: Sequence[int], unit: str) -> str:
    """Returns a text for the samples left, such as "8 images, and 1 untrained twin on 8 each"."""
    twins = [n for n in left[1:] if n]
    own = [f"{left[0]} {unit}"] if left[0] else []
    most = f"{max(twins)} each" if len(set(twins)) == 1 else f"up to {max(twins, default=0)} each"
    others = [f"{counted(len(twins), 'untrained twins')} on {most}"] if twins else []
    return ", and ".join([*own, *others])
