"""What work takes, said on one line before it begins: samples, forwards, time and bytes."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from crate_interp.core.progress import note
from crate_interp.data import Samples
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.runs.chunked_pass import Stage
from crate_interp.sweeps.runs.untrained_twins import FEW, SAMPLES

_FEW = 4  # samples of the forward that is timed
# measures of small tensors take about as long as Python does, so a small network's verbs take more
# of its forwards than a large one's
_LEAST = 0.01  # seconds that a forward counts as at least
_LONG = 60.0  # seconds from which a run says that it may be interrupted
_TRIAL = 10.0  # seconds after which a crowded machine is told of
_dry: ContextVar[bool] = ContextVar("dry run", default=False)
_told: ContextVar[bool] = ContextVar("told", default=False)  # a verb has told of all its parts


class Forecasted(Exception):
    """Raised in a dry run when the forecast has been said."""


@contextmanager
def dry_run() -> Iterator[None]:
    """Makes every measurement stop after its forecast, while it is open."""
    token = _dry.set(True)
    try:
        yield
    except Forecasted:
        pass
    finally:
        _dry.reset(token)


@dataclass(frozen=True)
class Work:
    """What a verb is asked to do; n: all its samples, asked: its meta."""

    n: int
    layers: int
    heads: int
    atoms: int
    asked: Mapping[str, Any]

    @property
    def first(self) -> int:
        """Returns how many samples twins, nulls and controls see."""
        return min(self.n, SAMPLES)

    @property
    def twins(self) -> int:
        """Returns how many samples all untrained twins see together."""
        return self.asked.get("untrained", 0) * self.first

    @property
    def shuffled(self) -> int:
        """Returns how many samples all networks with shuffled weights of an audit see together."""
        return self.asked.get("untrained", 0) * min(self.n, FEW)

    def setting(self, name: str, default: object = 0) -> Any:
        """Returns a setting of the verb."""
        return self.asked.get("settings", {}).get(name, default)


@dataclass(frozen=True)
class Cost:
    """What a verb takes; less: what to give so that it takes less; then: what else takes time.

    forwards: for all samples together, in forwards of one sample. size: the megabytes of its files.
    """

    forwards: Callable[[Work], float]
    size: Callable[[Work], float]
    less: str
    then: str = ""


# kind of result -> its cost, from what `make cost` measures of CRATE-B with 197 tokens
COSTS: dict[str, Cost] = {
    "atlas": Cost(
        lambda w: 7 * w.n + min(w.setting("ablate"), max(w.n // 4, 8)) * (3 * w.layers + 8),
        # the contexts of a text take more than the places of patches
        lambda w: (
            (1.7e-3 if w.asked.get("unit") == "windows" else 1.2e-3) * w.layers * w.atoms
            + 0.02 * w.n
        ),
        "limit=n or ablate=0",
    ),
    "atom_names": Cost(lambda w: 3 * w.n, lambda w: 4e-4 * w.layers * w.atoms, "limit=n"),
    "atoms": Cost(lambda w: 2 * w.n, lambda w: 4e-4 * w.layers * w.atoms, "limit=n"),
    "audit": Cost(
        lambda w: (
            60 + 8 * w.n + 45 * min(w.n, 8) + w.setting("grid") * 17 * w.first
            + 10 * (w.twins + w.shuffled)
        ),
        lambda w: 5e-3 * w.layers * (w.first + w.twins / 8) + 4e-4 * w.layers * w.n,
        "limit=n, untrained=0 or grid=False",
    ),
    "comparison": Cost(
        lambda w: 3 * w.n * (w.asked["networks"] + 2 * w.asked["twins"]),
        lambda w: (0.02 + 0.01 * w.n) * (w.asked["networks"] + 2 * w.asked["twins"]),
        "limit=n or untrained=0",
    ),
    "composition": Cost(lambda w: 2 * w.n, lambda w: 0.1, "limit=n"),
    "concentration": Cost(
        lambda w: (
            (w.n + w.twins) * len(w.setting("k", ())) * w.layers * (2 + w.setting("rotations"))
        ),
        lambda w: 1e-3 * w.n, "limit=n, fewer k, rotations or untrained=0",
    ),
    "head_ablation": Cost(
        lambda w: w.n * (2 + 0.7 * w.layers * w.heads), lambda w: 12 + 5e-4 * w.n, "limit=n",
    ),
    "linear_probe": Cost(lambda w: 2 * w.n, lambda w: 4e-3 * w.n, "limit=n"),
    "report": Cost(
        lambda w: (
            60 + 6 * w.n + 4 * w.twins
            + w.asked["audit"] * (60 + 8 * w.n + 17 * w.first + 10 * (w.twins + w.shuffled))
        ),
        lambda w: 2.5 + 0.01 * w.n + w.asked["audit"] * 5e-3 * w.layers * w.first,
        "limit=n or untrained=0", "10 s or more to draw",
    ),
    "saes": Cost(lambda w: 6 * w.n, lambda w: 1e-3 * w.n, "limit=n"),
    "segmentation": Cost(
        lambda w: 4 * (w.n + w.twins), lambda w: 1 + 2e-3 * (w.n + w.twins),
        "limit=n or untrained=0",
    ),
    "store": Cost(lambda w: 1.2 * w.n, lambda w: 0.6 * w.n, "limit=n or fewer points"),
    "surgery": Cost(
        lambda w: w.n * (2 + len(w.setting("mixes", ())) * (w.layers + 1)), lambda w: 1e-3 * w.n,
        "limit=n or fewer mixes",
    ),
    "sweep": Cost(
        lambda w: 2 * w.n + 4 * min(w.n, w.asked.get("controls") or 0), lambda w: 2e-2 + 1e-2 * w.n,
        "limit=n or controls=0",
    ),
}  # fmt: skip


def announce(
    kind: str,
    stage: Stage,
    left: int | None,
    meta: Mapping[str, Any],
    say: bool = True,
    keeps: bool = False,
) -> None:
    """Says what a verb takes, if `say`; in a dry run, raises Forecasted after that.

    stage: its first stage; left: the samples that are left of it, or None for a stream, whose
    length is unknown. keeps: whether a folder keeps what is done, which a longer run then says.
    """
    if _told.get() or not (say or _dry.get()) or left == 0 or kind not in COSTS:
        return
    cost, cfg, count = COSTS[kind], stage.model.cfg, left or 1000
    whole = stage.samples.n if isinstance(stage.samples, Samples) else count
    layers, heads, atoms = (
        getattr(cfg, name, None) or 0 for name in ("n_layers", "n_heads", "d_mlp")
    )
    work = Work(whole, layers, heads, atoms, meta)
    each, words = cost.forwards(work) / whole, f"{kind.replace('_', ' ')}: "
    seconds, ending = _forward(stage), ""
    if left is None:
        words += f"a stream, about {each:.0f} forwards for each of its {stage.model.unit}"
    else:
        words += f"{count:,} {stage.model.unit}, about {each:.0f} forwards each"
        if seconds is not None:
            whole_time = each * count * max(seconds, _LEAST)
            words += f" of {_short(seconds)}: {_short(whole_time)}"
            ending = " If it stops, the same command goes on." * (keeps and whole_time > _LONG)
        words += f", {cost.size(work) * count / whole:.2g} MB"
        words += f"; then {cost.then}" * bool(cost.then)
    note(f"{words}. For less: {cost.less}.{ending}")
    if _dry.get():
        raise Forecasted


@contextmanager
def announced(
    kind: str, model: HookedModel, samples: Samples | Stream, meta: Mapping[str, Any], say: bool
) -> Iterator[None]:
    """Says what a verb takes that is made of others, which say nothing while this is open."""
    left = samples.n if isinstance(samples, Samples) else None
    announce(kind, Stage(kind, model, samples, lambda chunk: {}), left, meta, say)
    token = _told.set(True)
    try:
        yield
    finally:
        _told.reset(token)


def _forward(stage: Stage) -> float | None:
    """Returns the seconds of a forward of one sample; None if the data cannot be read twice."""
    samples = stage.samples
    if not isinstance(samples, Samples):
        return None
    count, took = min(_FEW, samples.n), []
    try:
        inputs = samples.read(samples.start, samples.start + count).to(stage.model.cfg.device)
    except (ValueError, OSError):
        return None  # the measurement says what is wrong, or leaves such samples out
    with torch.no_grad():
        for _ in range(2):
            begin = time.perf_counter()
            stage.forward(stage.model, inputs)
            if inputs.is_cuda:
                torch.cuda.synchronize()
            took.append((time.perf_counter() - begin) / count)
    return min(took)


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _load() -> float:
    """Returns how many processes run or wait on this machine; 0 if that is unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@dataclass
class Watched:
    """Counts samples as they are measured, and once says if the machine is crowded.

    It waits ten seconds, so that short work says nothing. advance: a function that is called with
    each count.
    """

    advance: Callable[[int], object]
    busy: float = field(default_factory=_load)  # the load before this work began
    _until: float = field(default_factory=lambda: time.monotonic() + _TRIAL)

    def __call__(self, count: int) -> None:
        """Counts samples."""
        self.advance(count)
        if time.monotonic() < self._until:
            return
        self._until = float("inf")
        if words := crowded(self.busy):
            note(words)


def crowded(busy: float) -> str:
    """Returns advice if more threads want to run than there are cores, else "".

    busy: how many other processes run on this machine.
    """
    threads, cores = torch.get_num_threads(), _cores()
    ours = threads * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads == 1 or ours + busy <= 1.25 * cores:
        return ""
    return (
        f"{ours} threads and a load of {busy:.0f} share {cores} cores: OMP_NUM_THREADS=1 "
        "(--threads 1) may be ten times faster."
    )


def _cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
