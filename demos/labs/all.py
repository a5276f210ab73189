"""Runs every lab in its quick form, one after the other.

    python demos/labs/all.py --out DIR [--full]

Each writes into DIR/NAME. The first line is the digest of the rules by which claims are answered,
the last names the labs that failed, if any.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rules import digest
from tqdm.auto import tqdm

HERE = Path(__file__).parent
NOT_LABS = ("all", "lab")


def names() -> list[str]:
    """Returns the labs: the scripts beside this one that end in a call of `main`."""
    paths = sorted(HERE.glob("*.py"))
    return [path.stem for path in paths if path.stem not in NOT_LABS and is_lab(path)]


def is_lab(path: Path) -> bool:
    return "    main(run, draw" in path.read_text()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Runs every lab in its quick form, one after the other."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--full", action="store_true")
    given = parser.parse_args()
    print(f"rules (data/rules.csv): SHA-256 {digest()}")
    form, failed = "--full" if given.full else "--quick", []
    for name in tqdm(names(), desc="labs", unit="lab"):
        start = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), form, "--out", str(given.out / name)]
        print(f"\n== {name}", flush=True)
        if subprocess.run(command).returncode:
            failed.append(name)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(names()) - len(failed)} labs ran, these failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))
