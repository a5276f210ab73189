"""ci.merge: the result of a run, from the chunks in its folder, without model and data."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.results.kinds import KINDS, Kind, kind_of
from crate_interp.sweeps.ledgers.ledger import Ledger, settings_of
from crate_interp.sweeps.ledgers.own_files import RUN
from crate_interp.sweeps.runs.chunked_run import digest_of_run, finished

_MOST_SHOWN = 200  # ranges of chunks in an error


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
    return finished(kind, ledger, run["stages"], meta | {"run": digest_of_run(run)})


def _known(out: Path, run: Mapping[str, Any]) -> Kind:
    """Returns the kind of a run.

    Raises ValueError if another program or version wrote run.json.
    """
    name, stages = run["kind"], run["stages"]
    kind = kind_of(checks.one_of(f"kind in {str(out / RUN)!r}", name, tuple(KINDS)))
    known = all(kind.rules_of(stage) for stage in stages)
    if not (stages and known and len(set(stages)) == len(stages)):
        raise ValueError(
            f"{str(out / RUN)!r} is damaged, or of another version: its stages are "
            f"{checks.shown(stages)}. Run the same command again with resume=False (--restart)."
        )
    return kind


def _gone(ledger: Ledger, stage: str) -> list[tuple[str, str]]:
    """Returns ("missing" or "damaged", chunk numbers) for a stage."""
    chunks = ledger.missing(stage)
    if chunks is None:
        entries = ledger.entries(stage)
        there = [range(n, n + 1) for n in sorted(entries) if ledger.has(stage, n, entries)]
        but = f" but {_numbers(there)}" if there else ""
        return [("missing", f"all of {stage}{but}")]
    damaged, missing = [], []
    for gone in chunks:
        lost = ledger.path(stage, gone[0]).name not in ledger.damaged
        (missing if lost else damaged).append(gone)
    found = (("missing", missing), ("damaged", damaged))
    return [(way, f"{stage} {_numbers(own)}") for way, own in found if own]


def _numbers(chunks: list[range]) -> str:
    """Returns ranges in ascending order as text, such as "3, 7-12"; adjacent ranges are joined."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and chunk.start == runs[-1].stop:
            runs[-1] = range(runs[-1].start, chunk.stop)
        else:
            runs.append(chunk)
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_MOST_SHOWN]]
    return ", ".join(words) + (", ..." if runs[_MOST_SHOWN:] else "")
