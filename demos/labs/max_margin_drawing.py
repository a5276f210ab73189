"""The figure of the lab max_margin."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure

WORDS = {
    "cosine": "cosine of p with the SVM of the best tokens",
    "local cosine": "... with that of the tokens it selects",
    "mass": "attention on the best tokens",
}


def draw(found: Any) -> Figure:
    """Draws the cosines and the attention along training, a thin line a seed and the mean."""
    figure, axes = pyplot.subplots(1, len(WORDS), figsize=(14, 4.2), layout="constrained")
    for axis, (name, words) in zip(axes, WORDS.items(), strict=True):
        for place, (setting, rows) in enumerate(found.numbers(name).groupby("setting", sort=False)):
            wide = rows.pivot(index="place", columns="seed", values="value")
            axis.plot(wide, color=f"C{place}", lw=0.6, alpha=0.4)
            axis.plot(wide.mean(axis=1), color=f"C{place}", lw=2, label=f"{setting}, mean")
        random = found.numbers("random")["value"].mean()
        chance = random if name != "mass" else 1 / 6
        kind = "random direction" if name != "mass" else "even attention"
        axis.axhline(chance, color="black", ls=":", label=f"{kind}, {chance:.2f}")
        axis.set(xlabel="steps", title=words, ylim=(None, 1.03))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, loc="lower right")
    rows, several = found.table(), found.numbers("cosine", setting="5 samples")
    best = several[several["place"] == several["place"].max()]["value"].mean()
    figure.suptitle(
        f"p turns to a max-margin direction: cosine {rows['ours'].iloc[0]:.3f} for one sample, "
        f"{best:.3f} for five (width 64, 6 tokens, {rows['n'].iloc[0]} seeds)"
    )
    return figure
