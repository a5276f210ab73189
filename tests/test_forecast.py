"""What a run says of its progress and of the time that is left, and the dry run."""

import sys
from types import SimpleNamespace

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import crate_interp as ci
from command import run
from conftest import make
from crate_interp.core import progress
from crate_interp.questions import forecast

CELL = """
import sys
sys.modules["ipywidgets"] = None  # a notebook that lacks it
import torch
import crate_interp as ci
model = ci.HookedCrate(ci.CrateConfig(family="crate", d_model=12, n_layers=2, n_heads=2,
    image_size=8, patch_size=4, n_classes=3, mean=[0.5] * 3, std=[0.5] * 3)).eval()
ci.sweep(model, torch.randn(4, 3, 8, 8), controls=0)
ci.audit(model, torch.randn(4, 3, 8, 8), untrained=2)
"""


def test_a_bar_goes_to_stderr_in_a_terminal_and_to_stdout_in_a_notebook(capsys, monkeypatch):
    for _ in progress.tqdm(range(2), desc="there"):
        pass
    out, err = capsys.readouterr()
    assert not out and "there: 100%" in err
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    for _ in progress.tqdm(range(2), desc="here"):
        pass
    out, err = capsys.readouterr()
    assert "here: 100%" in out and not err


@pytest.mark.slow
def test_a_notebook_without_ipywidgets_has_no_red_box():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = notebook.cells[0]["outputs"]
    assert not [one["text"] for one in outputs if one.get("name") == "stderr"]
    assert "100%" in "".join(one["text"] for one in outputs if one.get("name") == "stdout")


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


def test_a_dry_run_ends_where_one_chunk_is_too_few(tmp_path):
    words = ["concentration", "crate-tiny-pictures", "--data", "embedded:pictures", "--limit", "9"]
    done = run(*words, "--chunk-size", "1", "--out", tmp_path / "out", "--dry-run")
    assert done.returncode == 0 and "'what follows'" in done.stderr, done.stderr
