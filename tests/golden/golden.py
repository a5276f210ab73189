"""The golden table: whether any number of the library has moved.

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

TABLE = Path(__file__).parent / "golden.json"
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


def recorded() -> dict[str, Any]:
    """Returns the table: the machine, and the digests of each case."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def is_exact(way: str, machine: str) -> bool:
    """Returns whether bits have to be the same: not in other batches, nor on another machine."""
    from golden.digests import machine as here

    return way != "sizes" and machine == here()


def differences(name: str, way: str, table: dict[str, Any]) -> dict[str, str]:
    """Runs a case and returns what moved."""
    from golden.digests import moved

    before = table["cases"].get(name, {})
    return moved(before, measured(name, way), is_exact(way, table["machine"]))


def record(names: list[str]) -> None:
    """Writes the digests of cases into the table, and keeps those of others."""
    from golden.cases import every_case
    from golden.digests import machine

    known = {case.name for case in every_case()}
    cases = recorded()["cases"] if TABLE.exists() else {}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = list(tqdm(pool.map(measured, names), "recording", len(names)))
    cases |= dict(zip(names, found, strict=True))
    rows = [f"{json.dumps(name)}: {json.dumps(cases[name])}" for name in sorted(known)]
    body = ",\n".join(rows)
    TABLE.write_text(f'{{"machine": "{machine()}", "cases": {{\n{body}\n}}}}\n', encoding="utf-8")


def main() -> None:
    """Runs the cases and prints what moved, or writes the table anew."""
    from golden.cases import every_case, every_way

    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    runs = [(case.name, "") for case in every_case()]
    runs += [(case.name, way) for case, way in every_way()]
    runs = [run for run in runs if not words or any(word in " ".join(run) for word in words)]
    if "--record" in sys.argv:
        record([name for name, way in runs if not way])
        return
    table, count = recorded(), 0
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        tasks = pool.map(differences, *zip(*runs, strict=True), [table] * len(runs))
        for (name, way), found in zip(runs, tqdm(tasks, "golden", len(runs)), strict=True):
            count += bool(found)
            for item, how in found.items():
                tqdm.write(f"{name} {way}: {item.strip('.')} {how}", sys.stdout)
    compared = "bits" if is_exact("", table["machine"]) else "numbers rounded to 1e-6"
    sys.stdout.write(f"{len(runs)} cases, {count} moved; {compared} compared\n")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
