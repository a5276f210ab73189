"""The figure that this package makes: a notebook shows it without a magic."""

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that a notebook shows if it is the last line of a cell.

    IPython knows how to show matplotlib's own figures only once pyplot is imported, or after
    `%matplotlib inline`. Then it uses its own way of showing them in place of this one.
    """

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()
