"""ci.verify: a report on a checkpoint, on a saved result, or on a run's folder."""

from collections.abc import Callable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.checkpoints import verify as checkpoints
from crate_interp.core.files import digest, open_regular
from crate_interp.core.folders import differs, named, read_index
from crate_interp.core.safe_text import plain
from crate_interp.results import json_schemas, result_hash
from crate_interp.results.json_schemas import fault_of_file
from crate_interp.results.kinds import KINDS, kind_of
from crate_interp.results.result import Result
from crate_interp.results.result_reading import META, table_from
from crate_interp.sweeps.ledgers.ledger import Ledger
from crate_interp.sweeps.ledgers.own_files import CHUNKS, RUN

Check = dict[str, Any]


def verify(
    source: checkpoints.Given, *, progress: bool = True, **options: object
) -> dict[str, Any]:
    """Checks a checkpoint, or the folder of a saved result or of a run, and returns a report.

    The values of the report are plain JSON. For a checkpoint, crate_interp/checkpoints/verify.py
    describes the report, and options are those of `ci.load`. For a folder, the report's keys are
    source, ok, result (the kind), digests (of the files), hash (`Result.digest()`, computed again
    from the saved tables), checks (name, ok and detail of each) and cannot_check. Every byte of a
    run's chunks is read.

    Raises ValueError for options together with a folder of a result or a run.
    """
    folder = Path(source) if isinstance(source, (str, Path)) else None
    index = {} if folder is None else read_index(folder / META)
    run = {} if folder is None else read_index(folder / RUN)
    if folder is None or not ("result" in index or "stages" in run):
        return checkpoints.verify(source, progress=progress, **options)
    if any(value is not None for value in options.values()):
        raise ValueError(
            f"{', '.join(options)}: options are for checkpoints, not for results. Leave them out."
        )
    checks, more, limits = [], {}, []
    if "result" in index:
        found, more, limits = _result(folder, index)
        checks += found
    else:
        limits.append("the result: it is not written before all chunks are there")
    if "stages" in run:
        checks += _run(folder, run)
    kind = plain(index.get("result", run.get("kind")), 80)
    return {
        "source": str(source),
        "ok": all(check["ok"] for check in checks),
        "result": kind,
        **more,
        "checks": checks,
        "cannot_check": limits,
    }


def _result(folder: Path, index: Mapping[str, Any]) -> tuple[list[Check], dict[str, Any], list]:
    """Returns the checks of a saved result, its digests and hash, and what cannot be checked."""
    files = named(index.get("files"))
    wrong = differs(folder, files)
    detail = f"{len(files)} files" + (f"; differ: {', '.join(map(plain, wrong))}" if wrong else "")
    checks = [_check("files are those that were saved", not wrong and bool(files), detail)]
    there = {name: digest(folder / name) for name in files if (folder / name).is_file()}
    more: dict[str, Any] = {"digests": there, "hash": None}
    if str(index["result"]) not in KINDS:
        kind = plain(index["result"], 80)
        return [*checks, _check("is a result", False, f"no kind {kind!r}")], more, []
    of_kind = kind_of(index["result"]).result
    checks.append(_passes("can be loaded", lambda: of_kind.load(folder).headline()))
    wanted, limits = index.get("hash"), []
    try:
        more["hash"] = result_hash.digest_of_result(_tables(folder, of_kind), index)
    except Exception as error:  # an unknown table may raise anything
        checks.append(_check("hash of tables and meta", False, plain(error, 300)))
        return checks, more, limits
    if wanted is None:
        limits.append("the hash of tables and meta: an older version saved the result without it")
    else:
        same = wanted == more["hash"]
        words = "computed again" if same else f"{META} says {plain(wanted, 80)}"
        checks.append(_check("hash of tables and meta", same, words))
    return checks, more, limits


def _tables(folder: Path, of_kind: type[Result]) -> dict[str, pd.DataFrame]:
    found = {}
    for name in of_kind.STORED:
        with open_regular(folder / f"{name}.parquet") as file:
            found[name] = table_from(file.read())
    return found


def _run(folder: Path, run: Mapping[str, Any]) -> list[Check]:
    """Returns the checks of the settings and the chunks of a run."""
    damage = fault_of_file(run, json_schemas.RUN)
    if damage:
        return [_check(f"settings in {RUN}", False, damage)]
    ledger, checks = Ledger(folder), []
    try:
        for stage in dict.fromkeys([*run["stages"], *ledger.lengths()]):
            checks += _chunks(ledger, stage)
    except ValueError as error:
        checks.append(_check("chunks can be read", False, plain(error, 300)))
    return checks


def _chunks(ledger: Ledger, stage: str) -> list[Check]:
    """Returns the checks of the chunks of a stage. Raises ValueError if a chunk cannot be read."""
    missing, name = ledger.missing(stage), f"chunks of {stage}"
    if missing is None:
        return [_check(name, False, "their number is unknown")]
    total, entries = ledger.lengths()[stage], ledger.entries(stage)
    first = list(islice(chain.from_iterable(missing), 9))
    shown = ", ".join(map(str, first[:8])) + (", ..." if first[8:] else "")
    detail = f"{total - sum(map(len, missing)):,} of {total:,}"
    detail += f"; missing or damaged: {shown}" if missing else ""
    # a range of several chunks has no entries
    gone = {chunks[0] for chunks in missing}
    there = sorted(chunk for chunk in entries if chunk < total and chunk not in gone)
    beside = [ledger.read(stage, chunk, entries).get("files") for chunk in there]
    named_there = [table for table in beside if table is not None and "sha256" in table]
    checks = [_check(name, not missing, detail)]
    return [*checks, _beside(ledger.out, pd.concat(named_there))] if named_there else checks


def _beside(folder: Path, table: pd.DataFrame) -> Check:
    """Checks the files that the tables of chunks refer to."""
    pairs = zip(table["file"], table["sha256"], strict=True)
    wrong = differs(folder / CHUNKS, dict(pairs))
    detail = f"{len(table)} files" + (f"; differ: {', '.join(map(plain, wrong))}" if wrong else "")
    return _check("files of activations", not wrong, detail)


def _passes(name: str, load: Callable[[], str]) -> Check:
    try:
        return _check(name, True, load())
    except Exception as error:
        return _check(name, False, plain(error, 300))


def _check(name: str, ok: bool, detail: str) -> Check:
    return {"name": name, "ok": bool(ok), "detail": detail}
