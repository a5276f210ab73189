"""A positive control: tokens whose subspaces are known, and a layer built for them by hand.

    python demos/planted.py

Prints how R^c changes in the layer, in three frames and at five eps, beside four other updates.

Each token is a Gaussian in one of `heads` orthogonal subspaces, with noise in all directions. A
sample uses a few of the subspaces. If it used all of them evenly, Z^T Z would be a multiple of I
with and without the noise, and R^c, which depends on Z^T Z alone, could not tell the two apart.
Every token has mean 0, because LayerNorm would remove its mean.

The layer takes the paper's own step: it adds MSSA(LN(Z)) with W_O a small positive multiple of U^T,
and subtracts 0.2 Z. The models have no weight on the skip connection, so a hook does that. The
frames are the stream as it is ("stream"), what the layer's first norm makes of it ("read"), and the
stream at a fixed norm ("unit"). R^c falls in all of them. With MSSA alone the stream grows, and R^c
falls in the other two frames only. With MSSA subtracted it falls in the stream only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import crate_interp as ci
from crate_interp.measures import (
    subspace_coding_rate,
    subspace_coding_rate_gradient,
    subspace_overlap,
)

HEADS, P = 5, 3
D = HEADS * P
GRID, PATCH = (6, 6), (3, 5)  # pos is 37: 36 patches and CLS
USED, SIGMA = 2, 0.3
SHRINK, WRITE = 0.2, 0.1
TEMP = 50.0  # of TSSA's memberships: about as large as the number of tokens
CONTRACT = -0.2  # step_rep of CBSA: representatives keep most of their own token
SIZE = 0.35  # of an entry of the stream; LayerNorm makes it 1
EPS = 4.0  # so large that alpha lambda stays below 1
FRAMES = ("stream", "read", "unit")
ALL_EPS = (0.01, 0.1, 1.0, 10.0, 100.0)

Step = Callable[[Tensor, Tensor], Tensor]  # what attention adds, and Z: `[batch, pos, d_model]`


# ---- the tokens


def subspaces(d_model: int, heads: int, p: int, seed: int = 0) -> Tensor:
    """Returns orthonormal bases of orthogonal subspaces, float64 `[head, d_model, p]`.

    The direction (1, .., 1) lies in the first subspace if heads * p = d_model, else in none.
    """
    square = torch.randn(d_model, d_model, generator=_random(seed), dtype=torch.float64)
    square[:, 0] = 1
    columns = torch.linalg.qr(square)[0][:, d_model - heads * p :]
    return rearrange(columns, "d_model (head p) -> head d_model p", head=heads)


def mixture(
    n: int, pos: int, v: Tensor, used: int, sigma: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns noisy tokens and clean ones, `[n, pos, d_model]`, and each token's subspace.

    A sample draws `used` of the subspaces, a token one of those, evenly. A clean token is V_k a
    less its mean, with a of independent standard normals; noise is `sigma` times standard normals.
    """
    heads, d_model, p = v.shape
    random = _random(seed)
    drawn = torch.rand(n, heads, generator=random).argsort(dim=1)[:, :used]
    subspace = drawn.gather(1, torch.randint(used, (n, pos), generator=random))
    a = torch.randn(n, pos, p, generator=random, dtype=v.dtype)
    clean = torch.einsum("nqdp,nqp->nqd", v[subspace], a)
    clean = clean - clean.mean(dim=-1, keepdim=True)
    noise = torch.randn(n, pos, d_model, generator=random, dtype=v.dtype)
    return clean + sigma * noise, clean, subspace


