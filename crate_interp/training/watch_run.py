"""ci.watch: probes on fixed samples at every n-th step of a training."""

import functools
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crate_interp.core import checks, folders
from crate_interp.core.run_options import run_options
from crate_interp.core.safe_text import plain
from crate_interp.data import Data, Samples
from crate_interp.data.samples import Notes, Reads, contents, noting, read_runs, table_of
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.questions import batches, chunks, provenance, run_folder
from crate_interp.questions.experiment import Tables, Task, Work, with_facts
from crate_interp.results import sample_ranges
from crate_interp.sweeps.run import Probes, Sweep
from crate_interp.training.watch_result import STORED, WatchResult, by_step

_STAGE = "watch"
# entries of meta that may differ between the steps, processes or devices of one training
_FREE = ("model_digest", "device", "seconds")


@dataclass(eq=False, repr=False)
class Watch:
    """Measures a model at every n-th step of its training; `ci.watch` returns a Watch.

    now: the number of updates so far. seconds: the time spent on measuring.
    """

    model: HookedModel
    work: Work
    meta: dict[str, Any]
    every: int
    start: int
    out: Path | None
    code: Mapping[str, Any]
    resume: bool
    now: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    not_measured: dict[int, str] = field(default_factory=dict, init=False)
    _steps: dict[int, Tables] = field(default_factory=dict, init=False)
    _chunks: chunks.InFolder | None = field(default=None, init=False)
    _open: ExitStack | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"Watch(every={self.every}, steps measured: {len(self._steps)})"

    def __enter__(self) -> "Watch":
        if self._open is not None:
            raise RuntimeError("this watch is open already: use one `with` at a time.")
        self.now = self.start
        with ExitStack() as stack:
            if self.out is not None:
                settings = {name: self.meta[name] for name in self.meta if name not in _FREE}
                settings |= {"every": self.every}
                folder = run_folder.in_folder(
                    self.out, WatchResult, settings, self.code, resume=self.resume
                )
                self._chunks = stack.enter_context(folder)
                self._chunks.open(self.work.step)
                for step, block in sorted(self._chunks.blocks[self.work.step.name].items()):
                    if step <= self.start:
                        self._steps[step] = self._chunks.read(self.work.step, block)
            if self.now in self._steps:
                self._check_same_training()
            if not self._steps:
                self._measure()
            self._open = stack.pop_all()
        return self

    def _check_same_training(self) -> None:
        """Raises ValueError if the model's numbers at this step differ from those in the folder."""
        kept, now = self._steps[self.now], self._tables()
        for name in ("samples", "moments", "weights"):
            columns = kept[name].select_dtypes("float").columns.difference(["n", "squares"])
            was, found = (tables[name][columns].to_numpy() for tables in (kept, now))
            # a wide tolerance: another device or precision does not make it another training
            if was.shape != found.shape or not np.allclose(was, found, 1e-2, 1e-4, equal_nan=True):
                words = f"at step {self.now} its {name} differ"
                words += ". Give another out, another start=, or resume=False."
                raise ValueError(f"{self.out} holds another training: {words}")

    def __exit__(self, kind: type | None, *error: object) -> None:
        opened, self._open = self._open or ExitStack(), None
        with opened:
            if kind is None and self.now not in self._steps:
                self._measure()
            if self.out is not None and self._steps:
                with folders.writable(self.out):
                    self.result().save(self.out)

    def step(self, number: int | None = None) -> None:
        """Counts an update, and measures the model if the update's number is a multiple of `every`.

        number: the number of updates so far, if you count them yourself. Raises RuntimeError
        outside `with`, and ValueError if the number is not above `now`.
        """
        if self._open is None:
            raise RuntimeError("use `with ci.watch(model, data) as watch:` around the loop.")
        if number is not None and checks.count("number", number) <= self.now:
            raise ValueError(f"number={number}: there were {self.now} updates already.")
        self.now = self.now + 1 if number is None else int(number)
        if self.now % self.every == 0:
            self._measure()

    def result(self) -> WatchResult:
        """Returns what was measured so far.

        Raises ValueError if nothing has been measured yet.
        """
        if not self._steps:
            reasons = "; ".join(self.not_measured.values()) or "open the watch with `with` first"
            raise ValueError(f"nothing was measured yet: {reasons}.")
        steps = sorted(self._steps)
        tables = {name: by_step({at: self._steps[at][name] for at in steps}) for name in STORED}
        _, meta = with_facts(self._steps[steps[-1]], self.meta)
        meta |= {"steps": steps, "not_measured": {str(n): w for n, w in self.not_measured.items()}}
        return WatchResult(tables, meta | {"seconds": round(self.seconds, 3)})

    def _measure(self) -> None:
        """Measures the model; if the measurement fails, warns and lets the training continue.

        During the measurement, the model is in eval mode without autocast. Afterwards its modes and
        torch's random numbers are as before.
        """
        started, step = time.perf_counter(), self.now
        try:
            tables = self._steps[step] = self._tables()
            if self._chunks is not None:  # a full disk does not end a training
                data: Any = self.work.data
                task = Task(step, data.start, data.start + data.n)
                self._chunks.put(self.work.step, task, tables)
        except ValueError as error:
            words = "kept" if step in self._steps else "measured"
            self.not_measured |= {} if step in self._steps else {step: plain(error, 300)}
            warnings.warn(f"step {step} was not {words}: {plain(error, 300)}", stacklevel=3)
        finally:
            self.seconds += time.perf_counter() - started

    def _tables(self) -> Tables:
        training = [module for module in self.model.modules() if module.training]
        kind = torch.device(str(self.model.cfg.device)).type
        data: Any = self.work.data
        try:
            for module in training:
                module.training = False
            with torch.random.fork_rng(devices=[]), torch.autocast(kind, enabled=False):
                return self.work.measured(Task(0, data.start, data.start + data.n))
        finally:
            for module in training:
                module.training = True
            self.work.held.clear()  # it holds values computed from weights, which change


