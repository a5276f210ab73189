"""What the papers claim of a layer, and when a claim counts as kept. Data; imports nothing.

The bounds are the same for every model. A claim has one number or several parts. Each number is
measured in the frames and at the eps of SETTINGS that concern it; crate_interp/audits/verdicts.py
makes words of them.
"""

from dataclasses import dataclass

FRAMES = {
    "stream": "both sides as they are",
    "read": "both sides through the LayerNorm that the step reads through",
    "unit": "both sides scaled to |Z|_F = sqrt(pos d_model)",
}
GRID = (0.01, 0.1, 1.0, 10.0, 100.0)  # the eps at which rates are measured, beside the asked one


@dataclass(frozen=True)
class Number:
    """A number of the audit, kept in [low, high]."""

    title: str
    number: str
    low: float | None
    high: float | None
    null: str = ""  # the null that the excess is against
    draws: str = ""  # the random weights that the gain is against
    every_eps: bool = False  # judged at every eps, or at the asked one alone
    of_weights: bool = False
    top: float | None = None  # the best value it can have at all, where a formula tells

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns low and high, infinite where there is none."""
        low = float("-inf") if self.low is None else self.low
        return low, float("inf") if self.high is None else self.high

    @property
    def better(self) -> int:
        """Returns -1 if lower values are better, 1 if higher ones are, 0 if the middle is."""
        if self.low is None:
            return -1
        return 1 if self.high is None else 0


@dataclass(frozen=True)
class Claim:
    """A row of the audit: what a paper says of a layer, and the numbers that it stands on."""

    title: str
    says: str  # what the paper says, in our words
    where: str
    group: str
    parts: tuple[str, ...]
    held: str = "holds"  # how the column `on` says that it holds, and that it does not
    missed: str = "does not hold"


_CRATE = "arXiv 2306.01129"
ATTENTION, SPARSE, WEIGHTS = "Attention", "The sparse step", "What the derivation assumes"

CLAIMS: dict[str, Claim] = {
    "compresses": Claim(
        "R^c falls",
        "MSSA compresses the tokens against the layer's subspaces.",
        f"{_CRATE}, section 2.3",
        ATTENTION,
        ("compresses",),
        "falls",
        "rises",
    ),
    "gradient": Claim(
        "a gradient step",
        "The update of MSSA is approximately a step of gradient descent on R^c, small enough to "
        "descend.",
        f"{_CRATE}, eq. 8-12 and section 2.3",
        ATTENTION,
        ("gradient", "step"),
    ),
    "neumann": Claim(
        "Neumann form",
        "(I + alpha C^T C)^{-1} is about I - alpha C^T C, alpha = p / (N eps^2), and MSSA follows "
        "the gradient in that form. It needs alpha |C|^2 < 1.",
        f"{_CRATE}, eq. 9-12",
        ATTENTION,
        ("neumann", "neumann_direction"),
    ),
    "output_map": Claim(
        "W_O is U",
        "MSSA writes with the subspaces that it reads with: the output map of head k is U_k^T.",
        f"{_CRATE}, eq. 11; arXiv 2411.17182, section 4.2",
        ATTENTION,
        ("output_map",),
    ),
    "descends": Claim(
        "lasso falls",
        "The sparse step lowers 1/2 |Y - DZ|^2 + lambda |Z|_1 from where it starts.",
        f"{_CRATE}, eq. 15-17",
        SPARSE,
        ("descends",),
        "falls",
        "rises",
    ),
    "solves": Claim(
        "lasso solved",
        "One or two steps go most of the way to the sparse code of Z^{l+1/2}.",
        f"{_CRATE}, section 2.4 and eq. 15",
        SPARSE,
        ("share", "converged", "kkt"),
    ),
    "threshold": Claim(
        "by the threshold",
        "The code is sparse because of the penalty lambda.",
        f"{_CRATE}, section 2.4",
        SPARSE,
        ("threshold",),
    ),
    "reconstructs": Claim(
        "D Z is what was read",
        "The dictionary decodes the code: LN(Z^{l+1/2}) is about D code.",
        f"{_CRATE}, eq. 15",
        SPARSE,
        ("reconstruction",),
    ),
    "rate_kept": Claim(
        "R is kept",
        "Sparsifying does not change R: R(Z^{l+1}) is about R of what the step reads, and about "
        "R(D Z^{l+1}).",
        f"{_CRATE}, section 2.4",
        SPARSE,
        ("rate_kept", "decoded"),
    ),
    "orthonormal": Claim(
        "U_k orthonormal",
        "The bases U_k have orthonormal columns.",
        f"{_CRATE}, section 2.2",
        WEIGHTS,
        ("orthonormal", "orthonormal_scaled"),
    ),
    "complete": Claim(
        "U complete",
        "The subspaces together cover the space: sum U_k U_k^T = I.",
        f"{_CRATE}, section 2.2",
        WEIGHTS,
        ("complete", "complete_scaled"),
    ),
    "incoherent": Claim(
        "U_k incoherent",
        "The subspaces of different heads are nearly orthogonal.",
        f"{_CRATE}, section 2.2",
        WEIGHTS,
        ("incoherent",),
    ),
    "dictionary": Claim(
        "D orthonormal",
        "The dictionary is orthonormal: D^T D = I.",
        f"{_CRATE}, section 2.4",
        WEIGHTS,
        ("dictionary", "dictionary_scaled"),
    ),
}

# a number -> the claim that it belongs to
CLAIM_OF = {part: claim for claim, facts in CLAIMS.items() for part in facts.parts}

NUMBERS: dict[str, Number] = {
    "compresses": Number(
        "R^c falls",
        "(R^c(Z^{l+1/2}) - R^c(Z^l)) / R^c(Z^l)",
        None,
        -1e-6,
        null="shuffled",
        draws="random map",
        every_eps=True,
    ),
    "gradient": Number(
        "along -grad",
        "cosine of Z^{l+1/2} - Z^l and -grad R^c(Z^l), both along the frame",
        0.5,
        None,
        null="shuffled",
        draws="random map",
        top=1.0,
    ),
    "step": Number(
        "step size",
        "kappa L: kappa = -<update, grad> / |grad|^2, L = 9 alpha / 4 |sum U_k U_k^T|_2, alpha = "
        "p / (N eps^2)",
        1e-6,
        2.0,
    ),
    "neumann": Number(
        "beyond the series",
        "share of the eigenvalues of alpha C_k^T C_k above 1, alpha = p / (N eps^2), C_k = Z U_k, "
        "mean over heads",
        None,
        0.0,
        top=0.0,
    ),
    "neumann_direction": Number(
        "along Neumann",
        "cosine of Z^{l+1/2} - Z^l and minus the Neumann form, both along the frame",
        0.5,
        None,
        null="shuffled",
        draws="random map",
        top=1.0,
    ),
    "output_map": Number(
        "W_O is U",
        "cosine of W_O,k and U_k^T, mean over heads; -1 is CRATE-N",
        0.5,
        None,
        of_weights=True,
        top=1.0,
    ),
    "descends": Number(
        "lasso falls",
        "(F(code) - F(start)) / F(start), F summed over tokens; the start is the part above 0 "
        "of what the step reads, or 0 where D is wide",
        None,
        -1e-6,
        null="random D",
        draws="random D",
    ),
    "share": Number(
        "share of the way", "(F(start) - F(code)) / (F(start) - F(solution))", 0.5, None, top=1.0
    ),
    "converged": Number(
        "near the solution",
        "|code - solution| / max(|code|, |solution|)",
        None,
        0.1,
        top=0.0,
    ),
    "kkt": Number(
        "KKT",
        "KKT residual of the code over that of the start",
        None,
        0.1,
        null="random D",
        draws="random D",
        top=0.0,
    ),
    "threshold": Number(
        "by the threshold",
        "share of the zeros that are gone without lambda; the others come from LayerNorm and ReLU",
        0.5,
        None,
        null="random D",
        draws="random D",
        top=1.0,
    ),
    "reconstruction": Number(
        "D Z is what was read",
        "|LN(Z^{l+1/2}) - D code| / |LN(Z^{l+1/2})|; a code of zeros has 1",
        None,
        0.5,
        null="random D",
        draws="random D",
    ),
    "rate_kept": Number(
        "R is kept", "(R(Z^{l+1}) - R(LN(Z^{l+1/2}))) / R(LN(Z^{l+1/2}))", -0.1, 0.1
    ),
    "decoded": Number("R(DZ) = R(Z)", "(R(DZ) - R(Z)) / R(Z) of the code Z", -0.1, 0.1),
    "orthonormal": Number(
        "U_k orthonormal",
        "|U_k^T U_k - I| / sqrt(p), mean over heads",
        None,
        0.1,
        of_weights=True,
        top=0.0,
    ),
    "orthonormal_scaled": Number(
        "U_k orthonormal up to scale",
        "|U_k^T U_k - c I| / (c sqrt(p)), c the mean of the diagonal, mean over heads",
        None,
        0.1,
        of_weights=True,
        top=0.0,
    ),
    "complete": Number(
        "U complete", "|sum U_k U_k^T - I| / sqrt(d)", None, 0.1, of_weights=True, top=0.0
    ),
    "complete_scaled": Number(
        "U complete up to scale",
        "|sum U_k U_k^T - c I| / (c sqrt(d)), c the mean of the diagonal",
        None,
        0.1,
        of_weights=True,
        top=0.0,
    ),
    "incoherent": Number(
        "U_k incoherent",
        "|Q_i^T Q_j|^2 / p, mean over pairs of heads; random subspaces have p / d",
        None,
        0.1,
        of_weights=True,
        top=0.0,
    ),
    "dictionary": Number(
        "D orthonormal", "|D^T D - I| / sqrt(d)", None, 0.1, of_weights=True, top=0.0
    ),
    "dictionary_scaled": Number(
        "D orthonormal up to scale",
        "|D^T D - c I| / (c sqrt(d)), c the mean of the diagonal",
        None,
        0.1,
        of_weights=True,
        top=0.0,
    ),
}

# Numbers measured beside the claims.
BESIDE: dict[str, str] = {
    "rate_before": "R^c(Z^l), nats per token",
    "rate_after": "R^c(Z^{l+1/2}), nats per token",
    "zeros": "share of zeros in the code, all tokens",
    "zeros_without_threshold": "the share of zeros with lambda = 0",
    "zeros_without_norm": "the same where the step takes Z^{l+1/2} itself and not its LayerNorm",
    "best_scaled": "|LN(Z^{l+1/2}) - c D code| / |LN(Z^{l+1/2})| at the best c",
    "unsolved": "KKT residual of what stands for the solution, over that of the start: how well it "
    "was solved",
}

# What a layer is measured beside.
NULLS: dict[str, str] = {
    "shuffled": "the update of another token of the sample (CLS keeps its own), mean of 8 draws",
    "negated": "the update with the other sign",
    "next sample": "the update of the next sample",
    "random": "random directions, each token's as long as its update",
    "random map": "a random output map with the singular values of W_O, 8 draws",
    "random D": "a random dictionary with the singular values of D, 8 draws",
}
LIMITS: dict[str, str] = {
    "ceiling": "the most that any update of this length can reach; of the sparse step: that as "
    "many steps of any size reach with this D",
    "construction": "what MSSA on orthonormal subspaces reaches on these tokens, or the step on D "
    "at the scale at which it goes furthest",
    "gradient step": "the exact gradient step at the length of the update",
    "Neumann step": "the Neumann form of the gradient step at the length of the update",
    "+U": "MSSA with the output map U_k^T, at the length of the update",
    "-U": "MSSA with the output map -U_k^T, at the length of the update",
    "lasso solution": "the solution of the lasso in place of the code",
}
