"""Runs the notebooks beside this file top to bottom and keeps their outputs.

    python demos/run_notebooks.py --out runs/notebooks   # all, or the beginnings of names: 01 05
    python demos/run_notebooks.py --sync                 # only writes NN_name.ipynb from the text

Each NN_name.py is a notebook as text (jupytext's percent format); NN_name.ipynb beside it is the
same without outputs. The folder --out gets the notebooks with their outputs, and every picture in
them as PNG.
"""

import argparse
import base64
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
    return notebook


def run(path: Path, out: Path) -> float:
    """Runs one notebook in `out`, writes it there with its pictures, and returns the seconds."""
    if (HERE / "weights").is_dir() and out.resolve() != HERE.resolve():  # 05 reads it beside itself
        shutil.copytree(HERE / "weights", out / "weights", dirs_exist_ok=True)
    notebook, started = as_notebook(path), time.perf_counter()
    folder = {"metadata": {"path": str(out)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
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
