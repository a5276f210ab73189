"""Runs the notebooks beside this file top to bottom and keeps what they showed.

    python demos/run_notebooks.py --out runs/notebooks        # all; or the beginnings of names: 01 05
    python demos/run_notebooks.py --sync                      # writes NN_name.ipynb from the text, and runs nothing

Each NN_name.py is a notebook as text (jupytext's percent format); NN_name.ipynb beside it is the same without outputs.
Into --out go the notebooks with their outputs, and every picture of them as PNG.
"""

import argparse
import base64
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def sources(names: list[str]) -> list[Path]:
    """The notebooks as text, in order; SystemExit where none is meant."""
    found = sorted(HERE.glob("[0-9][0-9]_*.py"))
    chosen = [
        path for path in found if not names or any(path.name.startswith(name) for name in names)
    ]
    if not chosen:
        raise SystemExit(
            f"no notebook is called {', '.join(names)}: there are {', '.join(path.stem for path in found)}"
        )
    return chosen


def as_notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook of a text, its cells numbered so that writing it twice makes the same file."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def run(path: Path, out: Path) -> float:
    """Executes one notebook in `out` and writes it there with its pictures; the seconds it took."""
    notebook, started = as_notebook(path), time.perf_counter()
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(out)}}
    ).execute()
    seconds = time.perf_counter() - started
    nbformat.write(notebook, out / path.with_suffix(".ipynb").name)
    for cell_number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            png = output.get("data", {}).get("image/png")
            if png:
                (out / f"{path.stem}-{cell_number}.png").write_bytes(base64.b64decode(png))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("runs/notebooks"))
    parser.add_argument("--sync", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for path in sources(args.names):
        if args.sync:
            nbformat.write(as_notebook(path), path.with_suffix(".ipynb"))
        else:
            print(f"{path.stem}: {run(path, args.out):.1f} s")


if __name__ == "__main__":
    main()
