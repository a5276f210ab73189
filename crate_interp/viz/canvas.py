"""What all figures share: colours, new Axes or the caller's, and how titles and labels look."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike

from crate_interp.core.safe_text import plain
from crate_interp.probes import statistic
from crate_interp.results.result import Result

# lines in these colours are legible on white; styles/colours.css has the colours of pages
INK = "#0a0b0c"
TRAINED = "#1f66a3"
UNTRAINED = "#a8500f"
CHANCE = "#59616a"
SHUFFLED = "#75409c"
CARD = "#f4f6f8"
# colour of a figure -> its replacement in the SVG of a page, in a light or dark scheme; a notebook
# lacks a page's colours, so that the others, which are legible on light and on dark, stand in
ON_A_PAGE = {
    INK: "currentColor",
    TRAINED: "var(--accent, #3a86c8)",
    UNTRAINED: "var(--other, #c8702c)",
    CHANCE: "var(--muted, currentColor)",
    SHUFFLED: "var(--third, #9a6cc0)",
    CARD: "var(--card, rgba(127, 127, 127, 0.12))",
}

LONGEST = 48  # characters of a name; more do not fit next to a figure
WIDTH = 3.3  # inches: the width of a column in a paper with two columns
PAGE = 6.9  # inches: the width of both columns of such a paper
TITLE, TEXT, SMALL = 8.0, 7.5, 7.0  # points: 7 is the smallest size that is legible in print
_DPI = 200
_NO_ENGINE: Any = {"figure.autolayout": False, "figure.constrained_layout.use": False}
_LINE = 42  # characters of a title on one line


class NotebookFigure(Figure):
    """A figure that a notebook shows, without a magic, if it is the last line of a cell.

    IPython knows how to show matplotlib's own figures only once pyplot is imported, or after
    `%matplotlib inline`. Then it uses its own way of showing them in place of this one.
    """

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


def fix_layout(figure: Figure) -> None:
    """Lays a figure out once: with an engine, matplotlib does it for each file, and draws twice."""
    if engine := figure.get_layout_engine():
        with quiet():
            engine.execute(figure)
        with matplotlib.rc_context(_NO_ENGINE):  # "none" would leave a placeholder: two draws
            figure.set_layout_engine(None)


def label(text: object) -> str:
    """Returns a text as a figure shows it: on one line, cut if it is long."""
    return plain(text, LONGEST)


def as_written(figure: Figure, *axes_drawn: object) -> Figure:
    r"""Returns a figure whose words are never read as formulas, by matplotlib or by LaTeX.

    Names may come from unknown files, and drawing a name such as "$\nonsense$" would raise. Tick
    labels are matplotlib's own and stay unchanged. axes_drawn: the Axes that were drawn into,
    if the figure belongs to the caller; the rest of the figure then stays unchanged.
    """
    texts = [] if axes_drawn else list(figure.texts)
    roots: Any = axes_drawn or (figure,)
    for root in roots:
        for axes in root.findobj(Axes):
            texts += [
                axes.title,
                axes.xaxis.label,
                axes.yaxis.label,
                *([] if axes_drawn else axes.texts),
            ]
        for legend in root.findobj(Legend):
            texts += legend.get_texts()
    for text in texts:
        text.set_parse_math(False)
        text.set_usetex(False)
    return figure


@contextmanager
def quiet() -> Iterator[None]:
    """Stops matplotlib from warning of each character that its font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def canvas(ax: object, height: float, dpi: float | None) -> tuple[Figure, Any]:
    """Returns the figure and the Axes to draw into: the caller's, or new ones.

    Raises ValueError if `ax` is not a matplotlib Axes.
    """
    figure = _figure(ax, (WIDTH, height), dpi)
    axes: Any = figure.add_subplot() if ax is None else ax
    axes.tick_params(labelsize=SMALL)
    return figure, axes


def panels(
    ax: object,
    shape: tuple[int, int],
    size: tuple[float, float],
    gap: tuple[float, float],
    dpi: float | None,
) -> tuple[Figure, list[list[Any]]]:
    """Returns a figure and its panels, row by row; if the caller gives Axes, they hold all panels.

    shape: rows and columns. size: width and height of a new figure. gap: the space between rows and
    between columns of panels in the caller's Axes, as shares of a panel's height and width. Raises
    ValueError as `canvas` does.
    """
    figure = _figure(ax, size, dpi)
    rows, columns = shape
    if ax is None:
        return figure, figure.subplots(rows, columns, squeeze=False).tolist()
    own: Any = ax
    own.set_axis_off()
    high, wide = 1 / (rows + gap[0] * (rows - 1)), 1 / (columns + gap[1] * (columns - 1))
    lefts = [column * wide * (1 + gap[1]) for column in range(columns)]
    feet = [1 - high - row * high * (1 + gap[0]) for row in range(rows)]
    return figure, [[own.inset_axes((left, foot, wide, high)) for left in lefts] for foot in feet]


def two_panels(ax: object, dpi: float | None) -> tuple[Figure, list[Any]]:
    """Returns a figure and two panels, one above the other, as `panels` does."""
    figure, ((above,), (below,)) = panels(ax, (2, 1), (WIDTH, 3.5), (0.3, 0.0), dpi)
    above.tick_params(labelbottom=False)
    return figure, [above, below]


