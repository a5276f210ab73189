"""Claims that no lab measures, because a command of the library does or because nothing can.

The numbers are read from what the commands wrote: the pages whose tables they printed, and the
tables beside the weights of the pairs. Where they stand here they are what a command printed.
"""

import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from by_depth import TABLE
from lab import claim
from rules import Interval, highest, lowest

DEMOS = Path(__file__).parent.parent
sys.path.append(str(DEMOS))

from pair_verdicts import PROPERTIES, mean_interval, values_of, welch  # noqa: E402
from pairs import KINDS, SEEDS, WEIGHTS, facts_of, untuned  # noqa: E402

PAGES = DEMOS / "docs" / "pages"

with (Path(__file__).parent / "data" / "documents.toml").open("rb") as file:
    LISTED = tomllib.load(file)
# the labs by document, in the order of the page
LABS: dict[str, tuple[str, ...]] = {
    each["name"]: tuple(each["labs"]) for each in LISTED["document"]
}
CRATE, SEGMENTATION, *_ = LABS

AXES = {"yes": 4, "no": 5, "both": 3}  # layers: 16 nodes of the code beside 16 principal axes
UPDATES = "shuffled updates, random W_O"
AUDITED = {  # rule: the claim of ci.audit, its nulls, and what else is said of its values
    "stream": ("objective falls", UPDATES, ""),
    "gradient": (
        "a gradient step",
        UPDATES,
        "; cosine with the gradient at most {high:g} at eps .1; MSSA on orthonormal subspaces "
        "stays below .5 too",
    ),
    "output_map": ("W_O is U", "random W_O", "; cosine {low:g} to {high:g}"),
    "lasso": ("lasso falls", "random dictionaries", ""),
}
# Jaccard index of a head, less that of maps that know no network
MAPS = {"middle": (0.402 - 0.325, 0.477 - 0.325), "border": (-0.209, -0.119)}


class Elsewhere(NamedTuple):
    """A row of the table of claims, what measured it, and its number and baseline in words."""

    row: dict[str, Any]
    by: str
    ours: str
    baseline: str


def made(
    rule: str, cases: dict, by: str, ours: str, baseline: str, n: int, **given: Any
) -> Elsewhere:
    row = claim(f"embedded.{rule}", math.nan, cases=cases, why="", size="tiny", n=n,
                baseline=math.nan, **given)  # fmt: skip
    return Elsewhere(row, by, ours, baseline)


def counted(counts: dict[str, int]) -> dict[str, Interval]:
    """Returns a case for each of so many layers that say yes, that say no, and that hold both."""
    ends = {"yes": (1.0, 1.0), "no": (-1.0, -1.0), "both": (-1.0, 1.0)}
    return {f"{what} {at}": ends[what] for what, count in counts.items() for at in range(count)}


def audited(rule: str) -> Elsewhere:
    """Returns a claim of `ci.audit` over the layers of the table of how/audit.md.

    A layer whose verdict is that it depends says yes in one frame and no in another.
    """
    name, null, more = AUDITED[rule]
    lines = (PAGES / "how" / "audit.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")[3:8]] for line in lines if f"| {name} |" in line
    ]
    if not cells:
        raise ValueError(
            f"the table of how/audit.md has no row {name!r}: see the short names there."
        )
    kept, broken, depends = (sum(int(row[at]) for row in cells) for at in range(3))
    others = {
        word: sum(int(count) for row in cells for count in re.findall(rf"(\d+) {word}", row[3]))
        for word in ("can't tell", "by construction")
    }
    other = sum(others.values())
    cases = counted({"yes": kept + depends, "no": broken + depends, "both": other})
    ours = f"kept in {kept} of {kept + broken + depends + other} layers, broken in {broken}"
    ours += f", depends on the frame in {depends}" * (depends > 0)
    ours += "".join(f", {word} in {count}" for word, count in others.items() if count)
    if more:  # of cosines; others are per cents
        values = [float(end) for row in cells for end in row[4].split(" to ")]
        ours += more.format(low=min(values), high=max(values))
    return made(rule, cases, "`make tables`", ours, null, 16)


