"""The words on figures: short, and drawn literally, whoever wrote them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crate_interp.core.safe_text import plain

LONGEST = 48  # characters; more do not fit beside a figure


def label(text: object) -> str:
    """Returns a text as a figure shows it: on one line, cut if it is long."""
    return plain(text, LONGEST)


def as_written(figure: Any, *own: object) -> Any:
    """Returns a figure whose words are never read as formulas, by matplotlib or by LaTeX.

    Names may come from unknown files: "$\nonsense$" would raise when the figure is drawn. Tick
    labels are matplotlib's own and stay unchanged. own: the Axes that were drawn into, if the rest
    of the figure is the caller's.
    """
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend

    texts = [] if own else list(figure.texts)
    roots: Any = own or (figure,)
    for root in roots:
        for axes in root.findobj(Axes):
            texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *([] if own else axes.texts)]
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
