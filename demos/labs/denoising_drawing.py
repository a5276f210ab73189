"""The figure of the lab `denoising`."""

from typing import Any

from lab import LabResult, finished
from twins import MODELS

SHOWN = 0.3  # sigma
WHO = ("trained", "turned", "turned subspaces", "untrained")


def draw(found: LabResult) -> Any:
    """Returns a figure: cosine and removed noise by layer at sigma .3, a column for each model."""
    from matplotlib import pyplot

    shown = ("cosine", "cosine across the token", "noise removed across the token")
    figure, axes = pyplot.subplots(
        len(shown), len(MODELS), figsize=(10, 8), sharex=True, sharey="row"
    )
    for column, name in enumerate(MODELS):
        for axis, quantity in zip(axes[:, column], shown, strict=True):
            for colour, who in enumerate(WHO):
                if who == "turned subspaces" and quantity.startswith("noise"):
                    continue
                table = found.numbers(quantity, setting=f"{name}|{who}|{SHOWN}")
                lines: Any = table[table["place"] >= 0].groupby("place")["value"]
                axis.plot(lines.mean(), "o-", label=who, color=f"C{colour}")
                if who == "trained":
                    ends = [
                        found.numbers(f"{quantity}, {end}", setting=f"{name}|{who}|{SHOWN}")
                        for end in ("low", "high")
                    ]
                    low, high = (end[end["place"] >= 0]["value"] for end in ends)
                    axis.fill_between(range(len(low)), low, high, alpha=0.3, color=f"C{colour}")
                else:
                    mean, ends = lines.mean(), (lines.min(), lines.max())
                    axis.fill_between(mean.index, *ends, alpha=0.2, color=f"C{colour}")
            axis.axhline(0, color="grey", linewidth=0.5)
            words = quantity.replace(" across", "\nacross")
            axis.set_ylabel(words if column == 0 else "")
        axes[0, column].set_title(name, fontsize=10)
        axes[-1, column].set_xlabel("layer")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=9, loc="lower center", ncols=4)
    table: Any = found.table()
    control, *cosine = table[table["claim"].str.contains("across the token, MSSA points")]["ours"]
    words = " and ".join(f"{value:.2f}" for value in cosine)
    title = (
        f"Across the token the cosine of MSSA with the posterior mean is {words}; on tokens of the "
        f"mixture {control:.2f}\n(means over layers, sigma {SHOWN}, two tiny models, "
        f"{table['n'].max()} images each; shaded: 95 % over images, range over rotations or seeds)"
    )
    return finished(figure, title, bottom=0.03)
