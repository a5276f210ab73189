"""HTML pages. Each is one file, light or dark, that needs no internet and is readable on a phone.

The texts and the style of a page are in the folder `templates`. jinja2 loads when the first page is
made. The pictures inside a page are PNG, JPEG or SVG.
"""

import base64
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from crate_interp.config.families import entry_word
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import in_html, plain, visible
from crate_interp.results.result import Result, model_name
from crate_interp.results.result_files import assumed
from crate_interp.stats.verdicts import SHOWN
from crate_interp.viz.canvas import INK, ON_A_PAGE, fix_layout, ink_on, quiet

_PERCENT = re.compile(r"(?<=\d)%(?![\dA-Fa-f])")  # not in an address
_LEVELS = 32  # colours of a map, too many to see steps; a map takes about half a kilobyte


@dataclass(frozen=True)
class Html:
    """A page that a notebook shows, and that `save` writes as one file.

    said: its answer, in one sentence. still: the data URI of a picture of it, or "".
    """

    title: str
    document: str
    said: str
    still: str

    def __repr__(self) -> str:
        size = len(self.document) / 1000
        return f"Html page {self.title!r}, {size:.0f} kB: .save(path) writes it"

    @classmethod
    def of(
        cls,
        template: str,
        title: str,
        *,
        said: Sequence[str],
        still: Figure | None = None,
        **values: object,
    ) -> "Html":
        """Returns a template of the folder `templates` filled in, with its title.

        said: as in `result_page`; links to the page and notebooks say its first sentence.
        still: a figure that stands for the page where no JavaScript runs.
        """
        picture = "" if still is None else figure_uri(still)
        page = render(template, title=title, said=said, still=picture, **values)
        return cls(title, page, " ".join(said[:2]), picture)

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
        return render("notebook.html", page=self)


def check_page(argument: str, name: str | None) -> None:
    """Raises ValueError if a text is not the name of a page that may lie beside another one."""
    if name is not None and not re.fullmatch(r"[\w.-]{1,80}\.html", name):
        raise ValueError(f"{argument}={name!r}: give the name of a page beside this one.")


