"""What the sparsity term does: its weight lambda set to 0 or raised, in training and after it.

After training: crate-tiny-fashion (trained with lambda .1) reads 256 test images with other
thresholds, clean and with noise on pixels, a shift, and noise on all codes. The baseline is a
threshold that moves as far in random directions. In training: small CRATEs on scikit-learn's digits
with lambda 0, .1 and .5, several seeds each, which share start and order of the images; the
baseline of their sparsity is what the threshold does before training. Published: CRATE-B reaches
70.8 % on ImageNet with lambda .02 or .1 and 70.5 % with .5 (arXiv 2306.01129, appendix).
"""

from functools import partial
from itertools import product
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
from drawing import curve, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result
from twins import FASHION, images_of

import crate_interp as ci
from crate_interp.stats.intervals import paired_shares

OWN, OTHER, TRAINED_AT = 0.1, (0.0, 0.05, 0.2, 0.5, 1.0), (0.0, 0.1, 0.5)
SEEDS, TRAIN_STEPS = {"quick": 3, "full": 10}, {"quick": 300, "full": 600}
SHIFT = {"fashion": (3, 3), "digits": (1, 0)}  # down, right; digits at (1, 1) are read by chance

MEASURED = (*CORRUPTIONS, "l0")


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


def hits_interval(a: list[float], b: list[float]) -> tuple[float, float]:
    """Returns Tango's interval of the paired difference a - b of hits, each 0 or 1."""
    found = paired_shares(np.subtract(a, b)[:, None])
    return float(found.low[0]), float(found.high[0])


def training_claims(found: dict[float, list[dict]], start: dict[float, list[dict]]) -> list[dict]:
    """Returns the claims on networks trained with different lambdas; start: before training."""
    of = lambda table, lambd, what: np.array([run[what] for run in table[lambd]])  # noqa: E731
    own = of(found, OWN, "clean")
    claims = [claim("sparsity_ablation.same", of(found, 0.5, "clean") - own, baseline=own.mean())]
    for lambd in TRAINED_AT[1:]:
        moved, alone = (of(each, lambd, "l0") - of(each, 0.0, "l0") for each in (found, start))
        claims.append(
            claim("sparsity_ablation.sparser", moved - alone, lambd=lambd, moved=moved.mean(),
                  baseline=alone.mean())
        )  # fmt: skip
    for how in CORRUPTIONS[1:]:
        without, high = (of(found, at, "clean") - of(found, at, how) for at in (0.0, 0.5))
        words = {"baseline": without.mean(), "how": how}
        claims.append(claim("sparsity_ablation.saves", without - high, **words))
    return claims


def loses_claim(after: dict[float, dict], moved: list[float]) -> dict:
    """Returns the claim that a trained network loses accuracy without its threshold.

    moved: hits with thresholds moved as far at random.
    """
    own, none = after[OWN]["clean"], after[0.0]["clean"]
    ends = hits_interval(none, own)
    return claim(
        "sparsity_ablation.loses", np.subtract(none, own).mean(), interval=ends, n=len(own),
        cases={"change": ends, "beyond": hits_interval(none, moved)},
        baseline=np.subtract(moved, own).mean(),
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by lambda and corruption."""
    after = {
        lambd: steps.do(f"after-{lambd}", partial(after_training, lambd)) for lambd in (OWN, *OTHER)
    }
    runs, updates = [*product(TRAINED_AT, range(SEEDS[form]))], TRAIN_STEPS[form]
    jobs = {f"digits-{at}-{seed}": partial(in_training, at, seed, updates) for at, seed in runs}
    jobs |= {f"start-{at}-{seed}": partial(in_training, at, seed, 0) for at, seed in runs}
    made = steps.all(jobs, "digits")
    found, start = (
        {at: [made[f"{what}-{at}-{seed}"] for seed in range(SEEDS[form])] for at in TRAINED_AT}
        for what in ("digits", "start")
    )
    moved = steps.do("moved", moved_at_random)
    claims = [*training_claims(found, start), loses_claim(after, moved)]
    numbers: list[tuple] = [
        (what, f"{FASHION}|{lambd}", 0, 0, sum(hit) / len(hit))
        for lambd, table in after.items() for what, hit in table.items()
    ]  # fmt: skip
    for lambd, seed in runs:
        table = found[lambd][seed]
        numbers += [(what, f"digits|{lambd}", seed, 0, value) for what, value in table.items()]
    return result(
        "sparsity_ablation", form, claims, numbers, accuracy=points(claims[0]),
        seeds=f"digits, {SEEDS[form]} seeds", nonzeros=points(claims[2]),
        untrained=100 * claims[2]["baseline"], in_trained=points(claims[6]),
    )  # fmt: skip


def points(row: Any) -> str:
    """Returns a claim's number and its interval in points, as -0.8 points [-2.0, 0.4]."""
    ours, low, high = (100 * row[end] for end in ("ours", "low", "high"))
    return f"{ours:.1f} points [{low:.1f}, {high:.1f}]"


def draw(found: LabResult) -> Any:
    """Returns a figure: accuracy and nonzeros by lambda, after training and in training."""
    figure, axes = panels(2, size=(10.5, 4.2), sharey=True)
    places = {
        FASHION: ("lambda set after training with .1", sorted((OWN, *OTHER))),
        "digits": ("lambda in training", list(TRAINED_AT)),
    }
    for axis, (name, (words, lambdas)) in zip(axes, places.items(), strict=True):
        for what in MEASURED:
            rows = found.numbers(what)
            at = {f"{name}|{lambd}": place for place, lambd in enumerate(lambdas)}
            rows = rows.assign(place=rows["setting"].map(at)).dropna()
            label = "nonzeros of the code" if what == "l0" else f"accuracy, {what}"
            curve(axis, rows, "k--" if what == "l0" else "-", marker="o", label=label)
        axis.set_xticks(range(len(lambdas)), [f"{v:g}" for v in lambdas])
        tidy(axis, legend=0, xlabel=words, title=name)
    axes[0].set_ylim(0, 1.02)
    return titled(figure, found, axes[0], 5, same=points(found.table().iloc[0]))


if __name__ == "__main__":
    main(run, draw)
