"""Do attention and MLP move together as JoMA says? Its Theorems 1, 2, 4, 5 and Figures 2, 3, 4.

    python demos/labs/joma_dynamics.py [--quick | --full] --out DIR

All at the paper's size (arXiv 2310.00535) in both forms; --full has more seeds. The theorems are
integrated or enumerated and compared with their closed forms, as printed and as corrected; the
figures are run at the constants of the released scripts.
"""

import math

import joma_figures as figures
import joma_flows as flows
import joma_theorems as theorems
import numpy as np
import torch
from joma_drawing import draw
from lab import LabResult, Steps, claim, main, mean_and_interval, result

SEEDS = {"quick": 5, "full": 20}
STEPS = (32, 64, 128, 256)  # of the integrator
OTHER = {"linear": "exp", "exp": "linear", "softmax": "exp"}  # whose invariant is the baseline
MU = (0.5, 1.0, 2.0, 3.0)
TREES = ((0.8, 4, 2, 0.5), (0.9, 5, 1, 0.95), (0.7, 3, 2, 0.2))  # rho, L, H, q
ITERATIONS, EVERY = 2000, 20  # of Figures 2 and 3
FULL = "published size"
OURS = "a problem of ours: 13 samples, 5 tokens, 3 units"

HEADLINE = (
    "{held} of {claims_in_all} claims of JoMA hold: linear and exp attention keep their invariants "
    "exactly and softmax does not, though its logits correlate at {whole[0]:.3f} and "
    "{whole[1]:.3f} with the estimate; entropy falls, then rises by {bounce:.2f} nats; Theorems 2 "
    "and 5 as printed fail."
)


def drifts(seeds: int) -> list[list]:
    """Returns rows (quantity, kind, seed, steps, value) of Theorem 1's invariants."""
    rows = []
    for kind in flows.KINDS:
        for seed in range(seeds):
            for steps in STEPS:
                moved, logits = flows.drift(kind, steps, seed)
                rows.append(["drift", kind, seed, steps, moved / logits])
            moved, logits = flows.drift(kind, STEPS[-1], seed, of=OTHER[kind])
            rows.append(["drift of the other", kind, seed, STEPS[-1], moved / logits])
    return rows


def theorem_1(rows: list[list], seeds: int) -> list[dict]:
    """Returns a claim for each kind of attention whose b meets the conditions of the theorem.

    The drift is the error of the integrator. Softmax attention is drawn alone.
    """
    claims, values = [], {tuple(row[:4]): row[4] for row in rows}
    for kind in ("linear", "exp"):
        last = [values["drift", kind, seed, STEPS[-1]] for seed in range(seeds)]
        before = [values["drift", kind, seed, STEPS[-2]] for seed in range(seeds)]
        order = np.log2(np.divide(before, last)).mean()
        of_other = [values["drift of the other", kind, seed, STEPS[-1]] for seed in range(seeds)]
        claims.append(
            claim("joma_dynamics.invariant", last, kind=kind, published="constant", n=seeds,
                  baseline=float(np.mean(of_other)), size=OURS,
                  baseline_is=f"the invariant of {OTHER[kind]} attention",
                  why=f"From {STEPS[-2]} to {STEPS[-1]} steps of Runge-Kutta the drift falls with "
                  f"dt^{order:.2f}; that of the integrator falls with dt^4.")
        )  # fmt: skip
    return claims


def figure_2(kind: str, rows: list[list], seeds: int) -> dict:
    """Returns the claim that z follows the estimate better than either part of it."""
    end = {
        name: [row[4] for row in rows if row[:2] == [name, kind] and row[3] == ITERATIONS]
        for name in ("whole", "squares", "rest")
    }
    gains = {part: np.subtract(end["whole"], end[part]).tolist() for part in ("squares", "rest")}
    least = min(float(np.mean(gain)) for gain in gains.values())
    return claim(
        "joma_dynamics.figure_2", end["whole"], kind=kind, published="a curve near 1", n=seeds,
        cases={part: mean_and_interval(gain)[1] for part, gain in gains.items()}, size=FULL,
        baseline=float(np.mean(end["whole"])) - least,
        why=f"It gains {least:+.4f} over the better part, paired by seed.",
    )  # fmt: skip


def joint_rows(kind: str, seeds: int) -> list[list]:
    """Returns rows of Figures 2 and 3, every 20 iterations."""
    found, rows = figures.joint_training(kind, seeds, ITERATIONS + 1), []
    for at in range(0, ITERATIONS + 1, EVERY):
        for name in ("whole", "squares", "rest"):
            for seed in range(seeds):
                rows.append([name, kind, seed, at, float(found[name][at, seed])])
        for token in range(4):
            for seed, value in enumerate(found["v0"][at, :, token].tolist()):
                rows.append([f"v_0 of token {token}", kind, seed, at, value])
    return rows


