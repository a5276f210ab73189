"""Writes and checks the page that says where the library has what the five documents have.

    python demos/docs/papers.py [--check]

The rows are those of papers.toml. --check runs each place in its smallest form: a call on a tiny
model, and --help of a command or a lab.
"""

import argparse
import contextlib
import io
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm.auto import tqdm

import crate_interp as ci
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import in_markdown

HERE = Path(__file__).parent
PAGES, ROOT = HERE / "pages", HERE.parent.parent
START = """\
# Where each paper's methods are

Of {all} systems, methods and claims in five documents {here} can be run here.

For the rest one sentence says why not. A command or function in the second column runs what the
first column names; the page explains it. [What the papers claim](claims.md) has the papers' numbers
beside ours, with intervals.
`python demos/docs/papers.py --check` runs each of them in its smallest form.
"""


def documents() -> list[dict[str, Any]]:
    """Returns the documents: name, and rows of what, the call or command, and the page or why."""
    return tomllib.loads((HERE / "papers.toml").read_text(encoding="utf-8"))["document"]


def place(run: str) -> str:
    """Returns the command or function that a row's call names."""
    if run.startswith("$ crate-interp"):
        return f"`{run[2:]}`"
    names = re.findall(r"ci\.[\w.]+\w", run) or ["ci.HookedCrateLM"]
    return f"`python {run[2:]}`" if run.startswith("$") else f"`{names[0]}`"


def label(page: str) -> str:
    """Returns the words of a link to a page."""
    name = page.removesuffix("/README.md").rpartition("/")[2]
    return name.replace(".md", "").replace("_", " ").replace("#", ": ").replace("-", " ")


def page() -> str:
    """Returns the page as Markdown."""
    every = documents()
    rows = [row for document in every for row in document["rows"]]
    here = sum(bool(run) for _, run, _ in rows)
    parts = [START.format(all=len(rows), here=here)]
    for document in every:
        cells = [
            (what, place(run), f"[{label(page)}]({page})")
            if run else (what, "not here", f"{page[:1].upper()}{page[1:]}.")
            for what, run, page in document["rows"]
        ]  # fmt: skip
        head = ("what", "function or command", "page, or why not")
        parts.append(f"## {document['name']}\n\n{in_markdown(head, cells)}\n")
    return "\n".join(parts)


def names() -> dict[str, Any]:
    """Returns what the calls may name: tiny models of random weights, and data."""
    torch.manual_seed(0)
    size: dict[str, Any] = dict(d_model=16, n_layers=2, n_heads=2)
    look = size | dict(image_size=16, patch_size=4, n_classes=3)
    words = size | dict(n_ctx=8, d_vocab=13)
    model = ci.HookedCrate(ci.CrateConfig(family="crate", **look)).eval()
    lm = ci.HookedCrateLM(ci.CrateConfig(family="crate-lm", **words)).eval()
    images = torch.rand(3, 3, 16, 16)
    _, cache = model.run_with_cache(images)
    z, u = torch.randn(17, 16), model.blocks[0].attn.U.detach()
    shown = dict(ci=ci, torch=torch, model=model, lm=lm, images=images, cache=cache, z=z, u=u)
    return {**shown, "d": model.blocks[0].mlp.D.detach(), "size": look, "words": words}


def run_smallest(run: str, known: dict[str, Any]) -> Any:
    """Evaluates a row's call, or asks its command for help; raises what fails."""
    if not run.startswith("$"):
        return eval(run, dict(known))
    first, *more = run[2:].split()
    path = ROOT / "crate_interp" / "__main__.py" if first == "crate-interp" else ROOT / first
    said = io.StringIO()
    asked = mock.patch.object(sys, "argv", [str(path), *more, "--help"])
    with asked, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        sys.path.insert(0, str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            sys.path.remove(str(path.parent))
    if "usage:" not in said.getvalue().lower():
        raise ValueError(f"{run} has no help: give a command that has.")
    return said.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        known = names()
        every = {row[1]: None for document in documents() for row in document["rows"] if row[1]}
        for run in tqdm(every, desc="places"):
            run_smallest(run, known)
        print(f"{len(every)} places run")
    write_text(PAGES / "papers.md", page())
    print(f"page: {PAGES / 'papers.md'}")
