"""ci.linear_probe: what a linear classifier reads from each layer, compared with chance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.core.progress import tqdm
from crate_interp.core.run_options import Run, RunOptions, run_options
from crate_interp.data import Data, Samples
from crate_interp.models.compat.offload import with_weights
from crate_interp.models.hooked import HookedModel
from crate_interp.probes.built_in import LINEAR, LINEAR_STATISTICS
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Forward, run_layers
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.questions.provenance import digest_of_labels
from crate_interp.results import sample_ranges
from crate_interp.stats.contrasts import by_group, paired
from crate_interp.stats.intervals import paired_shares, share_interval
from crate_interp.sweeps.linear_features import POOLED, by_layer, pooled
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.store_reading import Replay, opened
from crate_interp.sweeps.sweep_tables import Tally, tables_of

POOLS = ("cls", "mean", "last")
_ROWS = 256  # rows of features that are converted to float64 at once


class LinearProbeResult(SweepResult):
    """The accuracy of a linear classifier by layer: a SweepResult of the statistics "linear.*"."""

    KIND = "linear_probe"
    ALONE = "a linear probe is fitted to its data and does not merge: fit one to all of the data."

    def mean_ends(self, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the 95 % interval of each row of `layers()`.

        The interval is that of a share, because each mean is a share of samples; over groups, if
        samples are not independent, it is Student's t.
        """
        if self.independent[1] != self.meta["unit"]:
            low, high = super().mean_ends(rows)
            return low.clip(0, 1), high.clip(0, 1)
        n = rows["n"].to_numpy()
        return share_interval(rows["mean"].to_numpy(float) * n, n)

    def finding(self) -> str:
        """Returns a sentence on the layer of highest accuracy, with the input alone and chance.

        The difference to the input alone has an interval over held-out samples (`paired_shares`),
        with the layer fixed. A store of activations has no input.
        """
        table: Any = self._table("layers")
        wide = table.pivot(index="layer", columns="statistic", values="mean")
        best = int(wide["accuracy"].idxmax())
        row = wide.loc[best]
        return (
            f"A linear classifier names the class best from Z^{best}: held-out accuracy "
            f"{row['accuracy']:.3f} over {int(table['n'].iloc[0])} samples, "
            f"{self._beside_input(best) if 'input' in row else ''}{row['permuted']:.3f} "
            f"with permuted labels, {row['chance']:.3f} by the commonest class."
        )

    def _beside_input(self, layer: int) -> str:
        """Returns the accuracy from the input alone and the difference of a layer to it."""
        samples: Any = self._table("samples")
        held = samples[(samples["layer"] == layer) & samples["linear.input"].notna()]
        alone = held["linear.input"].to_numpy()
        better = (held["linear.accuracy"].to_numpy() - alone)[:, None]
        groups = self.groups_at(held["sample"])
        more = paired_shares(better) if groups is None else paired(by_group(better, groups))
        what = "pixels" if self.meta["unit"] == "images" else "token ids"
        ends = self.interval_words(more.low[0], more.high[0], form="+.3f", before="")
        return f"{alone.mean():.3f} from {what} alone (difference {more.value[0]:+.3f}, {ends}), "


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
    token per sample. pool: "cls", "mean" (over tokens) or "last"; None means "cls" if the model has
    a CLS token, else "last" for texts and "mean" for images. labels: one per sample; None takes the
    labels of the data. The split is stratified and the same for every layer, and keeps equal
    samples and groups together. Means and scales come from the training part.

    `linear.input` is the accuracy of the same classifier, with the same split, on the input alone,
    in at most d_model features: means of colours over a grid, or tokens (`input_features`). A layer
    shows what the network adds only if it is more accurate. A probe of a store has no such level.

    `linear.permuted` is the accuracy if labels are permuted among samples. It is at chance by
    construction, because a held-out sample shares nothing with the training part; so it shows the
    noise of the accuracy, not what the classifier could memorise. `result.samples()` has 1 (right)
    or 0 (wrong) for held-out samples, and NaN for other samples; std and n are over held-out
    samples.

    run: as in `ci.sweep`. The features are kept: n x (n_layers + 2) x d_model numbers in float32.
    The process that finds all chunks finished fits the classifiers, and needs memory for all
    features. data may be a store, as in `ci.sweep`.

    Raises ValueError if labels are missing, if there are fewer than two classes, or if a class has
    too few samples to split.
    """
    question = LinearProbe(pool, test, seed, labels)
    return ask(question, model, data, run_options(linear_probe, run))


@dataclass(frozen=True)
class LinearProbe(Question):
    """The question of `linear_probe`. classes: of samples. forward: a store's, or the model's."""

    pool: str | None
    test: float
    seed: int
    labels: Sequence[Any] | None = field(default=None, repr=False)
    classes: Sequence[Any] = field(default=(), repr=False)
    forward: Forward = field(default=run_layers, repr=False)
    result = LinearProbeResult

    def opened(
        self, model: HookedModel, data: Data, options: RunOptions
    ) -> tuple["LinearProbe", Samples]:
        """Opens the data, and fills in what model and samples decide."""
        checks.count("seed", self.seed, least=0)
        if not checks.is_number(self.test) or not 0 < self.test <= 0.5:
            raise ValueError(f"test={self.test}: give a share above 0 and at most 0.5.")
        pool = _pool(model, self.pool)
        samples, forward = _samples(model, data, options)
        given = samples.labels if self.labels is None else self.labels
        classes = _classes(given, samples.n, _folds(self.test))
        return replace(self, pool=pool, classes=classes, forward=forward), samples

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        store = self.forward if isinstance(self.forward, Replay) else None
        settings = super().facts(model)["settings"] | {"C": 1.0}
        facts = {
            "statistics": {
                f"{LINEAR}.{name}": list(record.facts)
                for name, record in LINEAR_STATISTICS.items()
                if name != "input" or store is None
            },
            "probes": {LINEAR: {"points": ["hook_resid_pre"], "settings": settings}},
            "blocks": "blocks",
        }
        return facts | (store.meta if store else {})

    def read(self) -> Mapping[str, object]:
        """Returns what else the numbers depend on, by name."""
        return {"labels": digest_of_labels(self.classes)}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        measure = partial(
            pooled, pool=str(self.pool), classes=self.classes, first=run.samples.start
        )
        found = yield Pass("features", measure, POOLED, forward=self.forward)
        return partial(_fit_all, found, run.facts_of("features"), run.options.progress)


def _samples(model: HookedModel, data: Data, options: RunOptions) -> tuple[Samples, Forward]:
    """Returns the samples and the forward for them; a store must hold the residual stream."""
    samples, forward = opened(model, data, options)
    assert isinstance(samples, Samples)  # streams are for ci.sweep only
    if isinstance(forward, Replay):
        count = len(model.blocks)
        names = [full_name("hook_resid_pre", layer) for layer in range(count)]
        forward.check_points([*names, full_name("hook_resid_post", count - 1)])
    return samples, forward


def _fit_all(own: Tables, meta: Mapping[str, Any], progress: bool) -> Tables:
    """Returns the tables of the result: fits a classifier in each layer."""
    table = own.pop("features")  # removed, so that its memory can be freed
    samples: Any = own["samples"]
    settings = meta["probes"]["linear"]["settings"]
    classes = np.unique(np.array(samples["named"].tolist()), return_inverse=True)[1]
    groups = _together(samples, sample_ranges.groups_of(meta["data"]))
    train = _split(classes, groups, settings["test"], settings["seed"])
    features = by_layer(table, meta["n_layers"], meta["config"]["d_model"], train)
    alone = features.pop()
    shuffled = np.random.default_rng(settings["seed"]).permutation(classes)
    if len(np.unique(shuffled[train])) < 2:
        raise ValueError(
            f"the {len(classes)} samples are too few for a level of chance: dealt out anew, all "
            "labels of the training part are equal. Give more samples, or another seed=."
        )
    layers = range(meta["n_layers"] + 1)
    columns: dict[str, list[np.ndarray]] = {"accuracy": [], "permuted": []}
    for _ in tqdm(layers, desc="linear probes", unit="layer", disable=not progress):
        right = _of_layer(features.pop(0), train, (classes, shuffled))
        for name, values in zip(columns, right, strict=True):
            columns[name].append(values)
    if f"{LINEAR}.input" in meta["statistics"]:
        columns["input"] = _of_layer(alone, train, [classes]) * len(layers)
    commonest = np.bincount(classes[train]).argmax()
    columns["chance"] = [(classes[~train] == commonest).astype(float)] * len(layers)
    return _tables(columns, ~train, samples)


def _pool(model: HookedModel, pool: str | None) -> str:
    wanted = pool or ("cls" if model.has_cls else "last" if model.cfg.kind == "text" else "mean")
    if wanted not in POOLS or (wanted == "cls" and not model.has_cls):
        raise ValueError(
            f"pool={pool!r}: give one of {', '.join(POOLS)}; 'cls' needs a model with a CLS token."
        )
    return wanted


def _classes(labels: Any, n: int, folds: int) -> list[str]:
    """Returns the label of each sample as a text."""
    if labels is None:
        raise ValueError(
            "a linear probe needs labels, and the data has none. Give labels=[...], one per sample."
        )
    labels = list(labels)
    if None in labels[:n]:
        raise ValueError(
            f"sample {labels.index(None)} has no label. Leave out samples without a label."
        )
    if len(labels) < n:
        raise ValueError(
            f"there are {len(labels)} labels for {n} samples. Give one label per sample."
        )
    classes = [str(label) for label in labels[:n]]
    if len(set(classes)) < 2:
        raise ValueError(
            f"all {n} samples have the label {classes[0]!r}: there is nothing to classify."
        )
    _check_least(min(Counter(classes).values()), folds)
    return classes


def _together(samples: Any, known: Int[np.ndarray, "n 2"] | None) -> Int[np.ndarray, "sample"]:
    """Returns the same number for samples that are equal, and for samples of a group."""
    equal = samples["digest"].factorize()[0]
    if known is None:
        return equal
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    group = pd.Series(known[:, 1], known[:, 0]).loc[samples["sample"]].to_numpy()
    size = max(equal.max(), group.max()) + 1
    links = coo_array((np.ones(len(equal)), (equal, size + group)), shape=(2 * size, 2 * size))
    return connected_components(links, directed=False)[1][equal]


def _split(
    classes: np.ndarray, groups: np.ndarray, test: float, seed: int
) -> Bool[np.ndarray, "sample"]:
    """Returns which samples are in the training part; equal samples, a group, are on one side."""
    from sklearn.model_selection import StratifiedGroupKFold

    kinds = np.unique(classes)
    _check_least(min(len(set(groups[classes == kind])) for kind in kinds), _folds(test))
    splitter = StratifiedGroupKFold(_folds(test), shuffle=True, random_state=seed)
    train = np.zeros(len(classes), dtype=bool)
    train[next(iter(splitter.split(classes, classes, groups)))[0]] = True
    if len(np.unique(classes[train])) < len(kinds):
        raise ValueError(
            f"the {len(classes)} samples are only {len(set(groups))} different ones, and equal "
            "samples stay together, so the training part has no sample of some class. Give more "
            "different samples."
        )
    return train


def _folds(test: float) -> int:
    return max(2, round(1 / test))


def _check_least(least: int, folds: int) -> None:
    """Raises ValueError for a smallest class with fewer different samples than folds."""
    if least < folds:
        raise ValueError(
            f"the smallest class has {least} different samples, but the split needs at least "
            f"{folds}. Give more data."
        )


def _of_layer(
    features: Float[np.ndarray, "sample d_model"],
    train: Bool[np.ndarray, "sample"],
    answers: Sequence[Int[np.ndarray, "sample"]],
) -> list[Float[np.ndarray, "held"]]:
    """Fits a classifier for each array in `answers`, and returns an array for each classifier.

    A returned array has a number per held-out sample: 1 if the sample is classified correctly, else
    0. features: the training part comes first; the features are standardised in place.
    """
    count = int(train.sum())
    middle, scale = _scaling(features[:count])
    features -= middle
    features /= scale
    probes = [_fitted(features[:count], wanted[train]) for wanted in answers]
    pairs = zip(probes, answers, strict=True)
    return [
        (probe.predict(features[count:]) == wanted[~train]).astype(float) for probe, wanted in pairs
    ]


def _scaling(
    values: Float[np.ndarray, "row d_model"],
) -> tuple[Float[np.ndarray, "d_model"], Float[np.ndarray, "d_model"]]:
    """Returns the means and the standard deviations of the columns.

    The standard deviation is given as 1 for a constant column. scikit-learn's scaler is not used,
    because it would make float64 copies of all rows.
    """
    origin = values[0].astype(float)
    total, squares = np.zeros_like(origin), np.zeros_like(origin)
    for start in range(0, len(values), _ROWS):
        moved = values[start : start + _ROWS] - origin  # exactly 0 for a constant column
        total, squares = total + moved.sum(axis=0), squares + (moved**2).sum(axis=0)
    off = total / len(values)
    scale = np.sqrt(np.maximum(squares / len(values) - off**2, 0))
    return origin + off, np.where(scale == 0, 1, scale)


def _fitted(features: Float[np.ndarray, "row d_model"], classes: Int[np.ndarray, "row"]) -> Any:
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        # with permuted labels, the classifier has nothing to converge to
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LogisticRegression(max_iter=1000).fit(features, classes)


def _tables(
    columns: dict[str, list[np.ndarray]], held: Bool[np.ndarray, "sample"], samples: pd.DataFrame
) -> Tables:
    """Returns a sweep's tables, in which a sample is right (1), wrong (0) or not held out (NaN)."""
    tally = Tally(len(samples))
    for name, layers in columns.items():
        for layer, right in enumerate(layers):
            values = np.full(len(samples), np.nan)
            values[held] = right
            tally.samples["linear", name, layer] = values
    count = len(columns["accuracy"])
    tables = tables_of(tally, samples["label"].tolist(), count)
    numbers = np.repeat(samples["sample"].to_numpy(), count)
    return {**tables, "samples": tables["samples"].assign(sample=numbers)}
