"""What work says before it begins: samples, forwards, time and bytes; and the dry run."""

import re

import pytest
import torch

import crate_interp as ci
from command import run
from conftest import make
from crate_interp.sweeps.runs import forecast
from crate_interp.sweeps.runs.forecast import COSTS, Watched, Work, crowded, dry_run
from result_kinds import result_kinds

NOT_FORECAST = {  # made from one sample or a cache, or measured beside a training
    "circuit_scores", "graph", "logit_attribution", "logit_lens", "watch",
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(forecast.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def pictures():
    return make("crate", n_layers=2), torch.randn(7, 3, 6, 20)


def test_each_verb_that_streams_has_a_cost():
    assert set(COSTS) == (set(result_kinds()) | {"report"}) - NOT_FORECAST


@pytest.mark.parametrize("kind", sorted(COSTS))
def test_costs_grow_with_the_samples(kind):
    asked = {"settings": {"k": (4,), "rotations": 4, "mixes": (1.0,), "grid": True, "ablate": 32}}
    asked |= {"untrained": 5, "controls": 32, "networks": 2, "twins": 5, "audit": True}
    one, many = (Work(n, 12, 12, 768, asked) for n in (10, 1000))
    assert 0 < COSTS[kind].forwards(one) < COSTS[kind].forwards(many)
    assert 0 < COSTS[kind].size(one) <= COSTS[kind].size(many)


def test_one_line_says_what_it_takes_before_it_begins(pictures, monkeypatch, capsys):
    model, data = pictures
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(forecast, "_forward", lambda stage: 0.5)
    ci.sweep(model, data, probes=["sparsity"], controls=0)
    told = [line for line in capsys.readouterr().err.splitlines() if "about" in line]
    # 2 forwards for each of 7 images
    words = "sweep: 7 images, about 2 forwards each of 500 ms: 7 s, 0.09 MB."
    assert told == [f"{words} For less: limit=n or controls=0."]
    ci.sweep(model, data, probes=["sparsity"], controls=0, progress=False)
    assert capsys.readouterr().err == ""


def test_a_long_run_that_is_kept_says_that_it_goes_on(pictures, monkeypatch, tmp_path, capsys):
    model, data = pictures
    for seconds, out, said in ((9.0, tmp_path / "a", True), (9.0, None, False),
                               (0.5, tmp_path / "b", False)):  # fmt: skip
        monkeypatch.setattr(forecast, "_forward", lambda stage, seconds=seconds: seconds)
        ci.sweep(model, data, probes=["sparsity"], controls=0, out=out)
        assert ("If it stops, the same command goes on." in capsys.readouterr().err) == said


def test_the_time_is_that_of_forwards_of_the_data(pictures, capsys):
    model, data = pictures
    seen = []
    model.blocks[0].hook_resid_pre.add_hook(lambda value, hook: seen.append(len(value)))
    with dry_run():
        ci.sweep(model, data, probes=["sparsity"], controls=0)
    assert seen == [4, 4]  # two forwards of a few samples, and nothing else
    assert re.search(r"forwards each of [\d.]+ (ms|s): [\d.]+ (ms|s), ", capsys.readouterr().err)


def test_a_report_and_a_comparison_tell_of_all_their_parts_at_once(pictures, tmp_path, capsys):
    model, data = pictures
    for verb, words in (
        (lambda: ci.report(model, data, tmp_path / "report", untrained=1), "report: 7 images"),
        (lambda: ci.compare(model, make("crate", n_layers=2, seed=1), data, untrained=1),
         "comparison: 7 images"),
    ):  # fmt: skip
        verb()
        told = [line for line in capsys.readouterr().err.splitlines() if "For less" in line]
        assert len(told) == 1 and told[0].startswith(words)


def test_a_stream_has_no_length(pictures, capsys):
    model, data = pictures
    with dry_run():
        ci.sweep(model, iter([data[:3], data[3:]]), probes=["sparsity"], controls=0)
    assert "sweep: a stream, about 2 forwards for each of its images." in capsys.readouterr().err


VERBS = ("report", "sweep", "audit", "atoms", "atlas", "ablate", "concentration", "segment")


@pytest.mark.parametrize("verb", (*VERBS, "compare"))
def test_a_dry_run_says_it_and_writes_nothing(verb, tmp_path):
    out, model = tmp_path / "out", "crate-tiny-pictures"
    words = [verb, model, *([model] if verb == "compare" else [])]
    words += ["--data", "embedded:pictures", "--limit", "4", "--out", out, "--dry-run"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "For less" in line]
    assert len(lines) == 1 and "4 images, about " in lines[0]
    assert not done.stdout and not out.exists()


@pytest.mark.parametrize(
    "threads, processes, load, cores, told",
    [(1, 1, 50, 2, False), (2, 1, 0.1, 2, False), (2, 1, 3, 2, True), (4, 4, 0, 8, True)],
)
def test_more_threads_than_cores(threads, processes, load, cores, told, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(forecast, "_cores", lambda: cores)
    assert ("OMP_NUM_THREADS=1" in crowded(float(load))) == told


def test_a_crowded_machine_is_told_of_once_in_long_work(clock, monkeypatch, capsys):
    monkeypatch.setattr(forecast, "crowded", lambda busy: "crowded")
    counted: list[int] = []
    watched = Watched(counted.append, busy=9.0)
    for seconds in (5, 4, 3, 2):
        clock[0] += seconds
        watched(7)
    assert counted == [7, 7, 7, 7] and capsys.readouterr().err.count("crowded") == 1