def as_images(tokens: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Returns images of one channel whose patches are the tokens, `[n, 1, height, width]`."""
    pattern = "n (h w) (p1 p2) -> n 1 (h p1) (w p2)"
    return rearrange(tokens, pattern, h=grid[0], w=grid[1], p1=patch[0], p2=patch[1]).float()


# ---- the score


def matched_overlap(u: Tensor, v: Tensor) -> float:
    """Returns the mean squared cosine between subspaces, matched one to one, in [0, 1].

    u, v `[head, d_model, p]`. The pairs are those with the largest sum (Hungarian algorithm), so
    random subspaces have more than p / d.
    """
    pairs = (len(u), len(v), *u.shape[1:])
    table = subspace_overlap(u.detach()[:, None].expand(pairs), v.expand(pairs))
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table[rows, columns].mean())


# ---- the layer


@dataclass
class Planted:
    """A model, images of the mixture, the true subspaces, and the step attention takes."""

    model: ci.HookedCrate
    images: Tensor
    v: Tensor
    step: Step

    @contextmanager
    def working(self) -> Iterator["Planted"]:
        """Hooks the step into the model while the block runs."""
        kept: dict[int, Tensor] = {}

        def keep(z: Tensor, hook) -> None:
            kept[hook.layer()] = z

        def replace(out: Tensor, hook) -> Tensor:
            return self.step(out, kept[hook.layer()])

        pair = (("hook_resid_pre", keep), ("hook_attn_out", replace))
        layers = range(self.model.cfg.n_layers)
        with self.model.hooks(
            [(f"blocks.{layer}.{name}", hook) for layer in layers for name, hook in pair]
        ):
            yield self


def paper_step(out: Tensor, z: Tensor) -> Tensor:
    """Returns the update of the paper, MSSA less a share of Z (arXiv 2306.01129, eq. 11).

    Z counts without each token's mean, which LayerNorm hides from MSSA.
    """
    return out - SHRINK * (z - z.mean(dim=-1, keepdim=True))


# what attention adds, by family: TSSA subtracts by itself, and AoT has no factor in W_O
STEPS: dict[str, Step] = {
    "crate": paper_step,
    "tost-ista": lambda out, z: out,
    "cbt": paper_step,
    "aot": lambda out, z: paper_step(WRITE * SIZE * out, z),
}


def ideal(n: int = 16, n_layers: int = 2, seed: int = 0, family: str = "crate") -> Planted:
    """Returns a model built for the mixture by hand, and `n` images of the mixture.

    family: one of `STEPS`. U_k = V_k, and W_O,k is a small positive multiple of U_k^T. D is
    orthonormal, with D 1 = 1. One step of eta = 1 is the exact solution of the lasso. LN2 has a
    bias that makes codes positive, so that the threshold makes the zeros. The code of a token is
    then nearly an affine map of it, and the subspaces of the next layer are D^T V_k.
    """
    # in CBT each token but the last is a representative of its own
    v, grid = subspaces(D, HEADS, P, seed), (8, 8) if family == "cbt" else GRID
    size = dict(d_model=D, n_layers=n_layers, n_heads=HEADS, n_classes=HEADS, channels=1)
    shape = (grid[0] * PATCH[0], grid[1] * PATCH[1])
    look = dict(image_size=shape, patch_size=PATCH, stem="linear", eta=1.0, lambd=SIZE / 2)
    # an eps of 1e-5 beside a variance of SIZE^2 would let the norm see the length of the stream
    norms = dict(ln_eps=1e-12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ci.HookedCrate(ci.CrateConfig(family=family, **size, **look, **norms)).eval()
    tokens, _, _ = mixture(n, grid[0] * grid[1], v, USED, SIGMA, seed + 1)
    embed: Any = model.embed
    blocks: Any = model.blocks
    with torch.no_grad():
        embed.proj.weight.copy_(torch.eye(D))
        embed.proj.bias.zero_()
        embed.norm_token.weight.fill_(SIZE)
        model.pos_embed.zero_()
        model.cls_token.copy_(embed(as_images(tokens[:1], grid, PATCH))[:, :1])
        u = v
        for layer, block in enumerate(blocks):
            set_bases(block, u)
            if family == "aot":
                continue
            # both bases have (1, .., 1) as their first column
            first, second = (subspaces(D, 1, D, seed + k + layer)[0] for k in (10, 20))
            dictionary = first @ second.T
            block.mlp.D.copy_(dictionary)
            block.ln2.weight.fill_(SIZE)
            block.ln2.bias.fill_(2 * SIZE)
            u = dictionary.T @ u
    return Planted(model, as_images(tokens, grid, PATCH), v, STEPS[family])


def set_bases(block: Any, u: Tensor) -> None:
    """Sets U_k, and W_O,k to a multiple of U_k^T; in AoT it is U_k^T by definition."""
    attn = block.attn
    with torch.no_grad():
        attn.u_proj.weight.copy_(rearrange(u, "head d_model p -> (head p) d_model"))
        if attn.out_proj is not None:
            attn.out_proj.weight.copy_(WRITE * SIZE * attn.u_proj.weight.T)
            attn.out_proj.bias.zero_()
        if hasattr(attn, "temp"):
            attn.temp.fill_(TEMP)
        if hasattr(attn, "step_x"):
            attn.step_x.fill_(1.0)
            attn.step_rep.fill_(CONTRACT)


# ---- what the layer does


def in_frame(frame: str, z: Tensor, norm: torch.nn.Module) -> Tensor:
    """Returns the stream in a frame, `[batch, pos, d_model]`."""
    if frame == "read":
        return norm(z.float()).double()
    if frame == "unit":
        return z * (z.shape[1] * z.shape[2]) ** 0.5 / _length(z)
    return z


def along_frame(frame: str, z: Tensor, x: Tensor) -> Tensor:
    """Returns x without its part that leaves the frame at z.

    "read" fixes each token's mean and length if the norm's gains are 1, "unit" the sample's length.
    """
    if frame == "read":
        x = x - x.mean(dim=-1, keepdim=True)
        return x - z * (x * z).sum(dim=-1, keepdim=True) / z.square().sum(dim=-1, keepdim=True)
    return x - z * _dot(x, z) / _length(z) ** 2 if frame == "unit" else x


@torch.no_grad()
def compression(planted: Planted, eps: float, layer: int = 0) -> dict[str, dict[str, float]]:
    """Returns, for each frame, what the layer does to R^c; the worst of the samples.

    change: (R^c after - R^c before) / R^c before. excess: the same less its mean over 8 updates
    shuffled over the tokens. cosine: of the change and -grad R^c, along the frame. step: the least
    and the most kappa L, as the audit's "step" but along the frame.
    """
    with planted.working():
        _, cache = planted.model.run_with_cache(planted.images)
    block: Any = planted.model.blocks[layer]
    before, after = (cache[name, layer].double() for name in ("resid_pre", "resid_mid"))
    u = block.attn.U.detach().double()
    return {frame: _in_one(frame, before, after - before, u, block.ln1, eps) for frame in FRAMES}


def _in_one(
    frame: str, z: Tensor, update: Tensor, u: Tensor, norm: torch.nn.Module, eps: float
) -> dict[str, float]:
    def rate(update: Tensor) -> Tensor:
        return subspace_coding_rate(in_frame(frame, z + update, norm), u, eps).sum(dim=-1)

    start, reached = in_frame(frame, z, norm), in_frame(frame, z + update, norm)
    orders = [torch.randperm(z.shape[1], generator=_random(k)) for k in range(8)]
    shuffled = torch.stack([rate(update[:, order]) for order in orders]).mean(dim=0)
    base, end = rate(torch.zeros_like(z)), rate(update)
    gradient = along_frame(frame, start, subspace_coding_rate_gradient(start, u, eps))
    moved = along_frame(frame, start, reached - start)
    down = -_dot(moved, gradient).flatten()
    wide = rearrange(u, "head d_model p -> d_model (head p)")
    curvature = 9 / 4 * u.shape[2] / (z.shape[1] * eps**2) * torch.linalg.matrix_norm(wide, 2) ** 2
    step = down / _length(gradient).flatten() ** 2 * curvature
    return {
        "change": float(((end - base) / base).max()),
        "excess": float(((end - shuffled) / base).max()),
        "cosine": float((down / (_length(moved) * _length(gradient)).flatten()).min()),
        "step_low": float(step.min()),
        "step_high": float(step.max()),
    }


UPDATES: dict[str, Step] = {
    "the paper's, MSSA - 0.2 Z": paper_step,
    "MSSA alone (CRATE-C)": lambda out, z: out,
    "minus MSSA (CRATE-N)": lambda out, z: -out,
    "-0.2 Z alone": lambda out, z: paper_step(0 * out, z),
    "the paper's, uphill": lambda out, z: -paper_step(out, z),
}


def main() -> None:
    planted = ideal(n_layers=1)
    for name, step in UPDATES.items():
        planted.step = step
        print(f"{name}: change of R^c in per cent, less that of shuffled updates (worst sample)")
        print(f"{'':8}" + "".join(f"{f'eps {eps:g}':>20}" for eps in ALL_EPS))
        found = [compression(planted, eps) for eps in ALL_EPS]
        for frame in FRAMES:
            cells = [[100 * each[frame][key] for key in ("change", "excess")] for each in found]
            print(f"{frame:8}" + "".join(f"{f'{a:+.2g} ({b:+.2g})':>20}" for a, b in cells))
        print()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(dim=(1, 2), keepdim=True)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    main()
