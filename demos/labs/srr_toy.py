"""Which update rules lower R^c? Rules (a) to (e) of arXiv 2411.17182, appendix A, and N and T.

Random Gaussian tokens pass through layers with an orthonormal U of their own, and each layer takes
one step of a rule. What counts is the change of R^c(Z | U^l) by the step of layer l, summed over
layers: the subspaces of the next layer are others, and R^c against them differs by chance. The
baseline is a step of the same length in a random direction. The paper's constants are lost; ours
are below. There are two regimes: in one no eigenvalue x of a C_k^T C_k is above 1 in the first
layer, a = p / (N eps^2) (rules that raise R^c leave this regime later), in the other nearly all
are. The answer depends if the regimes differ.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from drawing import level, panels, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, result, values
from rules import highest, lowest
from torch import Tensor

from crate_interp.measures import (
    attention_step,
    first_order_step,
    gradient_step,
    neumann_invalid,
    neumann_step,
    subspace_attention,
    subspace_coding_rate,
    third_order_step,
)
from crate_interp.measures.rates import head_codes

N, D, HEADS, LAYERS = 64, 96, 4, 12
P = D // HEADS
SEEDS = {"quick": 5, "full": 20}
# eps, and kappa a: the step in units of 1 / a
REGIMES = {"all x below 1 at first": (10.0, 0.1), "most x above 1": (0.5, 1e-4)}


def transposed_step(z: Tensor, u: Tensor, eps: float, kappa: float) -> Tensor:
    """Returns the tokens after CRATE-T's step, eq. 10; it needs p K = d.

    `Z + kappa a^2 [SSA_1 .. SSA_K] W` in rows, where W = [U_1 .. U_K] `[d_model, head * d_head]` is
    not transposed, as it is in CRATE-C.
    """
    a = u.shape[-1] / (z.shape[-2] * eps**2)
    heads = subspace_attention(head_codes(z, u)).transpose(-3, -2).flatten(-2)  # [..., pos, d]
    return z + kappa * a**2 * heads @ u.transpose(0, 1).flatten(1)


def _downhill(z: Tensor, u: Tensor, eps: float, kappa: float) -> Tensor:
    return attention_step(z, u, eps, -kappa)


# rule: (its step, whether kappa is in units of 1 / a^2, the sign of R^c's change in the paper); 0:
# drawn alone, because the paper names none (T) or a short step can take no other: down the gradient
# itself (a), and against (e) for N
RULES: dict[str, tuple[Any, bool, int]] = {
    "(a) gradient": (gradient_step, False, 0),
    "(b) gradient of the Taylor bound": (neumann_step, False, 1),
    "(c) first-order term": (first_order_step, False, -1),
    "(d) third-order term": (third_order_step, False, 1),
    "(e) attention, CRATE-C": (attention_step, True, 1),
    "CRATE-N": (_downhill, True, 0),
    "CRATE-T": (transposed_step, True, 0),
}


def orthonormal(generator: torch.Generator) -> Tensor:
    """Returns a random complete orthonormal U `[head, d_model, d_head]`."""
    noise = torch.randn(D, D, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(noise)[0].reshape(D, HEADS, P).movedim(1, 0)  # [head, d_model, d_head]


def passed(rule: str, regime: str, seed: int) -> list[list]:
    """Returns R^c before each layer, its change by each step and by a random step, and x > 1."""
    (eps, ratio), (step, squared, _) = REGIMES[regime], RULES[rule]
    a = P / (N * eps**2)
    kappa = ratio / a**2 if squared else ratio / a
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(N, D, generator=generator, dtype=torch.float64)
    rows: list[list] = []
    for layer in range(LAYERS):
        u = orthonormal(generator)
        before, after = subspace_coding_rate(z, u, eps).sum(), step(z, u, eps, kappa)
        length = torch.linalg.norm(after - z)
        random = torch.randn(N, D, generator=generator, dtype=torch.float64)
        other = z + length * random / torch.linalg.norm(random)
        found = {
            "rate": before,
            "change": subspace_coding_rate(after, u, eps).sum() - before,
            "change by a random step": subspace_coding_rate(other, u, eps).sum() - before,
            "share above 1": neumann_invalid(z, u, eps).mean(),
        }
        name = f"{rule}: {regime}"
        rows += [[key, name, seed, layer, float(value)] for key, value in found.items()]
        z = after
    return rows


def summed(rows: list[list], quantity: str, rule: str) -> list[Any]:
    """Returns a quantity summed over layers by seed, for each regime."""
    return [
        sum(values(rows, quantity, f"{rule}: {regime}").reshape(-1, LAYERS).T) for regime in REGIMES
    ]


def of_rule(rows: list[list], rule: str) -> dict:
    """Returns the claim about a rule, with a case for each regime; its number is of the first.

    In a regime both must go the way of the paper: the change, and what it is beyond a random step.
    """
    words, both = ("falls", highest) if RULES[rule][2] < 0 else ("rises", lowest)
    moved, random = (
        summed(rows, quantity, rule) for quantity in ("change", "change by a random step")
    )
    cases = {
        regime: both(ends_of(change), ends_of(change - other))
        for regime, change, other in zip(REGIMES, moved, random, strict=True)
    }
    return claim(f"srr_toy.{words}", moved[0], rule_=rule, cases=cases, baseline=random[0].mean())


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the rules in both regimes."""
    jobs = {
        f"{list(RULES).index(rule)}-{list(REGIMES).index(regime)}-{seed}":
            partial(passed, rule, regime, seed)
        for rule, regime, seed in product(RULES, REGIMES, range(SEEDS[form]))
    }  # fmt: skip
    rows = steps.rows(jobs, "rules")
    claims = [of_rule(rows, rule) for rule in RULES if RULES[rule][2]]
    low, high = (each.mean() for each in summed(rows, "change", "(b) gradient of the Taylor bound"))
    as_said = sum(row["answer"] == "supported" for row in claims)
    words = {"low": low, "high": high, "as_said": as_said, "rules": len(claims)}
    return result("srr_toy", form, claims, rows, **words)


def draw(found: LabResult) -> Any:
    """Draws what the steps have changed up to each layer, a panel for each regime."""
    figure, axes = panels(2, size=(12, 4.2))
    for axis, regime in zip(axes, REGIMES, strict=True):
        for rule in RULES:
            rows = found.numbers("change", setting=f"{rule}: {regime}")
            wide = rows.pivot(index="place", columns="seed", values="value").cumsum()
            line = "--" if rule in ("CRATE-N", "(d) third-order term") else "-"  # lie on others
            axis.plot(wide.index + 1, wide.mean(axis=1), line, label=rule, marker=".")
        level(axis, 0)
        axis.set_yscale("symlog", linthresh=1e-3 if "above" in regime else 1e-2)
        words = "change of R^c by the steps so far, nats"
        tidy(axis, legend=0, title=regime, xlabel="layer", ylabel=words)
    axes[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
