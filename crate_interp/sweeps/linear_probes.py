"""ci.linear_probe: what a linear classifier reads from each layer, compared with chance."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.core.run_options import Run, RunOptions, run_options, tqdm
from crate_interp.data import Data, Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.probes import LINEAR, LINEAR_STATISTICS
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Forward, Reading, last_point, run_layers
from crate_interp.questions.experiment import Opened, Pass, Plan, Question, Rules, Tables
from crate_interp.questions.provenance import digest_of_labels
from crate_interp.results import sample_ranges
from crate_interp.results.result import by
from crate_interp.sweeps.result import LinearProbeResult
from crate_interp.sweeps.store_reading import Replay, input_digests, opened
from crate_interp.sweeps.sweep_tables import Tally, tables_of

Chosen = Bool[np.ndarray, "sample"]  # samples
POOLS = ("cls", "mean", "last")
_ROWS = 256  # rows of features that are converted to float64 at once


@with_weights
def linear_probe(
    model: HookedModel,
    data: Data,
    *,
    labels: Sequence[Any] | None = None,
    pool: str | None = None,
    test: float = 0.25,
    seed: int = 0,
    **run: Unpack[Run],
) -> Perhaps[LinearProbeResult]:
    """Fits a linear classifier to Z^l for l = 0 to n_layers and reports its held-out accuracy.

    The statistics are `linear.accuracy`, `linear.permuted`, `linear.input` and `linear.chance`. The
    classifier is scikit-learn's logistic regression (l2, C = 1) on standardised features of one
    token per sample. The split is stratified and the same for every layer, and keeps equal samples
    and groups together. Means and scales come from the training part.

    `linear.input` is the accuracy of the same classifier, with the same split, on the input alone,
    in at most d_model features: means of colours over a grid, or tokens (`input_features`). A layer
    shows what the network adds only if it is more accurate. A probe of a store has no such level.

    `linear.permuted` is the accuracy if labels are permuted among samples. This accuracy is at
    chance by construction, because a held-out sample shares nothing with the training part; so it
    shows the noise of the accuracy, not what the classifier could memorise. `result.samples()` has
    1 (right) or 0 (wrong) for held-out samples, and NaN for other samples; std and n are over
    held-out samples.

    The features are kept: n x (n_layers + 2) x d_model numbers in float32. The process that finds
    all chunks finished fits the classifiers, and needs memory for all features.

    Args:
        model: A hooked model.
        data: As in `ci.sweep`; it may be a store.
        labels: One per sample. Default: the labels of the data.
        pool: "cls", "mean" (over tokens) or "last". Default: "cls" if the model has a CLS token,
            else "last" for texts and "mean" for images.
        test: The share of samples that are held out, above 0 and at most 0.5.
        seed: The seed of the split and of the permuted labels.
        run: As in `ci.sweep`.

    Returns:
        The accuracies by layer; None while chunks of other shards are missing.

    Raises:
        ValueError: If labels are missing, if there are fewer than two classes, or if a class has
            too few samples to split.
    """
    return ask(LinearProbe(pool, test, seed, labels), model, data, run_options(linear_probe, run))


@dataclass(frozen=True)
class LinearProbe(Question):
    """Fits a linear probe. classes: one per sample. forward: that of a store or of the model."""

    pool: str | None
    test: float
    seed: int
    labels: Sequence[Any] | None = field(default=None, repr=False)
    classes: Sequence[Any] = field(default=(), repr=False)
    forward: Forward = field(default=run_layers, repr=False)
    result = LinearProbeResult

    def opened(self, model: HookedModel, data: Data, options: RunOptions) -> Opened:
        """Opens the data, and fills in what model and samples decide."""
        checks.count("seed", self.seed, least=0)
        if not checks.is_number(self.test) or not 0 < self.test <= 0.5:
            raise ValueError(f"test={self.test}: give a share above 0 and at most 0.5.")
        usual = "last" if model.cfg.kind == "text" else "mean"
        pool = self.pool or ("cls" if model.has_cls else usual)
        if pool not in POOLS or (pool == "cls" and not model.has_cls):
            known = f"{', '.join(POOLS)}; 'cls' needs a model with a CLS token"
            raise ValueError(f"pool={pool!r}: give one of {known}.")
        samples, forward = opened(model, data, options)
        assert isinstance(samples, Samples)  # streams are for ci.sweep only
        if isinstance(forward, Replay):
            points = [full_name("hook_resid_pre", layer) for layer in range(len(model.blocks))]
            forward.check_points([*points, last_point(model)])
        given = samples.labels if self.labels is None else self.labels
        classes = _classes(given, samples.n, _folds(self.test))
        return replace(self, pool=pool, classes=classes, forward=forward), samples

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        store = self.forward if isinstance(self.forward, Replay) else None
        settings = super().facts(model)["settings"] | {"C": 1.0}
        names = [name for name in LINEAR_STATISTICS if name != "input" or store is None]
        statistics = {f"{LINEAR}.{name}": list(LINEAR_STATISTICS[name].facts) for name in names}
        probes = {LINEAR: {"points": ["hook_resid_pre"], "settings": settings}}
        facts = {"statistics": statistics, "probes": probes, "blocks": "blocks"}
        return facts | (store.meta if store else {})

    def read(self) -> Mapping[str, object]:
        """Returns what else the numbers depend on, by name."""
        return {"labels": digest_of_labels(self.classes)}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        measure = partial(_pooled, question=self, first=run.samples.start)
        rules: Rules = {"samples": by("sample"), "features": by("sample")}
        found = yield Pass("features", measure, rules, forward=self.forward)
        return partial(_fit_all, found, run.facts_of("features"), run.options.progress)


def _pooled(chunk: Chunk, question: LinearProbe, first: int) -> Tables:
    """Returns the tables "samples" and "features" of a chunk.

    Columns of samples: sample, label (from the data), named (the class), digest (of the input). The
    first class of the question belongs to sample number `first`. features has one array per chunk,
    since small arrays kept from every batch would fragment the memory. Its columns: sample (the
    number of the first sample), n (the number of samples), values (the bytes of
    `[n, n_layers + 2, d_model]` in float32: Z^l of one token, then `input_features`, which stay 0
    for a store of activations).

    Raises ValueError, with the layer and the samples, if the stream holds NaN or Inf.
    """
    labels, begin, pool = chunk.samples.labels, chunk.samples.start, str(question.pool)
    shape = (chunk.samples.n, len(chunk.model.blocks) + 2, chunk.model.cfg.d_model)
    values = np.zeros(shape, dtype=np.float32)
    rows: list[tuple[int, Any, str, int]] = []

    def keep(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        ((point, z),) = acts.items()
        layer += point == "hook_resid_post"  # hook_resid_post of the last layer is Z^L
        token = z[:, 0] if pool == "cls" else z[:, -1] if pool == "last" else z.mean(dim=1)
        own = values[len(rows) : len(rows) + len(z), layer]
        own[:] = token.float().cpu().numpy()
        if not np.isfinite(own).all():
            where = f"in samples {batch.start} to {batch.last}"
            raise ValueError(f"the stream of layer {layer} holds NaN or Inf {where}.")

    last = [len(chunk.model.blocks) - 1]
    readings = [Reading("hook_resid_pre", keep), Reading("hook_resid_post", keep, last)]
    for batch in chunk.batches():
        chunk.measure(batch, readings)
        if not isinstance(chunk.forward, Replay):
            alone = input_features(batch.inputs, pool, shape[2]).cpu().numpy()
            values[len(rows) : len(rows) + len(alone), -1, : alone.shape[1]] = alone
        digests = input_digests(chunk.forward, batch.inputs)
        for number, digest in enumerate(digests, start=batch.start):
            label = None if labels is None else labels[number - begin]
            # of a million samples, two have the same first 64 bits with a probability of 3e-8
            bits = int.from_bytes(bytes.fromhex(digest)[:8], signed=True)
            rows.append((number, label, question.classes[number - first], bits))
    first_row = rows[0][0] if rows else begin  # the first sample that was not left out
    features = [(first_row, len(rows), values[: len(rows)].tobytes())]
    return {
        "samples": pd.DataFrame(rows, columns=["sample", "label", "named", "digest"]),
        "features": pd.DataFrame(features, columns=["sample", "n", "values"]),
    }


def input_features(
    inputs: Shaped[Tensor, "batch ..."], pool: str, width: int
) -> Float[Tensor, "batch feature"]:
    """Returns at most `width` features of the model's input, without the network.

    Images `[batch, channels, height, width]`: the means of colours over the largest square grid
    that fits. Token ids `[batch, pos]`: the last token with pool "last", else how often each token
    occurs; ids that are equal modulo `width` share a feature.
    """
    if inputs.is_floating_point():
        side = max(1, math.isqrt(width // inputs.shape[1]))
        grid = (min(side, inputs.shape[2]), min(side, inputs.shape[3]))
        return torch.nn.functional.adaptive_avg_pool2d(inputs.float(), grid).flatten(1)[:, :width]
    ids = inputs[:, -1:] if pool == "last" else inputs
    return torch.nn.functional.one_hot(ids.long() % width, width).float().mean(dim=1)


def _by_layer(
    table: pd.DataFrame, n_layers: int, width: int, first: Chosen
) -> list[Float[np.ndarray, "sample d_model"]]:
    """Returns the features of each layer from the table "features", then those of the input.

    The samples marked in `first` come before the other samples. Values are removed from the table
    chunk by chunk as they are copied, so that memory never holds both copies in full.
    """
    chunks = table.pop("values").tolist()[::-1]
    place = np.empty(len(first), dtype=np.int64)  # the row of each sample
    place[np.argsort(~first, kind="stable")] = np.arange(len(first))
    layers: list[np.ndarray] = []
    start = 0
    for count in table["n"]:
        values = np.frombuffer(chunks.pop(), dtype=np.float32).reshape(count, n_layers + 2, width)
        if not layers:
            shape = (len(first), width)
            # allocated by torch, since NumPy would take huge pages wherever rows are written
            layers = [torch.empty(shape, dtype=torch.float32).numpy() for _ in range(n_layers + 2)]
        for layer, rows in enumerate(layers):
            rows[place[start : start + count]] = values[:, layer]
        start += count
    return layers


def _fit_all(stored: Tables, meta: Mapping[str, Any], progress: bool) -> Tables:
    """Returns a sweep's tables: a sample is right (1), wrong (0) or not held out (NaN)."""
    table = stored.pop("features")  # removed, so that its memory can be freed
    samples: Any = stored["samples"]
    settings = meta["probes"]["linear"]["settings"]
    classes = np.unique(np.array(samples["named"].tolist()), return_inverse=True)[1]
    groups = _together(samples, sample_ranges.groups_of(meta["data"]))
    train = _split(classes, groups, settings["test"], settings["seed"])
    features = _by_layer(table, meta["n_layers"], meta["config"]["d_model"], train)
    alone = features.pop()
    shuffled = np.random.default_rng(settings["seed"]).permutation(classes)
    tally, layers = Tally(len(samples)), range(meta["n_layers"] + 1)

    def keep(name: str, layer: int, right: Shaped[np.ndarray, "held"]) -> None:
        values = np.full(len(samples), np.nan)
        values[~train] = right
        tally.samples["linear", name, layer] = values

    for layer in tqdm(layers, desc="linear probes", unit="layer", disable=not progress):
        accuracy, permuted = _right(features.pop(0), train, (classes, shuffled))
        keep("accuracy", layer, accuracy)
        keep("permuted", layer, permuted)
    same = {"chance": classes[~train] == np.bincount(classes[train]).argmax()}
    if f"{LINEAR}.input" in meta["statistics"]:
        same = {"input": _right(alone, train, [classes])[0], **same}
    for name, right in same.items():
        for layer in layers:
            keep(name, layer, right)
    tables = tables_of(tally, samples["label"].tolist(), len(layers))
    numbers = np.repeat(samples["sample"].to_numpy(), len(layers))
    return {**tables, "samples": tables["samples"].assign(sample=numbers)}


