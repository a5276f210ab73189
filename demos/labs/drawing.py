"""What the figures of the labs share: panels, curves over seeds, intervals, and the title."""

from typing import Any  # of matplotlib and pandas: their own types are too wide here

from lab import LabResult, Values, mean_and_interval, texts


def panels(columns: int, rows: int = 1, size: tuple = (14, 4.2), **options: Any) -> tuple[Any, Any]:
    """Returns a figure and its axes."""
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", **options)


def curve(
    axis: Any, table: Any, style: str = "-", band: float = 0.2, unit: float = 1, **options: Any
) -> Any:
    """Draws the mean over seeds against the place, in a unit, and a band of their range."""
    values = table.groupby("place")["value"]
    (line,) = axis.plot(values.mean() / unit, style, **options)
    if band:
        ends = values.min() / unit, values.max() / unit
        axis.fill_between(ends[0].index, *ends, color=line.get_color(), alpha=band)
    return line


def interval(axis: Any, at: float, values: Values, **options: Any) -> None:
    """Draws a mean and its 95 % interval, upright, at a place."""
    mean, (low, high) = mean_and_interval(values)
    axis.errorbar(at, mean, [[mean - low], [high - mean]], fmt="o", **options)


def level(axis: Any, value: float, label: str | None = None, **options: Any) -> None:
    """Draws a level line; with a label, that of a baseline, it is dotted."""
    look = {"color": "black", "lw": 1.5, "ls": ":"} if label else {"color": "black", "lw": 0.8}
    axis.axhline(value, label=label, **(look | options))


def tidy(axis: Any, legend: int = 8, **words: Any) -> None:
    """Sets what an axis says, takes its upper and right line away, and draws a legend of a size."""
    axis.set(**words)
    axis.spines[["top", "right"]].set_visible(False)
    if legend and axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=legend)


def titled(figure: Any, found: LabResult, below: Any = None, ncols: int = 4, **words: Any) -> Any:
    """Gives a figure the title of data/texts.toml, and the legend of the axis `below` under it.

    The title names rows, those of the table of claims, and the words.
    """
    if below is not None:
        handles = below.get_legend_handles_labels()
        figure.legend(*handles, fontsize=8, loc="outside lower center", ncols=ncols)
    rows = found.table().to_dict("records")
    title = texts(found.meta["lab"])["title"].format(rows=rows, **words)
    figure.suptitle(title, fontsize=10)
    return figure
