"""Does attention alone denoise at a linear rate? The signal-to-noise of planted tokens, by layer.

The attention-only transformer (arXiv 2506.03790) is a stack of Z + eta MSSA(Z), without a sparse
step: `MSSA(Z) = sum_k U_k U_k^T Z phi(Z^T U_k U_k^T Z)`, tokens as columns. Its theorem is about
tokens z_i = U_k a_i + sum_{j != k} U_j e_ij of orthogonal subspaces, a standard normal and e normal
with a small standard deviation delta, and about a phi that sets each weight of the softmax to tau
if it is at least tau, and to 0 otherwise. It says that each layer multiplies the signal-to-noise
ratio of the tokens of a subspace, |U_k U_k^T Z_k|_F / |(I - U_k U_k^T) Z_k|_F, by 1 + eta tau.

Here four stacks of the planted subspaces run: with that phi; the same with all tokens brought back
to their common length after each layer, which changes no ratio; with the plain softmax; and with
the softmax of LN(Z) and the scale 1 / sqrt(p), as models run it. Baseline: random subspaces.
"""

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from drawing import curve, panels, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, result
from mixtures import rotation
from rules import beyond
from torch import Tensor

from crate_interp.measures import subspace_snr
from crate_interp.measures.gradients import written
from crate_interp.measures.rates import head_codes

HEADS, P, LAYERS = 4, 32, 12
ETA, TAU = 0.5, 0.6
RATE = 1 + ETA * TAU
DELTAS = (0.1, 0.2, 0.3, 0.4, 0.5)
SHOWN = 0.1
STACKS = ("thresholded", "thresholded, one length", "softmax", "softmax of LN(Z)")
SUBSPACES = ("planted", "random")
N_TOKENS, SEEDS = {"quick": 50, "full": 200}, {"quick": 10, "full": 5}  # tokens of each subspace
RANDOM = 20  # the first seed of random subspaces


def planted(u: Tensor, n: int, delta: float, seed: int) -> Tensor:
    """Returns n tokens of each subspace with noise in the others, `[head, n, d]`."""
    heads, _, p = u.shape
    random = torch.Generator().manual_seed(seed)
    codes = torch.randn(heads, heads, n, p, generator=random, dtype=u.dtype)
    own = torch.eye(heads, dtype=u.dtype)[:, :, None, None]
    return written(codes * (own + delta * (1 - own)), u)


def signal_to_noise(z: Tensor, u: Tensor) -> float:
    """Returns the geometric mean, over subspaces, of the ratio of their own tokens."""
    return float(subspace_snr(z, u).diagonal().log().mean().exp())


def next_layer(z: Tensor, u: Tensor, stack: str) -> Tensor:
    """Returns the tokens `[head, n, d]` after a layer of a stack; all attend to all."""
    read = torch.nn.functional.layer_norm(z, z.shape[-1:]) if "LN" in stack else z
    codes = head_codes(read.flatten(0, 1), u)
    scale = u.shape[2] ** -0.5 if "LN" in stack else 1.0
    weights = (scale * codes @ codes.mT).softmax(dim=-1)
    if stack.startswith("thresholded"):
        weights = TAU * (weights >= TAU).to(z.dtype)
    after = z + ETA * written(weights @ codes, u).view(z.shape)
    return after * (z.norm() / after.norm()) if "one length" in stack else after


def ratios(form: str, stack: str, which: str, delta: float) -> list[list[float]]:
    """Returns the signal-to-noise ratio before each layer and after the last, by seed."""
    found = []
    for seed in range(SEEDS[form]):
        u = bases(seed)
        used = u if which == "planted" else bases(RANDOM + seed)
        z = planted(u, N_TOKENS[form], delta, seed)
        found.append([signal_to_noise(z, u)])
        for _ in range(LAYERS):
            z = next_layer(z, used, stack)
            found[-1].append(signal_to_noise(z, u))
    return found


def bases(seed: int) -> Tensor:
    """Returns orthogonal subspaces that fill the space, `[head, d, p]`."""
    return rotation(HEADS * P, seed).reshape(HEADS * P, HEADS, P).transpose(0, 1)


def growth(by_seed: list[list[float]]) -> Tensor:
    """Returns the factor of each layer, `[seed, layer]`."""
    table = torch.tensor(by_seed, dtype=torch.float64)
    return table[:, 1:] / table[:, :-1]


