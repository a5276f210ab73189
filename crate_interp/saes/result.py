"""SaeResult: how well autoencoders replace activations, compared with baselines."""

from typing import Any

import numpy as np
import pandas as pd

from crate_interp.results.result import Result, by
from crate_interp.stats import contrasts, intervals

SAE, RANDOM, PCA, ZERO, MEAN = "autoencoder", "shuffled weights", "pca", "zero", "mean"
LOSSES = {
    "next token": "the loss of the next token",
    "masked tokens": "the loss of the masked tokens",
    "labels": "the cross-entropy of the labels",
    "kl": "the divergence from the model's own answers",
}
_RATIOS = {  # column -> its numerator and denominator, both sums over samples
    "l0": ("active", "tokens"),
    "variance_explained": ("explained", "variance"),
    "cosine": ("cosine", "tokens"),
}


Estimate = tuple[float, float, float]  # a number and the ends of its interval
Groups = np.ndarray | None  # the group of each sample; None: samples are independent


def ratio(above: np.ndarray, below: np.ndarray, groups: Groups = None) -> Estimate:
    """Returns sum(above) / sum(below) over samples, and the ends of a 95 % interval.

    The interval is a bootstrap-t of the linearised ratio. All three are NaN if sum(below) is 0.
    """
    return _mean_and_ends(intervals.linearised_ratio(above[:, None], below[:, None]), groups)


def recovered(
    ablated: np.ndarray, losses: np.ndarray, clean: np.ndarray, groups: Groups = None
) -> Estimate:
    """Returns (L_ablated - L_own) / (L_ablated - L_clean) and its interval, from losses by sample.

    Returns NaN if ablation does not raise the loss, or if the 95 % interval of the rise reaches 0:
    then there is nothing to recover.
    """
    cost = ablated - clean
    mean, low, _ = _mean_and_ends(cost[:, None], groups)
    if mean <= 0 or low <= 0:
        return np.nan, np.nan, np.nan
    return ratio(ablated - losses, cost, groups)


def _points(result: Result) -> pd.DataFrame:
    samples: Any = result.table("samples")
    features: Any = result.table("features").set_index(["point", "coder"])
    clean = result.table("clean")["loss"].to_numpy()
    groups = result.groups_at(result.table("clean")["sample"])
    losses = samples.groupby(["point", "coder"])["loss"]
    rows = []
    for (point, coder), own in samples.groupby(["point", "coder"], sort=False):
        loss, counts = own["loss"].to_numpy(), features.loc[(point, coder)]
        own = own.assign(explained=own["variance"] - own["error"])
        found = {"point": point, "coder": coder}
        for name, (above, below) in _RATIOS.items():
            numbers = ratio(own[above].to_numpy(float), own[below].to_numpy(float), groups)
            found |= _named(name, numbers)
        count = int(counts["features"])
        found |= {"features": count, "dead": float(counts["dead"] / count) if count else np.nan}
        found |= {"loss": loss.mean(), "clean": clean.mean()}
        found |= _named("loss_change", _mean_and_ends((loss - clean)[:, None], groups))
        for name in (ZERO, MEAN):
            rest = losses.get_group((point, name)).to_numpy()
            found |= _named(f"recovered_{name}", recovered(rest, loss, clean, groups))
        rows.append(found | {"n": len(own)})
    return pd.DataFrame(rows)


def _named(name: str, numbers: Estimate) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), numbers, strict=True))


def _mean_and_ends(values: np.ndarray, groups: Groups) -> Estimate:
    (low,), (high,) = intervals.mean_interval(contrasts.by_group(values, groups))
    return float(values.mean()), float(low), float(high)


class SaeResult(Result):
    """How well autoencoders replace the activations that they read.

    `table()`, also "points": a row per point and coder. The coders are "autoencoder"; "shuffled
    weights", its copy with the numbers of each matrix in random order (if it is a module); "pca",
    PCA fitted to these data, with as many components as the autoencoder has active features per
    token; "zero" and "mean", which replace the activation by 0 or by the mean over all tokens.

    l0: the number of features that are not 0, mean over tokens. variance_explained: 1 - sum |x -
    x'|^2 / sum |x - mean|^2 over all tokens, with the mean of all tokens; at most 1, 0 for "mean".
    cosine: the cosine of x and x', mean over tokens; 0 if x or x' is 0. features: the number of
    features. dead: the share of features that no token activates. loss: the loss in nats with the
    coder in place of the activation, mean over samples (for a window, the mean over its tokens).
    clean: the loss of the unchanged model. loss_change: loss - clean. recovered_zero,
    recovered_mean: (L_ablated - L) / (L_ablated - L_clean). The value 1 stands for the clean loss,
    and 0 for the loss under ablation. The value is NaN if the 95 % interval of the rise under
    ablation is not above 0.

    Columns ending in _low and _high are 95 % intervals over samples: bootstrap-t of means, and for
    ratios (l0, variance_explained, cosine, recovered_*) bootstrap-t of the linearised ratio
    (crate_interp/stats/intervals.py).

    Stored tables: `clean` (loss of each sample), `samples` (for each sample, point and coder: the
    loss, and the sums over tokens called tokens, active, error, variance, cosine), `features`.
    """

    KIND = "saes"
    MAIN = "points"
    INTERVALS = True
    ALONE = (
        "an evaluation of autoencoders ablates to the mean of its own data and does not merge: "
        "evaluate on all data at once."
    )
    STORED = {
        "clean": by("sample"),
        "samples": by("point", "coder", "sample"),
        "features": by("point", "coder"),
    }
    DERIVED = {"points": _points}

    def finding(self) -> str:
        """Returns how much each autoencoder explains and recovers, compared with PCA."""
        table: Any = self._table("points")
        words = []
        for point, rows in table.set_index("coder").groupby("point", sort=False):
            own, pca = rows.loc[SAE], rows.loc[PCA]
            words.append(
                f"The autoencoder at {point} explains "
                f"{100 * own['variance_explained']:.1f}\u00a0% of the variance with "
                f"{own['l0']:.1f} features a token; the same number of principal components "
                f"explain {100 * pca['variance_explained']:.1f}\u00a0%. It recovers "
                f"{100 * own['recovered_mean']:.1f}\u00a0% of the loss that mean ablation "
                f"adds; the components recover {100 * pca['recovered_mean']:.1f}\u00a0%."
            )
        loss = LOSSES[self.meta["settings"]["loss"]]
        return f"{' '.join(words)} Measured on {self.counted_samples()}, with {loss}."
