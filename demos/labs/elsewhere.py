"""Claims that no lab measures, because a command of the library does or because nothing can.

The numbers are read from what the commands wrote: the pages whose tables they printed, and the
tables beside the weights of the pairs. Where they stand here they are what a command printed.
"""

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from lab import claim
from rules import Interval, highest, lowest

DEMOS = Path(__file__).parent.parent
sys.path.append(str(DEMOS))

from pair_verdicts import PROPERTIES, mean_interval, values_of, welch  # noqa: E402
from pairs import KINDS, SEEDS, WEIGHTS, facts_of, untuned  # noqa: E402

PAGES = DEMOS / "docs" / "pages"

CRATE = "CRATE (arXiv 2306.01129, 2311.13110)"
SEGMENTATION = "Segmentation (arXiv 2308.16271)"
SRR = "Sparse rate reduction (arXiv 2411.17182)"
JOMA = "JoMA (arXiv 2310.00535)"
SELECTION = "Token selection (slides)"
AOT = "Attention alone (arXiv 2506.03790)"
OTHERS = "CRATE-MAE, CRATE-alpha, CRATE-LM"

# of the three embedded models, first and last layer: trained, untrained
RATES = {
    "fashion": (221, 166, 243, 250),
    "cutouts": (316, 187, 381, 383),
    "lm": (356, 301, 420, 373),
}
ZEROS = {"fashion": (0.54, 0.55, 0.50, 0.70), "cutouts": (0.52, 0.52, 0.51, 0.69),
         "lm": (0.70, 0.88, 0.56, 0.55)}  # fmt: skip
AXES = {"yes": 4, "no": 5, "both": 3}  # layers: 16 nodes of the code beside 16 principal axes
AUDITED = {  # rule: the claim of ci.audit, and what else is said of its values
    "stream": ("objective falls", ""),
    "gradient": (
        "a gradient step",
        "; cosine with the gradient at most {high:g} at eps .1; MSSA on orthonormal subspaces "
        "stays below .5 too",
    ),
    "output_map": ("W_O is U", "; cosine {low:g} to {high:g}"),
    "lasso": ("lasso falls", ""),
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
    name, more = AUDITED[rule]
    lines = (PAGES / "how" / "audit.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")[3:8]] for line in lines if f"| {name} |" in line
    ]
    if not cells:
        raise ValueError(
            f"the table of how/audit.md has no row {name!r}: see the short names there."
        )
    kept, broken, depends = (sum(int(row[at]) for row in cells) for at in range(3))
    other = sum(int(row[3].split()[0]) for row in cells if row[3])
    cases = counted({"yes": kept + depends, "no": broken + depends, "both": other})
    ours = f"kept in {kept} of {kept + broken + depends + other} layers, broken in {broken}"
    ours += f", depends on the frame in {depends}" * (depends > 0)
    values = [float(end) for row in cells for end in row[4].split(" to ")]
    ours += f", undecided in {other}" * (other > 0)
    ours += more.format(low=min(values), high=max(values))
    nulls = {"lasso": "random dictionaries", "output_map": "random W_O"}
    null = nulls.get(rule, "shuffled updates, random W_O")
    return made(rule, cases, "`make tables`", ours, null, 16)


def by_depth(numbers: dict[str, tuple], falls: bool) -> dict[str, Interval]:
    """Returns a case for each model: last less first layer, and that less that of untrained."""
    cases = {}
    for model, (first, last, begun, ended) in numbers.items():
        own, beyond = last - first, (last - first) - (ended - begun)
        cases[model] = (highest if falls else lowest)((own, own), (beyond, beyond))
    return cases


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
    segment, sweep = "`python demos/segmentation_emerges.py`", "`crate-interp sweep MODEL`"
    words = "; ".join(f"{name} {a} to {b}" for name, (a, b, *_) in RATES.items())
    begun = "; ".join(f"{a} to {b}" for *_, a, b in RATES.values())
    zeros = "; ".join(f"{name} {a:.2f} and {b:.2f}" for name, (a, b, *_) in ZEROS.items())
    start = "; ".join(f"{a:.2f} and {b:.2f}" for *_, a, b in ZEROS.values())
    incoherent, vit = of_pairs()
    return {
        CRATE: [
            made("rate_falls", by_depth(RATES, True), sweep,
                 f"{words} nats from the first to the last layer", f"{begun}, untrained", 3),
            *(audited(rule) for rule in AUDITED),
            made("sparser", by_depth(ZEROS, False), sweep,
                 f"zeros in the first and last layer: {zeros}", f"{start}, untrained", 3),
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


# claim, why not
CANNOT: dict[str, tuple[tuple[str, str], ...]] = {
    CRATE: (
        ("Accuracy on ImageNet and after transfer (Tables 1, 2)", "no data and no GPU here"),
        ("The curves of Figures 3 to 5 on trained CRATE-T, S, B, L", "their weights lie on a drive "
         "that is not public; `crate-interp sweep` draws them from any checkpoint"),
    ),
    SEGMENTATION: (
        ("mIoU on VOC12, AP on COCO (Tables 1, 2)", "no data here; `crate-interp segment --data "
         "voc:DIR` and `demos/maskcut_coco.py` compute them"),
    ),
    OTHERS: (
        ("CRATE-alpha gains with scale; CRATE-MAE reconstructs ImageNet", "several GPUs to train"),
        ("Scores of CRATE-LM's neurons by language models", "two language models of 7B"),
    ),
    SRR: (
        ("Tables 1 to 6 at their size", "64 models on CIFAR at width 384 and 768 need a GPU; here "
         "they are small networks on digits"),
    ),
    JOMA: (
        ("Joint dynamics of MLP and attention (Theorems 1 to 5) in a CRATE", "the theorems have "
         "free attention weights; in a CRATE query, key and value are one matrix, so they hold for "
         "the papers' own model alone, which the labs run"),
        ("Entropy along the training of a language model on WikiText", "no data and no GPU here"),
    ),
    SELECTION: (
        ("One-layer theorems (nearest neighbour, random walk, group-sparse, max-margin) in a CRATE",
         "their attention is a free matrix W; the labs run the slides' own models"),
    ),
}  # fmt: skip

# the labs by document, in the order of the page
LABS: dict[str, tuple[str, ...]] = {
    CRATE: (
        "denoising",
        "mixture",
        "reconstruction",
        "sparsity_ablation",
        "training_lens",
        "costs",
    ),
    SRR: ("srr_toy", "srr_zoo", "srr_complexity", "srr_regularizer"),
    JOMA: ("joma_dynamics", "joma_tree", "joma_entropy"),
    SELECTION: ("nearest_neighbour", "group_sparse", "random_walk", "scan_and_snap", "max_margin"),
    AOT: ("aot_denoising",),
}
