"""What the sparsity term does: its weight lambda set to 0 or raised, in training and after it.

After training: crate-tiny-fashion (trained with lambda .1) reads 256 test images with other
thresholds, clean and with noise on pixels, a shift, and noise on all codes. The baseline is a
threshold that moves as far in random directions. In training: small CRATEs on scikit-learn's digits
with lambda 0, .1 and .5, several seeds each, which share start and order of the images; the
baseline of their sparsity is what the threshold does before training. Published: CRATE-B reaches
70.8 % on ImageNet with lambda .02 or .1 and 70.5 % with .5 (arXiv 2306.01129, appendix).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from drawing import curve, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result
from torch import Tensor
from twins import FASHION, images_of

import crate_interp as ci
from crate_interp import CrateConfig, HookedCrate
from crate_interp.stats.intervals import paired_shares

LR, BATCH, DECAY = 3e-3, 64, 0.05
CORRUPTIONS = ("clean", "pixel noise", "shift", "code noise")
PIXEL_NOISE, CODE_NOISE = 0.5, 0.5  # of the standard deviation of pixels, of the size of a code
OWN, OTHER, TRAINED_AT = 0.1, (0.0, 0.05, 0.2, 0.5, 1.0), (0.0, 0.1, 0.5)
SEEDS, TRAIN_STEPS = {"quick": 3, "full": 10}, {"quick": 300, "full": 600}
SHIFT = {"fashion": (3, 3), "digits": (1, 0)}  # down, right; digits at (1, 1) are read by chance

MEASURED = (*CORRUPTIONS, "l0")


@contextmanager
def threshold(model: Any, lambd: float) -> Iterator[Any]:
    """Gives all sparse steps the threshold `lambd` while the context is open."""
    before = [block.mlp.lambd for block in model.blocks]
    try:
        for block in model.blocks:
            block.mlp.lambd = lambd
        yield model
    finally:
        for block, own in zip(model.blocks, before, strict=True):
            block.mlp.lambd = own


def shifted(images: Tensor, shift: tuple[int, int]) -> Tensor:
    """Returns images moved by (down, right) pixels; the edge is filled with their least value."""
    down, right = shift
    padded = F.pad(images, (right, 0, down, 0), value=float(images.min()))
    return padded[..., : images.shape[-2], : images.shape[-1]]


def noisy_codes(seed: int) -> list[tuple[Any, Any]]:
    """Returns the hooks that add noise to every code: half of its root mean square, by layer."""
    random = torch.Generator().manual_seed(seed)

    def add(code: Tensor, hook: Any) -> Tensor:
        size = code.square().mean().sqrt()
        return code + CODE_NOISE * size * torch.randn(code.shape, generator=random)

    return [(lambda name: name.endswith("mlp.hook_post"), add)]


def random_signs(model: Any, lambd: float, seed: int) -> list[tuple[Any, Any]]:
    """Returns the hooks that move what the ReLU reads by eta lambd, up or down at random.

    As far as a threshold that changes by lambd moves it, but each coordinate in its own direction.
    """
    random = torch.Generator().manual_seed(seed)
    cfg = model.cfg
    signs = 2.0 * torch.randint(2, (cfg.n_layers, cfg.d_model), generator=random) - 1

    def move(pre: Tensor, hook: Any) -> Tensor:
        return pre + cfg.eta * lambd * signs[hook.layer()]

    return [(lambda name: name.endswith("mlp.hook_pre"), move)]


@torch.no_grad()
def hits(
    model: Any, images: Tensor, labels: Tensor, how: str, shift: tuple[int, int]
) -> list[float]:
    """Returns 1 for each image whose largest logit is its label's, else 0, under a corruption."""
    hooks: list = noisy_codes(0) if how == "code noise" else []
    if how == "pixel noise":
        random = torch.Generator().manual_seed(0)
        images = images + PIXEL_NOISE * torch.randn(images.shape, generator=random)
    if how == "shift":
        images = shifted(images, shift)
    logits = model.run_with_hooks(images, fwd_hooks=hooks)
    return (logits.argmax(dim=-1) == labels).float().tolist()


@torch.no_grad()
def code_share(model: Any, images: Tensor) -> list[float]:
    """Returns the share of entries of Z^{l+1} that are not 0, by layer: |Z|_0 / (d N)."""
    names = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    _, cached = model.run_with_cache(images, names_filter=names)
    return [(cached[name] != 0).float().mean().item() for name in names]


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns scikit-learn's 8x8 digits: 1,437 images and labels to train, 360 to test."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    pixels = torch.from_numpy(data.images[order]).float()[:, None]
    pixels = (pixels - pixels.mean()) / pixels.std()
    labels = torch.from_numpy(data.target[order])
    return pixels[:-360], labels[:-360], pixels[-360:], labels[-360:]


def make_digits_model(lambd: float, seed: int) -> HookedCrate:
    """Returns an untrained CRATE for digits: patch 2 (17 tokens), d 48, 3 layers, 4 heads."""
    size: dict[str, Any] = dict(
        d_model=48, n_layers=3, n_heads=4, image_size=8, patch_size=2, channels=1, n_classes=10
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HookedCrate(CrateConfig(family="crate", **size, lambd=lambd)).eval()


def train_on_digits(lambd: float, seed: int, steps: int) -> HookedCrate:
    """Returns a CRATE trained on digits; order and start depend on the seed alone."""
    images, labels, _, _ = digits()
    model = make_digits_model(lambd, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    random = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,), generator=random)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


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
