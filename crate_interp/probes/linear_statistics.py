"""The statistics of `ci.linear_probe`, which fits classifiers and is therefore no Probe."""

from functools import partial

from crate_interp.results.statistic import Statistic

NAME = "linear"
HEADING = "What a linear classifier reads off"
_share = partial(Statistic, unit="share right", low=0.0, high=1.0)
STATISTICS: dict[str, Statistic] = {
    "accuracy": _share(
        "Accuracy of a linear classifier",
        "higher is better",
        how="Held-out accuracy of logistic regression on the layer's stream.",
    ),
    "permuted": _share(
        "Accuracy with permuted labels",
        "chance, with its noise",
        how="The same with labels permuted among samples, so that there is nothing to learn.",
    ),
    "chance": _share(
        "Share of the commonest class",
        "chance",
        how="Held-out accuracy of always naming the commonest class of the training part.",
    ),
}
