"""What the papers claim of a layer, and when a claim counts as kept. Data; imports nothing.

The bounds are the same for every model. A claim is kept if the entire confidence interval lies
within [low, high], broken if none of it does, undecided if a bound lies inside the interval.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A column of the audit: a number, per sample or of the weights, kept in [low, high]."""

    title: str
    says: str  # what the paper says, in our words
    where: str
    number: str
    low: float | None
    high: float | None
    of_weights: bool = False


_CRATE = "arXiv 2306.01129"
CLAIMS: dict[str, Claim] = {
    # ---- attention
    "compresses": Claim(
        "R^c falls",
        "MSSA compresses the tokens against the layer's subspaces.",
        f"{_CRATE}, section 2.3",
        "(R^c(Z^{l+1/2}) - R^c(Z^l)) / R^c(Z^l)",
        None,
        -1e-6,
    ),
    "gradient": Claim(
        "along -grad",
        "The update of MSSA is approximately a step of gradient descent on R^c.",
        f"{_CRATE}, eq. 8-12",
        "cosine of Z^{l+1/2} - Z^l and -grad R^c(Z^l)",
        0.5,
        None,
    ),
    "step": Claim(
        "step size",
        "The step is small enough to descend: 0 < kappa < 2 / L, with L the largest curvature "
        "R^c can have.",
        f"{_CRATE}, section 2.3",
        "kappa L: kappa = -<update, grad> / |grad|^2, L = 9 alpha / 4 |sum U_k U_k^T|_2",
        1e-6,
        2.0,
    ),
    "neumann": Claim(
        "Neumann holds",
        "(I + alpha C^T C)^{-1} is about I - alpha C^T C, which needs alpha |C|^2 < 1.",
        f"{_CRATE}, eq. 9",
        "share of eigenvalues alpha lambda above 1, mean over heads",
        None,
        0.0,
    ),
    "neumann_direction": Claim(
        "along Neumann",
        "The update of MSSA follows the Neumann form of the gradient.",
        f"{_CRATE}, eq. 9-12",
        "cosine of Z^{l+1/2} - Z^l and minus the Neumann form",
        0.5,
        None,
    ),
    # ---- the sparse step
    "descends": Claim(
        "lasso falls",
        "The sparse step lowers 1/2 |Y - DZ|^2 + lambda |Z|_1 from where it starts.",
        f"{_CRATE}, eq. 15-17",
        "(F(code) - F(start)) / F(start), F summed over tokens",
        None,
        -1e-6,
    ),
    "share": Claim(
        "share of the way",
        "One or two steps go most of the way to the sparse code.",
        f"{_CRATE}, section 2.4",
        "(F(start) - F(code)) / (F(start) - F(solution))",
        0.5,
        None,
    ),
    "converged": Claim(
        "near the solution",
        "The layer's output is the sparse code of Z^{l+1/2}.",
        f"{_CRATE}, eq. 15",
        "|code - solution| / max(|code|, |solution|)",
        None,
        0.1,
    ),
    "kkt": Claim(
        "KKT",
        "The code meets the optimality conditions of the lasso.",
        f"{_CRATE}, eq. 15",
        "KKT residual of the code over that of the start",
        None,
        0.1,
    ),
    "threshold": Claim(
        "by the threshold",
        "The code is sparse because of the penalty lambda.",
        f"{_CRATE}, section 2.4",
        "share of the zeros that are gone without lambda; the others come from LayerNorm and ReLU",
        0.5,
        None,
    ),
    # ---- assumptions
    "rate_kept": Claim(
        "R(DZ) = R(Z)",
        "Sparsifying does not change R: R(Z^{l+1}) is about R(D Z^{l+1}).",
        f"{_CRATE}, section 2.4",
        "(R(DZ) - R(Z)) / R(Z) of the code Z",
        -0.1,
        0.1,
    ),
    "orthonormal": Claim(
        "U_k orthonormal",
        "The bases U_k have orthonormal columns.",
        f"{_CRATE}, section 2.2",
        "|U_k^T U_k - I| / sqrt(p), mean over heads",
        None,
        0.1,
        of_weights=True,
    ),
    "complete": Claim(
        "U complete",
        "The subspaces together cover the space: sum U_k U_k^T = I.",
        f"{_CRATE}, section 2.2",
        "|sum U_k U_k^T - I| / sqrt(d)",
        None,
        0.1,
        of_weights=True,
    ),
    "dictionary": Claim(
        "D orthonormal",
        "The dictionary is orthonormal: D^T D = I.",
        f"{_CRATE}, section 2.4",
        "|D^T D - I| / sqrt(d)",
        None,
        0.1,
        of_weights=True,
    ),
}

# Numbers measured beside the claims.
NUMBERS: dict[str, str] = {
    "rate_before": "R^c(Z^l), nats",
    "rate_after": "R^c(Z^{l+1/2}), nats",
    "update_over_gradient": "|Z^{l+1/2} - Z^l| / |grad R^c(Z^l)|",
    "update_over_neumann": "|Z^{l+1/2} - Z^l| / |Neumann form of grad R^c(Z^l)|",
    "zeros": "share of zeros in the code",
    "zeros_without_threshold": "the same with lambda = 0",
    "zeros_without_norm": "the same where the step takes Z^{l+1/2} itself and not its LayerNorm",
    "unsolved": "KKT residual of what stands for the solution, over that of the start: how well it "
    "was solved",
}
