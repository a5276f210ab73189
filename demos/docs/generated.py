"""What the site shows of data that exists elsewhere: a hook of mkdocs, run when it builds.

Statistics, claims, models, hook points, measures, the command line, the reference of every public
name, notebooks and pictures.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from functools import partial, reduce
from html import escape, unescape
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

import crate_interp as ci
from crate_interp.core.safe_text import in_markdown
from crate_interp.viz.page import TERMS, finder, forms

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEMOS, PACKAGE = ROOT / "demos", Path(ci.__file__).parent
PAGES = HERE / "pages"
# what pages link to in the repository, and where it is on the site
MOVED = {
    "hooks/README.md": "reference/hooks.md",
    "crate_interp/measures/README.md": "reference/measures.md",
    "demos/first_look.png": "first_look.png",
    "demos/crate_against_vit.png": "crate_against_vit.png",
    "demos/whitebox_family.png": "whitebox_family.png",
    "demos/how_far_graphs_go.png": "how_far_graphs_go.png",
}
EXPLORER = "live/explorer.html"  # made when the site is built
SAMPLE, _CI = 5, "Every name of `ci` that is not a module."  # a tulip of the embedded pictures
REFERENCE = {
    "reference/statistics.md": "Statistics",
    "reference/audit.md": "Claims of the audit",
    "reference/hooks.md": "Hook points",
    "reference/measures.md": "Measures",
    "reference/models.md": "Models",
    "reference/commands.md": "Command line",
}


def on_config(config: Any) -> Any:
    """Adds what is generated to the table of contents."""
    labs = sorted(path.stem for path in (Path(config["docs_dir"]) / "labs").glob("*.md"))
    config["nav"] += [
        {"Experiments": [f"labs/{name}.md" for name in labs]},
        {"Notebooks, one by one": [
            {title_of(path): f"notebooks/{path.stem}.md"} for path in notebooks()
        ]},
        {"Reference": [
            *({title: name} for name, title in REFERENCE.items()),
            *({f"ci.{name}" if name else "ci": page} for name, page in api().items()),
        ]},
    ]  # fmt: skip
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures that are generated."""
    measures = (PACKAGE / "measures" / "README.md").read_text()
    pages = {
        "reference/hooks.md": (ROOT / "hooks" / "README.md").read_text(),
        "reference/measures.md": measures.replace("../../demos/docs/pages/reference/", ""),
        "reference/commands.md": commands(),
    }
    pages |= {page: api_page(name) for name, page in api().items()}
    for path in notebooks():
        text, images = notebook(path)
        pages[f"notebooks/{path.stem}.md"] = text
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for name, place in MOVED.items():
        if name.endswith(".png"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, EXPLORER, content=explorer()))
    return files


