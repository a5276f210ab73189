"""Writes and checks the page that says where the library has what the five documents have.

    python demos/docs/papers.py [--check]

The rows are those of papers.toml. --check evaluates each call on a tiny model, and asks each
command and lab for --help.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import crate_interp as ci
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import in_markdown

HERE = Path(__file__).parent
PAGES, ROOT = HERE / "pages", HERE.parent.parent
START = """\
# Where each paper's methods are

A method of a paper, and the command or function that runs it: {count} of {all} systems, methods
and claims in five documents.

For the rest one sentence says what is missing. A command or function in the second column runs what
the first column names; the page explains it. [What the papers claim](claims.md) has the papers'
numbers beside ours, with intervals.
`python demos/docs/papers.py --check` calls the functions on tiny models, and asks each command for
its help.
"""


def documents() -> list[dict[str, Any]]:
    """Returns the documents: name, and rows of what, the call or command, and the page or why."""
    return tomllib.loads((HERE / "papers.toml").read_text(encoding="utf-8"))["document"]


def place(run: str) -> str:
    """Returns the command or function that a row's call names."""
    if run.startswith("$ crate-interp"):
        return f"`{run[2:]}`"
    if run.startswith("$"):
        return f"`python {run[2:]}`"
    return f"`{re.findall(r'ci[.][.A-Za-z_0-9]+', run)[0]}`"


def label(page: str) -> str:
    """Returns the words of a link to a page."""
    name = page.removesuffix("/README.md").rpartition("/")[2]
    return name.replace(".md", "").replace("_", " ")


def page() -> str:
    """Returns the page as Markdown."""
    every = documents()
    rows = [row for document in every for row in document["rows"]]
    count = sum(bool(run) for _, run, _ in rows)
    parts = [START.format(all=len(rows), count=count)]
    for document in every:
        cells = [
            (what, place(run), f"[{label(page)}]({page})")
            if run else (what, "not here", f"{page[:1].upper()}{page[1:]}.")
            for what, run, page in document["rows"]
        ]  # fmt: skip
        head = ("what", "function or command", "page, or what is missing")
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
    d = model.blocks[0].mlp.D.detach()
    scope = dict(ci=ci, torch=torch, model=model, lm=lm, images=images, cache=cache, z=z, u=u, d=d)
    return {**scope, "size": look, "words": words}


def run_smallest(run: str, scope: dict[str, Any]) -> Any:
    """Evaluates a row's call, or asks its command for help; raises what fails."""
    if not run.startswith("$"):
        return eval(run, dict(scope))
    words = run[2:].replace("crate-interp", "-m crate_interp").split()
    command = [sys.executable, *words, "--help"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    if "usage:" not in done.stdout.lower():
        raise ValueError(f"{run} has no help: give a command that has.")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        scope = names()
        every = {row[1]: None for document in documents() for row in document["rows"] if row[1]}
        for run in tqdm(every, desc="places"):
            run_smallest(run, scope)
        print(f"{len(every)} places run")
    write_text(PAGES / "papers.md", page())
    print(f"page: {PAGES / 'papers.md'}")
