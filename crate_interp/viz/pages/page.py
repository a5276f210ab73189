"""HTML pages. Each is one file, light or dark, that needs no internet and is readable on a phone.

The texts and the style of a page are in the folder `templates`. jinja2 loads when the first page is
made.
"""

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crate_interp.core.files import write_text
from crate_interp.core.safe_text import visible
from crate_interp.results.assumed_settings import assumed
from crate_interp.viz.pages.glossary import explained


@dataclass(frozen=True)
class Html:
    """A page that a notebook shows, and that `save` writes as one file."""

    title: str
    document: str

    def __repr__(self) -> str:
        size = len(self.document) / 1000
        return f"Html page {self.title!r}, {size:.0f} kB: .save(path) writes it"

    def html(self) -> str:
        """Returns the document, from its doctype on."""
        return self.document

    def save(self, path: str | Path) -> Path:
        """Writes the page and returns its path. A folder that does not exist is made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.document)
        return path

    def _repr_html_(self) -> str:
        return render("notebook.html", title=self.title, document=self.document)


def is_page(name: str) -> bool:
    """Tells whether a text is the name of a page that may lie beside another one."""
    return re.fullmatch(r"[\w.-]{1,80}\.html", name) is not None


def render(template: str, **values: object) -> str:
    """Returns a template of the folder `templates`, filled in.

    The first use of a word of `glossary.TERMS` shows its meaning under the pointer. Every value is
    escaped as HTML, and control characters, marks of writing direction and lone
    surrogates are made visible. `meta` is that of a result, whose assumed settings the page names.

    Raises jinja2.UndefinedError if the template needs a value that is not given.
    """
    meta: Any = values.get("meta", {})
    text = _templates().get_template(template).render({"assumed": assumed(meta)} | values)
    return explained(text) if text.startswith("<!doctype html>") else text


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("crate_interp.viz", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"counted": _counted, "number": format}
    templates.filters |= {"score": _score, "superscripts": _superscripts}
    return templates


def _visible(value: Any) -> Any:
    is_markup = hasattr(value, "__html__")  # our own markup
    return visible(value) if isinstance(value, str) and not is_markup else value


def _superscripts(words: str) -> Any:
    """Returns escaped text in which `code` and formulas such as Z^{l+1/2}, R^c, U_k are HTML."""
    from markupsafe import Markup, escape

    raised = re.sub(
        r"\^(?:\{([^}]{0,99})\}|(\w))",
        lambda match: f"<sup>{match[1] or match[2]}</sup>",
        str(escape(visible(words))),
    )
    coded = re.sub(r"`([^`]{1,99})`", r"<code>\1</code>", raised)
    return Markup(re.sub(r"(?<![\w.])([A-Z])_([A-Za-z0-9])(?!\w)", r"\1<sub>\2</sub>", coded))


def _counted(count: int, word: str) -> str:
    """Returns a count with its word, such as "1 seed" or "2 seeds"."""
    return f"{count} {word}{'s' if count != 1 else ''}"


def _score(value: float) -> str:
    """Returns a value with three decimals, or a dash for a value that was not measured (NaN)."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def fingerprints(meta: dict[str, Any]) -> str:
    """Returns the fingerprints of a result's data."""
    return ", ".join(dict.fromkeys(str(data["fingerprint"]) for data in meta["data"]))


def sources(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) pairs that say where a result's numbers come from."""
    pairs = [
        ("model", str(meta["model_digest"])),
        ("data", fingerprints(meta)),
        ("dtype, device", f"{meta['dtype']}, {meta['device']}"),
        ("versions", ", ".join(f"{name} {number}" for name, number in meta["versions"].items())),
    ]
    pairs = [pair for pair in pairs if pair != ("data", "None")]  # tensors without a name
    if "seconds" in meta:
        pairs.append(("seconds", f"{meta['seconds']:g}"))
    return [*pairs, ("config", json.dumps(meta["config"]))]
