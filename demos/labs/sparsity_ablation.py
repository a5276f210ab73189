"""What the sparsity term does: its weight lambda set to 0 or raised, in training and after it.

After training: crate-tiny-fashion (trained with lambda .1) reads 256 test images with other
thresholds, clean and with noise on pixels, a shift, and noise on all codes. The baseline is a
threshold that moves as far in random directions. In training: small CRATEs on scikit-learn's digits
with lambda 0, .1 and .5, several seeds each, which share start and order of the images; the
baseline of their sparsity is what the threshold does before training. Published: CRATE-B reaches
70.8 % on ImageNet with lambda .02 or .1 and 70.5 % with .5 (arXiv 2306.01129, appendix).
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from ablated import (
    CORRUPTIONS,
    code_share,
    digits,
    hits,
    make_digits_model,
    random_signs,
    threshold,
    train_on_digits,
)
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from tqdm.auto import tqdm
from twins import FASHION, images_of

import crate_interp as ci
from crate_interp.stats.intervals import paired_shares

OWN, OTHER, TRAINED_AT = 0.1, (0.0, 0.05, 0.2, 0.5, 1.0), (0.0, 0.1, 0.5)
SEEDS, TRAIN_STEPS = {"quick": 3, "full": 10}, {"quick": 300, "full": 600}
SHIFT = {"fashion": (3, 3), "digits": (1, 0)}  # down, right; digits at (1, 1) are read by chance

HEADLINE = (
    "Training with lambda .5 in place of .1 changes accuracy by {accuracy} ({seeds}), and in place "
    "of 0 the share of nonzeros by {nonzeros} beyond the {untrained:.1f} by which the threshold "
    "alone, before training, changes it. To set lambda to 0 in a trained network changes its "
    "accuracy by {in_trained}."
)


def after_training(lambd: float) -> dict[str, list[float]]:
    """Returns hits under each corruption by image, and the share of nonzeros by layer."""
    images, labels = images_of(FASHION, 256)
    with threshold(ci.load(FASHION), lambd) as model:
        found = {how: hits(model, images, labels, how, SHIFT["fashion"]) for how in CORRUPTIONS}
        return found | {"l0": code_share(model, images)}


@torch.no_grad()
def moved_at_random() -> list[float]:
    """Returns hits of the model whose thresholds move by as much as to 0, up or down at random."""
    images, labels = images_of(FASHION, 256)
    model = ci.load(FASHION)
    with threshold(model, OWN):
        logits = model.run_with_hooks(images, fwd_hooks=random_signs(model, OWN, 0))
    return (logits.argmax(dim=-1) == labels).float().tolist()


def in_training(lambd: float, seed: int, steps: int) -> dict[str, float]:
    """Returns accuracy under each corruption and the share of nonzeros of a digits model."""
    model = train_on_digits(lambd, seed, steps) if steps else make_digits_model(lambd, seed)
    _, _, images, labels = digits()
    found = {how: hits(model, images, labels, how, SHIFT["digits"]) for how in CORRUPTIONS}
    shares = code_share(model, images)
    means = {how: sum(values) / len(values) for how, values in found.items()}
    return means | {"l0": sum(shares) / len(shares)}


def difference(a: list[float], b: list[float]) -> tuple[float, tuple[float, float]]:
    """Returns mean and interval of the paired difference a - b."""
    return mean_and_interval([x - y for x, y in zip(a, b, strict=True)])


def hits_interval(a: list[float], b: list[float]) -> tuple[float, float]:
    """Returns Tango's interval of the paired difference a - b of hits, each 0 or 1."""
    found = paired_shares(np.subtract(a, b)[:, None])
    return float(found.low[0]), float(found.high[0])


def training_claims(found: dict[float, list[dict]], start: dict[float, list[dict]]) -> list[dict]:
    """Returns the claims on networks trained with different lambdas; start: before training."""
    seeds = len(found[0.0])
    size = f"digits, 17 tokens, d 48, 3 layers, {seeds} seeds"
    values = {
        (lambd, what): [run[what] for run in runs]
        for lambd, runs in found.items()
        for what in (*CORRUPTIONS, "l0")
    }
    own = values[OWN, "clean"]
    claims = [
        claim("sparsity_ablation.same", np.subtract(values[0.5, "clean"], own).tolist(),
              published="70.5 % against 70.8 % (CRATE-B, ImageNet)", size=size, n=seeds,
              baseline=sum(own) / seeds, why="Paired by seed."),
    ]  # fmt: skip
    for lambd in TRAINED_AT[1:]:
        moved = np.subtract(values[lambd, "l0"], values[0.0, "l0"])
        at_start = [[run["l0"] for run in start[at]] for at in (lambd, 0.0)]
        alone = np.subtract(at_start[0], at_start[1])
        claims.append(
            claim("sparsity_ablation.sparser", (moved - alone).tolist(), lambd=lambd, size=size,
                  baseline=float(alone.mean()), n=seeds,
                  why=f"In all the share changes by {moved.mean():+.4f}. Paired by seed.")
        )  # fmt: skip
    for how in CORRUPTIONS[1:]:
        fall = {
            lambd: np.subtract(values[lambd, "clean"], values[lambd, how]) for lambd in (0.0, 0.5)
        }
        claims.append(
            claim("sparsity_ablation.saves", (fall[0.0] - fall[0.5]).tolist(), how=how, size=size,
                  baseline=float(fall[0.0].mean()), n=seeds, why="Paired by seed.")
        )  # fmt: skip
    return claims