def _figure(ax: object, size: tuple[float, float], dpi: float | None) -> Figure:
    # not pyplot: a library must neither choose a backend nor keep figures open
    if ax is None:
        return NotebookFigure(figsize=size, dpi=dpi or _DPI, layout="constrained")
    if not isinstance(ax, Axes):
        raise ValueError(
            f"ax is a {type(ax).__name__}: give one matplotlib Axes, such as figure.subplots()."
        )
    figure: Any = ax.figure
    while figure is not figure.figure:  # from a SubFigure to the figure that it is part of
        figure = figure.figure
    if dpi is not None:
        figure.set_dpi(dpi)
    return figure


def set_title(axes: Axes, title: str | None, words: str, pad: int = 6) -> None:
    """Writes a title `pad` points above the Axes: `title`, or `words` if `title` is None.

    If `title` is "", nothing is written.
    """
    text = plain(words if title is None else title)
    if text:
        axes.set_title(fill(text, _LINE), fontsize=TITLE, pad=pad)


def set_legend(figure: Figure, rows: list[Any], inside: bool) -> None:
    """Adds one legend for all Axes: below a new figure, or below the last of a caller's Axes."""
    named = {
        words: handle
        for axes in rows
        for handle, words in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    look: Any = {"fontsize": SMALL, "frameon": False, "borderpad": 0, "labelspacing": 0.25}
    if not inside:
        below = rows[-1].transAxes + ScaledTranslation(0, -0.4, figure.dpi_scale_trans)
        place: Any = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
        rows[-1].legend(named.values(), named.keys(), **place, **look)
        return
    columns = 2 if max(map(len, named), default=0) < 26 else 1
    lines = -(-len(named) // columns)
    figure.set_figheight(figure.get_figheight() + 0.15 * lines)
    place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(named.values(), named.keys(), **place, **look)


def finished(figure: Figure, rows: list[Any], ax: object, title: str | None, words: str) -> Figure:
    """Adds the title above the first Axes and the legend below the last, and returns the figure.

    rows: the Axes that were drawn into. ax: the caller's Axes, or None. title, words: as in
    `set_title`. No text is read as a formula.
    """
    set_title(rows[0], title, words)
    set_legend(figure, rows, inside=ax is None)
    return as_written(figure, *([] if ax is None else rows))


def line(
    axes: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    band: Sequence[ArrayLike] | None = None,
    *,
    color: object,
    label: str = "",
    band_label: str = "",
    marker: str = "",
    ls: object = "-",
    lw: float = 1.6,
) -> None:
    """Draws a line with dots, and the band (low, high) around it unless all of its ends are NaN."""
    axes.plot(x, mean, color=color, label=label, marker=marker, ls=ls, lw=lw, ms=3)
    if band is not None and not np.isnan(np.asarray(band[0], dtype=float)).all():
        low, high = (np.asarray(end, dtype=float) for end in band)
        axes.fill_between(x, low, high, color=color, alpha=0.22, lw=0, label=band_label)


def name_lines(axes: Axes, x: np.ndarray, lines: Mapping[str, tuple[np.ndarray, str]]) -> None:
    """Writes the name of each line (y, colour) where it is highest or lowest by most."""
    every = np.stack([y for y, _ in lines.values()])
    for place, (name, (y, colour)) in enumerate(lines.items()):
        apart = y - np.delete(every, place, axis=0)
        apart = np.nan_to_num(np.stack([apart.min(axis=0), -apart.max(axis=0)]))  # above, below
        low, at = np.unravel_index(int(apart.argmax()), apart.shape)
        look: Any = {"color": colour, "fontsize": SMALL, "va": "top" if low else "bottom"}
        look |= {"ha": {0: "left", len(y) - 1: "right"}.get(int(at), "center")}
        axes.annotate(name, (x[at], y[at]), (0, -5 if low else 5), "data", "offset points", **look)


def percent(tick: float, _: object) -> str:
    """Returns a share on an axis in per cent."""
    return f"{100 * tick:g}\u00a0%"


def set_layers(
    axes: Axes,
    ylabel: str = "",
    xlabel: str = "layer",
    layers: np.ndarray | None = None,
    size: float = TEXT,
) -> None:
    """Names the axes, numbers layers or steps with whole numbers, and draws the frame and a grid.

    layers: what the axis below holds from end to end; None leaves that to the lines. size: of the
    label on the left.
    """
    axes.set_ylabel(ylabel, fontsize=size)
    axes.set_xlabel(xlabel, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.03)
    if layers is not None:
        axes.set_xlim(layers.min() - 0.2, layers.max() + 0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def ink_on(colour: Sequence[float]) -> str:
    """Returns "black" or "white", whichever is more legible on a colour by WCAG's luminance."""
    parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return "black" if luminance > 0.179 else "white"


def axis_label(result: Result, name: str, line: int = 30) -> str:
    """Returns the unit and direction of a statistic, in lines of at most `line` characters."""
    record = statistic(result.meta, name)
    parts = [part for part in (label(record.unit), label(record.direction)) if part]
    return fill(f"{parts[0]} ({parts[1]})" if len(parts) > 1 else "".join(parts) or "no unit", line)
