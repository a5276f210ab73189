"""SweepResult: tidy tables of what probes measured."""

from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.core.safe_text import notebook_view, table_in_html
from crate_interp.results.result import Result, by, first
from crate_interp.stats.contrasts import by_group, paired
from crate_interp.stats.intervals import paired_shares, share_interval, student_interval
from crate_interp.sweeps import findings, moments, sweep_tables
from crate_interp.sweeps.layer_curves import controls_text, even, rows_of

_EVERY = "every layer"  # the name under which `layers()` keeps its answer


class SweepResult(Result):
    """The numbers that probes measured on a data set.

    Stored tables: `samples`, `head_samples`, `moments`, `weights`, `controls`. moments has n, mean
    and sum of squared deviations over samples for each head; rows with head -1 are about each
    sample's mean over heads. Derived tables: `layers` and `heads`. meta: model and data, settings,
    units, versions, seconds.
    """

    KIND = "sweep"
    INTERVALS = True
    MAIN = "layers"
    STORED = {
        "samples": by("sample", "layer"),
        "head_samples": by("sample", "layer", "head"),
        "moments": moments.merged_moments,
        "weights": first,
        "controls": sweep_tables.merged_controls,
    }
    DERIVED = {"layers": sweep_tables.layers, "heads": sweep_tables.heads}

    def samples(self) -> pd.DataFrame:
        """Returns a row per sample and layer: sample, label, layer, and a column "probe.statistic".

        There is a column for each `[batch]` statistic. A statistic that a layer lacks is NaN there:
        layer n_layers has only statistics of Z^L.
        """
        return self.table("samples")

    def layers(self) -> pd.DataFrame:
        """Returns a row per statistic and layer: probe, statistic, layer, mean, std, n, over.

        mean and std are over n samples. std divides by n - 1 and is NaN for n < 2. A statistic of
        the weights has n = 1. If `over` is "heads", the statistic is per head, and was averaged
        over heads for each sample; `heads()` has each head. `table("layers")` leaves out statistics
        per head.
        """
        if _EVERY not in self._computed:  # a report asks hundreds of times
            parts = [self._table("layers").assign(over="samples")]
            if len(self._table("heads")):
                parts.append(sweep_tables.mean_of_heads(self).assign(over="heads"))
            # leaves out tables without rows, since they have no column types
            full = [part for part in parts if len(part)] or parts[:1]
            self._computed[_EVERY] = pd.concat(full, ignore_index=True)
        return self._computed[_EVERY].copy()

    def heads(self) -> pd.DataFrame:
        """Returns a row per statistic, layer and head.

        Its columns: probe, statistic, layer, head, mean, std, n.
        """
        return self.table("heads")

    def head_samples(self) -> pd.DataFrame:
        """Returns a row per sample, layer and head, and a column "probe.statistic".

        There is a column for each statistic in a probe's `per_head`; if there are none, the table
        is empty.
        """
        return self.table("head_samples")

    @cached_property
    def errors_over_groups(self) -> dict[tuple, tuple[float, float]]:
        """The errors of means over groups of samples; a report asks for them hundreds of times."""
        return moments.errors_over_groups(self)

    def mean_ends(self, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the 95 % interval of each row of `layers()` or `heads()`.

        The interval is Student's t. Its ends are NaN for a single sample, and for statistics of the
        weights.
        """
        return student_interval(rows["mean"].to_numpy(float), *moments.errors(self, rows))

    def controls(self) -> pd.DataFrame:
        """Returns a row per negative control, statistic and layer.

        Columns: control, probe, statistic, layer, control_mean, model_mean, n, lower. Both means
        are over the same n samples. In `lower` of these samples, the model's number is below the
        control's, which is better for R^c and worse for R - R^c. A statistic that a control does
        not change has no row.

        The control "random weights" (one untrained network, seed 0) is measured on all controlled
        samples. Three controls are measured on an evenly spread part (5 of the first 32 samples,
        about an eighth of a large number): "random subspaces" (with the singular values of the
        model's U, drawn separately for each sample), "permuted heads" (each head's result written
        by the W_O of the head before), and "tight frame" (a stream of the same energy, spread
        evenly over as many directions as possible).

        meta["controls"] is the number of controlled samples: the first samples of the data. The
        table is empty for `ci.probe`, and for a part of the data after the controlled samples. In a
        merged result, the means are over the controlled samples of both parts.
        """
        return self.table("controls")

    def controls_text(self) -> str:
        """Returns the controls of R^c in lines of text, with their meaning; "" without controls."""
        return controls_text(self)

    def finding(self) -> str:
        """Returns what was measured, and how both rates that are called R^c change."""
        return findings.headline(self)

    def _written(self, name: str | None) -> pd.DataFrame:
        return self.layers() if name is None else super()._written(name)

    def sharpest(self, count: int = 3) -> str:
        """Returns lines of text on the heads with the sharpest attention, lowest entropy first.

        There is a line for each of `attention.entropy_cls`, `entropy_patches` and `entropy` that
        was measured; "" if none was. A line has the means over samples in nats with their 95 %
        intervals by Student's t, the standard deviation over samples (sd; if it is large, the head
        is sharp only on some samples), the value of even attention, and how many other intervals
        overlap the interval of the first head. Two heads whose intervals do not overlap differ (p <
        .05), however they correlate over samples.
        """
        lines = []
        for statistic in ("entropy_cls", "entropy_patches", "entropy"):
            heads = self.sharpest_heads(statistic)
            if len(heads):
                table: Any = heads.head(count).itertuples()
                shown = [
                    f"L{row.layer}H{row.head} {row.mean:#.4g} ({row.low:#.4g} to {row.high:#.4g}; "
                    f"sd {row.std:.2g})"
                    for row in table
                ]
                most = even(self, f"attention.{statistic}")
                level = "" if most is None else f" (even attention: {most[0]:.4g} nats)"
                near = int((heads["low"].iloc[1:] <= heads["high"].iloc[0]).sum())
                lines.append(
                    f"Sharpest heads by {statistic}{level}: {'; '.join(shown)}. Other intervals "
                    f"that overlap the first: {near} of {len(heads) - 1}."
                )
        return "\n".join(lines)

    def sharpest_heads(self, statistic: str) -> pd.DataFrame:
        """Returns the rows of `heads()` for a statistic of attention, lowest mean first.

        low, high: the 95 % interval of the mean by Student's t; NaN for a single sample.
        """
        heads = rows_of(self.table("heads"), f"attention.{statistic}")
        rows = heads.sort_values("mean", kind="stable", ignore_index=True)
        low, high = self.mean_ends(rows)
        return rows.assign(low=low, high=high)

    def _notebook_table(self) -> pd.DataFrame:
        return self._table("heads").head(20)  # a probe may have only statistics per head

    def _repr_html_(self) -> str:
        table: Any = self._table("layers")
        if not len(table):
            return super()._repr_html_()
        columns = ["probe", "statistic"]
        wide = table.pivot_table(index="layer", columns=columns, values="mean", sort=False)
        return notebook_view(self._words(), table_in_html(wide, index=True))


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

        The accuracy minus that from the input alone has an interval over held-out samples
        (`paired_shares`), with the layer fixed. A store of activations has no input.
        """
        table: Any = self._table("layers")
        wide = table.pivot(index="layer", columns="statistic", values="mean")
        best = int(wide["accuracy"].idxmax())
        row = wide.loc[best]
        return (
            f"A linear classifier names the class best from Z^{best}: held-out accuracy "
            f"{row['accuracy']:.3f} over {int(table['n'].iloc[0])} samples. For comparison: "
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
