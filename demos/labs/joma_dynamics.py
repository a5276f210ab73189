"""Do attention and MLP move together as JoMA says? Its Theorems 1 to 5 and Figures 2, 3, 4.

    python demos/labs/joma_dynamics.py [--quick | --full] --out DIR

All at the paper's size (arXiv 2310.00535) in both forms; --full has more seeds. The theorems are
integrated or enumerated and compared with their closed forms, as printed and as corrected; the
figures are run at the constants of the released scripts.
"""

import math
from functools import partial
from itertools import product
from typing import Any

import joma
import numpy as np
import torch
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, mean_and_interval, result, values

SEEDS = {"quick": 5, "full": 20}
STEPS = (32, 64, 128, 256)  # of the integrator
OTHER = {"linear": "exp", "exp": "linear", "softmax": "exp"}  # whose invariant is the baseline
MU = (0.5, 1.0, 2.0, 3.0)
DISTANCES = (0.5, 1.0, 2.0, 4.0)  # Theorem 3: of x+ from 0
TREES = ((0.8, 4, 2, 0.5), (0.9, 5, 1, 0.95), (0.7, 3, 2, 0.2))  # rho, L, H, q
ITERATIONS, EVERY = 2000, 20  # of Figures 2 and 3
CORRELATED = {
    "whole": "estimate", "squares": r"part $\Sigma v^2$", "rest": r"part $-|v|^2\bar b$",
}  # fmt: skip


def drifts(seeds: int) -> list[list]:
    """Returns rows (quantity, kind, seed, steps, value) of Theorem 1's invariants."""
    asked = [("drift", steps) for steps in STEPS] + [("drift of the other", STEPS[-1])]
    rows = []
    for kind, seed, (name, steps) in product(joma.KINDS, range(seeds), asked):
        of = OTHER[kind] if name.endswith("other") else kind
        moved, logits = joma.drift(kind, steps, seed, of)
        rows.append([name, kind, seed, steps, moved / logits])
    return rows


def theorem_1(rows: list[list], kind: str) -> dict:
    """Returns the claim for a kind of attention whose b meets the conditions of the theorem.

    The drift is the error of the integrator. Softmax attention is drawn alone.
    """
    before, last = (values(rows, "drift", kind, steps) for steps in STEPS[-2:])
    return claim(
        "joma_dynamics.invariant", last, kind=kind, other=OTHER[kind],
        baseline=values(rows, "drift of the other", kind).mean(), few=STEPS[-2], many=STEPS[-1],
        order=np.log2(before / last).mean(),
    )  # fmt: skip


def figure_2(rows: list[list], kind: str) -> dict:
    """Returns the claim that z follows the estimate better than either part of it."""
    whole, *parts = (values(rows, name, kind, ITERATIONS) for name in CORRELATED)
    gains = {name: whole - part for name, part in zip(list(CORRELATED)[1:], parts, strict=True)}
    least = min(float(gain.mean()) for gain in gains.values())
    return claim(
        "joma_dynamics.figure_2", whole, kind=kind, cases=gains, least=least,
        baseline=whole.mean() - least,
    )  # fmt: skip


def joint_rows(kind: str, seeds: int) -> list[list]:
    """Returns rows of Figures 2 and 3, every 20 iterations."""
    found = joma.joint_training(kind, seeds, ITERATIONS + 1)
    every = {name: found[name] for name in CORRELATED}
    every |= {f"v_0 of token {token}": found["v0"][..., token] for token in range(4)}
    return [
        [name, kind, seed, at, float(of[at, seed])]
        for at in range(0, ITERATIONS + 1, EVERY)
        for name, of in every.items()
        for seed in range(seeds)
    ]


