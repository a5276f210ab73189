"""SIGKILL at random moments of everything that writes a folder, onto the folder of an older run.

    python tests/kill.py 200

kills so many times, half of them after a random share of the time that the work takes and half at
a random one of its changes of the disk, and prints what the folders are afterwards: the old whole,
the new whole, or refused with a sentence. Anything else is mixed, and there may be none. Then the
work is done again, and what the dead process left has to be gone: leftovers are counted too.
tests/test_folders.py runs a few.
"""

import functools
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

import crate_interp as ci
from conftest import make
from crate_interp import reports
from crate_interp.models.weights import model_digest
from folders import leftovers
from killing import died_at, killed_after

OLD, NEW = (make(seed=seed, model_name=name) for seed, name in ((0, "the-old"), (1, "the-new")))
DATA = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))
QUIET = {"progress": False}


def report(model, out):
    # the grid of an audit would take most of the time, and adds no file
    with patch.object(reports, "run_audit", functools.partial(ci.audit, grid=False)):
        ci.report(model, DATA, out, probes="compression", untrained=0, audit=True, **QUIET)


def audit(model, out):
    ci.viz.audit_page(ci.audit(model, DATA, untrained=0, grid=False, **QUIET), out)


def atlas(model, out):
    ci.viz.atlas_pages(ci.atlas(model, DATA, top=2, ablate=1, **QUIET), out)


def save_pretrained(model, out):
    model.save_pretrained(out)


def convert(model, out):
    source = out.parent / "source"
    if not source.exists():
        model.save_pretrained(source)
    ci.convert(source, out)


def of_result(kind, page):
    """Returns a judge of folders with a result of this kind and, perhaps, its page."""

    def judge(out):
        try:
            name = kind.load(out).meta["model"]
        except ValueError as error:
            assert "interrupted" in str(error) and "\n" not in str(error), error
            return "refused"
        if (out / page).exists():
            (other,) = {"the-old", "the-new"} - {name}
            text = (out / page).read_text()
            assert name in text and other not in text, f"the page is not that of {name}"
        return name

    return judge


def of_report(out):
    judged = of_result(ci.SweepResult, "report.html")(out)
    inner = of_result(ci.AuditResult, "audit.html")(out / "audit")
    page = out / "report.html"
    if page.exists():  # it links to the audit
        named = "the-new" if "the-new" in page.read_text() else "the-old"
        assert inner in (named, "refused"), f"a page of {named} beside an audit of {inner}"
    return judged


def of_model(out):
    try:
        digest = model_digest(ci.load(out))
    except ci.CheckpointError as error:
        assert "no config.json" in str(error) or "not a file" in str(error), error
        return "refused"
    return {model_digest(OLD): "the-old", model_digest(NEW): "the-new"}[digest]


CASES = {
    "save_pretrained": (save_pretrained, of_model),
    "convert": (convert, of_model),
    "atlas": (atlas, of_result(ci.Atlas, "index.html")),
    "audit": (audit, of_result(ci.AuditResult, "audit.html")),
    "report": (report, of_report),
}


def measured(work, out):
    """Returns how long the work takes, and how many times it changes the disk."""
    began = time.monotonic()
    assert not killed_after(3600, lambda: work(NEW, out))
    seconds, steps = time.monotonic() - began, 1
    while died_at(steps, lambda: work(NEW, fresh(out))):
        steps *= 2
    return seconds, steps // 2


def fresh(out):
    """Puts the folder of the old run into its place; there is none for a conversion."""
    shutil.rmtree(out, ignore_errors=True)
    old = out.parent / "old"
    if old.exists():
        shutil.copytree(old, out)
    return out


def shown(verdicts):
    return ", ".join(f"{times} {verdict}" for verdict, times in sorted(verdicts.items()))


def run(name, count, left, seed=0, timed=True):
    """Kills one kind of work `count` times and returns how often its folder was what.

    left: is increased by the number of leftovers after the next runs.
    """
    work, judge = CASES[name]
    rng, verdicts = random.Random(f"{name} {seed}"), Counter()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a page that is not the one that was saved
        out = Path(place) / "out"
        if name != "convert":
            work(OLD, out.parent / "old")
        seconds, steps = measured(work, fresh(out))
        while verdicts.total() < count:
            fresh(out)
            if timed and rng.random() < 0.5:
                died = killed_after(rng.random() * seconds, lambda: work(NEW, out))
            else:
                died = died_at(rng.randrange(2 * steps), lambda: work(NEW, out))
            if not died:
                continue
            try:
                judged = judge(out)
            except AssertionError as error:
                judged = f"mixed: {error}"
            verdicts[judged] += 1
            if not verdicts.total() % 20:
                print(
                    f"{name:16} {verdicts.total()} of {count} kills: {shown(verdicts)}", flush=True
                )
            if name != "convert" or judged == "refused":
                assert not killed_after(3600, lambda: work(NEW, out))
                left[0] += len(leftovers(out))
        if name != "convert" or judge(out) == "refused":
            work(NEW, out)  # goes through, whatever the dead one left
        assert judge(out) == "the-new"
    return verdicts


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    mixed, left = 0, [0]
    for case in CASES:
        found = run(case, total // len(CASES), left, seed=int(time.time()))
        mixed += sum(times for verdict, times in found.items() if verdict.startswith("mixed"))
        print(f"{case:16} {found.total()} kills: {shown(found)}", flush=True)
    print(f"mixed: {mixed}; leftovers: {left[0]}")
    assert mixed == left[0] == 0
