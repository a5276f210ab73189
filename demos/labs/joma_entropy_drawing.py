"""The figure of the lab joma_entropy."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure


def draw(found: Any) -> Figure:
    """Draws entropy and stable rank of each layer against the step, a row for each model."""
    names = found.numbers("uniform entropy")["setting"].tolist()
    figure, axes = pyplot.subplots(len(names), 2, figsize=(11, 7.5), layout="constrained")
    for name, (left, right) in zip(names, axes, strict=True):
        for axis, quantity in ((left, "entropy"), (right, "stable rank")):
            table = found.numbers(quantity)
            mine = table[table["setting"].str.startswith(name)]
            for setting, rows in mine.groupby("setting"):
                axis.plot(rows["place"], rows["value"], "o-", label=str(setting).split(", ")[1])
            axis.set_xscale("symlog", linthresh=10)
            axis.set(xlabel="step", title=name)
        uniform = found.numbers("uniform entropy", setting=name)["value"][0]
        left.axhline(uniform, color="black", linestyle=":", label="uniform")
        left.set_ylabel("entropy of attention, nats")
        right.set_ylabel("stable rank of D")
        left.legend(fontsize=8)
    figure.suptitle(found.headline().replace("; ", ";\n"), fontsize=10)
    return figure
