"""The notebooks in demos/ run top to bottom and show what their text announces.

They are the same as text and as notebook.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

DEMOS = Path(__file__).parent.parent / "demos"
SHOWN = {  # what their outputs must hold, and how many pictures
    "01_meet_crate": ("722,122 parameters", 1),
    "02_is_each_layer_doing_its_job": ("Answer, for 6 layers", 2),
    "03_segmentation_for_free": ("mask of another image", 1),
    "04_edit_a_subspace": ("span taken out of ln1.hook_normalized", 1),
    "05_a_circuit_in_a_tiny_language_model": ("Answer: no induction head", 0),
    "06_watch_it_learn": ("trained: accuracy", 3),
    "07_crate_alpha_from_the_hub": ("skipped: ", 0),
    "08_do_the_job_better": ("Answer: not measurably", 1),
}
NAMES = list(SHOWN)


def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", DEMOS / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_what_it_announces(name, tmp_path):
    """In processes of its own, without network."""
    command = [sys.executable, DEMOS / "run_notebooks.py", name, "--out", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(rf"{name}: [\d.]+ s", done.stdout)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs if output.output_type == "stream")
    words, pictures = SHOWN[name]
    assert words in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures


def test_text_and_notebook_are_the_same():
    here = runner()
    assert sorted(path.stem for path in here.sources([])) == NAMES
    for name in NAMES:
        kept = nbformat.read(DEMOS / f"{name}.ipynb", as_version=4)
        assert nbformat.writes(here.as_notebook(DEMOS / f"{name}.py")) == nbformat.writes(kept), (
            f"{name}: run_notebooks.py --sync"
        )
        assert not any(cell.get("outputs") for cell in kept.cells)


def test_an_unknown_notebook_is_refused():
    with pytest.raises(SystemExit, match="no notebook is called 99"):
        runner().sources(["99"])
