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
    "01_meet_crate": ("Answer: you can see every step", 1),
    "02_is_each_layer_doing_its_job": ("Answer, for 6 layers", 2),
    "03_segmentation_for_free": ("Answer: the fixed head", 2),
    "04_edit_a_subspace": ("Answer: on images that did not choose it", 1),
    "05_a_circuit_in_a_tiny_language_model": ("Answer: L0H0", 5),
    "06_watch_it_learn": ("Answer: the rate", 3),
    "07_crate_alpha_from_the_hub": ("Answer, for a random network", 0),
    "08_do_the_job_better": ("Answer: not measurably", 1),
    "09_is_it_crate_or_any_transformer": ("Answer: training brings", 2),
    "10_why_this_word": ("Answer: the graph of one sequence finds more", 2),
    "11_why_this_picture": ("Answer: rollout orders the patches best", 2),
}
NAMES = list(SHOWN)
CLAIMS = {  # in how many of the three networks of notebook 05 each holds, as its top says
    "the lines cross": 3,
    "the head looks after the copy": 3,
    "exchanged positions turn it round": 2,
    "the found heads are a circuit": 3,
}


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
    streams = [output for output in outputs if output.output_type == "stream"]
    red = [output["text"] for output in streams if output["name"] == "stderr"]
    assert not red, red
    text = "".join(output["text"] for output in streams)
    words, pictures = SHOWN[name]
    assert words in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    pages = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert any("Point at a" in page for page in pages) == name.startswith(("01", "05", "10", "11"))
    if name.startswith("05"):
        check_circuit(text)


def check_circuit(text):
    """What notebook 05 prints: the heads of each kind, how faithful they are, its claims."""
    kinds = re.findall(r"^(previous-token|duplicate-token|induction) heads: (.*)$", text, re.M)
    assert [kind for kind, _ in kinds] == ["previous-token", "duplicate-token", "induction"]
    found = re.search(
        r"^faithfulness ([.\d]+) \(95 % ([.\d]+) to ([.\d]+)\); 100 random circuits of (\d+) heads "
        r"([.\d]+) \(([.\d]+) to ([.\d]+)\), share as good ([.\d]+)$",
        text,
        re.MULTILINE,
    )
    value, low, high, count, mean, least, most, share = map(float, found.groups())
    assert 0.8 < low < value < high and least < mean < most < low and share < 0.05
    assert count == len({head for _, heads in kinds for head in heads.split(", ")})
    assert "turns round" in text and "are a circuit." in text
    for claim, networks in CLAIMS.items():
        assert f"\n{claim}: in {networks} of 3 networks\n" in text


def test_text_and_notebook_are_the_same():
    """And the outputs are those of the code: the digest of its cells tells which are stale."""
    here = runner()
    assert sorted(path.stem for path in here.sources([])) == NAMES
    for name in NAMES:
        path = DEMOS / f"{name}.ipynb"
        kept = nbformat.read(path, as_version=4)
        code = here.as_notebook(DEMOS / f"{name}.py").metadata["code_sha256"]
        assert kept.metadata["code_sha256"] == code == here.digest(kept), f"{name}: make notebooks"
        assert nbformat.writes(here.synced(DEMOS / f"{name}.py")) == nbformat.writes(kept), (
            f"{name}: run_notebooks.py --sync"
        )
        assert path.stat().st_size < 1_500_000
        assert all(cell["outputs"] or "import" in cell.source or "=" in cell.source
                   for cell in kept.cells if cell.cell_type == "code")  # fmt: skip
        lead = kept.cells[0].get("attachments", {})
        assert name.startswith("07") or lead["lead.png"]["image/png"]
        text = "".join(
            output["text"]
            for cell in kept.cells
            for output in cell.get("outputs", [])
            if output.output_type == "stream"
        )
        assert SHOWN[name][0] in text
