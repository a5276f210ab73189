"""The notebooks in demos/ run top to bottom, show what they say, and are the same as text and as notebook."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

DEMOS = Path(__file__).parent.parent / "demos"
NAMES = [
    "01_meet_crate", "02_is_each_layer_doing_its_job", "03_segmentation_for_free", "04_edit_a_subspace",
    "05_a_circuit_in_a_tiny_language_model", "06_watch_it_learn", "07_crate_alpha_from_the_hub",
]  # fmt: skip
SAID = {  # what their outputs must hold, and how many pictures
    "01_meet_crate": ("722,122 parameters", 1),
    "02_is_each_layer_doing_its_job": ("compresses", 1),
    "03_segmentation_for_free": ("mask of another image", 1),
    "04_edit_a_subspace": ("span taken out of ln1.hook_normalized", 1),
    "05_a_circuit_in_a_tiny_language_model": ("Answer: no induction head", 0),
    "06_watch_it_learn": ("trained: accuracy", 2),
    "07_crate_alpha_from_the_hub": ("skipped: ", 0),
}


def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", DEMOS / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Each in processes of its own, without network; where their outputs are, and what the runner printed."""
    out = tmp_path_factory.mktemp("notebooks")

    def run(name):
        command = [sys.executable, DEMOS / "run_notebooks.py", name, "--out", out]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)

    return out, {name: run(name) for name in NAMES}


@pytest.mark.xdist_group("notebooks")  # they run once, and not in every worker
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_what_it_says(ran, name):
    out, done = ran
    assert done[name].returncode == 0, done[name].stderr[-3000:]
    assert re.search(rf"{name}: [\d.]+ s", done[name].stdout)  # alone on the machine less than 60
    notebook = nbformat.read(out / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    words, pictures = SAID[name]
    assert (
        words in text
        and sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    )


def test_text_and_notebook_are_the_same():
    here = runner()
    assert sorted(path.stem for path in here.sources([])) == NAMES
    for name in NAMES:
        kept = nbformat.read(DEMOS / f"{name}.ipynb", as_version=4)
        assert nbformat.writes(here.as_notebook(DEMOS / f"{name}.py")) == nbformat.writes(kept), (
            f"{name}: run_notebooks.py --sync"
        )
        assert not any(cell.get("outputs") for cell in kept.cells)


def test_an_unknown_notebook_is_said():
    with pytest.raises(SystemExit, match="no notebook is called 99"):
        runner().sources(["99"])
