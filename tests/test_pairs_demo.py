"""The command that compares the shipped pairs: its table, its picture, and what it refuses."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import concentration_of_pairs
import crate_against_vit as demo
import pair_measures
import pairs
from pair_measures import Network
from pair_verdicts import PROPERTIES, judged

GAIN = {"crate": 1.0, "vit": 0.25}  # what training adds to every number


class Swept:
    """What the demo reads of a sweep: two layers of two heads, and the stream after the last."""

    meta = {"n_layers": 2}

    def __init__(self, shift):
        self.shift = shift

    def table(self, name):
        assert name == "layers"
        rows = [("evenness", "entropy"), ("sparsity", "hoyer"), ("filled", "stream")]
        rows += [(f"compression_{place}", "change") for place in ("read", "stream")]
        rows += [("compression_read", "beyond"), ("sparsity", "zero_fraction")]
        return self.made(rows, (1.0, 3.0, 1000.0), None)

    def heads(self):
        rows = [("alignment", "head_overlap"), ("filled", "subspace")]
        return pd.concat([self.made(rows, (1.0, 3.0), head) for head in (0, 1)])

    def made(self, rows, means, head):
        return pd.DataFrame(
            [
                dict(probe=probe, statistic=name, layer=layer, head=head)
                | dict(mean=mean + self.shift + (0 if head is None else 2 * head), std=0.0, n=4)
                for probe, name in rows
                for layer, mean in enumerate(means)
            ]
        )


@pytest.fixture
def table():
    sweeps = {
        network: Swept((0.01 * network.seed + GAIN[network.kind]) * network.trained)
        for network in pair_measures.networks()
    }
    segments = pd.DataFrame(
        [
            dict(kind=one.kind, seed=one.seed, trained=one.trained, statistic=name)
            | dict(value=(0.1 + 0.001 * one.seed) * one.trained)
            for one in sweeps
            if one.subspaces != "key"
            for name in ("fixed", "best")
        ]
    )
    return demo.long(sweeps, segments)


def test_a_number_is_the_mean_over_layers_and_heads_without_the_last_stream(table):
    own = table[(table["kind"] == "crate") & table["trained"] & (table["seed"] == 0)]
    value = own.set_index("source")["value"]
    assert value["sparsity.hoyer"] == 3.0  # (1 + 3) / 2 + 1
    assert value["alignment.head_overlap"] == 4.0  # one more, the mean of 0 and 2
    assert value["segmentation.fixed"] == pytest.approx(0.1)


def test_every_property_has_a_line_a_panel_and_a_verdict(table):
    rows = judged(table)
    assert [row.property for row in rows] == list(PROPERTIES)
    for row in rows:
        gain = (0.102, 0.102) if row.property.source.startswith("seg") else (1.02, 0.27)
        assert (row.gains[0].value, row.gains[1].value) == pytest.approx(gain)
    verdicts = {row.property.source: row.verdict for row in rows}
    assert verdicts["sparsity.hoyer"] == "more to CRATE"  # wanted high, and both rise
    assert verdicts["evenness.entropy"] == "neither"  # wanted low, and both rise
    assert verdicts["segmentation.fixed"] == "both"
    lines = demo.text(rows).splitlines()
    assert len(lines) == 3 + 2 * len(rows)
    brought = lines[-len(rows) :]
    assert all(line.endswith(f"  {row.verdict}") for row, line in zip(rows, brought, strict=True))
    sparse = next(line for line in lines if line.startswith("sparsity"))
    assert "+0.750 (+0.7" in sparse  # of the trained: 3.02 against 2.27
    figure = demo.picture(table, rows)
    drawn = [axis for axis in figure.axes if axis.lines]
    assert len(drawn) == len(PROPERTIES)
    for axis, row in zip(drawn, rows, strict=True):
        assert row.property.name in axis.get_title() and row.verdict in axis.get_title()
        before, after = axis.lines[0].get_ydata()
        own = demo.values_of(table, row.property, "crate", True)[0]
        assert after == own and np.isfinite(before)


def test_the_untrained_twin_is_the_start_of_the_training(monkeypatch):
    network = Network("crate", 0, False, "")
    assert pairs.digest(pair_measures.load(network)) == pairs.facts_of("crate", 0)["start"]
    monkeypatch.setattr(pair_measures, "facts_of", lambda *_: {"start": "another"})
    with pytest.raises(SystemExit, match="seed 0 does not give the crate here"):
        pair_measures.load(network)


def test_ratios_of_the_axes_are_geometric_means_over_seeds():
    ratios = {("a", 0): [2.0, 8.0], ("a", 1): [1.0, 1.0], ("b", 0): [0.5, 2.0]}
    rows = [
        (asked, seed, layer, 0.25 + 0.5 * seed, ratio)
        for (asked, layer), own in ratios.items()
        for seed, ratio in enumerate(own)
    ]
    table = pd.DataFrame(rows, columns=["asked", "seed", "layer", "share", "ratio"])
    lines = concentration_of_pairs.text(table).splitlines()[1:]
    half = 12.706204736174694  # Student's t, 1 degree of freedom, times sd / sqrt(2) = log 2
    low, high = (4 * 2.0 ** (sign * half) for sign in (-1, 1))
    assert [line.split() for line in lines] == [
        ["a", "0", "4.00", f"({low:.2f}", "to", f"{high:.2f})", "0.50"],
        ["a", "1", "1.00", "(1.00", "to", "1.00)", "0.50"],
        ["b", "0", "1.00", *f"({1 / 2**half:.2f} to {2**half:.2f})".split(), "0.50"],
    ]