def loses_claim(after: dict[float, dict], moved: list[float]) -> dict:
    """Returns the claim that a trained network loses accuracy without its threshold.

    moved: hits with thresholds moved as far at random.
    """
    own, none = after[OWN]["clean"], after[0.0]["clean"]
    ends = hits_interval(none, own)
    return claim(
        "sparsity_ablation.loses", float(np.subtract(none, own).mean()), interval=ends,
        cases={"change": ends, "beyond": hits_interval(none, moved)}, n=len(own),
        baseline=float(np.subtract(moved, own).mean()), size=f"{FASHION}, {len(own)} test images",
        why="Tango's interval of paired shares.",
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by lambda and corruption."""
    after = {
        lambd: steps.do(f"after-{lambd}", partial(after_training, lambd)) for lambd in (OWN, *OTHER)
    }
    found: dict[float, list[dict]] = {lambd: [] for lambd in TRAINED_AT}
    for seed in tqdm(range(SEEDS[form]), desc="digits", unit="seed"):
        for lambd in TRAINED_AT:
            make = partial(in_training, lambd, seed, TRAIN_STEPS[form])
            found[lambd].append(steps.do(f"digits-{lambd}-{seed}", make))
    start = {
        lambd: [
            steps.do(f"start-{lambd}-{seed}", partial(in_training, lambd, seed, 0))
            for seed in range(SEEDS[form])
        ]
        for lambd in TRAINED_AT
    }
    moved = steps.do("moved", moved_at_random)
    claims = [*training_claims(found, start), loses_claim(after, moved)]
    same, sparser = claims[0], claims[2]
    seeds = f"digits, {SEEDS[form]} seeds"
    headline = HEADLINE.format(
        accuracy=points(same),
        seeds=seeds,
        nonzeros=points(sparser),
        untrained=100 * sparser["baseline"],
        in_trained=points(claims[6]),
    )
    return result("sparsity_ablation", form, headline, claims, rows(after, found))


def points(row: dict) -> str:
    """Returns a claim's number and its interval in points, as -0.8 points [-2.0, 0.4]."""
    ours, low, high = (100 * row[end] for end in ("ours", "low", "high"))
    return f"{ours:.1f} points [{low:.1f}, {high:.1f}]"


def rows(after: dict[float, dict], found: dict[float, list[dict]]) -> list[tuple]:
    """Returns the rows of numbers; setting: model|lambda."""
    numbers: list[tuple] = []
    for lambd, table in after.items():
        for what, values in table.items():
            mean = sum(values) / len(values)
            numbers.append((what, f"{FASHION}|{lambd}", 0, 0, mean))
    for lambd, runs in found.items():
        for seed, table in enumerate(runs):
            for what, value in table.items():
                numbers.append((what, f"digits|{lambd}", seed, 0, value))
    return numbers


def draw(found: LabResult) -> Any:
    """Returns a figure: accuracy and nonzeros by lambda, after training and in training."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10.5, 4.2), sharey=True)
    places = {
        FASHION: ("lambda set after training with .1", sorted((OWN, *OTHER))),
        "digits": ("lambda in training", list(TRAINED_AT)),
    }
    for axis, (name, (words, lambdas)) in zip(axes, places.items(), strict=True):
        for what in (*CORRUPTIONS, "l0"):
            rows: list[Any] = [found.numbers(what, setting=f"{name}|{v}")["value"] for v in lambdas]
            label = "nonzeros of the code" if what == "l0" else f"accuracy, {what}"
            style = "k--" if what == "l0" else "-"
            x = range(len(lambdas))
            (line,) = axis.plot(x, [v.mean() for v in rows], style, marker="o", label=label)
            low, high = [v.min() for v in rows], [v.max() for v in rows]
            axis.fill_between(x, low, high, alpha=0.2, color=line.get_color())
        axis.set_xticks(range(len(lambdas)), [f"{v:g}" for v in lambdas])
        axis.set_xlabel(words)
        axis.set_title(name, fontsize=10)
    axes[0].set_ylim(0, 1.02)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=5)
    same: Any = found.table().iloc[0]
    figure.suptitle(
        f"Training with lambda .5 in place of .1 changes accuracy by {points(same)}\n(right: "
        f"digits, {same['n']} seeds, shaded: their range; left: 256 test images of "
        "Fashion-MNIST, 0.3 M parameters, one network)",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


if __name__ == "__main__":
    main(run, draw)
