"""Options and arguments that several commands share, and the objects they become."""

import inspect
import json
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import crate_interp as ci
from crate_interp.core import checks
from crate_interp.core.folders import locked

if TYPE_CHECKING:
    from crate_interp.results.result import Result

DTYPES = ("float32", "float64", "bfloat16", "float16")
locks = ExitStack()  # locks of the folders that the command writes, released when it ends
places: dict[Path, int | None] = {}  # folder -> when its earlier result was saved


def _lock(out: Path) -> Path:
    return locks.enter_context(locked(_note(out)))


def _shared(out: Path) -> Path:
    """Records a folder that several processes write; raises ValueError if it cannot be written."""
    try:
        there = nearest(out)
        reason = "" if there.is_dir() else f"{str(there)!r} is not a folder"
        reason = reason or ("" if os.access(there, os.W_OK | os.X_OK) else "permission denied")
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        reason = str(getattr(error, "strerror", None) or error)
    if reason:
        raise ValueError(f"cannot write into {str(out)!r}: {reason}. Give another folder.")
    return _note(out)


def nearest(place: Path) -> Path:
    """Returns a path, or the nearest existing folder above it."""
    return next(path for path in (place, *place.parents) if path.exists())


def _note(out: Path) -> Path:
    places[out] = saved_at(out)
    return out


Source = Annotated[
    str,
    Argument(help="A name of `crate-interp models`, NAME@step-N, a weight file or a saved folder."),
]
Data = Annotated[
    str,
    Option(
        help='"embedded:fashion", "embedded:pictures", "embedded:held-out-text", '
        '"embedded:repeats", a folder, "imagefolder:DIR" or "hf:owner/name:split".'
    ),
]
Out = Annotated[Path, Option(help="The folder to write into.", callback=_lock)]
# not locked here: several processes may run the command on one folder at once
SharedOut = Annotated[
    Path,
    Option(
        help="The folder to write into. The same command continues where an earlier one stopped.",
        callback=_shared,
    ),
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
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1. Default: cpu.")]
Dtype = Annotated[
    str | None, Option(help="float32, float64, bfloat16 or float16. Default: float32.")
]
Threads = Annotated[int | None, Option(help="Threads of torch in each process.")]
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
    """Sets the number of threads for torch, before torch is imported.

    Raises ValueError if torch was imported earlier and runs with another number.
    """
    if threads is None:
        return
    checks.count("--threads", threads)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        raise ValueError(
            f"--threads {threads}: torch already runs with {torch.get_num_threads()} threads. Set "
            f"OMP_NUM_THREADS={threads} before Python starts."
        )


def finding(result: "Result") -> str:
    """Returns a result's finding, and what its intervals do not cover."""
    return " ".join(words for words in (result.headline(), result.caution()) if words)


def revised(source: str, revision: str | None) -> tuple[str, str | None]:
    """Returns source and revision: NAME@step-100 gives a revision if --revision does not."""
    name, at, step = source.rpartition("@")
    if not at or not name or revision is not None or Path(source).exists():
        return source, revision
    return name, step


def load(
    source: str,
    family: str | None,
    revision: str | None,
    config: list[str] | None,
    device: str | None = None,
    dtype: str | None = None,
    rename: str | None = None,
    weights: str | None = None,
) -> Any:
    """Returns the hooked model that a command names, or a black box."""
    source, revision = revised(source, revision)
    given: Any = {"device": device or "cpu", "dtype": _dtype(dtype), **chosen(rename, weights)}
    return ci.bridge.load(source, family=family, revision=revision, **given, **fields(config))


def chosen(rename: str | None, weights: str | None) -> dict[str, Any]:
    """Returns the given ones among --rename and --weights; a black box takes neither."""
    given = {"rename": rename, "weights": weights}
    return {name: value for name, value in given.items() if value is not None}


def _dtype(name: str | None) -> Any:
    """Returns a dtype of torch by its name, or None."""
    if name is None:
        return None
    checks.one_of("dtype", name, DTYPES)
    import torch

    return getattr(torch, name)


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
    python = {"True": "true", "False": "false", "None": "null"}
    taken = inspect.signature(ci.load).parameters
    fields: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--config {pair!r}: write NAME=VALUE, such as n_heads=6.")
        if name == "family":
            raise ValueError(f"--config {pair!r}: write --family {value}.")
        if name in taken:
            raise ValueError(f"--config {pair!r}: CrateConfig has no field {name!r}.")
        try:
            # people write .5, which is not JSON
            told = value if '"' in value else re.sub(r"(?<![\d.])\.(?=\d)", "0.", value)
            # and (28, 28), as Python has it
            told = re.sub(r"^\s*\(([\d., ]*?),?\s*\)\s*$", r"[\1]", told)
            fields[name] = json.loads(python.get(told, told))
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


def place() -> Path | None:
    """Returns the folder in which this command has saved a result or a chunk, or None."""
    done = [out for out, before in places.items() if saved_at(out) not in (None, before)]
    return done[0] if done else None


def saved_at(out: Path) -> int | None:
    """Returns when a result, or a chunk of one, was last saved in a folder, or None."""
    try:
        found = [*out.glob("ledger-*.jsonl"), *out.glob("meta.json")]
        return max((path.stat().st_mtime_ns for path in found), default=None)
    except (OSError, ValueError):
        return None