def figure_3(rows: list[list]) -> dict:
    """Returns the claim that the weights of a class grow in the order of how salient tokens are.

    They must stand in this order after a tenth of the training, and at its end.
    """
    early, end = (
        np.array([values(rows, f"v_0 of token {token}", "gauss", at) for token in range(4)])
        for at in (ITERATIONS // 10, ITERATIONS)
    )  # [token, seed]
    ratios = np.log(np.maximum(end[:-1], 1e-9) / np.maximum(end[1:], 1e-9))
    low, high = np.exp(mean_and_interval(ratios[0])[1])
    return claim(
        "joma_dynamics.figure_3", float(np.exp(ratios[0].mean())), interval=(low, high),
        cases={"early, 0 less 1": early[0] - early[1], "ln of 0 over 1 at the end": ratios[0],
               "1 over 2": ratios[1], "2 over 3": ratios[2]},
        n=len(ratios[0]), baseline=1.0, ends=", ".join(f"{v:.2f}" for v in end.mean(axis=1)),
    )  # fmt: skip


def theorem_2() -> dict:
    """Returns the claim of Theorem 2's invariant as printed; the corrected one is its baseline."""
    end = joma.blow_up_time(joma.DELTA)
    times = end * np.array([0.1, 0.5, 0.9, 0.999])
    v = joma.flowed(lambda v: joma.DELTA * np.exp(v**2 / 2), times, np.zeros(len(joma.DELTA)))
    right, printed = (
        float((np.ptp(value, axis=0) / value.max(axis=0)).max())
        for value in (joma.growth_invariant(v, joma.DELTA, root) for root in (2**0.5, 2))
    )
    return claim("joma_dynamics.theorem_2", printed, cases={"": printed}, baseline=right, n=1)


def theorem_3_rows() -> list[list]:
    """Returns rows of C and of the misfit for each gradient and mixture; place: |x+|."""
    return [
        [f"Theorem 3, {name}", gradient, density, distance, value]
        for gradient in joma.GRADIENTS
        for density, (distance, scales) in enumerate(product(DISTANCES, joma.DENSITIES.values()))
        for name, value in joma.near_critical(gradient, distance, scales).items()
    ]


def theorem_3(rows: list[list]) -> list[dict]:
    """Returns the claims of Theorem 3: the form of the field, the sign of C, and stability."""
    of = {
        name: {each: values(rows, f"Theorem 3, {name}", each) for each in joma.GRADIENTS}
        for name in ("across", "along", "misfit", "misfit of one")
    }
    misfit = {each: float(found.max()) for each, found in of["misfit"].items()}
    signs = {each: -1 if "against" in each else 1 for each in joma.GRADIENTS}
    beta = {each: float((sign * of["across"][each]).min()) for each, sign in signs.items()}
    ratio = {
        each: float((of["along"][each] / of["across"][each]).min())
        for each, sign in signs.items() if sign > 0
    }  # fmt: skip
    multiple = np.min(list(of["misfit of one"].values()))  # what a multiple of I leaves
    mixtures, rule = len(DISTANCES) * len(joma.DENSITIES), "joma_dynamics.theorem_3_"
    n = mixtures * len(beta)
    return [
        claim(f"{rule}form", max(misfit.values()), cases=misfit, baseline=multiple, n=n),
        claim(f"{rule}sign", min(beta.values()), cases=beta, baseline=0.0, n=n),
        claim(f"{rule}stable", max(ratio.values()), cases=ratio, baseline=0.0,
              n=mixtures * len(ratio), flat=min(ratio.values())),
    ]  # fmt: skip


def theorem_4() -> list[dict]:
    """Returns the claims of Theorem 4: the exact time, its bound, and the ratio of two tokens."""
    errors, rests, alone = [], [], []
    for mu in MU:
        y = -np.log1p(-np.array([0.1, 0.5, 0.9, 0.999]))
        times = [joma.elapsed(mu, value) for value in y]
        errors.append(np.abs(joma.converged([mu], times)[0] / y - 1).max())
        alone.append(np.abs(np.array(times) * math.exp(mu**2 / 2) / y - 1).max())
        grid = -np.log(np.logspace(-12, -0.01, 50))
        rests += [joma.elapsed(mu, at) - math.exp(-(mu**2) / 2) * at for at in grid]
    y = joma.converged([2.0, 1.0], [10.0, 100.0, 1000.0])
    ratio, worst = y[0] / y[1] / math.exp(1.5), float(max(errors))
    return [
        claim("joma_dynamics.theorem_4_time", worst, cases={"": worst}, n=1, baseline=max(alone),
              least=min(rests), most=max(rests), slack=joma.SLACK),
        claim("joma_dynamics.theorem_4_ratio", ratio[-1], cases={"": 1 - abs(ratio[-1] - 1)}, n=1,
              baseline=math.exp(-1.5), ratio=ratio),
    ]  # fmt: skip


def theorem_5_rows() -> list[list]:
    """Returns rows of P by the sum over all paths, by the corrected rho_0 and by the printed."""
    rows = []
    for rho, depth, height, q in TREES:
        prior, first = joma.classes(q)
        found = {
            "all paths": joma.enumerated(rho, depth, height, prior, first),
            "corrected": joma.sibling(rho, depth, height, float(prior @ (2 * first - 1))),
            "printed": joma.sibling(rho, depth, height, float(prior @ first)),
        }
        tree = str((rho, depth, height, q))
        rows += [[f"Theorem 5, {name}", tree, 0, 0, value] for name, value in found.items()]
    return rows


def theorem_5(rows: list[list]) -> dict:
    """Returns the claim of Theorem 5 as printed, over trees; rho_0 corrected is its baseline."""
    exact, right, printed = (
        values(rows, f"Theorem 5, {name}") for name in ("all paths", "corrected", "printed")
    )
    off = abs(printed - exact)
    return claim(
        "joma_dynamics.theorem_5", off.max(), cases=dict(zip(map(str, TREES), off, strict=True)),
        n=len(TREES), baseline=abs(right - exact).max(),
    )  # fmt: skip


def figure_4_rows(seeds: int) -> list[list]:
    """Returns rows of Figure 4: entropies of the published mu, and the rises of other draws."""
    every = torch.stack([joma.targets(seed) for seed in range(4 * seeds + 1)])
    rows = []
    for name, attends in (("entropy", True), ("entropy without attention", False)):
        found = joma.entropies(every, attends=attends)
        at = sorted({*range(0, len(found), EVERY), int(found[:, 0].argmin()), len(found) - 1})
        rows += [[name, "published", 0, i, float(found[i, 0])] for i in at]
        rises = (found[-1] - found.min(dim=0).values).tolist()
        rows += [[f"rise of {name}", "draws of mu", i, 0, rise] for i, rise in enumerate(rises)]
    return [*rows, ["asymptote", "published", 0, 0, float(joma.asymptote(every[0]))]]


def figure_4(rows: list[list]) -> list[dict]:
    """Returns the claims that entropy bounces back by more than it does without attention."""
    curve = {row[3]: row[4] for row in rows if row[0] == "entropy"}
    lowest, last = min(curve, key=lambda at: curve[at]), max(curve)
    rises = values(rows, "rise of entropy")[1:]
    without = values(rows, "rise of entropy without attention").max()
    own = curve[last] - curve[lowest]
    return [
        claim("joma_dynamics.figure_4", own, cases={"": own - without}, n=1, baseline=without,
              begun=curve[0], lowest=curve[lowest], at=lowest, end=curve[last],
              limit=values(rows, "asymptote")[0]),
        claim("joma_dynamics.figure_4_draws", rises, cases={"": rises - without},
              baseline=without, risen=sum(rises > without)),
    ]  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims of JoMA's theorems and simulated joma."""
    seeds = SEEDS[form]
    jobs = {"drift": partial(drifts, seeds)}
    jobs |= {kind: partial(joint_rows, kind, seeds) for kind in joma.INPUTS}
    numbers = steps.rows(jobs | {"figure-4": partial(figure_4_rows, seeds)}, "theorems")
    numbers += theorem_3_rows() + theorem_5_rows()
    claims = [theorem_1(numbers, kind) for kind in ("linear", "exp")]
    claims += [figure_2(numbers, kind) for kind in joma.INPUTS]
    claims += [
        figure_3(numbers),
        theorem_2(),
        *theorem_3(numbers),
        *theorem_4(),
        *figure_4(numbers),
    ]
    claims.append(theorem_5(numbers))
    held = sum(row["answer"] == "supported" for row in claims)
    whole = [next(c["ours"] for c in claims if kind in c["claim"]) for kind in joma.INPUTS]
    bounce = next(c["ours"] for c in claims if "published mu" in c["claim"])
    words = {"held": held, "count": len(claims), "whole": whole, "bounce": bounce}
    return result("joma_dynamics", form, claims, numbers, **words)


def draw_exact(axes: Any, found: LabResult) -> None:
    """Draws Theorems 1, 2 and 5."""
    for kind in joma.KINDS:
        rows = found.numbers("drift", setting=kind).groupby("place")["value"].mean()
        axes[0].loglog(2 / rows.index.to_numpy(), rows.to_numpy(), "o-", label=kind)
    ticks = [2 / steps for steps in STEPS[::-1]]
    axes[0].set_xticks(ticks, [f"1/{steps // 2}" for steps in STEPS[::-1]])
    axes[0].minorticks_off()
    tidy(axes[0], 10, xlabel="dt of Runge-Kutta", ylabel="drift / movement of z",
         title="Theorem 1: linear and exp are exact")  # fmt: skip
    end = joma.blow_up_time(joma.DELTA)
    times = np.linspace(0, 0.9999, 400) * end
    for delta in joma.DELTA:
        grown = [joma.grown(np.array([delta]), t)[0] for t in times]
        axes[1].plot(times, grown, label=rf"$\Delta$ = {delta}")
    axes[1].axvline(end, color="black", linewidth=0.8, linestyle=":")
    tidy(axes[1], 10, xlabel="t", ylabel="v", title=rf"Theorem 2: blow-up at $t^*$ = {end:.3f}")
    exact, right, printed = (
        found.numbers(f"Theorem 5, {name}") for name in ("all paths", "corrected", "printed")
    )
    at = np.arange(len(exact))
    axes[2].bar(at - 0.2, right["value"], 0.4, label="corrected")
    axes[2].bar(at + 0.2, printed["value"], 0.4, label="as printed")
    axes[2].plot(at - 0.2, exact["value"], "k_", markersize=18, label="sum over all paths")
    axes[2].set_xticks(at, exact["setting"], fontsize=8)
    tidy(axes[2], title="Theorem 5", ylim=(0, 1), xlabel=r"$(\rho, L, H, q)$",
         ylabel=r"$P[y_l = 1 \mid y_m = 1]$")  # fmt: skip


def draw_theorem_3(axes: Any) -> None:
    """Draws how far from mu a unit is that starts a tenth away, across mu and along it."""
    for axis, gradient in zip(axes, ("constant, mu along x+", "of a squared loss"), strict=True):
        rate, mu = joma.unit_flow(gradient, 2.0, (1.0,))
        c, times = joma.near_critical(gradient, 2.0, (1.0,)), np.linspace(0, 3, 60)
        size = float(np.linalg.norm(mu))
        for colour, (name, step) in enumerate((("across", np.eye(5)[1]), ("along", joma.AXIS))):
            path = joma.flowed(rate, times, mu + size / 10 * step)
            far = np.linalg.norm(path - mu[:, None], axis=0) / size
            axis.semilogy(times, far, f"C{colour}", label=f"start {name} mu")
            axis.semilogy(times, np.exp(-c[name] * times) / 10, f"k{':-'[colour == 0]}", lw=0.8)
        tidy(axis, xlabel="t (black: the theorem)", ylim=(1e-5, 0.3), ylabel="|v - mu| / |mu|",
             title=f"Theorem 3: gradient\n{gradient}")  # fmt: skip


def draw(found: LabResult) -> Any:
    """Draws Theorems 1, 2, 3, 5 and Figures 2, 3, 4."""
    figure, axes = panels(4, 2, size=(18, 7.5))
    draw_theorem_3(axes[:, 3])
    draw_exact((axes[0, 0], axes[1, 0], axes[1, 2]), found)
    for kind, line in (("gauss", "-"), ("random", "--")):
        for colour, (name, words) in enumerate(CORRELATED.items()):
            rows = found.numbers(name, setting=kind)
            curve(axes[0, 1], rows, f"{line}C{colour}", 0, label=f"{words}, {kind}")
    tidy(axes[0, 1], 7, xlabel="iteration", ylabel="correlation with z", ylim=(-0.6, 1.05),
         title="Figure 2: softmax logits follow the estimate")  # fmt: skip
    for token in range(4):
        rows = found.numbers(f"v_0 of token {token}", setting="gauss", seed=0)
        curve(axes[0, 2], rows, band=0, label=f"token {token}")
    tidy(axes[0, 2], 10, xlabel="iteration", ylabel="weight for class 0",
         title="Figure 3: the salient token takes over")  # fmt: skip
    for name, words in (("entropy", "attention"), ("entropy without attention", "without")):
        curve(axes[1, 1], found.numbers(name), band=0, label=words)
    level(axes[1, 1], found.numbers("asymptote")["value"][0], "limit")
    tidy(axes[1, 1], 10, xlabel="iteration", ylabel="entropy, nats",
         title="Figure 4: entropy falls, then rises")  # fmt: skip
    return titled(figure, found, seeds=found.numbers("drift")["seed"].nunique())


if __name__ == "__main__":
    main(run, draw)