def claims_of(found: dict[str, list], **words: Any) -> list[dict]:
    """Returns the claims; words: those of all of them."""
    factors = {key: growth(table) for key, table in found.items()}  # [seed, layer]
    most = math.sqrt(math.log(words["tokens"]) / P)  # the noise for which the theorem is made
    own, random = (factors[f"thresholded|{which}|{SHOWN}"][:, 0] for which in SUBSPACES)
    cases: dict[str, Any] = {
        f"delta {delta}": factors[f"thresholded|planted|{delta}"][:, 0] - RATE
        for delta in DELTAS if delta <= most
    }  # fmt: skip
    claims = [claim("aot_denoising.one_layer", own, cases=cases, baseline=random.mean(), **words)]
    for stack in STACKS:  # the ratio grows in every layer, by the theorem's factor in its stack
        own, random = (factors[f"{stack}|{which}|{SHOWN}"] for which in SUBSPACES)
        lowest = int(own.mean(dim=0).argmin())
        rule, bar = ("linear", RATE) if stack == STACKS[0] else ("grows", 1)
        cases = {f"layer {layer + 1}": each - bar for layer, each in enumerate(own.T)}
        claims.append(
            claim(f"aot_denoising.{rule}", own[:, lowest], cases=cases, stack=stack,
                  baseline=random[:, lowest].mean(), layer=lowest + 1, **words)
        )  # fmt: skip
    cases = {}
    for stack, delta in product(STACKS, DELTAS):
        ends = (ends_of(factors[f"{stack}|{which}|{delta}"][:, 0]) for which in SUBSPACES)
        cases[f"{stack}, delta {delta}"] = beyond(*ends, (1.0, 1.0))
    own, random = (factors[f"softmax|{which}|{SHOWN}"][:, 0] for which in SUBSPACES)
    last = claim("aot_denoising.planted", own, cases=cases, baseline=random.mean(), **words)
    return [*claims, last]


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and the ratio of each stack by seed and layer."""
    cases = {"|".join(map(str, case)): case for case in product(STACKS, SUBSPACES, DELTAS)}
    jobs = {key.replace("|", "-"): partial(ratios, form, *case) for key, case in cases.items()}
    found: dict[str, Any] = dict(zip(cases, steps.all(jobs, "stacks").values(), strict=True))
    size: Any = {"heads": HEADS, "p": P, "d": HEADS * P, "layers": LAYERS}
    words = {"tokens": HEADS * N_TOKENS[form], "rate": RATE, "shown": SHOWN}
    claims = claims_of(found, **size, **words)
    shown = [torch.tensor(found[f"{stack}|planted|{SHOWN}"]) for stack in STACKS]
    times, _, plain, normed = (float((x[:, -1] / x[:, 0]).mean()) for x in shown)
    # the layers that are nearer to the theorem's factor than to none
    kept, same = (
        (abs(growth(found[f"{stack}|planted|{SHOWN}"]) - RATE) < (RATE - 1) / 2).double()
        for stack in STACKS[:2]
    )
    numbers = [
        ("signal-to-noise ratio", key, seed, layer, value)
        for key, table in found.items()
        for seed, row in enumerate(table)
        for layer, value in enumerate(row)
    ]
    ends = {
        "kept": kept.sum(dim=1).mean(),
        "same": same.sum(dim=1).mean(),
        "times": times,
        "plain": plain,
        "normed": normed,
    }
    return result("aot_denoising", form, claims, numbers, rate=RATE, layers=LAYERS, **ends)


def draw(found: LabResult) -> Any:
    """Returns a figure: the ratio by layer, a column for each amount of noise that is shown."""
    name, shown = "signal-to-noise ratio", DELTAS[::2]
    figure, axes = panels(len(shown), size=(10, 4), sharex=True, sharey=True)
    for axis, delta in zip(axes, shown, strict=True):
        for colour, stack in enumerate(STACKS):
            for which, style in zip(SUBSPACES, ("o-", ":"), strict=True):
                rows = found.numbers(name, setting=f"{stack}|{which}|{delta}")
                label = stack if which == "planted" else None
                curve(axis, rows, style, 0.15, color=f"C{colour}", label=label, markersize=3)
        begun = found.numbers(name, setting=f"softmax|planted|{delta}", place=0)["value"].mean()
        rate = [begun * RATE**layer for layer in range(LAYERS + 1)]
        axis.plot(rate, color="grey", linewidth=0.8, label="the theorem")
        tidy(axis, legend=0, title=f"noise delta = {delta}", xlabel="layer", yscale="log")
    axes[0].set_ylabel(name)
    return titled(figure, found, axes[0], 5, rate=RATE, seeds=found.table()["n"].max())


if __name__ == "__main__":
    main(run, draw)