def watch(
    model: HookedModel,
    data: Data,
    *,
    every: int = 100,
    probes: Probes = None,
    out: str | Path | None = None,
    callback: str | None = None,
    limit: int = 32,
    batch_size: int = 32,
    start: int = 0,
    resume: bool = True,
    tag: str | None = None,
) -> Watch:
    """Returns a Watch, which measures a model in training on the first `limit` samples.

        with ci.watch(model, images, every=100) as watch:
            for x, y in batches:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.step()
        result = watch.result()

    The model is measured before the first update, after each `every` updates, and after the last
    update. The watch does not change a bit of the training: the model is in eval mode only while it
    is measured, torch's random numbers are not used, and gradients are untouched. If a number is
    not finite at a step, as in a training that diverges, the step is listed in
    meta["not_measured"], the watch warns, and the training continues.

    Args:
        model: The hooked model, even if a trainer wraps it. Weights sharded over processes (FSDP)
            cannot be measured.
        data: As in `ci.sweep`.
        every: After how many updates the model is measured again.
        probes: As in `ci.sweep`; "frames" and "objective" measure R^c and the objective under the
            scalings of the audit.
        out: A folder that keeps each step as soon as it is measured, and the result.
        callback: "transformers" or "lightning" makes the returned watch a callback too, to be
            passed as `Trainer(callbacks=[watch])`; it counts the updates itself, and only the first
            process measures.
        limit: How many of the first samples are measured.
        batch_size: Samples that run at once.
        start: The number of updates already made, if a training continues from a checkpoint; the
            steps up to `start` are taken from the folder.
        resume: False starts the folder over.
        tag: As in `ci.sweep`.

    Returns:
        The watch; `result()` has the numbers of each step.

    Raises:
        ValueError: Before the training, for arguments and data that cannot be measured, and if the
            folder holds something else or, at the step `start`, numbers that are not this model's.
        ImportError: If the trainer's package is missing.
    """
    every, limit = checks.count("every", every), checks.count("limit", limit)
    options = run_options(watch, {"limit": limit, "batch_size": batch_size, "tag": tag})
    start, resume = checks.count("start", start, least=0), checks.flag("resume", resume)
    made = Watch if callback is None else _callback(callback)
    batches.check_model(model)
    question, samples = Sweep(probes).opened(model, data, options)
    meta = provenance.data_meta(model, samples, options.batch_size) | question.facts(model)
    meta["model_digest"] = ""  # the model is different at every step
    step = replace(question.passes(model), name=_STAGE, apart=True)
    samples = samples.first_samples() if isinstance(samples, Stream) else samples
    samples, known = _remembered(samples, options.batch_size, step.masks)
    known |= sample_ranges.grouped(samples.groups) if samples.groups else {}
    meta["data"] = [entry | known for entry in meta["data"]]
    place = None if out is None else Path(out)
    code = {} if out is None else provenance.code_of(model, question.read(), tag)
    return made(model, Work(step, model, samples, options), meta, every, start, place, code, resume)


