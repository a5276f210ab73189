"""Runs the notebooks beside this file top to bottom and keeps their outputs.

    python demos/run_notebooks.py --out runs/notebooks   # all, or the beginnings of names: 01 05
    python demos/run_notebooks.py --keep                 # and writes NN_name.ipynb beside the text
    python demos/run_notebooks.py --sync                 # writes changed words without running code

Each NN_name.py is a notebook as text (jupytext's percent format); NN_name.ipynb beside it is the
same with its outputs, and tells the digest of the code that made them. The first picture of the
cell tagged "lead" stands below the first words. The folder --out gets the notebooks, and every
picture in them as PNG.
"""

import argparse
import base64
import hashlib
import shutil
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def sources(names: list[str]) -> list[Path]:
    """Returns the notebooks as text, in order.

    Raises SystemExit if no notebook has such a name.
    """
    paths = sorted(HERE.glob("[0-9][0-9]_*.py"))
    chosen = [path for path in paths if not names or path.name.startswith(tuple(names))]
    if not chosen:
        known = ", ".join(path.stem for path in paths)
        raise SystemExit(f"no notebook is called {', '.join(names)}: there are {known}")
    return chosen


def as_notebook(path: Path) -> nbformat.NotebookNode:
    """Returns a text as a notebook, with numbered cells so that each write gives the same file."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata["code_sha256"] = digest(notebook)
    return notebook


def digest(notebook: nbformat.NotebookNode) -> str:
    """Returns the SHA-256 of a notebook's code cells; outputs of other code are stale."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def with_lead(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Puts the first picture of the cell tagged "lead", if there is one, below the first words."""
    for cell in notebook.cells:
        if "lead" in cell.metadata.get("tags", ()):
            pictures = (output.get("data", {}).get("image/png") for output in cell.outputs)
            lead, first = next(filter(None, pictures)), notebook.cells[0]
            first["attachments"] = {"lead.png": {"image/png": lead.replace("\n", "")}}
            first.source += "\n\n![what was found](attachment:lead.png)"
    return notebook


def without_widgets(notebook: nbformat.NotebookNode) -> None:
    """Removes progress bars, which show nothing without the kernel that drew them."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            bar = "application/vnd.jupyter.widget-view+json"
            cell["outputs"] = [one for one in cell.outputs if bar not in one.get("data", {})]


def run(path: Path, out: Path) -> tuple[nbformat.NotebookNode, float]:
    """Runs one notebook in `out`, writes it there with its pictures; also returns the seconds."""
    if out.resolve() != HERE.resolve():  # what notebooks read beside themselves
        shutil.copytree(HERE / "weights", out / "weights", dirs_exist_ok=True)
        shutil.copy(HERE / "notebook_figures.py", out)
    notebook, started = as_notebook(path), time.perf_counter()
    folder = {"metadata": {"path": str(out)}}
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources=folder, record_timing=False,
        store_widget_state=False,
    )  # fmt: skip
    client.execute()
    seconds = time.perf_counter() - started
    without_widgets(notebook)
    nbformat.write(with_lead(notebook), out / path.with_suffix(".ipynb").name)
    for cell_number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            png = output.get("data", {}).get("image/png")
            if png:
                (out / f"{path.stem}-{cell_number}.png").write_bytes(base64.b64decode(png))
    return notebook, seconds


def synced(path: Path) -> nbformat.NotebookNode:
    """Returns a text as a notebook with the outputs of the one beside it.

    Raises SystemExit if other code has made them.
    """
    notebook, kept = as_notebook(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    if kept.metadata.get("code_sha256") != digest(notebook):
        raise SystemExit(f"{path.stem}: its code has changed; run it with --keep")
    outputs = iter([cell for cell in kept.cells if cell.cell_type == "code"])
    for cell in notebook.cells:
        if cell.cell_type == "code":
            old = next(outputs)
            cell["outputs"], cell["execution_count"] = old.outputs, old.execution_count
    notebook.metadata = kept.metadata
    return with_lead(notebook)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("runs/notebooks"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--sync", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for path in sources(args.names):
        if args.sync:
            nbformat.write(synced(path), path.with_suffix(".ipynb"))
            continue
        notebook, seconds = run(path, args.out)
        if args.keep:
            nbformat.write(notebook, path.with_suffix(".ipynb"))
        print(f"{path.stem}: {seconds:.1f} s")


if __name__ == "__main__":
    main()
