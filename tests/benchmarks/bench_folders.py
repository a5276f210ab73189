"""How large folders of runs are after 200 chunks of CRATE-B's width, and how a run of 5,005 ends.

One chunk is measured for each pass. All further chunks have the same tables with other sample
numbers, so that only what a folder costs is repeated. most: the largest size after a chunk was
written; end: the size before the result is written; then processor time, for each chunk that is
written, and after the last one (merging and the result).

    python tests/benchmarks/bench_folders.py [VERB ...] [--chunks 200] [--long]
"""

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from timing import settle, verdict

import crate_interp as ci
from crate_interp.questions.chunks import InFolder
from crate_interp.questions.experiment import Work
from crate_interp.results.result import Result

MEGABYTE, MOST, END = 1e6, 50.0, 30.0
DISTINCT = {"linear_probe"}  # needs samples that differ
VERBS = {  # verb -> what makes its forwards few; its rows are as many as at the defaults
    "sweep": {"controls": 0},
    "atoms": {},
    "atlas": {"ablate": 1},
    "ablate_heads": {},
    "segment": {"untrained": 0},
    "linear_probe": {},
    "surgery": {"directions": 2, "mixes": (0.5,)},
    "audit": {"untrained": 1, "grid": False},
    "circuits.composition": {"through": "data", "draws": 100},
    "circuits.concentration": {"untrained": 1},
}


def size(folder: Path) -> float:
    """Returns the megabytes of the files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total / MEGABYTE


class Repeated:
    """Measures two chunks of each pass, and repeats them; notes what the folder costs."""

    def __init__(self, out: Path) -> None:
        self.out, self.first, self.most, self.end = out, {}, 0.0, 0.0
        self.writing, self.chunks, self.last = 0.0, 0, 0.0

    def measured(self, work: Work, task, advance=None, ahead=None) -> dict:
        key = work.step.name, task.number % 2
        if key not in self.first:
            self.first[key] = task.start, MEASURED(work, task)
        start, tables = self.first[key]
        moved = {}
        for key, table in tables.items():
            columns = {"sample"} & set(table) if key != "chunk" else {"start", "stop"}
            moved[key] = table.assign(**{one: table[one] + task.start - start for one in columns})
        return moved

    def put(self, chunks: InFolder, *what) -> None:
        began = time.process_time()
        PUT(chunks, *what)
        self.last = time.process_time()
        self.writing, self.chunks = self.writing + self.last - began, self.chunks + 1
        self.most = max(self.most, size(self.out))

    def saved(self, result: Result, *what, **named) -> None:
        self.end = size(self.out)
        SAVE(result, *what, **named)


MEASURED, PUT, SAVE = Work.measured, InFolder.put, Result.save


def row(verb: str, chunks: int, side: int = 224, samples: int = 1) -> tuple[Repeated, float]:
    """Runs a verb and prints a row; chunks have `samples` images of `side` pixels."""
    torch.manual_seed(0)
    shape = {"d_model": 768, "n_layers": 12, "n_heads": 12, "image_size": side, "patch_size": 16}
    model = ci.HookedCrate(ci.CrateConfig(family="crate", **shape, n_classes=10))
    count = chunks * samples
    alike = chunks if verb in DISTINCT else 2
    images = torch.randn(alike, samples, 3, side, side).repeat(-(-chunks // alike), 1, 1, 1, 1)
    labels = [number % 10 for number in range(count)]
    data = {"image": images.flatten(0, 1)[:count], "label": labels}
    with torch.no_grad():  # so that answers differ
        model.unembed.bias.sub_(model(data["image"][:2]).mean(dim=0))
    if verb == "segment":
        data["mask"] = (torch.rand(1, side, side) > 0.6).expand(count, -1, -1).numpy()
    function = getattr(ci.circuits if "." in verb else ci, verb.rpartition(".")[2])
    with tempfile.TemporaryDirectory() as place:
        kept = Repeated(out := Path(place) / "run")
        repeated = MEASURED if verb in DISTINCT else lambda *a: kept.measured(*a)
        with (
            patch.object(Work, "measured", repeated),
            patch.object(InFolder, "put", lambda *a: kept.put(*a)),
            patch.object(Result, "save", lambda *a, **k: kept.saved(*a, **k)),
        ):
            options = VERBS[verb] | {"chunk_size": samples, "batch_size": samples}
            function(model, data, out=out, progress=False, **options)
        ended = time.process_time() - kept.last
        sizes = f"{kept.most:>10.1f}{kept.end:>10.1f}{size(out):>11.1f}"
    print(f"{verb:<24}{kept.chunks:>8,}{sizes}{kept.writing / kept.chunks:>11.4f}{ended:>8.1f}")
    return kept, ended


def main() -> bool:
    settle()
    parser = argparse.ArgumentParser()
    parser.add_argument("verbs", nargs="*", choices=[*VERBS, []])
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--long", action="store_true", help="runs of 625 to 5,005 chunks, too")
    given = parser.parse_args()
    print(f"{'verb':<24}{'chunks':>8}{'most MB':>10}{'end MB':>10}{'result MB':>11}", end="")
    print(f"{'s a chunk':>11}{'s end':>8}")
    most = [row(verb, given.chunks)[0].most for verb in given.verbs or VERBS]
    good = verdict("largest folder, MB", max(most), MOST)
    if given.long:  # ten images a chunk, of one patch: rows are as long as with more
        ends = [row("sweep", count, side=16, samples=10)[1] for count in (625, 1250, 2500, 5005)]
        good = verdict("seconds of the end of 5,005 chunks", ends[-1], END) and good
        good = verdict("the same over that of 2,500", ends[-1] / ends[-2], 2.2) and good
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
