"""ci.linear_probe: what a linear classifier reads from each layer, beside chance."""

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crate_interp import checks
from crate_interp.bars import tqdm
from crate_interp.data import Data, Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.offload import with_weights
from crate_interp.sweeps.provenance import data_meta
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.stream import Batch, Chunk, Reading, check_model, fold, samples_of
from crate_interp.sweeps.tables import tables_of
from crate_interp.sweeps.tally import Tally

_STATISTICS = {
    "linear.accuracy": [
        "share right", 0.0, 1.0, "Held-out accuracy of logistic regression on the layer's stream."
    ],
    "linear.permuted": [
        "share right", 0.0, 1.0,
        "The same with labels permuted among samples: at chance, as there is nothing to learn.",
    ],
    "linear.chance": [
        "share right", 0.0, 1.0,
        "Held-out accuracy of always naming the commonest class of the training part.",
    ],
}  # fmt: skip
_POOLS = ("cls", "mean", "last")
Features = tuple[
    list[list[Tensor]], list[str]
]  # of each layer, batch by batch; a digest per sample


class LinearProbeResult(SweepResult):
    """The accuracy of a linear classifier by layer: a SweepResult of the statistics "linear.*"."""

    KIND = "linear_probe"
    ALONE = "a linear probe is fitted to its data and does not merge: fit one to all of the data."

    def headline(self) -> str:
        """Returns the layer with the highest accuracy, beside chance and permuted labels."""
        table: Any = self._table("layers")
        wide = table.pivot(index="layer", columns="statistic", values="mean")
        best = wide["accuracy"].idxmax()
        row = wide.loc[best]
        return (
            f"A linear classifier names the class best from Z^{best}: held-out accuracy "
            f"{row['accuracy']:.3f} over {int(table['n'].iloc[0])} samples, {row['permuted']:.3f} "
            f"with permuted labels, {row['chance']:.3f} by the commonest class."
        )


@with_weights
def linear_probe(
    model: HookedModel,
    data: Data,
    *,
    labels: Sequence[Any] | None = None,
    pool: str | None = None,
    test: float = 0.25,
    seed: int = 0,
    batch_size: int = 32,
    limit: int | None = None,
    progress: bool = True,
) -> LinearProbeResult:
    """Fits a linear classifier to Z^l for l = 0 to n_layers and reports its held-out accuracy.

    The statistics are `linear.accuracy`, `linear.permuted` and `linear.chance`, by layer. The
    classifier is scikit-learn's logistic regression (l2, C = 1) on standardised features of one
    token per sample. pool: "cls", "mean" (over tokens) or "last"; None is "cls" if there is one,
    else "last". labels: one per sample; None takes those of the data. The split is stratified and
    the same for every layer, and equal samples lie on one side of it. Means and scales are those of
    the training part. Permuted: the same with labels permuted among samples. It is at chance by
    construction, because a held-out sample shares nothing with the training part: it shows the
    noise of the accuracy and not what the classifier could learn by heart. Features are streamed: n
    x d_model numbers per layer are kept. `result.samples()` has 1 or 0 for held-out samples and NaN
    for the others; std and n are over held-out samples.

    Raises ValueError if labels are missing, if there are fewer than two classes, or if a class has
    too few samples to split.
    """
    checks.count("batch_size", batch_size)
    seed = checks.count("seed", seed, least=0)
    check_model(model)
    wanted = pool or ("cls" if model.has_cls else "last")
    if wanted not in _POOLS or (wanted == "cls" and not model.has_cls):
        raise ValueError(
            f"pool={pool!r}: give one of {', '.join(_POOLS)}; 'cls' needs a model with a CLS token."
        )
    samples = samples_of(model, data, limit)
    classes = _classes(samples.labels if labels is None else list(labels), samples.n)
    started = time.perf_counter()
    features, groups = _features(model, samples, batch_size, wanted, progress)
    train, held = _split(classes, groups, test, seed)
    shuffled = np.random.default_rng(seed).permutation(classes)
    columns: dict[str, list[np.ndarray]] = {"accuracy": [], "permuted": []}
    for layer in tqdm(features, desc="linear probes", unit="layer", disable=not progress):
        columns["accuracy"].append(_right(layer, classes, train, held))
        columns["permuted"].append(_right(layer, shuffled, train, held))
    commonest = np.bincount(classes[train]).argmax()
    columns["chance"] = [(classes[held] == commonest).astype(float)] * len(features)
    settings = {"pool": wanted, "test": test, "seed": seed, "C": 1.0}
    meta = data_meta(model, samples, batch_size) | {
        "seconds": round(time.perf_counter() - started, 3),
        "statistics": _STATISTICS,
        "probes": {"linear": {"points": ["hook_resid_pre"], "settings": settings}},
        "blocks": "blocks",
        "counts": {},
    }
    return LinearProbeResult(_tables(columns, held, samples), meta)


