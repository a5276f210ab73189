"""SweepResult: tidy tables of what probes found, with provenance, saved as parquet and JSON."""

import html
import json
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.files import write_parquet, write_text
from crate_interp.sweeps.controls import empty
from crate_interp.sweeps.tally import Tally

_SAMPLES, _LAYERS, _HEADS, _META = "samples.parquet", "layers.parquet", "heads.parquet", "meta.json"
_CONTROLS, _HEAD_SAMPLES = "controls.parquet", "head_samples.parquet"
_COLUMNS = ["probe", "statistic", "layer", "mean", "std", "n"]


@dataclass(frozen=True)
class SweepResult:
    """What probes found on a data set. `meta`: model and data digests, settings, units, versions, seconds."""

    sample_table: pd.DataFrame
    layer_table: pd.DataFrame
    head_table: pd.DataFrame
    meta: dict[str, Any]
    control_table: pd.DataFrame = field(default_factory=empty)
    head_sample_table: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __repr__(self) -> str:
        model, n = self.meta.get("model") or "a model", self.meta.get("n_samples")
        count = len(self.meta.get("statistics", ()))
        return f"SweepResult of {model} on {n} samples: {count} statistics; .samples() .layers() .heads() .meta"

    def _repr_html_(self) -> str:
        table: Any = self.layer_table
        wide = table.pivot_table(
            index="layer", columns=["probe", "statistic"], values="mean", sort=False
        )
        return f"<p>{html.escape(repr(self))}</p>" + wide.to_html(
            float_format=lambda value: f"{value:.4g}"
        )

    def samples(self) -> pd.DataFrame:
        """One row per sample and layer: sample, label, layer, then a column "probe.statistic" per `[batch]` statistic.

        A statistic that a layer does not have is NaN there (layer n_layers has only what is measured on Z^L).
        """
        return self.sample_table.copy()

    def layers(self) -> pd.DataFrame:
        """One row per statistic and layer: probe, statistic, layer, mean, std, n over samples.

        std divides by n - 1 and is NaN for n < 2; a statistic of the weights has n = 1.
        """
        return self.layer_table.copy()

    def heads(self) -> pd.DataFrame:
        """One row per statistic, layer and head: probe, statistic, layer, head, mean, std, n over samples."""
        return self.head_table.copy()

    def head_samples(self) -> pd.DataFrame:
        """One row per sample, layer and head: sample, layer, head, then a column "probe.statistic" for each that Probe.per_head names.

        Empty where no probe keeps any.
        """
        return self.head_sample_table.copy()

    def controls(self) -> pd.DataFrame:
        """One row per negative control, statistic and layer: control, probe, statistic, layer, control_mean, model_mean, n.

        Both means are over the same first n samples. Controls: "random weights" (the untrained network), "random subspaces" (with the
        singular values of the model's U), "permuted heads" (each head's result written by the next head's W_O), "tight frame" (a stream
        of the same energy without structure). A statistic that a control does not change has no row. Empty for `ci.probe`.
        """
        return self.control_table.copy()

    def save(self, folder: str | Path) -> Path:
        """Writes its tables (samples.parquet, layers.parquet, ...) and meta.json into `folder`, meta last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tables = (
            self.sample_table,
            self.layer_table,
            self.head_table,
            self.control_table,
            self.head_sample_table,
        )
        for name, table in zip(
            (_SAMPLES, _LAYERS, _HEADS, _CONTROLS, _HEAD_SAMPLES), tables, strict=True
        ):
            write_parquet(folder / name, table)
        write_text(folder / _META, json.dumps(self.meta, indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "SweepResult":
        """The result saved in `folder`; ValueError where it is not a whole saved result."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / _META).read_text(encoding="utf-8"))
            samples, layers, heads = (
                pd.read_parquet(folder / name) for name in (_SAMPLES, _LAYERS, _HEADS)
            )
            controls, head_samples = (
                pd.read_parquet(folder / name) if (folder / name).exists() else none()
                for name, none in ((_CONTROLS, empty), (_HEAD_SAMPLES, pd.DataFrame))
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder} holds no saved SweepResult ({_META} and three tables): {error}"
            ) from None
        if not isinstance(meta, dict) or not {"n_layers", "statistics"} <= set(meta):
            raise ValueError(
                f"{folder / _META} is not what SweepResult.save writes: n_layers and statistics are missing."
            )
        return cls(samples, layers, heads, meta, controls, head_samples)


