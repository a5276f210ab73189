"""Sentences and tables that compare a model with its negative controls on the same samples."""

import math
from typing import Any

from crate_interp.results.result import Result, as_text
from crate_interp.results.sample_ranges import counted
from crate_interp.sweeps.layer_curves import rows_of

EVERY = 8  # controls within a layer are measured on 1 in 8 of the samples that have controls
_GOLDEN = (5**0.5 - 1) / 2
_TELLS = 10  # by chance, the model is better in all or none of 10 samples once in 512
# the statistics that are shown, and their names in a sentence
CONTROLLED = {
    "compression.subspace_rate_mid": "R^c",
    "compression.reduction_mid": "R - R^c",
    "compression.official_rate": "the authors' R^c",
}


KINDS = {
    "random weights": "one untrained network, seed 0. A number that is the same there was not "
    "learned.",
    "random subspaces": "random U_k with the singular values of the model's U_k, drawn separately "
    "for each sample. If the model is no better, its subspaces compress its tokens no better than "
    "random subspaces. The model may also be better because its subspaces hold less of the tokens: "
    "see the share of a token in each head's subspace.",
    "permuted heads": "each head's result is written by the output map of the head before it. If "
    "the model is better in about half of the samples, it does not matter which map writes which "
    "result. If the model is better in nearly all samples, its own maps compress more than the "
    "permuted maps; if it is better in nearly none, its own maps compress less.",
    "tight frame": "a stream of the same energy, spread evenly over as many directions as "
    "possible, so its R is the highest. It has no structure. Tokens that fill few directions (see "
    "the probe ranks) have a lower R and a lower R^c.",
}
IN_BRACKETS = (
    "In brackets: in how many samples the model is better, that is, has a lower R^c, or a higher "
    "R - R^c."
)


def controls_table(result: Result, name: str) -> tuple[list[str], list[list[str]]]:
    """Returns the header and rows for "probe.statistic": a row per layer, with model and controls.

    The columns are grouped by the number of samples. In each group, a column of the model's means
    precedes the columns of the controls, over the same samples. There are no rows if no control
    applies to the statistic.
    """
    rows = rows_of(result.table("controls"), name)
    lines = {layer: [str(layer)] for layer in sorted(set(rows["layer"]))}
    header = ["layer"]
    for n in sorted(set(rows["n"]), reverse=True):
        seen = rows[rows["n"] == n]
        kinds, unit = list(dict.fromkeys(seen["control"])), str(result.meta["unit"])
        header += [f"model, {counted(n, unit)}", *kinds]
        found = {(row.control, row.layer): row for row in seen.itertuples()}
        for layer, cells in lines.items():
            there = [found.get((kind, layer)) for kind in kinds]
            own = next((f"{row.model_mean:.4g}" for row in there if row is not None), "")
            cells += [own, *("" if row is None else _control(row) for row in there)]
    return header, list(lines.values())


def _control(row: Any) -> str:
    """Returns the mean under a control, and in how many samples the model is better."""
    if not hasattr(row, "lower"):  # older saved results lack this number
        return f"{row.control_mean:.4g}"
    # for R - R^c, better means higher; for other statistics, it means lower
    better = row.n - row.lower if row.statistic.startswith("reduction") else row.lower
    return f"{row.control_mean:.4g} ({better}/{row.n})"


def an_eighth(start: int, count: int) -> list[int]:
    """Returns which samples the controls within a layer see, as sample numbers minus `start`.

    The samples are chosen among `count` samples from number `start` on. The golden ratio selects
    samples 0, 5, 13, 18, ...: 5 of the first 32, and about an eighth of a large number. With a
    fixed step, the controls might see only one class of data whose classes alternate.
    """
    return [place for place in range(count) if (start + place) * _GOLDEN % 1 < 1 / EVERY]


def few_controlled(result: Result) -> str:
    """Returns a caution if there are too few controlled samples to rule out chance, else ""."""
    table: Any = result.table("controls")
    least, asked = int(table["n"].min()), result.meta["controls"]
    groups = result.groups_at(result.table("samples")["sample"].unique()[:asked])
    least = least if groups is None else min(least, len(set(groups)))
    if least > _TELLS:
        return ""
    return (
        f"With {least} independent samples, the model is better in all or none by chance once in "
        f"{2 ** (least - 1):,}: give more with controls=N (`--controls N`)."
    )


def controls_text(result: Result) -> str:
    """Returns the controls of the first measure with controls, as lines of text, or ""."""
    for name in CONTROLLED:
        header, rows = controls_table(result, name)
        if rows:
            config = result.meta["config"]
            grouped = config.get("subspaces", "query") != "query"  # a group of heads shares one U_k
            heads = config["value_heads"] if grouped else config["n_heads"]
            bound = config["d_model"] / 2 * math.log(heads)
            of_each = "\n".join(f"{kind}: {KINDS[kind]}" for kind in header if kind in KINDS)
            return (
                f"\nNegative controls: {name} over {controlled(result)}, next to the model on the "
                f"same {result.meta['unit']}. {IN_BRACKETS} {few_controlled(result)}\n"
                f"{as_text(header, rows)}\n\n{of_each}\n"
                f"d/2 ln K = {bound:.4g} nats per token is the most that R - R^c can be for "
                "complete orthonormal subspaces; other subspaces may exceed it.\n"
            )
    return ""


def controlled(result: Result) -> str:
    """Returns how many samples the controls have seen, in words."""
    counts: Any = result.table("controls")["n"]
    words = f"the first {counts.max()} {result.meta['unit']}"
    if counts.min() == counts.max():
        return words
    return f"{words} (random weights; the others on {counts.min()} of them, evenly spread)"
