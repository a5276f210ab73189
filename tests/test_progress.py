"""Progress bars: where they go in a terminal and in a notebook without ipywidgets."""

import sys
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from crate_interp.core import progress

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
