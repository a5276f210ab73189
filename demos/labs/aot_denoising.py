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
from typing import Any

import torch
from lab import LabResult, Steps, claim, finished, main, mean_and_interval, result
from mixtures import rotation
from rules import beyond
from torch import Tensor
from tqdm.auto import tqdm

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

HEADLINE = (
    "One layer of attention multiplies the signal-to-noise ratio of planted tokens by {first:.3f} "
    "where the theorem says {rate:g}. {kept:.1f} of {layers} layers do so, and after the last one "
    "the ratio is {times:.2g} times the first: signals grow, until noise attends to them. If the "
    "tokens keep their length, {same:.1f} layers do. With a plain softmax it is {plain:.2g} times, "
    "with LN(Z) {normed:.2g} times."
)


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


def layers_at_rate(by_seed: list[list[float]]) -> list[float]:
    """Returns how many layers of each seed are nearer to the theorem's factor than to none."""
    return ((growth(by_seed) - RATE).abs() < (RATE - 1) / 2).double().sum(dim=1).tolist()


def one_layer_claim(found: dict[str, list], size: str, n: int, tokens: int) -> dict:
    """Returns the claim about the first layer, by amount of noise for which the theorem is made."""
    cases, most = {}, math.sqrt(math.log(tokens) / P)
    for delta in (each for each in DELTAS if each <= most):
        first = growth(found[f"thresholded|planted|{delta}"])[:, 0] - RATE
        cases[f"delta {delta}"] = mean_and_interval(first.tolist())[1]
    return claim(
        "aot_denoising.one_layer",
        growth(found[f"thresholded|planted|{SHOWN}"])[:, 0].tolist(),
        cases=cases,
        published=f"{RATE:g}",
        why=f"The number is the factor at delta = {SHOWN}.",
        size=size,
        baseline=float(growth(found[f"thresholded|random|{SHOWN}"])[:, 0].mean()),
        n=n,
    )


def stack_claim(found: dict[str, list], stack: str, size: str, n: int) -> dict:
    """Returns the claim that the ratio grows in every layer, by the theorem's factor in its stack.

    The number is the lowest factor of a layer.
    """
    factors = growth(found[f"{stack}|planted|{SHOWN}"])  # [seed, layer]
    lowest = int(factors.mean(dim=0).argmin())
    theorem = stack == STACKS[0]
    return claim(
        f"aot_denoising.{'linear' if theorem else 'grows'}",
        factors[:, lowest].tolist(),
        cases={
            f"layer {layer + 1}": mean_and_interval((own - (RATE if theorem else 1)).tolist())[1]
            for layer, own in enumerate(factors.T)
        },
        published=f"{RATE:g}" if theorem else "",
        why=f"The number is that of layer {lowest + 1} at delta = {SHOWN}.",
        size=size,
        baseline=float(growth(found[f"{stack}|random|{SHOWN}"])[:, lowest].mean()),
        n=n,
        stack=stack,
        layers=LAYERS,
    )


def planted_claim(found: dict[str, list], size: str, n: int) -> dict:
    """Returns the claim that the planted subspaces denoise, and random ones do not."""
    cases = {}
    for stack in STACKS:
        for delta in DELTAS:
            own, other = (
                mean_and_interval(growth(found[f"{stack}|{which}|{delta}"])[:, 0].tolist())[1]
                for which in SUBSPACES
            )
            cases[f"{stack}, delta {delta}"] = beyond(own, other, (1.0, 1.0))
    return claim(
        "aot_denoising.planted",
        growth(found[f"softmax|planted|{SHOWN}"])[:, 0].tolist(),
        cases=cases,
        why=f"The number is that of the plain softmax at delta = {SHOWN}.",
        size=size,
        baseline=float(growth(found[f"softmax|random|{SHOWN}"])[:, 0].mean()),
        n=n,
    )


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and the ratio of each stack by seed and layer."""
    cases = [(stack, which, delta) for stack in STACKS for which in SUBSPACES for delta in DELTAS]
    found: dict[str, Any] = {}
    for case in tqdm(cases, desc="stacks", unit="stack"):
        key = "|".join(map(str, case))
        found[key] = steps.do(key.replace("|", "-"), partial(ratios, form, *case))
    n, tokens = SEEDS[form], HEADS * N_TOKENS[form]
    size = f"{HEADS} subspaces of {P} in {HEADS * P} dimensions, {tokens} tokens, {LAYERS} layers"
    claims = [
        one_layer_claim(found, size, n, tokens),
        *(stack_claim(found, stack, size, n) for stack in STACKS),
        planted_claim(found, size, n),
    ]
    shown = {stack: torch.tensor(found[f"{stack}|planted|{SHOWN}"]) for stack in STACKS}
    times = {stack: float((x[:, -1] / x[:, 0]).mean()) for stack, x in shown.items()}
    kept, same = (
        mean_and_interval(layers_at_rate(found[f"{stack}|planted|{SHOWN}"]))[0]
        for stack in STACKS[:2]
    )
    headline = HEADLINE.format(
        first=claims[0]["ours"], rate=RATE, kept=kept, layers=LAYERS, times=times["thresholded"],
        same=same, plain=times["softmax"], normed=times["softmax of LN(Z)"],
    )  # fmt: skip
    numbers = [
        ("signal-to-noise ratio", key, seed, layer, value)
        for key, table in found.items()
        for seed, row in enumerate(table)
        for layer, value in enumerate(row)
    ]
    return result("aot_denoising", form, headline, claims, numbers)


def draw(found: LabResult) -> Any:
    """Returns a figure: the ratio by layer, a column for each amount of noise that is shown."""
    from matplotlib import pyplot

    shown = DELTAS[::2]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(10, 4), sharex=True, sharey=True)
    for axis, delta in zip(axes, shown, strict=True):
        for colour, stack in enumerate(STACKS):
            for which, style in zip(SUBSPACES, ("o-", ":"), strict=True):
                rows = found.numbers("signal-to-noise ratio", setting=f"{stack}|{which}|{delta}")
                by_layer: Any = rows.groupby("place")["value"]
                label = stack if which == "planted" else None
                axis.plot(by_layer.mean(), style, color=f"C{colour}", label=label, markersize=3)
                ends = by_layer.min(), by_layer.max()
                axis.fill_between(ends[0].index, *ends, alpha=0.15, color=f"C{colour}")
        begun = found.numbers("signal-to-noise ratio", setting=f"softmax|planted|{delta}", place=0)
        first = begun["value"].to_numpy().mean()
        rate = [first * RATE**layer for layer in range(LAYERS + 1)]
        axis.plot(rate, color="grey", linewidth=0.8, label="the theorem")
        axis.set_yscale("log")
        axis.set_title(f"noise delta = {delta}", fontsize=10)
        axis.set_xlabel("layer")
    axes[0].set_ylabel("signal-to-noise ratio")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="lower center", ncols=5)
    seeds = found.table()["n"].max()
    title = (
        f"Attention alone multiplies the signal-to-noise ratio by {RATE:g} for a few layers, and "
        "for all only if tokens keep their length\n"
        f"(planted subspaces; dotted: random ones; mean and range over {seeds} seeds)"
    )
    return finished(figure, title, bottom=0.08)


if __name__ == "__main__":
    main(run, draw)