def by_depth(statistic: str, rule: str, both: Any) -> Elsewhere:
    """Returns the claim that a number changes from the first layer to the last, by network.

    both: `highest` or `lowest`, as the change and what it is less that of untrained networks must
    both go its way.
    """
    table = pd.read_csv(TABLE)
    rows: list[Any] = list(table[table["statistic"] == statistic].itertuples())
    less = {
        row.network: (row.low - row.untrained_high, row.high - row.untrained_low) for row in rows
    }
    ours = "; ".join(
        f"{row.network.removeprefix('crate-tiny-')} {row.first:g} to {row.last:g} "
        f"({row.low:+g} to {row.high:+g})" for row in rows
    )  # fmt: skip
    begun = "; ".join(
        f"{row.untrained_first:g} to {row.untrained_last:g} (beyond it "
        f"{less[row.network][0]:+.4g} to {less[row.network][1]:+.4g})" for row in rows
    )  # fmt: skip
    return made(
        rule, {row.network: both((row.low, row.high), less[row.network]) for row in rows},
        "`python demos/labs/by_depth.py`", ours, f"{begun}, five untrained", len(rows),
    )  # fmt: skip


def of_pairs() -> list[Elsewhere]:
    """Returns the claims about the five pairs of a CRATE and a ViT."""
    by = "`python demos/crate_against_vit.py`"
    table = pd.read_csv(WEIGHTS / "pairs-networks.csv", keep_default_na=False)
    overlap = next(
        each for each in PROPERTIES if each.name.startswith("overlap of heads (U; values")
    )
    after, before = (values_of(table, overlap, "crate", trained) for trained in (True, False))
    gain = mean_interval(after - before)
    tests = {kind: [100 * facts_of(kind, seed)["test"] for seed in SEEDS] for kind in KINDS}
    apart = welch(tests["crate"], tests["vit"])
    spans = {kind: f"{min(each):.0f} to {max(each):.0f} %" for kind, each in tests.items()}
    # a better rate might raise the ViT by this, and CRATE by nothing
    gain_vit, least, most = untuned("vit")
    assert untuned("crate") == (0.0, 0.0, 0.0)
    tuned = f"; at its best rate the ViT would gain {gain_vit:.1f} ({least:+.1f} to {most:+.1f})"
    return [
        made("incoherent", {"": (gain.low, gain.high)}, by,
             f"overlap of heads {gain.value:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})",
             f"{before.mean():.3f} before training, to which this adds", len(SEEDS)),
        made("vit", {"": (apart.low - max(0.0, most), apart.high - max(0.0, least))}, by,
             f"{apart.value:+.1f} points ({apart.low:+.1f} to {apart.high:+.1f}): {spans['crate']} "
             f"of 4,000 composites{tuned}; crate-tiny-cutouts and its ViT, one training each, have "
             "68.2 and 68.6 %", f"{spans['vit']}, the ViT", len(SEEDS)),
    ]  # fmt: skip


def measured() -> dict[str, list[Elsewhere]]:
    """Returns the claims by document."""
    segment = "`python demos/segmentation_emerges.py`"
    incoherent, vit = of_pairs()
    return {
        CRATE: [
            by_depth("rate", "rate_falls", highest),
            *(audited(rule) for rule in AUDITED),
            by_depth("zeros", "sparser", lowest),
            made("concentration", counted(AXES), "`crate-interp concentration MODEL`",
                 "16 nodes carry .16 to .75 of the gap between two answers, more than principal "
                 "axes in 4 of 12 layers, less in 5",
                 "principal axes; random axes, which carry less in all 12", 12),
            incoherent,
            vit,
        ],
        SEGMENTATION: [
            made("segments", MAPS, segment,
                 "Jaccard: cutouts .439 (.402 to .477); pictures .319 (.297 to .341)",
                 "a map in the middle .325; .322, untrained .172; .178, colour contrast to the "
                 "border .604 (difference -.164, -.209 to -.119); .554", 128),
            made("segments_vit", {}, "`python demos/segmentation_emerges.py`",
                 "cutouts, one training each: .439 (.402 to .477)",
                 "the ViT .335 (.307 to .365)", 128, met=False),
        ],
    }  # fmt: skip