def _remembered(samples: Samples, size: int, masks: bool) -> tuple[Samples, dict[str, str]]:
    """Returns samples that are read now and then stay in memory, and digests of their files.

    The digests are `CONTENTS` of sample_ranges. Samples are read in batches of `size`, with their
    masks if `masks` is True.
    """
    notes = Notes()
    noted = noting(samples, notes)
    of_masks = None if noted.masks is None else _copied(noted.masks)
    kept = replace(noted, read=_copied(noted.read), masks=of_masks, files=None)
    bad = sum(len(read_runs(kept, *ends, masks).bad) for ends in batches.ranges_of(kept, size))
    if samples.files is None:
        return kept, {}
    ends = samples.start, samples.start + samples.n
    return kept, contents(table_of(notes), *ends, samples.n - bad)


def _copied(read: Reads) -> Reads:
    """Returns a function that reads once, and copies: the training may reuse the tensor."""
    return functools.cache(lambda start, stop: read(start, stop).clone())


def _begin(watch: Watch, step: int, *_: object) -> None:
    watch.start = max(watch.start, step)
    watch.__enter__()


def _count(watch: Watch, step: int, *_: object) -> None:
    # a batch whose gradients are only accumulated is not an update
    if step > watch.now:
        watch.step(step)


def _end(watch: Watch, step: int, *others: object) -> None:
    if watch._open is not None:
        watch.__exit__(type(others[-1]) if isinstance(others[-1], BaseException) else None)


# what a Watch does when a trainer calls it
_EVENTS = {
    "on_train_begin": _begin, "on_train_start": _begin,
    "on_step_end": _count, "on_train_batch_end": _count,
    "on_train_end": _end, "on_exception": _end,
}  # fmt: skip
# trainer: (its package, its class of callbacks, which argument of an event knows the step, and
# which attribute of this argument tells the first process)
_TRAINERS = {
    "transformers": ("transformers", "TrainerCallback", 1, "is_world_process_zero"),
    "lightning": ("pytorch_lightning", "Callback", 0, "is_global_zero"),
}


def _callback(trainer: str) -> Any:
    """Returns a Watch class that is a callback, too; raises ImportError without the package.

    Lightning has two packages: `lightning.pytorch` is used if it is already imported.
    """
    checks.one_of("callback", trainer, tuple(_TRAINERS))
    package, base, place, first = _TRAINERS[trainer]
    if trainer == "lightning" and "lightning.pytorch" in sys.modules:
        package = "lightning.pytorch"

    def listening(react: Callable[..., None]) -> Callable[..., None]:
        def event(self: Watch, *args: Any, **fields: object) -> None:
            if getattr(args[place], first):
                react(self, args[place].global_step, *args)

        return event

    events = {name: listening(react) for name, react in _EVENTS.items()}
    return type("CallbackWatch", (Watch, getattr(import_module(package), base)), events)
