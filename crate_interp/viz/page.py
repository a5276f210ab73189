"""HTML pages that are one file: no script, no network, light and dark, readable on a phone."""

import base64
import html
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crate_interp.files import write_text

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
figure { margin: 1.2rem 0; } figcaption { font-size: .92rem; }
figure svg, figure img { width: 100%; height: auto; max-width: 46rem; }
figure img { background: #fff; border-radius: 4px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem; }
dt { opacity: .75; } dd { margin: 0; overflow-wrap: anywhere; }
"""
_INK = "#0a0b0c"  # drawn in this, then handed over to the page's own text colour


def page(title: str, body: list[str], head: str = "") -> str:
    """A whole document; head: what else stands there, such as a policy."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


@dataclass(frozen=True)
class Html:
    """A page that a notebook shows and that `save` writes as one file."""

    title: str
    body: list[str]
    head: str = ""

    def __repr__(self) -> str:
        return f"Html page {self.title!r}, {len(self.html()) / 1000:.0f} kB: .save(path) writes it"

    def html(self) -> str:
        """The whole document."""
        return page(self.title, self.body, self.head)

    def save(self, path: str | Path) -> Path:
        """Writes the page; the folder is made where there is none."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.html())
        return path

    def _repr_html_(self) -> str:
        source, title = (html.escape(words, quote=True) for words in (self.html(), self.title))
        return f'<iframe srcdoc="{source}" title="{title}" style="width: 100%; height: 36rem; border: 0"></iframe>'


def text(words: str) -> str:
    """Escaped text with the superscripts of formulas: Z^{l+1/2}, R^c."""
    return re.sub(
        r"\^(?:\{([^}]*)\}|(\w))",
        lambda match: f"<sup>{match[1] or match[2]}</sup>",
        html.escape(words),
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table that scrolls sideways on a narrow screen."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def facts(pairs: list[tuple[str, str]]) -> str:
    """A list of names and values."""
    return "<dl>" + "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in pairs) + "</dl>"


def sources(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the numbers of a result come from, as names and values."""
    return [
        ("model", str(meta["model_digest"])),
        ("data", str(meta["data_fingerprint"])),
        ("dtype, device", f"{meta['dtype']}, {meta['device']}"),
        ("versions", ", ".join(f"{name} {number}" for name, number in meta["versions"].items())),
        ("seconds", f"{meta['seconds']:g}"),
        ("config", json.dumps(meta["config"])),
    ]


def inline_svg(figure: Any, alt: str, salt: str) -> str:
    """A matplotlib figure as SVG whose ink follows the page's colour scheme; `salt` keeps ids of figures apart."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        _recolour(figure)
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt, quote=True)}" ', 1)


def _recolour(figure: Any) -> None:
    """Text, ticks and spines in _INK."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(colors=_INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(_INK)
    for item in figure.findobj(Text):
        item.set_color(_INK)


def inline_png(figure: Any, alt: str, dpi: int = 110) -> str:
    """A matplotlib figure as an embedded PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{data}">'


def captioned(picture: str, caption: str) -> str:
    """A figure with its caption (already HTML)."""
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"
