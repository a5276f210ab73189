"""Do changed pictures fool a CRATE more than a ViT of the same budget?

    python demos/labs/robustness.py [--quick | --full] --out DIR

The five pairs of demos/pairs.py answer test composites (quick: 64, full: 256). Attack: PGD on each
network, 10 steps of eps / 4 along the sign of the slope, from a random start, no pixel moved by
more than eps of 255 or out of 0 to 255; pixels are not rounded. Beside it random noise of the same
size: each pixel moves by eps, up or down. Shifts: a blur of 3x3 pixels, and 255 - x behind the
object. `ci.compare` says whether codes stay sparser under a shift; under attack it cannot, as it
gives both sides the same pictures.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import twins  # noqa: F401 (puts the scripts of demos on the path)
from drawing import interval, panels, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, result
from pair_measures import Network, load, sample
from pairs import KINDS, MEAN, SEEDS, STD, logits
from rules import lowest
from torch import Tensor

import crate_interp as ci

COUNT, EPS, PGD_STEPS = {"quick": 64, "full": 256}, (1, 2, 4, 8), 10
SHIFTS = ("blur", "inverted ground")
ATTACK, NOISE, SHIFT = "PGD 2", "noise 2", SHIFTS[1]  # what the numbers of the claims are of


def pictures(n: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns images in 0 to 255 `[n, 3, h, w]`, labels, and the images by what changes them."""
    rows = sample()[:n]
    images, masks = (np.stack([*map(np.asarray, rows[name])]) for name in ("image", "mask"))
    x, ground = torch.from_numpy(images).permute(0, 3, 1, 2).float(), torch.from_numpy(masks == 0)
    blur = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    done = {"clean": x, SHIFTS[0]: blur, SHIFTS[1]: (255 - x).where(ground[:, None], x)}
    return x, torch.tensor(rows["label"]), done | {f"noise {e}": random_noise(x, e) for e in EPS}


def network(kind: str, seed: int) -> Any:
    """Returns the trained network of a pair."""
    return load(Network(kind, seed, True, "value" if kind == "vit" else "")).requires_grad_(False)


def random_noise(images: Tensor, eps: float, seed: int = 0) -> Tensor:
    """Returns pictures of which each pixel is moved by eps, up or down."""
    signs = torch.randint(2, images.shape, generator=torch.Generator().manual_seed(seed))
    return (images + eps * (2 * signs - 1)).clamp(0, 255)


def pgd(model: Any, images: Tensor, labels: Tensor, eps: float, seed: int = 0) -> Tensor:
    """Returns pictures within eps of the images that raise a network's loss."""
    low, high = (images - eps).clamp(min=0), (images + eps).clamp(max=255)
    x = low + (high - low) * torch.rand(images.shape, generator=torch.Generator().manual_seed(seed))
    for _ in range(PGD_STEPS):
        loss = F.cross_entropy(logits(model, x.requires_grad_()), labels)
        x = x.detach() + eps / 4 * torch.autograd.grad(loss, x)[0].sign()
        x = x.clamp(low, high)
    return x


def answered(kind: str, seed: int, n: int) -> dict[str, list[bool]]:
    """Returns which pictures a network has right, by what was done to them."""
    model, (x, labels, done) = network(kind, seed), pictures(n)
    done |= {f"PGD {eps}": pgd(model, x, labels, eps) for eps in EPS}
    with torch.no_grad():
        return {k: (logits(model, y).argmax(-1) == labels).tolist() for k, y in done.items()}


def sparser(done: str, n: int) -> np.ndarray:
    """Returns how much sparser codes of CRATEs are (Hoyer's), with both ends, `[layer, 3]`."""
    sides = ([network(kind, seed) for seed in SEEDS] for kind in KINDS)
    data, how = (pictures(n)[2][done] / 255 - MEAN) / STD, dict(untrained=0, progress=False)
    table: Any = ci.compare(*sides, data, probes="sparsity", **how).table()  # type: ignore
    return table[table["statistic"] == "hoyer"][["difference", "low", "high"]].to_numpy()


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims on accuracy and sparsity under changes."""
    n, nets = COUNT[form], [f"{kind} {seed}" for kind in KINDS for seed in SEEDS]
    jobs = {net: partial(answered, net.split()[0], int(net[-1]), n) for net in nets}
    found = steps.all(jobs, "networks")
    right = {name: np.array([found[net][name] for net in nets]).reshape(2, len(SEEDS), n) * 1.0
             for name in found[nets[0]]}  # [kind, seed, picture]  # fmt: skip
    share = {name: each.mean(-1) for name, each in right.items()}
    kept = {name: (each * right["clean"]).mean(-1) / share["clean"] for name, each in right.items()}
    numbers = [(what, f"{kind}, {name}", seed, 0, each[name][at, seed])
               for what, each in (("right", share), ("kept", kept)) for name in right
               for at, kind in enumerate(KINDS) for seed in SEEDS]  # fmt: skip
    more = {name: each[0] - each[1] for name, each in right.items()}
    keeps = {name: each[0] - each[1] for name, each in kept.items()}
    attacks = [f"PGD {eps}" for eps in EPS]
    both = {name: lowest(*[ends_of(more[name].mean(at)) for at in (1, 0)]) for name in attacks}
    lost = {f"{kind} {eps}": share[f"noise {eps}"][at] - share[f"PGD {eps}"][at]
            for at, kind in enumerate(KINDS) for eps in EPS}  # fmt: skip
    codes = {name: sparser(name, n) for name in ("clean", *SHIFTS)}
    hoyer = {name: lowest(*map(tuple, rows[:, 1:].tolist())) for name, rows in codes.items()}
    asked: dict[str, tuple[Any, Any, float]] = {  # rule -> number, cases, baseline
        "pgd": (more[ATTACK].mean(1), both, more["clean"].mean()),
        "kept": (keeps[ATTACK], {name: keeps[name] for name in attacks}, keeps[NOISE].mean()),
        "random": (lost[f"crate {ATTACK[-1]}"], lost, 0.0),
        "shift": (keeps[SHIFT], {name: keeps[name] for name in SHIFTS}, 0.0),
        "sparser": (codes[SHIFT].mean(0)[0], hoyer, codes["clean"].mean(0)[0]),
    }
    claims = [claim(f"robustness.{rule}", ours, cases=cases, baseline=base, n=len(SEEDS))
              for rule, (ours, cases, base) in asked.items()]  # fmt: skip
    words = dict(zip(KINDS, 100 * kept[ATTACK].mean(1), strict=True))
    return result("robustness", form, claims, numbers, **words)


def draw(found: LabResult) -> Any:
    """Draws which share is right, and which stays right, by what was done, with intervals."""
    figure, axes = panels(2)
    words = {"right": "pictures right (share)", "kept": "stay right, of those right clean (share)"}
    for axis, (quantity, title) in zip(axes, words.items(), strict=True):
        rows = found.numbers(quantity)
        names = dict.fromkeys(setting.split(", ")[1] for setting in rows["setting"])
        for at, (kind, label) in enumerate(zip(KINDS, ("CRATE", "ViT"), strict=True)):
            for place, name in enumerate(names):
                own = found.numbers(quantity, setting=f"{kind}, {name}")["value"]
                shown = None if place else label
                interval(axis, place + 0.2 * at, own, color=f"C{at}", label=shown)
        axis.set_xticks(range(len(names)), [*names], rotation=30, ha="right")
        tidy(axis, title=title, ylim=(0, None))
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
