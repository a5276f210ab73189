"""What the sparsity term does: its weight lambda set to 0 or raised, in training and after it.

After training: crate-tiny-fashion (trained with lambda .1) reads 256 test images with other
thresholds, clean and with noise on pixels, a shift, and noise on all codes; crate-tiny-cutouts
segments. The baseline is a threshold that moves as far in random directions. In training: small
CRATEs on scikit-learn's digits with lambda 0, .1 and .5, several seeds each, which share start and
order of the images. Published: CRATE-B reaches 70.8 % on ImageNet with lambda .02 or .1 and 70.5 %
with .5 (arXiv 2306.01129, appendix).
"""

from functools import partial
from typing import Any

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
from twins import images_of, untrained

import crate_interp as ci

FASHION, CUTOUTS = "crate-tiny-fashion", "crate-tiny-cutouts"
OWN, OTHER, TRAINED_AT = 0.1, (0.0, 0.05, 0.2, 0.5, 1.0), (0.0, 0.1, 0.5)
SEGMENTED = (0.0, 0.1, 0.5)
SEEDS, TRAIN_STEPS, N_MASKS = {"quick": 3, "full": 10}, {"quick": 300, "full": 600}, 64
SHIFT = {"fashion": 3, "digits": 1}
SAME = 0.02  # accuracies that differ by less are called the same
PAPER = "arXiv 2306.01129, appendix (ablation of lambda)"


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


def untrained_share() -> float:
    """Returns the mean share of nonzeros of an untrained network like crate-tiny-fashion."""
    images, _ = images_of(FASHION, 256)
    shares = code_share(untrained(ci.load(FASHION).cfg, 0), images)
    return sum(shares) / len(shares)


def segmented(lambd: float) -> list[float]:
    """Returns each image's Jaccard index of the best fixed head of the cutouts model."""
    with threshold(ci.load(CUTOUTS), lambd) as model:
        found = ci.segment(model, "embedded:cutouts", limit=N_MASKS, untrained=0, progress=False)
    return found.table("images")["score"].tolist()


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


def signed(
    text: str, found: tuple, sign: int, *, baseline: float, baseline_is: str, size: str, n: int
) -> dict:
    """Returns a claim that a paired difference has a sign. Rule: its interval excludes 0.

    It depends if the interval holds 0 and more; where nothing changes it is not supported.
    """
    mean, (low, high) = found
    inside = low * sign > 0 and high * sign > 0
    against = low * sign <= 0 and high * sign <= 0
    return claim(
        text,
        "arXiv 2306.01129, section 2.4 (the sparsity term)",
        mean,
        interval=(low, high),
        answer="supported" if inside else "not supported" if against else "depends",
        why="The rule is the sign of the interval of the paired difference; it depends if 0 is in.",
        size=size,
        baseline=baseline,
        baseline_is=baseline_is,
        n=n,
    )


def same_claim(found: dict[float, list[dict]], size: str) -> dict:
    """Returns the claim that lambda .5 costs no accuracy. Rule: the interval within 2 points."""
    high, own = ([run["clean"] for run in found[lambd]] for lambd in (0.5, OWN))
    mean, (low, top) = difference(high, own)
    inside, outside = -SAME < low and top < SAME, low > SAME or top < -SAME
    return claim(
        "Lambda .5 in place of .1 in training changes accuracy by less than 2 points.",
        PAPER,
        mean,
        interval=(low, top),
        published="70.5 % against 70.8 % (CRATE-B, ImageNet)",
        answer="supported" if inside else "not supported" if outside else "depends",
        why="The rule is that the paired interval over seeds lies within 2 points of 0.",
        size=size,
        baseline=sum(own) / len(own),
        baseline_is="accuracy with lambda .1",
        n=len(own),
    )


def training_claims(found: dict[float, list[dict]], random: dict[str, float]) -> list[dict]:
    """Returns the claims on networks trained with different lambdas."""
    seeds = len(found[0.0])
    size = f"digits, 17 tokens, d 48, 3 layers, {seeds} seeds"
    values = {
        (lambd, what): [run[what] for run in runs]
        for lambd, runs in found.items()
        for what in (*CORRUPTIONS, "l0")
    }
    claims = [same_claim(found, size)]
    for lambd in TRAINED_AT[1:]:
        claims.append(
            signed(
                f"Training with lambda {lambd} in place of 0 makes codes sparser (nonzeros).",
                difference(values[lambd, "l0"], values[0.0, "l0"]),
                -1,
                baseline=random["l0"],
                baseline_is="nonzeros of an untrained network",
                size=size,
                n=seeds,
            )
        )
    for how in CORRUPTIONS[1:]:
        fall = {
            lambd: [a - b for a, b in zip(values[lambd, "clean"], values[lambd, how], strict=True)]
            for lambd in (0.0, 0.5)
        }
        claims.append(
            signed(
                f"Training with lambda .5 in place of 0 saves accuracy under {how}.",
                difference(fall[0.0], fall[0.5]),
                1,
                baseline=sum(fall[0.0]) / seeds,
                baseline_is="accuracy lost with lambda 0",
                size=size,
                n=seeds,
            )
        )
    return claims


