"""ci.merge: the result of a run, from the chunks in its folder, without model and data."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.results.kinds import KINDS, Kind, Tables, kind_of
from crate_interp.results.result import Result
from crate_interp.sweeps.ledgers.ledger import Ledger, settings_of
from crate_interp.sweeps.ledgers.own_files import RUN
from crate_interp.sweeps.runs.chunked_run import digest_of_run, finished

_ANEW = "Move it to another place, then run the same command again with resume=False (--restart)."


def merge(folder: str | Path) -> Any:
    """Returns the result of a run whose chunks are all in its folder, and saves it there.

    folder: the run's `out`. Neither model nor data is read. The result is the same, to the bit, as
    the result that the last process of the run would return.

    Raises ValueError if the folder holds no run, and if chunks are missing or damaged; the message
    has the numbers of these chunks.
    """
    out = Path(folder)
    run = settings_of(out)
    kind = _known(out, run)
    ledger = Ledger(out)
    gone = [words for name in run["stages"] for words in _gone(ledger, name)]
    if gone:
        missing, damaged = (
            ", ".join(words for way, words in gone if way == state)
            for state in ("missing", "damaged")
        )
        parts = [f"missing: {missing}"] * bool(missing) + [f"damaged: {damaged}"] * bool(damaged)
        raise ValueError(
            f"{str(out)!r} does not hold all chunks of its run ({'; '.join(parts)}). Run the "
            "same command again: it measures only these chunks."
        )
    meta = {**run["settings"], "command": plain(shlex.join(sys.argv), 1000)}
    kind = replace(kind, finish=partial(_finish, kind=kind, out=out))
    return finished(kind, ledger, run["stages"], meta | {"run": digest_of_run(run)})


def _finish(found: Mapping[str, Tables], meta: dict[str, Any], kind: Kind, out: Path) -> Result:
    assert kind.finish is not None
    try:
        return kind.finish(found, meta)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        # the run has settings or a table that this version does not write
        raise ValueError(f"{_damaged(out)}: {type(error).__name__} ({error}). {_ANEW}") from error


def _known(out: Path, run: Mapping[str, Any]) -> Kind:
    """Returns the kind of a run.

    Raises ValueError if another program or version wrote run.json.
    """
    name, stages = run.get("kind"), run.get("stages")
    checks.one_of(f"kind in {str(out / RUN)!r}", name, tuple(KINDS))
    kind = kind_of(str(name))
    names = stages if isinstance(stages, list) else []
    known = all(kind.rules_of(stage) for stage in names)
    settings = isinstance(run.get("settings"), dict)
    if not (names and known and settings and len(set(names)) == len(names)):
        raise ValueError(f"{_damaged(out)}: its stages are {plain(repr(stages), 80)}. {_ANEW}")
    return kind


def _damaged(out: Path) -> str:
    return f"{str(out / RUN)!r} is damaged, or of another version"


def _gone(ledger: Ledger, stage: str) -> list[tuple[str, str]]:
    """Returns ("missing" or "damaged", chunk numbers) for a stage."""
    chunks = ledger.missing(stage)
    if chunks is None:
        return [("missing", f"all of {stage}")]
    damaged = [chunk for chunk in chunks if ledger.path(stage, chunk).name in ledger.damaged]
    missing = [chunk for chunk in chunks if chunk not in damaged]
    found = (("missing", missing), ("damaged", damaged))
    return [(way, f"{stage} {_numbers(own)}") for way, own in found if own]


def _numbers(chunks: list[int]) -> str:
    """Returns numbers in ascending order as text, such as "3, 7-12"."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ", ".join(f"{one}-{last}" if one < last else f"{one}" for one, last in runs)