def explorer() -> str:
    """Returns the page of one image on which a reader of the site points at patches."""
    model = ci.load("crate-tiny-pictures")
    images = model.preprocess(ci.data.embedded("pictures")[SAMPLE : SAMPLE + 1]["image"])
    _, cache = model.run_with_cache(images)
    off = ci.circuits.switched_off(model, images[0])
    return ci.viz.explore(cache, images, name="a tulip", without=off).html()


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Typesets formulas, explains words at their first use, and lets readers point at the explorer.

    In prose, R^c is R with a raised c; code keeps it. $x$ and $$x$$ are TeX, which becomes MathML.
    """
    own = page.file.src_uri
    up = os.path.relpath(".", os.path.dirname(own) or ".")
    if own == "index.md":  # its first picture is of a page that the site has
        live = rf'<iframe class="live" src="{EXPLORER}" title="\1" loading="lazy"></iframe>'
        live += f' <a href="{EXPLORER}">Open the page alone</a>'
        html = re.sub(r'<img alt="([^"]*)"[^>]*>( \(A picture.*?\))?', live, html, count=1)
    if own != "glossary.md":
        html = explained(html, f"{up}/glossary.html")
    return in_prose(html, typeset)


def on_post_page(output: str, **_: Any) -> str:
    """Lets names in code and heads of tables break after a dot, a line or a slash, unseen."""
    names = re.compile(r"(?<=<code>)[^<]+(?=</code>)|(?<=<th>)[^<]+(?=</th>)")
    return names.sub(lambda at: re.sub(r"(?<=\w)([._/])(?=[a-zA-Z])", r"\1<wbr>", at[0]), output)


def in_prose(html: str, change: Callable[[str], str]) -> str:
    """Returns HTML with its text changed outside of code, scripts and tags."""
    kept = re.split(r"(<(pre|code|script|style|a|iframe)\b.*?</\2>|<[^>]*>)", html, flags=re.DOTALL)
    # a split by a pattern with two groups gives text, markup and the second group in turn
    return "".join(
        part if place % 3 == 1 else change(part) for place, part in enumerate(kept) if place % 3 < 2
    )


def typeset(text: str) -> str:
    """Returns a text with TeX as MathML, and indices and powers of plain formulas raised."""
    from latex2mathml.converter import convert

    text = re.sub(r"\$\$(.+?)\$\$", lambda at: convert(unescape(at[1]), display="block"), text)
    text = re.sub(r"\$([^$\s][^$]*?)\$", lambda at: convert(unescape(at[1])), text)
    text = re.sub(
        r"(?<=[A-Za-z0-9)])\^(?:\{([^}]{0,40})\}|(\w))",
        lambda at: f"<sup>{at[1] or at[2]}</sup>",
        text,
    )
    return re.sub(r"(?<![\w.])([A-Z])_(\{[^}]{1,40}\}|[A-Za-z0-9](?!\w))", _lowered, text)


def _lowered(at: re.Match[str]) -> str:
    return f"{at[1]}<sub>{at[2].strip('{}')}</sub>"


def explained(html: str, glossary: str) -> str:
    """Returns HTML in which the first use of each word of the glossary leads to it."""
    known = forms()
    seen: set[str] = set()

    def linked(at: re.Match[str]) -> str:
        word = known[at[0]]
        if word in seen:
            return at[0]
        seen.add(word)
        link = f'href="{glossary}#{anchor(word)}" title="{escape(TERMS[word][1])}"'
        return f'<a class="word" {link}>{typeset(at[0])}</a>'

    heads = re.split(r"(<h\d.*?</h\d>)", html, flags=re.DOTALL)
    change = partial(finder(known).sub, linked)
    return "".join(one if place % 2 else in_prose(one, change) for place, one in enumerate(heads))


def anchor(word: str) -> str:
    return re.sub(r"[^a-z]+", "-", word.lower()).strip("-")


def glossary() -> str:
    """Returns the page of words."""
    start = (
        "Every page of the library shows these meanings under the pointer, where a word is first "
        "used."
    )
    parts = [f"## {word} {{#{anchor(word)}}}\n\n{fill(said, 100)}" for word, (_, said) in
             sorted(TERMS.items(), key=lambda item: item[0].lower())]  # fmt: skip
    return "\n\n".join(["# Glossary", fill(start, 100), *parts])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts the table of models at the end of its page, and links to what the site has moved."""
    own = page.file.src_uri
    if own == "index.md":  # its page of one image takes the whole width
        page.meta["hide"] = ["toc"]
    if own == "reference/statistics.md":  # who searches for a statistic wants to know what it is
        page.meta["search"] = {"boost": 200}
    folder = os.path.dirname(own)

    def moved(link: re.Match[str]) -> str:
        there = os.path.normpath(os.path.join(PAGES, folder, link[1]))
        place = MOVED.get(os.path.relpath(there, ROOT))
        return f"]({os.path.relpath(place, folder or '.')})" if place else link[0]

    markdown = re.sub(r"\]\(([^)#\s]+)\)", moved, markdown)
    return f"{markdown}\n{models()}" if own == "reference/models.md" else markdown


def written() -> dict[str, str]:
    """Returns the pages that lie in the repository too, where people read them without a site."""
    return {
        "reference/statistics.md": statistics(),
        "reference/audit.md": claims(),
        "glossary.md": glossary(),
    }


def bound(value: Any) -> str:
    return "no bound" if value is None else f"{value:g}"


