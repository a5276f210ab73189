"""Options and arguments that several commands share, and the objects they become."""

import inspect
import json
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import crate_interp as ci
from crate_interp.core import checks
from crate_interp.core.folders import locked

locks = ExitStack()  # locks of the folders that the command writes, released when it ends
places: dict[Path, int | None] = {}  # folder -> when its earlier result was saved


def folder(out: Path, alone: bool) -> Path:
    """Notes the folder that a command writes, and locks it until its end if it writes `alone`."""
    places[out] = saved_at(out)
    return locks.enter_context(locked(out)) if alone else out


def place() -> Path | None:
    """Returns the folder in which this command has saved a result or a chunk, or None."""
    return next((out for out, old in places.items() if saved_at(out) not in (None, old)), None)


def saved_at(out: Path) -> int | None:
    """Returns when a result, or a chunk of one, was last saved in a folder, or None."""
    try:
        found = [*out.glob("chunks/*.parquet"), *out.glob("meta.json")]
        return max((path.stat().st_mtime_ns for path in found), default=None)
    except (OSError, ValueError):
        return None


Source = Annotated[
    str,
    Argument(help="A name of `crate-interp models`, NAME@step-N, a weight file or a saved folder."),
]
Out = Annotated[Path, Option(help="The folder to write into.")]
# several processes may run the command on such a folder at once
SharedOut = Annotated[
    Path,
    Option(help="The folder to write into. The same command continues where an earlier one ended."),
]
Family = Annotated[
    str | None, Option(help="Model family. Default: inferred from the checkpoint's keys.")
]
Step = Annotated[str | None, Option("--revision", help="step-N: a checkpoint from the training.")]
Revision = Annotated[
    str | None, Option(help="A commit on the Hub, or step-N of an embedded model.")
]
File = Annotated[str | None, Option(help="A file of a repo on the Hub.")]
Config = Annotated[
    list[str] | None,
    Option(help="A field of the config, such as n_heads=6. Repeat it for more fields."),
]
Rename = Annotated[
    str | None,
    Option(help="Renames the keys of a weight file, as in sed: 's/^net\\.//'."),
]
Weights = Annotated[
    str | None, Option(help="ema: the averaged weights of a file that has plain ones too.")
]
Side = Annotated[
    str,
    Argument(
        help="A name of `crate-interp models`, NAME@step-N, a weight file, or the folder of a "
        "saved model or sweep. Separate several seeds with commas."
    ),
]
ProbeNames = Annotated[
    str | None,
    Option(
        help="Names of probes, separated by commas, such as frames, which has the "
        "change of R^c by attention. Default: compression, sparsity, alignment, attention."
    ),
]
Untrained = Annotated[int, Option(help="How many untrained twins to measure as well.")]


def take_threads(threads: int | None) -> None:
    """Sets the number of threads for torch, before torch is imported."""
    if threads is not None:
        checks.count("--threads", threads)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(threads)


def revised(source: str, revision: str | None) -> tuple[str, str | None]:
    """Returns source and revision: NAME@step-100 gives a revision if --revision does not."""
    name, at, step = source.rpartition("@")
    if not at or not name or revision is not None or Path(source).exists():
        return source, revision
    return name, step


def chosen(rename: str | None, weights: str | None) -> dict[str, Any]:
    """Returns the given ones among --rename and --weights; a black box takes neither."""
    given = {"rename": rename, "weights": weights}
    return {name: value for name, value in given.items() if value is not None}


def names_of(probes: str | None) -> list[str] | None:
    """Returns the names in --probes, or None."""
    return None if probes is None else [name.strip() for name in probes.split(",")]


def heads_of(names: list[str] | None, layers: int, heads: int) -> set[tuple[int, int]]:
    """Returns (layer, head) of each name in --head; raises ValueError for a bad name."""
    found = {f"L{layer}H{head}": (layer, head) for layer in range(layers) for head in range(heads)}
    for name in names or []:
        if name.upper() not in found:
            raise ValueError(
                f"--head {name}: the heads of this model are L0H0 to L{layers - 1}H{heads - 1}."
            )
    return {found[name.upper()] for name in names or []}


def fields(pairs: list[str] | None) -> dict[str, Any]:
    """Returns the fields of --config: n_heads=6 becomes {"n_heads": 6}.

    A value is JSON, True, False, None or a tuple of numbers; anything else is a string.
    """
    words = {"True": True, "False": False, "None": None}
    arguments = inspect.signature(ci.load).parameters
    fields: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--config {pair!r}: write NAME=VALUE, such as n_heads=6.")
        if name == "family":
            raise ValueError(f"--config {pair!r}: write --family {value}.")
        if name in arguments:
            raise ValueError(f"--config {pair!r}: CrateConfig has no field {name!r}.")
        # people write .5, which is not JSON, and (28, 28), as Python has it
        text = value if '"' in value else re.sub(r"(?<![\d.])\.(?=\d)", "0.", value)
        text = re.sub(r"^\s*\(([\d., ]*?),?\s*\)\s*$", r"[\1]", text)
        try:
            fields[name] = words[text] if text in words else json.loads(text)
        except (ValueError, RecursionError):
            if value.startswith(("[", "{")):
                raise ValueError(
                    f"--config {pair!r}: a list is JSON, with strings in double quotes, such as "
                    '--config \'labels=["cat", "dog"]\'.'
                ) from None
            fields[name] = value
    return fields


def say(text: str) -> None:
    """Prints a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