def result_of(
    tally: Tally,
    labels: list[Any] | None,
    meta: dict[str, Any],
    controls: pd.DataFrame | None = None,
) -> SweepResult:
    """The tables of a finished tally."""
    samples = _sample_table(tally, labels, meta["n_layers"])
    table = empty() if controls is None else controls
    return SweepResult(
        samples, _layer_table(tally), _head_table(tally), meta, table, _head_sample_table(tally)
    )


def _sample_table(tally: Tally, labels: list[Any] | None, n_layers: int) -> pd.DataFrame:
    n, values = tally.n, tally.samples
    count = max([n_layers, *(layer + 1 for _, _, layer in values)])
    columns: dict[str, Any] = {
        "sample": np.repeat(np.arange(n), count),
        "label": [
            label for label in (labels or [None] * n) for _ in range(count)
        ],  # may be lists: no array
        "layer": np.tile(np.arange(count), n),
    }
    for probe, statistic in dict.fromkeys((probe, statistic) for probe, statistic, _ in values):
        blank = np.full(n, np.nan)
        wide = np.stack(
            [values.get((probe, statistic, layer), blank) for layer in range(count)], axis=1
        )
        columns[f"{probe}.{statistic}"] = wide.reshape(-1)  # [n * count], sample-major
    return pd.DataFrame(columns).infer_objects()


def _head_sample_table(tally: Tally) -> pd.DataFrame:
    """Rows for every layer and head that any statistic has; NaN where another has none."""
    tables: dict[
        tuple, dict[str, Any]
    ] = {}  # statistics of the same layers and heads lie beside each other
    for probe, statistic in dict.fromkeys(key[:2] for key in tally.head_samples):
        layers = sorted(
            layer for *name, layer in tally.head_samples if tuple(name) == (probe, statistic)
        )
        wide = np.stack(
            [tally.head_samples[probe, statistic, layer] for layer in layers], axis=1
        )  # [n, layer, head]
        index = np.indices(wide.shape).reshape(3, -1)
        place = {"sample": index[0], "layer": np.array(layers)[index[1]], "head": index[2]}
        table = tables.setdefault((*layers, wide.shape[2]), place)
        table[f"{probe}.{statistic}"] = wide.reshape(-1)
    if not tables:
        return pd.DataFrame()
    keys = ["sample", "layer", "head"]
    frames = [pd.DataFrame(table) for table in tables.values()]
    return reduce(lambda left, right: left.merge(right, on=keys, how="outer", sort=True), frames)


def _layer_table(tally: Tally) -> pd.DataFrame:
    rows: list[tuple] = []
    for (probe, statistic, layer), values in tally.samples.items():
        found = values[~np.isnan(values)]
        std = found.std(ddof=1) if len(found) > 1 else np.nan
        rows.append(
            (probe, statistic, layer, found.mean() if len(found) else np.nan, std, len(found))
        )
    for (probe, statistic, layer), value in tally.weights.items():
        if value.ndim == 0:
            rows.append((probe, statistic, layer, float(value), np.nan, 1))
    return _sorted(pd.DataFrame(rows, columns=_COLUMNS))


def _head_table(tally: Tally) -> pd.DataFrame:
    rows: list[tuple] = []
    for (probe, statistic, layer), moments in tally.heads.items():
        heads = enumerate(zip(moments.mean, moments.std, strict=True))
        rows += [
            (probe, statistic, layer, head, mean, std, moments.n) for head, (mean, std) in heads
        ]
    for (probe, statistic, layer), value in tally.weights.items():
        if value.ndim == 1:
            rows += [
                (probe, statistic, layer, head, float(mean), np.nan, 1)
                for head, mean in enumerate(value)
            ]
    return _sorted(pd.DataFrame(rows, columns=[*_COLUMNS[:3], "head", *_COLUMNS[3:]]))


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    """Statistics in the order they were first measured, then layers (and heads) counting up."""
    order = {
        pair: place
        for place, pair in enumerate(
            dict.fromkeys(zip(table["probe"], table["statistic"], strict=True))
        )
    }
    place = [order[pair] for pair in zip(table["probe"], table["statistic"], strict=True)]
    keys = ["place", "layer", *(["head"] if "head" in table else [])]
    return table.assign(place=place).sort_values(keys, ignore_index=True).drop(columns="place")