def statistics() -> str:
    """Returns the page of all statistics: unit, range, how to read each, which way is which."""
    start = (
        "Every number that a sweep measures is called `probe.statistic`.",
        f"* `ci.sweep` measures {', '.join(ci.probes.DEFAULT)}, and membership or representatives "
        "in models that have them. Ask for the others: `probes=[...]`.",
        "* A number of activations has a value for each sample, or each sample and head; tables "
        "show the mean over samples. A number of weights has one value.",
        "* N is the number of tokens, d the width of the stream, p the width of a head, K the "
        "number of heads, and |A| the Frobenius norm.",
    )
    parts = ["# Statistics", *start]
    for name in ci.probes.available():
        probe = ci.probes.resolve(name)[0]
        words = (inspect.getdoc(getattr(ci.probes, name)) or "").split("\n\n")[0]
        words = words.removeprefix("Returns a probe of ")
        words = f"{words[:1].upper()}{words[1:]}"
        rows = []
        for statistic, record in probe.records.items():
            span = "any" if record.low is None else f"{record.low:g} or more"
            span = span if record.high is None else f"{record.low:g} to {record.high:g}"
            said = f"{record.title}. {record.how}"
            rows.append((f"`{name}.{statistic}`", said, record.unit, span, record.direction))
        head = ("statistic", "how to read it", "unit", "lowest to highest", "which way")
        parts.append(f"## {name}\n\n{fill(words, 100)}\n\n{in_markdown(head, rows)}")
    return "\n\n".join(parts)


def claims() -> str:
    """Returns the page of the claims that `ci.audit` tests, and of the numbers they stand on."""
    from crate_interp.audits.claims import CLAIMS, NUMBERS
    from crate_interp.probes.layer_reading import FRAMES

    rows = [(f"`{k}`", c.short, c.says, c.where, ", ".join(c.numbers)) for k, c in CLAIMS.items()]
    numbers = [
        (f"`{name}`", n.formula, bound(n.low), bound(n.high), n.null or "none")
        for name, n in NUMBERS.items()
    ]
    frames = [(name, frame.sides) for name, frame in FRAMES.items()]
    return "\n\n".join([
        "# Claims of the audit",
        "A claim is kept if its numbers lie within their bounds in all frames and settings, and "
        "beyond their nulls. [Audit each layer](../how/audit.md) shows how.",
        in_markdown(("claim", "short", "what is said", "where", "numbers"), rows),
        "## Numbers", in_markdown(("number", "formula", "from", "to", "null"), numbers),
        "## Frames", in_markdown(("frame", "what is compared"), frames),
    ])  # fmt: skip


def models() -> str:
    rows = [
        (f"`{r['name']}`", r["family"] or "", f"{r['params']:,}" if r["params"] == r["params"]
         and r["params"] else "unknown", r["licence"], r["status"],
         "embedded" if r["embedded"] else r["repo"] or r["link"] or "")
        for r in ci.list_models().astype(object).to_dict("records")
    ]  # fmt: skip
    head = ("name", "family", "parameters", "licence", "status", "where")
    return f"## All of them\n\n{in_markdown(head, rows)}\n"


def commands() -> str:
    """Returns the page of the command line: the help text of each command."""
    from crate_interp.cli import COMMANDS, EXIT_CODES

    def help_of(*words: str) -> str:
        command = [sys.executable, "-m", "crate_interp", *words, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip().replace("python -m crate_interp", "crate-interp")

    parts = [f"# Command line\n\n{EXIT_CODES}\n\n```\n{help_of()}\n```"]
    for name in COMMANDS:
        parts.append(f"## crate-interp {name}\n\n```\n{help_of(name)}\n```")
    return "\n\n".join(parts)


def api() -> dict[str, str]:
    """Returns the pages of the reference: a module's public name, or "" for `ci` itself."""
    modules = (name for name in ci.__all__ if isinstance(getattr(ci, name), ModuleType))
    names = ["", *modules, "hooks.edit"]
    return {name: f"reference/api/{name or 'ci'}.md" for name in sorted(names)}


def module_of(name: str) -> ModuleType:
    return reduce(getattr, name.split("."), ci) if name else ci


def public(name: str) -> dict[str, Any]:
    """Returns the public names of a module, functions first; "" is `ci` itself."""
    module = module_of(name)
    named = {own: getattr(module, own) for own in module.__all__ if not own.startswith("_")}
    if not name:
        named = {own: value for own, value in named.items() if not isinstance(value, ModuleType)}
    return dict(sorted(named.items(), key=lambda item: isinstance(item[1], type)))


def examples(name: str) -> dict[str, str]:
    """Returns the examples of a module's page by public name, and what goes "before" them all.

    They are doctests: the tests run them and compare what they show.
    """
    text = (HERE / "examples" / f"{name or 'ci'}.txt").read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in text.removeprefix("== ").split("\n== "))
    return {own.strip(): example.strip() for own, _, example in parts}


