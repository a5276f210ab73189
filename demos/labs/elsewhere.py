"""Claims that no lab measures, because a command of the library does or because nothing can.

Literal data. The numbers are what the command printed on the embedded models; tests hold the
README's to them.
"""

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """A claim, its place in a paper, what measures it, what that gave, and the answer."""

    claim: str
    where: str
    by: str
    ours: str
    answer: str


CRATE = "CRATE (arXiv 2306.01129, 2311.13110)"
SEGMENTATION = "Segmentation (arXiv 2308.16271)"
SRR = "Sparse rate reduction (arXiv 2411.17182)"
JOMA = "JoMA (arXiv 2310.00535)"
SELECTION = "Token selection (slides)"
OTHERS = "CRATE-MAE, CRATE-alpha, CRATE-LM"

MEASURED: dict[str, tuple[Elsewhere, ...]] = {
    CRATE: (
        Elsewhere(
            "R^c as the authors' script counts it falls from layer to layer", "Figures 3 to 5",
            "`crate-interp sweep MODEL`, `compression.official_rate`",
            "first to last layer 221 to 166, 316 to 187 and 356 to 301 nats in the three embedded "
            "models; untrained 243 to 250, 381 to 383, 420 to 373",
            "supported (three tiny models; the last one is lowest in layer 2)",
        ),
        Elsewhere(
            "Attention lowers R^c of the stream", "section 2.3", "`crate-interp audit MODEL`",
            "in every frame and at every eps in none of 16 layers, in some in 14", "depends",
        ),
        Elsewhere(
            "Attention is a gradient step on R^c", "eq. 8 to 12", "`crate-interp audit MODEL`",
            "cosine with the gradient at most .054 in 16 layers", "not supported",
        ),
        Elsewhere(
            "The output map of a head is U_k^T", "eq. 12, 115", "`crate-interp audit MODEL`",
            "cosine -.27 to .072; below 0 in 69 of 84 heads", "not supported",
        ),
        Elsewhere(
            "The sparse step lowers its lasso", "eq. 15 to 17", "`crate-interp audit MODEL`",
            "beyond its nulls in 3 of 16 layers, not in 8, undecided in 5", "depends",
        ),
        Elsewhere(
            "Codes are sparser in deeper layers", "Figure 3", "`crate-interp sweep MODEL`",
            "zeros in the first and last layer: .54 and .55, .52 and .52 in two models of images "
            "(untrained .50 and .70, .51 and .69), .70 and .88 in the language model (.56, .55)",
            "depends",
        ),
        Elsewhere(
            "The code is a privileged basis: few of its nodes carry an answer",
            "ours (2306.01129 calls D a dictionary)", "`crate-interp concentration MODEL`",
            "16 nodes carry .18 to .78 of the gap between two answers, more than in random axes in "
            "12 of 12 layers of two models of images (64 pairs each), more than in principal axes "
            "in 4 and less in 5; more beyond random axes than untrained in 4", "depends",
        ),
        Elsewhere(
            "Subspaces of the heads become incoherent", "Figure 7",
            "`python demos/crate_against_vit.py`", "training brings no less overlap, 5 seeds",
            "not supported",
        ),
        Elsewhere(
            "CRATE is nearly as accurate as a ViT", "Table 1 (ImageNet)",
            "`python demos/crate_against_vit.py`",
            "60 to 64 % against 46 to 49 % of 4,000 composites, one budget of steps, 5 seeds each",
            "supported (tiny; published models are not trained here)",
        ),
    ),
    SEGMENTATION: (
        Elsewhere(
            "Attention of supervised CRATEs segments objects", "Figure 4, Table 1",
            "`crate-interp segment crate-tiny-cutouts`",
            "Jaccard .442 (.408 to .475); untrained .160, a map in the middle .325, but a map of "
            "colour contrast to the border .604 (difference -.162, -.204 to -.121)",
            "depends (above chance, below contrast; one training, by the share of mass)",
        ),
        Elsewhere(
            "More so than that of a ViT", "Table 1", "`python demos/segmentation_emerges.py`",
            ".442 against .335 (.307 to .365), one training each; of five seeds of smaller pairs "
            "neither segments", "depends",
        ),
    ),
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
}
