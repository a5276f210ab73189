"""Does training find planted subspaces? Trains small CRATEs to denoise a mixture, and looks.

    python demos/planted_training.py --out runs/planted

Tokens lie in 8 orthogonal planes of a space of 16 dimensions, two of them in a sample, with noise
(demos/planted.py). A token is scaled to the length that LayerNorm gives it. One layer of
CRATE-alpha and a linear map learn to return the clean token. The task is denoising because its best
answer, the posterior mean, needs the subspaces, and MSSA is derived as an approximation of it
(arXiv 2306.01129, section 2.3). A task that only names the planes of a sample would need less.

The embedding stays the identity and there are no position embeddings, so U_k and the planted V_k
lie in one space. The score is the mean squared cosine of their angles, matched one to one, beside
random subspaces and the network before training. A head that takes one direction of each of two
planes scores a half, so the table also says how many planes a head reads. Each finished network is
saved, and the same command goes on after it.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from planted import (
    SIGMA,
    USED,
    as_images,
    chance,
    matched_overlap,
    mixture,
    planted_per_head,
    subspaces,
)
from torch import Tensor, nn
from tqdm.auto import tqdm
from training import set_learning_rate

import crate_interp as ci
from crate_interp.core.files import write
from crate_interp.measures import posterior_mean

HEADS, P, D = 8, 2, 16
GRID, PATCH = (6, 6), (4, 4)
VARIANTS = ("crate", "c", "n", "t")
BATCH, LR = 16, 0.05
HELD_OUT = 512
V = subspaces(D, HEADS, P)


class Denoiser(nn.Module):
    """One layer, and a linear map of each token's place in the stream after it."""

    def __init__(self, variant: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        size: dict[str, Any] = dict(d_model=D, n_layers=1, n_heads=HEADS, n_classes=1, channels=1)
        look: dict[str, Any] = dict(image_size=(24, 24), patch_size=PATCH)
        cfg = ci.CrateConfig(family="crate-alpha", variant=variant, **size, **look)
        self.model, self.out = ci.HookedCrate(cfg), nn.Linear(D, D)
        conv: Any = self.model.embed.conv
        with torch.no_grad():
            conv.weight.copy_(torch.eye(D).view(D, 1, *PATCH))
            conv.bias.zero_()
            self.model.pos_embed.zero_()
        for fixed in (self.model.embed, self.model.unembed, self.model.ln_final):
            fixed.requires_grad_(False)
        self.model.pos_embed.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the clean tokens that it expects, `[batch, patch, d_model]`."""
        z = self.model(as_images(tokens, GRID, PATCH), stop_at_layer=1)
        return self.out(z[:, 1:])

    def reads(self) -> Tensor:
        """Returns bases of what the heads read of a token, `[head, d_model, d_head]`.

        The codes are U_k^T diag(g) (z - mean), where g are the gains of the first norm.
        """
        block: Any = self.model.blocks[0]
        u = (block.ln1.weight[:, None] * block.attn.U).detach().double()
        return u - u.mean(dim=1, keepdim=True)


def data(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns noisy tokens, the clean ones, and the posterior mean, on the noisy ones' scale."""
    noisy, clean, _ = mixture(n, GRID[0] * GRID[1], V, USED, SIGMA, seed)
    scale = D**0.5 / torch.linalg.vector_norm(noisy, dim=-1, keepdim=True)
    best = posterior_mean(noisy, V, SIGMA)
    return (scale * noisy).float(), (scale * clean).float(), (scale * best).float()


def error(guess: Tensor, clean: Tensor) -> float:
    """Returns the squared error of an entry, on average."""
    return float((guess - clean).square().mean())


def train(variant: str, seed: int, steps: int, bar: tqdm) -> dict[str, Any]:
    """Returns what one network has learned."""
    network, started = Denoiser(variant, seed), time.perf_counter()
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=LR)
    untrained = matched_overlap(network.reads(), V)
    for step in range(steps):
        set_learning_rate(optimizer, step, steps, LR)
        noisy, clean, _ = data(BATCH, 10_000 * (seed + 1) + step)
        loss = (network(noisy) - clean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update()
    with torch.no_grad():
        noisy, clean, _ = data(HELD_OUT, 0)
        held_out = error(network(noisy), clean)
    u = network.reads()
    found = dict(error=held_out, overlap=matched_overlap(u, V), planes=planted_per_head(u, V))
    found |= dict(untrained=untrained)
    return dict(variant=variant, seed=seed, **found, seconds=time.perf_counter() - started)


def bounds() -> dict[str, float]:
    """Returns the errors of the best linear map and of the posterior mean, and chance."""
    noisy, clean, best = data(HELD_OUT, 0)
    flat, target = noisy.flatten(0, 1), clean.flatten(0, 1)
    linear = flat @ torch.linalg.lstsq(flat, target).solution
    limits = dict(linear=error(linear, target), posterior=error(best, clean))
    shape = (D, HEADS, P)
    return limits | dict(chance=chance(*shape), planes=chance(*shape, score=planted_per_head))


def table(rows: list[dict[str, Any]], limits: dict[str, float]) -> str:
    """Returns a line for each variant, mean and standard deviation over seeds, as text."""
    heads = f"{'variant':8} {'error':>15} {'overlap':>15} {'planes a head':>15}"
    lines = [f"{heads} {'untrained':>9} {'seconds':>8}"]
    for variant in VARIANTS:
        own = [row for row in rows if row["variant"] == variant]
        names = ("error", "overlap", "planes", "untrained", "seconds")
        columns = [torch.tensor([row[name] for row in own]) for name in names]
        cells = [f"{each.mean():.3f} +- {each.std():.3f}" for each in columns[:3]]
        last = f"{columns[3].mean():10.3f} {columns[4].mean():8.1f}"
        lines.append(f"{variant:8} " + " ".join(f"{cell:>15}" for cell in cells) + last)
    lines += [
        f"error of the best linear map {limits['linear']:.3f}, of the posterior mean of a token "
        f"alone {limits['posterior']:.3f}",
        f"overlap of random subspaces {limits['chance']:.3f}, of the planted ones 1; planes a head "
        f"{limits['planes']:.1f} and 1",
    ]
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], limits: dict[str, float], path: Path) -> None:
    """Writes a picture: a point for each network, its overlap against its error."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for variant, marker in zip(VARIANTS, "osv^", strict=True):
        own = [row for row in rows if row["variant"] == variant]
        x, y = ([row[name] for row in own] for name in ("overlap", "error"))
        label = "CRATE" if variant == "crate" else f"CRATE-{variant.upper()}"
        axes.plot(x, y, marker, alpha=0.8, label=label)
    axes.axvline(limits["chance"], color="0.6", linestyle=":")
    axes.annotate("random\nsubspaces", (limits["chance"] - 0.01, 0.02), ha="right", color="0.4")
    axes.axvline(0.5, color="0.6", linestyle=":")
    axes.annotate("half of each\nof two planes", (0.51, 0.02), color="0.4")
    lines = (("linear", "best linear map"), ("posterior", "posterior mean of a token alone"))
    for name, label in lines:
        axes.axhline(limits[name], color="0.6", linestyle="--")
        axes.annotate(label, (0.99, limits[name] - 0.004), ha="right", va="top", color="0.4")
    axes.set(xlim=(0, 1), xlabel="overlap of U with the planted subspaces (1: found)")
    axes.set(ylim=(0, 1.1 * limits["linear"]), ylabel="squared error of a denoised entry")
    axes.set_title("What training finds of planted subspaces")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / f"networks-{args.steps}.json"
    rows = json.loads(saved.read_text()) if saved.exists() else []
    done = {(row["variant"], row["seed"]) for row in rows}
    wanted = [(variant, seed) for seed in range(args.seeds) for variant in VARIANTS]
    total = len(wanted) * args.steps
    with tqdm(total=total, initial=len(done & set(wanted)) * args.steps, unit="step") as bar:
        for variant, seed in wanted:
            if (variant, seed) not in done:
                bar.set_description(f"{variant} {seed}")
                rows.append(train(variant, seed, args.steps, bar))
                write(saved, partial(_dump, rows))
    limits = bounds()
    print(table(rows, limits))
    picture(rows, limits, args.out / "planted.png")
    print(f"written to {args.out}")


def _dump(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
