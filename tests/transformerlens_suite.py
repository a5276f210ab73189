"""Runs TransformerLens' own tests on our language models, and checks each failure against a table.

    python tests/transformerlens_suite.py [--sdist PATH] [--only FILE] [-n WORKERS]

The files and the expected failures, with their reasons, are in tests/transformerlens_failures.toml.
A failure that the table lacks, and an entry that passes, are told and end with exit code 1.
The tests come with the source distribution of TransformerLens, which is downloaded unless given.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

import transformerlens_sdist

HERE = Path(__file__).parent
TABLE = HERE / "transformerlens_failures.toml"
SECONDS = 60  # of one test
GROUPS = (
    "GPT-2's own vocabulary, sizes or Hub",
    "by design (table of refusals)",
    "bridge internals",
    "other",
)
COUNTED = GROUPS[2:]  # the failures that are ours to keep few
AT_MOST = 60


def expected(table: dict) -> dict[str, tuple[str, str]]:
    """Returns `test -> (group, reason)`; raises ValueError for a group or a test that is odd."""
    found: dict[str, tuple[str, str]] = {}
    for entry in table["expected"]:
        if entry["group"] not in GROUPS or not entry["reason"]:
            raise ValueError(f"an entry has group {entry['group']!r}: give one of {GROUPS}.")
        for test in entry["tests"]:
            if test in found:
                raise ValueError(f"{test} stands twice in {TABLE.name}.")
            found[test] = (entry["group"], entry["reason"])
    return found


def run(source: Path, files: list[str], workers: int, report: Path) -> str:
    """Runs test files of the source distribution; returns the last lines that pytest printed."""
    options = ["-p", "transformerlens_shim", "-p", "no:cacheprovider", "-q", "--tb=short"]
    options += ["-o", "addopts=", "--disable-warnings", f"--timeout={SECONDS}", "--no-header"]
    options += ["--jaxtyping-packages=transformer_lens,beartype.beartype"]  # as theirs
    options += ["--continue-on-collection-errors"]
    options += ["-n", str(workers)] if workers else []
    paths = [str(HERE), str(HERE.parent), str(HERE.parent / "hooks")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    # a worker of a run that runs this would be taken for one of the run that starts here
    own = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    environment = own | offline | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(
        command,
        cwd=source,
        env=environment | {"TL_REPORT": str(report)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return "\n".join(done.stdout.splitlines()[-3:])


def outcomes(report: Path) -> dict[str, dict]:
    """Returns `test -> line of the report`; a failure of any phase is a failure of the test."""
    kept: dict[str, dict] = {}
    for line in report.read_text().splitlines() if report.exists() else []:
        row = json.loads(line)
        before = kept.get(row["test"])
        if before is None or before["outcome"] == "passed":
            kept[row["test"]] = row
    return kept


def differences(found: dict[str, dict], listed: dict[str, tuple[str, str]]) -> list[str]:
    """Returns what the table does not say of a run, as lines."""
    lines = []
    for test, row in found.items():
        if row["outcome"] == "failed" and test not in listed:
            lines.append(f"not in the table: {test}: {row['message'].splitlines()[:1]}")
        if row["outcome"] == "passed" and test in listed:
            lines.append(f"passes, but stands in the table: {test}")
    return lines


def summary(found: dict[str, dict], listed: dict[str, tuple[str, str]]) -> tuple[str, int]:
    """Returns the counts as text, and how many failures are in the groups that are counted."""
    count = Counter(row["outcome"] for row in found.values())
    ours = Counter(row["outcome"] for row in found.values() if row["ours"])
    failed = [test for test, row in found.items() if row["outcome"] == "failed"]
    groups = Counter(listed.get(test, ("not in the table", ""))[0] for test in failed)
    kept = sum(groups[group] for group in (*COUNTED, "not in the table"))
    lines = [
        f"{len(found)} cases: {count['passed']} pass, {count['failed']} fail, "
        f"{count['skipped']} skip",
        f"on our models: {ours['passed']} pass, {ours['failed']} fail",
        *(f"  {number:4d}  {group}" for group, number in groups.most_common()),
        f"{kept} failures are of neither of the first two groups (at most {AT_MOST}).",
    ]
    return "\n".join(lines), kept


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="TransformerLens' own tests on our models")
    parser.add_argument("--sdist", type=Path, help="the archive, or its folder")
    parser.add_argument("--only", action="append", help="a test file, as the table names it")
    parser.add_argument("-n", type=int, default=0, help="processes (0: none beside pytest)")
    parser.add_argument("--report", type=Path, help="keep each outcome here, as lines of JSON")
    args = parser.parse_args()
    table = tomllib.loads(TABLE.read_text())
    listed = expected(table)
    with tempfile.TemporaryDirectory() as folder:
        source = transformerlens_sdist.unpacked(args.sdist, Path(folder)).resolve()
        report = (args.report or Path(folder) / "report.jsonl").resolve()
        report.unlink(missing_ok=True)
        words = Path(folder) / "tokenizer.json"
        words.write_text(transformerlens_sdist.tokenizer(transformerlens_sdist.words(source)))
        os.environ["TL_TOKENIZER"] = str(words)
        say(run(source, args.only or table["files"], args.n, report))
        found = outcomes(report)
    told = differences(found, listed)
    if not args.only:
        told += [f"in the table, but no such test ran: {test}" for test in listed.keys() - found]
    text, kept = summary(found, listed)
    say("\n".join([*told, text]))
    return int(bool(told) or not found or kept > AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
