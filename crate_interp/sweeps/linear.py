"""ci.linear_probe: what a linear classifier reads from each layer, beside control labels and chance."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import read
from crate_interp.probes.shared import has_cls
from crate_interp.sweeps.provenance import sweep_meta
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.stream import batches, check_batch_size, check_model, run, samples_of

_STATISTICS = {
    "linear.accuracy": ["share right", 0.0, 1.0, "Held-out accuracy of logistic regression on the layer's stream."],
    "linear.control": ["share right", 0.0, 1.0, "The same with labels permuted among samples: nothing is there to learn but by heart."],
    "linear.chance": ["share right", 0.0, 1.0, "Held-out accuracy of always naming the commonest class of the training part."],
}  # fmt: skip
_POOLS = ("cls", "mean", "last")


def linear_probe(
    model: Any,
    data: Any,
    *,
    labels: Sequence[Any] | None = None,
    pool: str | None = None,
    test: float = 0.25,
    seed: int = 0,
    batch_size: int = 32,
    limit: int | None = None,
    progress: bool = True,
) -> SweepResult:
    """The accuracy of a linear classifier on Z^l, l = 0 to n_layers, as `linear.accuracy`, `.control` and `.chance` by layer.

    scikit-learn's logistic regression (l2, C = 1) on standardised features of one token per sample. pool: "cls", "mean" (over
    tokens) or "last"; None is "cls" where there is one and "last" elsewhere. labels: one per sample; None takes the data's
    own. The split is stratified and the same for every layer, and equal samples are on one side of it; means and scales
    are those of the training part. Control: the same with labels permuted among samples (Hewitt and Liang 2019). Features
    are streamed: n x d_model numbers per layer are kept. `result.samples()` has 1 or 0 for held-out samples, NaN for the
    others; std and n are over held-out samples.

    Raises ValueError for missing labels, fewer than two classes, and too few samples of a class to split.
    """
    check_batch_size(batch_size)
    check_model(model)
    wanted = pool or ("cls" if has_cls(model.blocks[0]) else "last")
    if wanted not in _POOLS or (wanted == "cls" and not has_cls(model.blocks[0])):
        raise ValueError(
            f"pool={pool!r}: give one of {', '.join(_POOLS)}; 'cls' where the model has a CLS token."
        )
    samples = samples_of(model, data, limit)
    classes = _classes(samples.labels if labels is None else list(labels), samples.n)
    started = time.perf_counter()
    features, groups = _features(model, samples, batch_size, wanted, progress)
    train, held = _split(classes, groups, test, seed)
    shuffled = np.random.default_rng(seed).permutation(classes)
    columns = {"accuracy": [], "control": []}
    for layer in tqdm(features, desc="linear probes", unit="layer", disable=not progress):
        columns["accuracy"].append(_right(layer, classes, train, held))
        columns["control"].append(_right(layer, shuffled, train, held))
    commonest = np.bincount(classes[train]).argmax()
    columns["chance"] = [(classes[held] == commonest).astype(float)] * len(features)
    meta = sweep_meta(model, [], samples, batch_size, time.perf_counter() - started) | {
        "statistics": _STATISTICS,
        "probes": {"linear": {"points": ["hook_resid_pre"], "settings": {"pool": wanted, "test": test, "seed": seed, "C": 1.0}}},
        "blocks": "blocks",
        "counts": {},
    }  # fmt: skip
    return _result(columns, held, samples, meta)


def _classes(labels: Any, n: int) -> np.ndarray:
    if labels is None:
        raise ValueError(
            "a linear probe needs labels: the data has none, give labels=[...], one per sample."
        )
    if len(labels) < n:
        raise ValueError(f"there are {len(labels)} labels for {n} samples: give one per sample.")
    names, classes = np.unique(np.array([str(label) for label in labels[:n]]), return_inverse=True)
    if len(names) < 2:
        raise ValueError(
            f"all {n} samples have the label {str(names[0])!r}: there is nothing to tell apart."
        )
    return classes


def _features(
    model: Any, samples: Any, batch_size: int, pool: str, progress: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Z^l of one token per sample, `[n, d_model]` for each l, and which samples are equal."""
    count = len(model.blocks)
    kept: list[list[Tensor]] = [[] for _ in range(count + 1)]
    seen: dict[str, int] = {}
    groups: list[int] = []

    def pooled(z: Tensor) -> Tensor:
        return (
            (z[:, 0] if pool == "cls" else z[:, -1] if pool == "last" else z.mean(dim=1))
            .float()
            .cpu()
        )

    def before(layer: int, acts: dict[str, Tensor]) -> None:
        kept[layer].append(pooled(acts["hook_resid_pre"]))

    def after(layer: int, acts: dict[str, Tensor]) -> None:
        kept[count].append(pooled(acts["hook_resid_post"]))

    with (
        torch.no_grad(),
        read(model, "hook_resid_pre", before),
        read(model, "hook_resid_post", after, layers=[count - 1]),
    ):
        for _, batch in batches(model, samples, batch_size, "features", progress):
            for sample in batch.cpu():
                digest = hashlib.sha256(
                    sample.contiguous().view(torch.uint8).numpy().data
                ).hexdigest()
                groups.append(seen.setdefault(digest, len(seen)))
            run(model, batch)
    features = [torch.cat(parts).numpy() for parts in kept]
    for layer, values in enumerate(features):
        if not np.isfinite(values).all():
            raise ValueError(
                f"the stream of layer {layer} holds NaN or Inf: nothing can be learned from it."
            )
    return features, np.array(groups)


def _split(
    classes: np.ndarray, groups: np.ndarray, test: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.model_selection import StratifiedGroupKFold

    if not 0 < test <= 0.5:
        raise ValueError(f"test={test}: give a share above 0 and at most 0.5.")
    folds = max(2, round(1 / test))
    least = min(len(set(groups[classes == kind])) for kind in np.unique(classes))
    if least < folds:
        raise ValueError(
            f"a class has {least} different samples, and each part of {folds} needs one: give more data."
        )
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    return next(iter(splitter.split(classes, classes, groups)))


def _right(
    features: np.ndarray, classes: np.ndarray, train: np.ndarray, held: np.ndarray
) -> np.ndarray:
    """1 where a held-out sample is told right, 0 where not."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # of control labels: nothing is there to converge to
        probe.fit(features[train], classes[train])
    return (probe.predict(features[held]) == classes[held]).astype(float)


def _result(
    columns: dict[str, list[np.ndarray]], held: np.ndarray, samples: Any, meta: dict[str, Any]
) -> SweepResult:
    count = len(columns["accuracy"])
    table = {
        "sample": np.repeat(np.arange(samples.n), count),
        "label": [label for label in (samples.labels or [None] * samples.n) for _ in range(count)],
        "layer": np.tile(np.arange(count), samples.n),
    }
    rows: list[tuple] = []
    for name, layers in columns.items():
        wide = np.full((samples.n, count), np.nan)
        for layer, right in enumerate(layers):
            wide[held, layer] = right
            rows.append(("linear", name, layer, right.mean(), right.std(ddof=1), len(right)))
        table[f"linear.{name}"] = wide.reshape(-1)
    layer_table = pd.DataFrame(rows, columns=["probe", "statistic", "layer", "mean", "std", "n"])
    heads = pd.DataFrame(
        {name: [] for name in ["probe", "statistic", "layer", "head", "mean", "std", "n"]}
    )
    return SweepResult(pd.DataFrame(table).infer_objects(), layer_table, heads, meta)