def render(template: str, **values: object) -> str:
    """Returns a template of the folder `templates`, filled in.

    The first use of a word of `glossary.TERMS` shows its meaning under the pointer. Every value is
    escaped as HTML, and control characters, marks of writing direction and lone
    surrogates are made visible. `meta` is that of a result, whose assumed settings the page names.

    Raises jinja2.UndefinedError if the template needs a value that is not given.
    """
    meta: Any = values.get("meta", {})
    word = entry_word(meta.get("config", {}).get("sparse_step"))
    words = {"assumed": assumed(meta), "word": word} | values
    text = _templates().get_template(template).render(words)
    return explained(text) if text.startswith("<!doctype html>") else text


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def visible_value(value: Any) -> Any:
        is_text = isinstance(value, str) and not hasattr(value, "__html__")  # our own markup
        return _PERCENT.sub("\u00a0%", visible(value)) if is_text else value

    def counted(count: int, word: str) -> str:
        return f"{count} {word}{'s' if count != 1 else ''}"

    templates = Environment(
        loader=PackageLoader("crate_interp.viz", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible_value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    templates.filters |= {"counted": counted, "number": format, "plain": plain, "visible": visible}
    templates.globals["shown_as"] = SHOWN
    templates.filters |= {"superscripts": _superscripts, "cells": cells}
    return templates


def _superscripts(words: str) -> Any:
    """Returns escaped text in which `code` and formulas such as Z^{l+1/2}, R^c, U_k are HTML."""
    from markupsafe import Markup, escape

    raised = re.sub(
        r"\^(?:\{([^}]{0,99})\}|(\w))",
        lambda match: f"<sup>{match[1] or match[2]}</sup>",
        str(escape(_PERCENT.sub("\u00a0%", visible(words)))),
    )
    coded = re.sub(r"`([^`]{1,99})`", r"<code>\1</code>", raised)
    return Markup(re.sub(r"(?<![\w.])([A-Z])_([A-Za-z0-9])(?!\w)", r"\1<sub>\2</sub>", coded))


def write_page(
    result: Result,
    out: str | Path,
    name: str,
    question: str,
    beside: Mapping[str, str | Figure] | None = None,
    **values: Any,
) -> Path:
    """Writes a result, its page `name` and files beside it into a folder; returns the page's path.

    beside: texts and figures, by the names of their files. question, values: as in `result_page`.
    """
    with result.saved_with_pages(out) as stage:
        for file, content in (beside or {}).items():
            if isinstance(content, str):
                write_text(stage / file, content)
            else:
                content.savefig(stage / file)
        write_text(stage / name, result_page(result, name, question, **values))
    return Path(out) / name


def result_page(
    result: Result,
    template: str,
    question: str,
    *,
    said: Sequence[str],
    numbers: Mapping[str, pd.DataFrame],
    **values: object,
) -> str:
    """Returns a page of a result; its title is the name of the result's model and the question.

    Args:
        result: What the page is of.
        template: The template of the folder `templates`.
        question: What was asked, in a few words.
        said: The answer, in at most 20 words; then the doubt, which the result's own caution
            follows; the rest stands folded, under "How sure?".
        numbers: The tables of "All numbers", by their titles.
        values: What else the template reads.
    """
    meta = result.meta
    parts = {"kicker": "", "command": "", "sources": sources(meta), "meta": meta, "result": result}
    parts |= {"said": said, "caution": result.caution(), "numbers": numbers}
    return render(template, title=f"{model_name(meta)}: {question}", **(parts | values))


def cells(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of a table, with four digits a number."""
    header = [str(name).replace("_", " ") for name in table.columns]
    return header, [
        [
            "" if pd.isna(value) else f"{value:.4g}" if isinstance(value, float) else str(value)
            for value in row
        ]
        for row in table.to_numpy(dtype=object)
    ]


def heat_map(
    colours: Float[np.ndarray, "layer head 4"], cell: Callable[[int, int], dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Returns the cells of a heat map, each with its colours and with what `cell` says of it.

    `cell` is given a layer and a head. It returns the `text` and, if there are any, the `note` that
    is shown under the pointer, the `link`, the `mark`, a class of the style, and `ends`.
    """
    return [
        [
            {"ground": to_hex(colour), "ink": ink_on(colour), "note": "", "link": "", "mark": ""}
            | cell(layer, head)
            for head, colour in enumerate(row)
        ]
        for layer, row in enumerate(colours.tolist())
    ]


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


def image_uri(picture: Float[np.ndarray, "..."], longest: int = 224) -> str:
    """Returns a picture `[height, width]` or `[height, width, 3]` (0 to 1) as a PNG data URI.

    The picture is made smaller if its longer side has more than `longest` pixels.
    """
    image = Image.fromarray((picture * 255).round().astype(np.uint8))
    image.thumbnail((longest, longest), Image.Resampling.LANCZOS, reducing_gap=None)
    return picture_uri(image)


def map_tile(values: Float[np.ndarray, "h w"]) -> str:
    """Returns a map as a palette PNG with one pixel for each patch. values: 0 or more.

    Colours go from dark (0) to bright (the map's own largest value). The map hides the picture
    below it, whose bright places would look like attention.
    """
    levels = np.arange(_LEVELS) / (_LEVELS - 1)
    colours = matplotlib.colormaps["inferno"](0.2 + 0.8 * levels)[:, :3]
    scaled = values / max(float(values.max()), 1e-30)
    image = Image.fromarray((scaled * (_LEVELS - 1)).round().astype(np.uint8), mode=None)
    image = image.convert("P")
    image.putpalette((colours * 255).round().astype(np.uint8).tobytes())
    return picture_uri(image)


def outline(mask: Bool[np.ndarray, "h w"]) -> str:
    """Returns the border of a mask as an SVG path, in pixels of the mask.

    Each run of edges is one line of the path. Horizontal runs come first, row by row, then vertical
    runs.
    """
    parts = []
    for kind, values in (("h", mask), ("v", mask.T)):
        padded = np.pad(values.astype(np.int8), ((1, 1), (0, 0)))
        edges = np.pad((np.diff(padded, axis=0) != 0).astype(np.int8), ((0, 0), (1, 1)))
        ends = np.diff(edges, axis=1)  # [row of edges, place]: 1 where a run starts, -1 after it
        starts, stops = np.argwhere(ends == 1).tolist(), np.argwhere(ends == -1).tolist()
        for (row, start), (_, stop) in zip(starts, stops, strict=True):
            place = f"{start} {row}" if kind == "h" else f"{row} {start}"
            parts.append(f"M{place}{kind}{stop - start}")
    return "".join(parts)


def picture_uri(image: Image.Image) -> str:
    """Returns a picture as a data URI of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return data_uri(buffer.getvalue())


def data_uri(data: bytes, kind: str = "png") -> str:
    """Returns the bytes of a picture's file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def figure_uri(figure: Figure) -> str:
    """Returns a matplotlib figure as the data URI of a PNG file."""
    buffer = io.BytesIO()
    with quiet():
        figure.savefig(buffer, format="png", dpi=110, pil_kwargs={"optimize": True})
    return data_uri(buffer.getvalue())


def inline_svg(figure: Figure, alt: str, salt: str, legend: bool = True) -> str:
    """Returns a matplotlib figure as SVG in the colours of the page's light or dark scheme.

    Words get the page's text colour. The colours in crate_interp/viz/canvas.py become
    colours of the page; all other colours stay. salt: a text that makes the ids in this figure
    differ from the ids in other figures of the page. legend: whether to keep the figure's legend.
    """
    if not legend:
        figure.legends.clear()
        figure.set_layout_engine("constrained")
    fix_layout(figure)
    buffer = io.StringIO()
    with quiet(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        _recolour(figure)
        nothing = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(?<=[:] )#[0-9a-f]{6}\b", lambda at: ON_A_PAGE.get(at[0], at[0]), svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    words = in_html(alt)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)


def _recolour(figure: Any) -> None:
    """Gives spines, ticks and words the colour INK.

    Words on heat maps, and words in one of the other colours of figures, keep their colour.
    """
    kept = {id(text) for axes in figure.axes if axes.images for text in axes.texts}
    for axes in figure.axes:
        axes.tick_params(colors=INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
    for item in figure.findobj(Text):
        if id(item) not in kept and to_hex(item.get_color()) not in ON_A_PAGE:
            item.set_color(INK)


# word -> its other forms, and what it means; docs list the same words
TERMS: dict[str, tuple[tuple[str, ...], str]] = {}
for _line in Path(__file__).with_name("glossary.txt").read_text(encoding="utf-8").splitlines():
    _names, _, _meaning = _line.partition(": ")
    _word, *_others = _names.split(", ")
    TERMS[_word] = tuple(_others), _meaning

_SKIPPED = re.compile(
    r"<(script|style|svg|title|table|button|label|legend|select|option|pre|code|summary|h1|h2|h3|a|iframe|textarea|dl)\b"
    r".*?</\1>",
    re.DOTALL,
)
_TAG = re.compile(r"<[^>]*>")
_RATE, _AS_ONE = "R<sup>c</sup>", "\0"  # R^c on a page, and while words are looked for


def forms() -> dict[str, str]:
    """Returns each form of each word, and the word."""
    return {form: word for word, (others, _) in TERMS.items() for form in (word, *others)}


def finder(words: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds these words, the longest that fits at each place."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest))})(?![\w-])")


def explained(document: str) -> str:
    """Returns an HTML page in which the first use of each word of `TERMS` shows its meaning."""
    at = document.find("<body")
    head, document = document[:at], document[at:].replace(_RATE, _AS_ONE)
    known = forms() | {_AS_ONE: "R^c"}
    words, explained_words = finder(known), set[str]()

    def wrapped(match: re.Match[str]) -> str:
        word = known[match[0]]
        if word in explained_words:
            return match[0]
        explained_words.add(word)
        return f'<abbr title="{html.escape(TERMS[word][1])}">{match[0]}</abbr>'

    parts, at = [head], 0
    while (tag := _TAG.search(document, at)) is not None:
        end = (_SKIPPED.match(document, tag.start()) or tag).end()
        parts += [words.sub(wrapped, document[at : tag.start()]), document[tag.start() : end]]
        at = end
    return ("".join(parts) + document[at:]).replace(_AS_ONE, _RATE)