def _classes(labels: Any, n: int) -> np.ndarray:
    if labels is None:
        raise ValueError(
            "a linear probe needs labels: the data has none, give labels=[...], one per sample."
        )
    if None in labels[:n]:
        raise ValueError(
            f"sample {labels.index(None)} has no label: leave out the samples without one."
        )
    if len(labels) < n:
        raise ValueError(f"there are {len(labels)} labels for {n} samples: give one per sample.")
    names, classes = np.unique(np.array([str(label) for label in labels[:n]]), return_inverse=True)
    if len(names) < 2:
        raise ValueError(
            f"all {n} samples have the label {str(names[0])!r}: there is nothing to classify."
        )
    return classes


def _features(
    model: HookedModel, samples: Samples, batch_size: int, pool: str, progress: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns Z^l of a token per sample, `[n, d_model]` for each l, and groups of equal samples."""
    options: dict[str, Any] = dict(batch_size=batch_size, what="features", progress=progress)
    kept, digests = fold(model, samples, partial(_of_chunk, pool=pool), _joined, **options)
    features = [torch.cat(parts).numpy() for parts in kept]
    for layer, values in enumerate(features):
        if not np.isfinite(values).all():
            raise ValueError(
                f"the stream of layer {layer} holds NaN or Inf: nothing can be learned from it."
            )
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    return features, np.array([numbers[digest] for digest in digests])


def _of_chunk(chunk: Chunk, pool: str) -> Features:
    count = len(chunk.model.blocks)
    kept: list[list[Tensor]] = [[] for _ in range(count + 1)]
    digests: list[str] = []

    def pooled(z: Tensor) -> Tensor:
        token = z[:, 0] if pool == "cls" else z[:, -1] if pool == "last" else z.mean(dim=1)
        return token.float().cpu()

    def before(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        kept[layer].append(pooled(acts["hook_resid_pre"]))

    def after(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        kept[count].append(pooled(acts["hook_resid_post"]))

    readings = [Reading("hook_resid_pre", before), Reading("hook_resid_post", after, [count - 1])]
    for batch in chunk.batches():
        for sample in batch.inputs.cpu():
            values = sample.contiguous().view(torch.uint8).numpy().data
            digests.append(hashlib.sha256(values).hexdigest())
        chunk.measure(batch, readings)
    return kept, digests


def _joined(mine: Features, theirs: Features) -> Features:
    kept = [[*one, *two] for one, two in zip(mine[0], theirs[0], strict=True)]
    return kept, [*mine[1], *theirs[1]]


def _split(
    classes: np.ndarray, groups: np.ndarray, test: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.model_selection import StratifiedGroupKFold

    if not checks.is_number(test) or not 0 < test <= 0.5:
        raise ValueError(f"test={test}: give a share above 0 and at most 0.5.")
    folds = max(2, round(1 / test))
    least = min(len(set(groups[classes == kind])) for kind in np.unique(classes))
    if least < folds:
        raise ValueError(
            f"a class has {least} different samples, and each of the {folds} parts needs one: "
            "give more data."
        )
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    return next(iter(splitter.split(classes, classes, groups)))


def _right(
    features: np.ndarray, classes: np.ndarray, train: np.ndarray, held: np.ndarray
) -> np.ndarray:
    """Returns 1 for each held-out sample that is classified rightly, 0 for the others."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # there is nothing to converge to in permuted labels
        probe.fit(features[train], classes[train])
    return (probe.predict(features[held]) == classes[held]).astype(float)


def _tables(columns: dict[str, list[np.ndarray]], held: np.ndarray, samples: Samples) -> dict:
    """Returns a sweep's tables; samples are right (1), wrong (0) or not held out (NaN)."""
    tally = Tally(samples.n, samples.start)
    for name, layers in columns.items():
        for layer, right in enumerate(layers):
            values = np.full(samples.n, np.nan)
            values[held] = right
            tally.samples["linear", name, layer] = values
    return tables_of(tally, samples.labels, len(columns["accuracy"]))
