"""The golden tables: whether any number of the library has moved.

There is a table for each kind of processor, since their kernels round differently and some numbers
(of untrained networks, or of close decisions) then differ in the first digit. On other processors,
and with other versions, only the names and the lengths of columns are compared.

Usage, in tests/: python -m golden.golden [--record] [PART OF A CASE'S NAME ...]
"""

import json
import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

TABLES = Path(__file__).parent / "tables"
Digests = dict[str, list[Any]]


def measured(name: str, way: str = "") -> Digests:
    """Returns the digests of one case, run in another way if one is named."""
    import torch

    from golden.cases import every_case, in_another_way
    from golden.digests import digests

    warnings.simplefilter("ignore")
    os.environ["RAY_ADDRESS"] = ""
    torch.manual_seed(0)
    (case,) = [case for case in every_case() if case.name == name]
    try:
        with tempfile.TemporaryDirectory() as place:
            return digests(in_another_way(case, way, Path(place) / "run") if way else case())
    except Exception as error:  # is what the case gives, too
        return {f"raises {type(error).__name__}: {error}": []}


def tables() -> dict[str, dict[str, Digests]]:
    """Returns the digests of each case, by machine."""
    read = [json.loads(path.read_text("utf-8")) for path in sorted(TABLES.glob("*.json"))]
    return {table["machine"]: table["cases"] for table in read}


def differences(name: str, way: str, known: dict[str, dict[str, Digests]]) -> dict[str, str]:
    """Runs a case and returns what moved: bits; in other batches numbers; elsewhere sizes."""
    from golden.digests import machine, moved

    after, mine = measured(name, way), known.get(machine(), {})
    if way == "sizes":
        return moved(measured(name, "double"), after, "numbers")
    if name in mine:
        return moved(mine[name], after, "bits")
    before = next((cases[name] for cases in known.values() if name in cases), {})
    return moved(before, after, "sizes")


def write(machine: str, cases: dict[str, Digests]) -> None:
    """Writes the table of a machine."""
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(cases[name])}" for name in sorted(cases))
    text = f'{{"machine": "{machine}", "cases": {{\n{body}\n}}}}\n'
    (TABLES / f"{machine.split()[0]}.json").write_text(text, encoding="utf-8")


def record(names: list[str]) -> None:
    """Writes the digests of cases anew; those that moved are removed from the other tables."""
    from golden.cases import every_case
    from golden.digests import machine

    known, every = tables(), {case.name for case in every_case()}
    mine = known.pop(machine(), {})
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = zip(names, tqdm(pool.map(measured, names), "recording", len(names)), strict=True)
    new = {name: digests for name, digests in found if digests != mine.get(name)}
    write(machine(), {name: one for name, one in (mine | new).items() if name in every})
    for other, cases in known.items():
        stale = new.keys() & mine.keys() | cases.keys() - every
        write(other, {name: one for name, one in cases.items() if name not in stale})


def main() -> None:
    """Runs the cases and prints what moved, or writes the table anew."""
    from golden.cases import every_case, every_way
    from golden.digests import machine

    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    runs = [(case.name, "") for case in every_case()]
    runs += [(case.name, way) for case, way in every_way()]
    runs = [run for run in runs if not words or any(word in " ".join(run) for word in words)]
    if "--record" in sys.argv:
        record([name for name, way in runs if not way])
        return
    known, count = tables(), 0
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        tasks = pool.map(differences, *zip(*runs, strict=True), [known] * len(runs))
        for (name, way), found in zip(runs, tqdm(tasks, "golden", len(runs)), strict=True):
            count += bool(found)
            for item, how in found.items():
                tqdm.write(f"{name} {way}: {item.strip('.')} {how}", sys.stdout)
    what = "bits" if machine() in known else "sizes"
    sys.stdout.write(f"{len(runs)} cases, {count} moved; {what} compared ({machine()})\n")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
