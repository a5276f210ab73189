"""Runs TransformerLens' tutorials on a random CRATE-LM, cell by cell, and says why cells fail.

    python tests/transformerlens_demos.py [--sdist PATH] [--only NAME]

The notebooks come with the source distribution of TransformerLens, which is downloaded unless
given. What loads a model gets a random narrow CRATE-LM with the layers and heads of the network
that is named; plots are drawn by nobody. Ends with exit code 1 if a cell fails for a reason that is
neither trained weights nor the network.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import tqdm

import transformerlens_sdist
import transformerlens_shim

NOTEBOOKS = (
    "Main_Demo",
    "Exploratory_Analysis_Demo",
    "Attribution_Patching_Demo",
    "Activation_Patching_in_TL_Demo",
    "Head_Detector_Demo",
    "Direct_Logit_Attribution_Demo",
)
# what draws: nothing is drawn here, and calls of it cannot fail
DRAWS = (
    "plotly", "plotly.express", "plotly.io", "plotly.graph_objects", "plotly.subplots",
    "circuitsvis", "circuitsvis.attention", "circuitsvis.tokens", "circuitsvis.activations",
    "neel_plotly", "neel_plotly.plot", "IPython", "IPython.display", "matplotlib.pyplot",
)  # fmt: skip
# (notebook, cell): cells that need published weights, and what for
WEIGHTS: dict[tuple[str, int], str] = {
    ("Main_Demo", 58): "cfg.checkpoint_value: which published step of training was loaded"
}
IDS = 20_480  # of the vocabulary: the notebooks draw random ids up to 20,000
# notebook -> family, where it is not crate-lm: these sum parts of layers, and there, as in
# nanochat-crate, parts of different layers do not add up to a logit
FAMILIES = dict.fromkeys(
    ("Exploratory_Analysis_Demo", "Attribution_Patching_Demo", "Direct_Logit_Attribution_Demo"),
    "gpt-baseline",
)
OFFLINE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "HfHubHTTPError")


def source_of(cell: str) -> str:
    """Returns a cell without the lines that only a notebook understands."""
    lines = cell.splitlines()
    if lines and lines[0].startswith("%%"):
        lines = lines[1:]
    return "\n".join(
        line[: len(line) - len(line.lstrip())] + "pass" if line.lstrip()[:1] in ("%", "!") else line
        for line in lines
    )


def reason(notebook: str, place: int, error: BaseException) -> str:
    """Returns "network", "weights" or "ours"."""
    chain, one = [], error
    while one is not None:
        chain.append(one)
        one = one.__cause__ or one.__context__
    offline = any(type(each).__name__ in OFFLINE for each in chain)
    if offline or (isinstance(error, OSError) and "huggingface.co" in str(error)):
        return "network"
    return "weights" if (notebook, place) in WEIGHTS else "ours"


def run(notebook: Path) -> list[tuple[int, str, str]]:
    """Runs the cells of a notebook in one namespace.

    Returns (cell, reason, error) of each that fails.
    """
    module = ModuleType("notebook")
    module.__dict__.update({"__name__": "__main__", "display": MagicMock()})
    failed = []
    for place, cell in enumerate(transformerlens_sdist.cells(notebook)):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = compile(source_of(cell), f"{notebook.stem}[{place}]", "exec")
                exec(code, module.__dict__)  # noqa: S102
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said_last = (str(error).splitlines() or [""])[0][:200]
            text = f"{type(error).__name__}: {said_last} ({where.filename}:{where.lineno})"
            failed.append((place, reason(notebook.stem, place, error), text))
    return failed


def prepare(source: Path, folder: Path) -> None:
    """Puts our models and silent plots in place of theirs."""
    notebooks = [source / "demos" / f"{name}.ipynb" for name in NOTEBOOKS]
    words = folder / "tokenizer.json"
    words.write_text(transformerlens_sdist.tokenizer(notebooks, IDS))
    os.environ |= {"TL_TOKENIZER": str(words), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    transformerlens_shim.install()
    for name in DRAWS:
        sys.modules[name] = MagicMock()
    sys.modules["tqdm.notebook"] = tqdm  # its bars are widgets, which draw
    tqdm.notebook = tqdm  # pyright: ignore[reportAttributeAccessIssue]


def main() -> int:
    parser = argparse.ArgumentParser(description="TransformerLens' tutorials on a CRATE-LM")
    parser.add_argument("--sdist", type=Path, help="the archive, or its folder")
    parser.add_argument("--only", action="append", choices=NOTEBOOKS)
    args = parser.parse_args()
    ours = 0
    with tempfile.TemporaryDirectory() as folder:
        source = transformerlens_sdist.unpacked(args.sdist, Path(folder)).resolve()
        prepare(source, Path(folder))
        for name in args.only or NOTEBOOKS:
            notebook = source / "demos" / f"{name}.ipynb"
            os.environ["TL_FAMILY"] = FAMILIES.get(name, "crate-lm")
            failed = run(notebook)
            total = len(transformerlens_sdist.cells(notebook))
            kinds = [kind for _, kind, _ in failed]
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            lines = [
                f"{name}: {total - len(failed)} of {total} cells run" + f"; {counts}" * bool(counts)
            ]
            lines += [f"  cell {place} ({kind}): {text}" for place, kind, text in failed]
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
            ours += kinds.count("ours")
    return int(ours > 0)


if __name__ == "__main__":
    sys.exit(main())
