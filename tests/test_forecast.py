"""What a run says of the time that is left, and the dry run."""

import pytest
import torch

import crate_interp as ci
from command import run
from conftest import make
from crate_interp.questions import forecast


@pytest.fixture
def pictures():
    return make("crate", n_layers=2), torch.randn(7, 3, 6, 20)


def test_long_work_says_after_its_first_chunk_what_is_left(pictures, tmp_path, monkeypatch, capsys):
    now, (model, data) = [0.0], pictures
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now[0])
    model.blocks[0].hook_resid_pre.add_hook(lambda value, hook: now.__setitem__(0, now[0] + 30))
    options = dict(probes=["sparsity"], controls=0, chunk_size=2, batch_size=2)
    for out in (None, tmp_path):
        ci.sweep(model, data, out=out, **options)
        lines = [line for line in capsys.readouterr().err.splitlines() if "more chunks" in line]
        assert len(lines) == 1 and "sweep: 3 more chunks, about 75 s." in lines[0]  # 30 s for 2
        assert ("the same command goes on" in lines[0]) == (out is not None)
    ci.sweep(model, data[:4], **options)  # 30 s are left
    assert "more chunks" not in capsys.readouterr().err


STAGES = {"ablate": 2, "concentration": 7, "atlas": 2, "audit": 11, "segment": 7}  # others: one
VERBS = ("report", "sweep", "compare", "atoms", "atlas", "ablate", "segment")
LONG = [pytest.param(verb, marks=pytest.mark.slow) for verb in ("audit", "concentration")]


@pytest.mark.parametrize("verb", [*VERBS, *LONG])
def test_a_dry_run_measures_a_chunk_of_each_stage_and_writes_nothing(verb, tmp_path):
    out, model = tmp_path / "out", "crate-tiny-pictures"
    words = [verb, model, *([model] if verb == "compare" else [])]
    words += ["--data", "embedded:pictures", "--limit", "9", "--out", out, "--dry-run"]
    chunked = verb not in ("report", "compare")  # they sweep, a chunk at a time
    done = run(*words, *(["--chunk-size", "4"] if chunked else []))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "all take about" in line]
    assert len(lines) == STAGES.get(verb, 1), done.stderr
    size = "chunk of 4 images took" if chunked else "chunk of 9 images took"
    assert all(size in line and f" of {3 if chunked else 1}, so" in line for line in lines)
    assert done.stderr.count("in all") == 1 and not done.stdout and not out.exists()
