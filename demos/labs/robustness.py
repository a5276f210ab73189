"""Do changed pictures fool a CRATE more than a ViT of the same budget?

    python demos/labs/robustness.py [--quick | --full] --out DIR

The five pairs of demos/pairs.py answer test composites (quick: 64, full: 256). Attack: PGD on each
network, 10 steps of eps / 4 along the sign of the slope, from a random start, no pixel moved by
more than eps of 255 or out of 0 to 255; pixels are not rounded. Beside it random noise of the same
size: each pixel moves by eps, up or down. Shifts: half the contrast, and 255 - x behind the
object. `ci.compare` says whether codes stay sparser under a shift.
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

COUNT, EPS, PGD_STEPS, MAIN = {"quick": 64, "full": 256}, (1, 2, 4, 8), 10, 2
SHIFTS = ("half contrast", "inverted ground")


def pictures(n: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns images in 0 to 255 `[n, 3, h, w]`, labels, and the images by what changes them."""
    rows = sample()[:n]
    images, masks = (np.stack([*map(np.asarray, rows[name])]) for name in ("image", "mask"))
    x, ground = torch.from_numpy(images).permute(0, 3, 1, 2).float(), torch.from_numpy(masks == 0)
    done = {"clean": x, SHIFTS[0]: (x + 127.5) / 2, SHIFTS[1]: (255 - x).where(ground[:, None], x)}
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
    """Returns how much sparser codes of CRATEs are (Hoyer's), low and high end, `[layer, 3]`."""
    sides = ([network(kind, seed) for seed in SEEDS] for kind in KINDS)
    data, how = (pictures(n)[2][done] / 255 - MEAN) / STD, dict(untrained=0, progress=False)
    table: Any = ci.compare(*sides, data, probes="sparsity", **how).table()  # type: ignore
    return table[table["statistic"] == "hoyer"][["difference", "low", "high"]].to_numpy()


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims on accuracy and sparsity under changes."""
    n, pairs = COUNT[form], [(kind, seed) for kind in KINDS for seed in SEEDS]
    found = steps.all({f"{k}-{s}": partial(answered, k, s, n) for k, s in pairs}, "networks")
    numbers, gap, kept, lost, attacks = [], {}, {}, {}, [f"PGD {eps}" for eps in EPS]
    for name in found["vit-0"]:
        right = np.array([[found[f"{k}-{s}"][name] for s in SEEDS] for k in KINDS])
        clean = np.array([[found[f"{k}-{s}"]["clean"] for s in SEEDS] for k in KINDS])
        share, stays = right.mean(-1), (right & clean).sum(-1) / clean.sum(-1)
        numbers += [
            (what, f"{kind}, {name}", seed, 0, one[at][seed])
            for seed in SEEDS
            for at, kind in enumerate(KINDS)
            for what, one in (("right", share), ("kept", stays))
        ]
        gap[name], kept[name], lost[name] = right[0] * 1.0 - right[1], stays[0] - stays[1], share
    accurate = {k: lowest(ends_of(gap[k].mean(1)), ends_of(gap[k].mean(0))) for k in attacks}
    worse = {f"{kind} {eps}": lost[f"noise {eps}"][at] - lost[f"PGD {eps}"][at]
             for at, kind in enumerate(KINDS) for eps in EPS}  # fmt: skip
    codes = {name: sparser(name, n) for name in ("clean", *SHIFTS)}
    hoyer = {name: lowest(*map(tuple, rows[:, 1:].tolist())) for name, rows in codes.items()}
    main_attack, shift = f"PGD {MAIN}", SHIFTS[-1]
    asked: dict[str, tuple[Any, Any, float]] = {  # rule -> number, cases, baseline
        "pgd": (gap[main_attack].mean(1), accurate, gap["clean"].mean()),
        "kept": (kept[main_attack], {k: kept[k] for k in attacks}, kept[f"noise {MAIN}"].mean()),
        "random": (worse[f"crate {MAIN}"], worse, 0.0),
        "shift": (kept[shift], {k: kept[k] for k in SHIFTS}, 0.0),
        "sparser": (codes[shift].mean(0)[0], hoyer, codes["clean"].mean(0)[0]),
    }
    claims = [claim(f"robustness.{rule}", ours, cases=cases, baseline=base, n=len(SEEDS))
              for rule, (ours, cases, base) in asked.items()]  # fmt: skip
    stays = {
        kind: 100
        * np.mean([row[4] for row in numbers if row[:2] == ("kept", f"{kind}, {main_attack}")])
        for kind in KINDS
    }
    return result("robustness", form, claims, numbers, **stays)


def draw(found: LabResult) -> Any:
    """Draws the share of right answers of both kinds, by what was done, with its interval."""
    figure, axes = panels(1, size=(10, 3.8))
    table: Any = found.numbers("right")
    for at, (kind, rows) in enumerate(table.groupby(table["setting"].str.split(",").str[0])):
        names = [setting.split(", ")[1] for setting in rows["setting"].unique()]
        for place, (_, own) in enumerate(rows.groupby("setting", sort=False)):
            label = None if place else {"crate": "CRATE", "vit": "ViT"}[str(kind)]
            interval(axes, place + 0.2 * at, own["value"], color=f"C{at}", label=label)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    tidy(axes, ylabel="share of pictures right", ylim=(0, None))
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