def threshold_claims(after: dict[float, dict], moved: list[float], share: float) -> list[dict]:
    """Returns the claims on a trained network whose threshold is changed."""
    size = f"{FASHION}, 256 test images"
    own, none = after[OWN], after[0.0]
    base, _ = difference(moved, own["clean"])
    claims = [
        signed(
            "A trained network loses accuracy without its threshold.",
            difference(none["clean"], own["clean"]),
            -1,
            baseline=base,
            baseline_is="thresholds moved as far at random",
            size=size,
            n=256,
        ),
        signed(
            "Without its threshold a trained network's codes are denser (nonzeros, by layer).",
            difference(none["l0"], own["l0"]),
            1,
            baseline=share,
            baseline_is="nonzeros of an untrained network",
            size=size,
            n=len(own["l0"]),
        ),
    ]
    return claims


def segment_claim(scores: dict[float, list[float]]) -> dict:
    """Returns the claim on segmentation with the threshold at 0."""
    return signed(
        "Without its threshold a trained network segments worse (Jaccard index, fixed head).",
        difference(scores[0.0], scores[OWN]),
        -1,
        baseline=sum(scores[OWN]) / len(scores[OWN]),
        baseline_is="Jaccard index with its own threshold",
        size=f"{CUTOUTS}, {N_MASKS} images",
        n=N_MASKS,
    )


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by lambda and corruption."""
    after = {
        lambd: steps.do(f"after-{lambd}", partial(after_training, lambd)) for lambd in (OWN, *OTHER)
    }
    scores = {
        lambd: steps.do(f"segmented-{lambd}", partial(segmented, lambd)) for lambd in SEGMENTED
    }
    found: dict[float, list[dict]] = {lambd: [] for lambd in TRAINED_AT}
    for seed in tqdm(range(SEEDS[form]), desc="digits", unit="seed"):
        for lambd in TRAINED_AT:
            make = partial(in_training, lambd, seed, TRAIN_STEPS[form])
            found[lambd].append(steps.do(f"digits-{lambd}-{seed}", make))
    random = steps.do("digits-untrained", partial(in_training, OWN, 0, 0))
    moved = steps.do("moved", moved_at_random)
    share = steps.do("untrained", untrained_share)
    claims = training_claims(found, random) + threshold_claims(after, moved, share)
    claims.append(segment_claim(scores))
    numbers: list[tuple] = []
    for lambd, table in after.items():
        for what, values in table.items():
            mean = sum(values) / len(values)
            numbers.append((what, f"{FASHION}|{lambd}", 0, 0, mean))
    for lambd, runs in found.items():
        for seed, table in enumerate(runs):
            for what, value in table.items():
                numbers.append((what, f"digits|{lambd}", seed, 0, value))
    for lambd, values in scores.items():
        numbers.append(("jaccard", f"{CUTOUTS}|{lambd}", 0, 0, sum(values) / len(values)))
    same, sparser = claims[0], claims[2]
    headline = (
        f"On digits, lambda .5 in place of .1 in training changes accuracy by {same['ours']:+.1%}, "
        f"and in place of 0 the share of nonzeros by {sparser['ours']:+.1%}; a trained network "
        f"without its threshold changes by {claims[6]['ours']:+.1%} in accuracy."
    )
    return result("sparsity_ablation", form, headline, claims, numbers)


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
        axis.set_title(f"{name}{' (range over seeds)' if name == 'digits' else ''}", fontsize=10)
    axes[0].set_ylim(0, 1.02)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=5)
    change = float(found.table()["ours"].iloc[0])
    figure.suptitle(
        f"Lambda .5 in place of .1 in training: {change:+.1%} accuracy "
        f"(digits, {found.table()['n'].iloc[0]} seeds; 0.3 M parameters on the left)",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


if __name__ == "__main__":
    main(run, draw)