def api_page(name: str) -> str:
    """Returns the page of a module: each public name with its docstring and an example."""
    shown = f"ci.{name}" if name else "ci"
    said, given = (module_of(name).__doc__ or "").strip() if name else _CI, examples(name)
    before = f"The examples on this page begin with:\n\n```pycon\n{given['before']}\n```"
    blocks = [
        f"{block(f'{shown}.{own}', value)}\n\n```pycon\n{given[own]}\n```"
        for own, value in public(name).items()
    ]
    if not name:  # what users call most is of no class of its own
        blocks.append("::: crate_interp.models.hooked.HookedModel")
    rows = [(f"[`{own}`][{one.__module__}.{one.__qualname__}]", f"{one.__doc__}".split("\n\n")[0])
            for own, one in public(name).items() if block(own, one)[0] == ":"]  # fmt: skip
    listed = in_markdown(("name", "what it does"), rows)
    return "\n\n".join([f"# {shown}", said, listed, before, *blocks])


def block(shown: str, value: Any) -> str:
    """Returns the block of one name, which mkdocstrings fills; a constant is shown as it is."""
    if isinstance(value, ModuleType):
        return f"## {shown}\n\n{inspect.getdoc(value)}"
    where, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if where is None or own is None or not where.startswith(("crate_interp", "crate_hooks")):
        return f"## {shown}\n\n`{str(value)[:300]}`"
    return f"::: {where}.{own}\n    options:\n      heading: '{shown}'"


def notebooks() -> list[Path]:
    return sorted(DEMOS.glob("[0-9][0-9]_*.ipynb"))


def title_of(path: Path) -> str:
    first = json.loads(path.read_text())["cells"][0]["source"]
    return "".join(first).splitlines()[0].lstrip("# ")


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook with its outputs as Markdown, and its pictures and pages by name."""
    parts, files = [], {}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        text, name = "".join(cell["source"]), f"{path.stem}-{number}"
        if cell["cell_type"] == "markdown":
            for attached, data in cell.get("attachments", {}).items():
                files[f"{name}-{attached}"] = b64decode(data["image/png"])
                text = text.replace(f"attachment:{attached}", f"{name}-{attached}")
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for place, output in enumerate(cell.get("outputs", ())):
            shown, found = _output(output, f"{name}-{place}")
            parts.append(shown)
            files |= found
    return "\n\n".join(part for part in parts if part), files


def _output(output: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Returns an output of a cell as Markdown, and its picture or page by name."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output of the cell above]({name}.png)", {
            f"{name}.png": b64decode(data["image/png"])
        }
    text = "".join(data.get("text/html", ""))
    page = re.search(r'<iframe srcdoc="([^"]*)" title="([^"]*)"', text)
    if page:
        shown = f'<iframe class="live" src="{name}.html" title="{page[2]}" loading="lazy"></iframe>'
        return shown, {f"{name}.html": unescape(page[1]).encode()}
    if "<table" in text:
        table = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
        return re.sub(r"\n\s*", "", table).replace('border="1" class="dataframe"', ""), {}
    said = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{said.strip()}\n```" if said.strip() else "", {}


if __name__ == "__main__":
    for name, text in written().items():
        (PAGES / name).write_text(f"{text}\n", encoding="utf-8")