def _classes(labels: Any, n: int, folds: int) -> list[str]:
    """Returns the label of each sample as a text."""
    if labels is None:
        raise ValueError("a linear probe needs labels, one per sample: give labels=[...].")
    labels = list(labels)
    if len(labels) < n or None in labels[:n]:
        count = len(labels) - labels.count(None)
        raise ValueError(f"there are {count} labels for {n} samples. Give one label per sample.")
    classes = [str(label) for label in labels[:n]]
    if len(set(classes)) < 2:
        raise ValueError(f"all {n} samples have the label {classes[0]!r}: give two classes.")
    _check_least(min(Counter(classes).values()), folds)
    return classes


def _together(samples: Any, pairs: Int[np.ndarray, "n 2"] | None) -> Int[np.ndarray, "sample"]:
    """Returns the same number for samples that are equal, and for samples of a group."""
    equal = samples["digest"].factorize()[0]
    if pairs is None:
        return equal
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    group = pd.Series(pairs[:, 1], pairs[:, 0]).loc[samples["sample"]].to_numpy()
    size = max(equal.max(), group.max()) + 1
    links = coo_array((np.ones(len(equal)), (equal, size + group)), shape=(2 * size, 2 * size))
    return connected_components(links, directed=False)[1][equal]


def _split(classes: np.ndarray, groups: np.ndarray, test: float, seed: int) -> Chosen:
    """Returns which samples are in the training part; equal samples, a group, are on one side."""
    from sklearn.model_selection import StratifiedGroupKFold

    least = min(len(set(groups[classes == kind])) for kind in np.unique(classes))
    _check_least(least, _folds(test))
    splitter = StratifiedGroupKFold(_folds(test), shuffle=True, random_state=seed)
    train = np.zeros(len(classes), dtype=bool)
    train[next(iter(splitter.split(classes, classes, groups)))[0]] = True
    return train


