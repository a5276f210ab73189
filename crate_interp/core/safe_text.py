"""Text from files and the network, made safe for errors, tables, figures and file names."""

import html
import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 200  # characters
_JOINERS = "\u200c\u200d"  # invisible, but needed in Persian words and emoji
_HARMFUL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions and tags, surrogates, line ends
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: object, longest: int = LONGEST) -> str:
    """Returns a text on one line, without characters that could control a terminal or a page.

    Runs of white space become one space. Control characters, marks of writing direction and lone
    surrogates are written as escapes, such as \x1b and \u202e. A text of more than `longest`
    characters is cut, and ends in " ...".
    """
    words = str(text)[: 4 * longest]  # the rest would be cut anyway
    shown = "".join(_escaped(sign) for sign in " ".join(words.split()))
    cut = len(shown) > longest or len(str(text)) > 4 * longest
    return f"{shown[:longest].rstrip()} ..." if cut else shown


def in_html(text: object) -> str:
    """Returns a text for HTML or SVG, for the inside of a tag or of a quoted attribute."""
    return html.escape(visible(text))


def notebook_view(words: str, body: str) -> str:
    """Returns a result as a notebook shows it: a sentence of plain text above HTML."""
    # these classes keep a notebook from reading a $ in a name as the start of a formula
    return f'<div class="tex2jax_ignore mathjax_ignore"><p>{in_html(words)}</p>{body}</div>'


def table_in_html(table: "pd.DataFrame", index: bool = False) -> str:
    """Returns a pandas table as HTML: numbers to four digits, all text escaped."""
    cells = table.map(lambda value: visible(value) if isinstance(value, str) else value)
    cells = cells.rename(columns=lambda name: visible(name) if isinstance(name, str) else name)
    return cells.to_html(index=index, float_format=lambda value: f"{value:.4g}")


def in_markdown(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Returns a table of cells in Markdown, a line per row; a bar within a cell is escaped."""
    names = list(head)
    lines = [
        " | ".join(re.sub(r"(?<!\\)\|", r"\\|", str(cell)).replace("\n", " ") for cell in row)
        for row in (names, ["---"] * len(names), *rows)
    ]
    return "\n".join(f"| {line} |" for line in lines)


def visible(text: object, longest: int | None = None) -> str:
    """Escapes what `plain` escapes, but keeps spaces and line ends.

    A text of more than `longest` characters is cut, and ends in " ...".
    """
    words = str(text)
    cut = longest is not None and len(words) > longest
    words = words[:longest]
    if not words.isprintable():
        words = "".join(sign if sign in "\t\n\r" else _escaped(sign) for sign in words)
    return f"{words} ..." if cut else words


def is_harmless(text: str) -> bool:
    """Tells whether a text is on one line and holds nothing that `plain` would escape.

    Unlike `is_plain` it allows spaces at the ends, and several in a row.
    """
    return text.isprintable() or all(_escaped(sign) == sign for sign in text)


def markdown(text: object) -> str:
    """Returns a text on one line of Markdown, with links, markup and bars of tables escaped."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", plain(text))


def is_plain(text: str, longest: int = LONGEST) -> bool:
    """Tells whether `plain` leaves a text as it is."""
    return plain(text, longest) == text


def cell(value: Any) -> Any:
    """Returns a value for a CSV file; text that a spreadsheet would run gets an apostrophe.

    Numbers stay unchanged.
    """
    if not isinstance(value, str):
        return value
    shown = visible(value, longest=32_000)  # the most that a spreadsheet's cell holds
    return f"'{shown}" if value.lstrip().startswith(_FORMULA) or shown[:1] in _FORMULA else shown


def file_name(text: object) -> str:
    """Returns a text as a file name: letters, digits, dots, hyphens and underscores.

    Everything else becomes an underscore. The name has at most 100 characters, does not begin
    with a dot, and is never empty.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", str(text)[:1000])[:100].lstrip(".") or "_"


def _escaped(sign: str) -> str:
    if unicodedata.category(sign) not in _HARMFUL or sign in _JOINERS:
        return sign
    return sign.encode("unicode_escape", "surrogatepass").decode("ascii")
