"""The command that checks an installation."""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option

import crate_interp as ci
from crate_interp.cli.options import nearest, say

PASS, WARN, FAIL = "pass", "warn", "fail"
_PACKAGES = ("torch", "transformer-lens", "transformers", "datasets", "huggingface-hub", "numpy")
# extra of the package -> (a package that it installs, its purpose)
_EXTRAS = {"ray": ("ray", "--engine ray"), "coco": ("pycocotools", "crowd masks of COCO")}
_ROOM = 2  # GB that a checkpoint and its results may take


class Line(NamedTuple):
    """A line of the report: its state, what was checked, what was found, and what to do."""

    state: str
    name: str
    found: str
    advice: str = ""


def doctor(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """Check this installation.

    Looks at versions, devices, the cache of the Hub, folders and an embedded model. The exit code
    is 1 if a line says fail.
    """
    lines = list(_lines())
    if as_json:
        say(json.dumps([line._asdict() for line in lines], indent=2))
    else:
        wide = max(len(line.name) for line in lines)
        for line in lines:
            advice = f". {line.advice}" if line.advice else ""
            say(f"{line.state}  {line.name.ljust(wide)}  {line.found}{advice}")
    if any(line.state == FAIL for line in lines):
        raise typer.Exit(1)


def _lines() -> Iterator[Line]:
    yield Line(PASS, "crate_interp", ci.__version__)
    yield Line(PASS, "python", f"{platform.python_version()} at {sys.executable}")
    yield from _packages()
    yield from _devices()
    yield from _cache()
    for name, place in (("this folder", Path.cwd()), ("temporary folder", tempfile.gettempdir())):
        yield _folder(name, Path(place))
    yield _model()


def _packages() -> Iterator[Line]:
    for name in _PACKAGES:
        yield _package(name, FAIL, "Run pip install crate_interp, which installs it")
    for extra, (name, purpose) in _EXTRAS.items():
        advice = f"For {purpose}, run pip install 'crate_interp[{extra}]'"
        yield _package(name, WARN, advice)


def _package(name: str, missing: str, advice: str) -> Line:
    """Returns a line with the version of a package.

    missing, advice: the state and the advice of the line if the package is not installed.
    """
    try:
        return Line(PASS, name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Line(missing, name, "not installed", advice)


def _devices() -> Iterator[Line]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    crowded = threads > (cores or threads)
    advice = f"Give --threads {cores}, one for each core" if crowded else ""
    found = f"{cores} cores, torch uses {threads} threads"
    yield Line(WARN if crowded else PASS, "processor", found, advice)
    if not torch.cuda.is_available():
        yield Line(PASS, "gpu", "none that torch can use: models run on the processor")
    for number in range(torch.cuda.device_count()):
        yield Line(PASS, f"cuda:{number}", torch.cuda.get_device_name(number))


def _cache() -> Iterator[Line]:
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    found = "offline: HF_HUB_OFFLINE is set" if offline else "online, as far as the settings say"
    advice = "Models load from the cache only" if offline else ""
    yield Line(WARN if offline else PASS, "Hugging Face Hub", found, advice)
    yield _folder("cache of the Hub", Path(constants.HF_HUB_CACHE))


def _folder(name: str, place: Path) -> Line:
    """Returns whether a folder can be written, and how much room it has."""
    there = nearest(place)
    if not os.access(there, os.W_OK | os.X_OK):
        state = WARN if name == "this folder" else FAIL
        return Line(state, name, f"{place} cannot be written", "Give --out another folder")
    room = shutil.disk_usage(there).free / 1e9
    state, advice = (PASS, "") if room > _ROOM else (WARN, "Free space before you fetch a model")
    return Line(state, name, f"{place}, {room:,.0f} GB free", advice)


def _model() -> Line:
    """Returns whether an embedded model gives the right answers."""
    try:
        model: Any = ci.load("crate-tiny-fashion")
        images = ci.data.embedded("fashion")[:8]
        answers = model(model.preprocess(images["image"])).argmax(dim=-1).tolist()
    except Exception as error:  # a broken installation may raise anything
        return Line(
            FAIL, "embedded model", f"{type(error).__name__}: {error}", "Reinstall crate_interp"
        )
    right = sum(one == two for one, two in zip(answers, images["label"], strict=True))
    state = PASS if right >= 6 else FAIL
    return Line(state, "embedded model", f"crate-tiny-fashion loads, {right} of 8 labels right")