def _folds(test: float) -> int:
    return max(2, round(1 / test))


def _check_least(least: int, folds: int) -> None:
    """Raises ValueError for a smallest class with fewer different samples than folds."""
    if least < folds:
        raise ValueError(f"the smallest class has {least} different samples: give {folds} or more.")


def _right(
    features: Float[np.ndarray, "sample d_model"],
    train: Chosen,
    answers: Sequence[Int[np.ndarray, "sample"]],
) -> list[Bool[np.ndarray, "held"]]:
    """Fits a classifier for each array in `answers`; returns which held-out samples it names right.

    features: the training part comes first; the features are standardised in place.
    """
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    count, found = int(train.sum()), []
    # scikit-learn's scaler is not used, because it would make float64 copies of all rows
    origin = features[0].astype(float)
    total, squares = np.zeros_like(origin), np.zeros_like(origin)
    for start in range(0, count, _ROWS):
        rows = features[start : min(start + _ROWS, count)]
        moved = rows - origin  # exactly 0 for a constant column
        total, squares = total + moved.sum(axis=0), squares + (moved**2).sum(axis=0)
    off = total / count
    scale = np.sqrt(np.maximum(squares / count - off**2, 0))
    features -= origin + off
    features /= np.where(scale == 0, 1, scale)
    for wanted in answers:
        with warnings.catch_warnings():
            # with permuted labels, the classifier has nothing to converge to
            warnings.simplefilter("ignore", ConvergenceWarning)
            probe = LogisticRegression(max_iter=1000).fit(features[:count], wanted[train])
        found.append(probe.predict(features[count:]) == wanted[~train])
    return found