def figure_3(rows: list[list], seeds: int) -> dict:
    """Returns the claim that the weights of a class grow in the order of how salient tokens are.

    They must stand in this order after a tenth of the training, and at its end.
    """
    curves = np.array(
        [[row[4] for row in rows if row[0] == f"v_0 of token {token}"] for token in range(4)]
    ).reshape(4, -1, seeds)  # [token, iteration, seed]
    end, early = curves[:, -1], curves[:, ITERATIONS // EVERY // 10]
    ratios = np.log(np.maximum(end[:-1], 1e-9) / np.maximum(end[1:], 1e-9))
    leads = {"early, 0 less 1": early[0] - early[1], "ln of 0 over 1 at the end": ratios[0],
             "1 over 2": ratios[1], "2 over 3": ratios[2]}  # fmt: skip
    return claim(
        "joma_dynamics.figure_3", float(np.exp(ratios[0].mean())), published="a curve", size=FULL,
        interval=tuple(np.exp(mean_and_interval(ratios[0].tolist())[1])), n=seeds, baseline=1.0,
        cases={name: mean_and_interval(lead.tolist())[1] for name, lead in leads.items()},
        why=f"Tokens 0 to 3 end at {', '.join(f'{v:.2f}' for v in end.mean(axis=1))} on average.",
    )  # fmt: skip


def theorem_2() -> dict:
    """Returns the claim of Theorem 2's invariant as printed; the corrected one is its baseline."""
    end = theorems.blow_up_time(theorems.DELTA)
    times = end * np.array([0.1, 0.5, 0.9, 0.999])
    v = theorems.flowed(
        lambda v: theorems.DELTA * np.exp(v**2 / 2), times, np.zeros(len(theorems.DELTA))
    )
    spreads = []
    for form in (theorems.growth_invariant, theorems.printed_growth_invariant):
        value = form(v, theorems.DELTA)
        spreads.append(float((np.ptp(value, axis=0) / value.max(axis=0)).max()))
    right, printed = spreads
    return claim(
        "joma_dynamics.theorem_2", printed, cases={"": (printed, printed)}, published="0",
        baseline=right, n=1, size="exact: no size",
        why="The derivative of erf(v / 2) does not cancel e^(v^2 / 2), that of erf(v / sqrt 2) "
        "does.",
    )  # fmt: skip


def theorem_4() -> list[dict]:
    """Returns the claims of Theorem 4: the exact time, its bound, and the ratio of two tokens."""
    errors, rests, alone = [], [], []
    for mu in MU:
        y = -np.log1p(-np.array([0.1, 0.5, 0.9, 0.999]))
        times = [theorems.elapsed(mu, value) for value in y]
        errors.append(np.abs(theorems.converged([mu], times)[0] / y - 1).max())
        alone.append(np.abs(np.array(times) * math.exp(mu**2 / 2) / y - 1).max())
        grid = -np.log(np.logspace(-12, -0.01, 50))
        rests += [theorems.elapsed(mu, at) - math.exp(-(mu**2) / 2) * at for at in grid]
    y = theorems.converged([2.0, 1.0], [10.0, 100.0, 1000.0])
    ratio = y[0] / y[1] / math.exp(1.5)
    worst, last = float(max(errors)), float(ratio[-1])
    return [
        claim("joma_dynamics.theorem_4_time", worst, cases={"": (worst, worst)}, n=1,
              size="exact: no size", baseline=float(max(alone)),
              why=f"F less its main part lies in {min(rests):.3f} to {max(rests):.3f}; the bound is"
              f" 0 to sqrt(pi / 2) + 1 = {theorems.SLACK:.3f}."),
        claim("joma_dynamics.theorem_4_ratio", last, n=1, published="1 + Lambda",
              cases={"": (1 - abs(last - 1), 1 - abs(last - 1))},
              size="exact: no size", baseline=math.exp(-1.5),
              why=f"For mu = 2, 1 it is {ratio[0]:.3f}, {ratio[1]:.3f}, {ratio[2]:.4f} at t = 10, "
              "100, 1000: Lambda goes to 0."),
    ]  # fmt: skip


def theorem_5_rows() -> list[list]:
    """Returns rows of P by the sum over all paths, by the corrected rho_0 and by the printed."""
    rows = []
    for rho, depth, height, q in TREES:
        prior, first = theorems.classes(q)
        values = {
            "all paths": theorems.enumerated(rho, depth, height, prior, first),
            "corrected": theorems.sibling(rho, depth, height, float(prior @ (2 * first - 1))),
            "printed": theorems.sibling(rho, depth, height, float(prior @ first)),
        }
        tree = str((rho, depth, height, q))
        rows += [[f"Theorem 5, {name}", tree, 0, 0, value] for name, value in values.items()]
    return rows


def theorem_5(rows: list[list]) -> dict:
    """Returns the claim of Theorem 5 as printed, over trees; rho_0 corrected is its baseline."""
    values = {(row[0], row[1]): row[4] for row in rows}
    off = {
        name: {
            str(tree): abs(values[name, str(tree)] - values["Theorem 5, all paths", str(tree)])
            for tree in TREES
        }
        for name in ("Theorem 5, printed", "Theorem 5, corrected")
    }
    printed, corrected = off.values()
    return claim(
        "joma_dynamics.theorem_5", max(printed.values()), published="0", n=len(TREES),
        cases={tree: (value, value) for tree, value in printed.items()},
        baseline=max(corrected.values()), size="exact: no size",
        why="rho_0 is a mean of 2 P - 1, and of P as it is printed.",
    )  # fmt: skip


def figure_4_rows(seeds: int) -> list[list]:
    """Returns rows of Figure 4: entropies of the published mu, and the rises of other draws."""
    published = figures.targets(0)
    others = torch.stack([figures.targets(seed) for seed in range(1, 4 * seeds + 1)])
    rows = []
    for name, attends in (("entropy", True), ("entropy without attention", False)):
        values = figures.entropies(torch.cat([published[None], others]), attends=attends)
        at = sorted({*range(0, len(values), EVERY), int(values[:, 0].argmin()), len(values) - 1})
        rows += [[name, "published", 0, i, float(values[i, 0])] for i in at]
        rises = (values[-1] - values.min(dim=0).values).tolist()
        rows += [[f"rise of {name}", "draws of mu", i, 0, rise] for i, rise in enumerate(rises)]
    return [*rows, ["asymptote", "published", 0, 0, float(figures.asymptote(published))]]


def figure_4(rows: list[list]) -> list[dict]:
    """Returns the claims that entropy bounces back by more than it does without attention."""
    curve = {row[3]: row[4] for row in rows if row[0] == "entropy"}
    lowest, last = min(curve, key=lambda at: curve[at]), max(curve)
    end = next(row[4] for row in rows if row[0] == "asymptote")
    rises = [row[4] for row in rows if row[0] == "rise of entropy"][1:]
    without = max(row[4] for row in rows if row[0] == "rise of entropy without attention")
    own = curve[last] - curve[lowest]
    return [
        claim("joma_dynamics.figure_4", own, cases={"": (own - without, own - without)}, n=1,
              published="a curve", size=FULL, baseline=without,
              why=f"It starts at ln 10 = {curve[0]:.4f}, is {curve[lowest]:.4f} at iteration "
              f"{lowest}, {curve[last]:.4f} at the end; its limit is {end:.4f}."),
        claim("joma_dynamics.figure_4_draws", rises, baseline=without, size=FULL, n=len(rises),
              cases={"": mean_and_interval([rise - without for rise in rises])[1]},
              why=f"It rises in {sum(rise > without for rise in rises)} of {len(rises)} draws."),
    ]  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims of JoMA's theorems and simulated figures."""
    seeds = SEEDS[form]
    drift = steps.do("drift", lambda: drifts(seeds))
    joint = {kind: steps.do(kind, lambda kind=kind: joint_rows(kind, seeds))
             for kind in figures.KINDS}  # fmt: skip
    fourth = steps.do("figure-4", lambda: figure_4_rows(seeds))
    claims = theorem_1(drift, seeds)
    claims += [figure_2(kind, joint[kind], seeds) for kind in figures.KINDS]
    claims += [figure_3(joint["gauss"], seeds), theorem_2(), *theorem_4(), *figure_4(fourth)]
    fifth = theorem_5_rows()
    claims.append(theorem_5(fifth))
    held = sum(row["answer"] == "supported" for row in claims)
    whole = [next(c["ours"] for c in claims if kind in c["claim"]) for kind in figures.KINDS]
    bounce = next(c["ours"] for c in claims if "published mu" in c["claim"])
    headline = HEADLINE.format(held=held, claims_in_all=len(claims), whole=whole, bounce=bounce)
    numbers = [*drift, *sum(joint.values(), []), *fourth, *fifth]
    return result("joma_dynamics", form, headline, claims, numbers)


if __name__ == "__main__":
    main(run, draw)
