"""Every attack that was ever tried on the library, with counts by kind.

    python tests/attacks.py [KIND ...]

runs all of them, or those of some kinds (`python tests/attacks.py servers ledgers`), with 200
examples of each property unless CRATE_SLOW and CRATE_PROFILE say less (tests/selection.py), and
prints for each kind how many tests there are and how many held. A test is an attack of its own, or
a property over many. The fast ones are part of every run of the tests.
"""

import os
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
# kind -> the files of its attacks
KINDS = {
    "checkpoints": (
        "hostile",
        "hostile_files",
        "foreign_loading",
        "trainer_formats",
        "npz",
        "pickles",
        "torch_files",
        "zip_archives",
    ),  # fmt: skip
    "tokenizers": ("tokenizer_attacks",),
    "pictures and masks": ("hostile_pictures", "pictures_by_content"),
    "tables": ("hostile_tables",),
    "texts on pages": ("strings", "safe_text"),
    "servers": ("hub_attacks", "hub_names"),
    "bridges": ("bridge_attacks",),
    "results of strangers": ("result_reading", "old_folders", "folders", "files"),
    "ledgers": ("ledgers",),
    "kills and faults": ("faults", "kill", "kill_runs", "leftovers", "only_ours_removed"),
    "runs that go on": ("run_state", "resume"),
    "caches, probes and threads": ("whose_cache", "writing_probes", "threads", "padded_cache"),
    "misuse": ("misuse", "contradictions", "odd_images"),
}


class Counts:
    """Counts the outcomes of tests by kind, as a plugin of pytest."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}

    def pytest_runtest_logreport(self, report) -> None:
        """Counts a test once, or its setup if that failed or skipped it."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            name = Path(report.location[0]).stem.removeprefix("test_")
            self.found[kind_of(name)][report.outcome] += 1

    def table(self) -> str:
        """Returns a line for each kind and a line for all."""
        lines = [(kind, *(own[name] for name in ("passed", "failed", "skipped")))
                 for kind, own in self.found.items()]  # fmt: skip
        lines.append(("all", *(sum(column) for column in list(zip(*lines, strict=True))[1:])))
        head = f"{'kind':28} {'held':>6} {'not held':>9} {'not run':>8}"
        return "\n".join([head, *(f"{a:28} {b:6} {c:9} {d:8}" for a, b, c, d in lines)])


def kind_of(name: str) -> str:
    """Returns the kind of a file of tests."""
    return next(kind for kind, names in KINDS.items() if name in names)


def main() -> int:
    """Runs the attacks; returns pytest's exit code."""
    import pytest

    for name, value in (("SLOW", "all"), ("PROFILE", "thorough")):
        os.environ.setdefault(f"CRATE_{name}", value)
    os.environ["OMP_NUM_THREADS"] = "1"
    counts = Counts()
    kinds = [kind for kind in KINDS if kind in sys.argv] or KINDS
    paths = [str(HERE / f"test_{name}.py") for kind in kinds for name in KINDS[kind]]
    more = [argument for argument in sys.argv[1:] if argument not in KINDS]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *paths, *more], plugins=[counts])
    print(counts.table())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
