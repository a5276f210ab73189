"""The records of the audit: the papers' claims about a layer, and when a claim counts as kept.

The bounds are the same for every model. A claim has one number or several. A number's record says
whether it is judged at every eps. Pages, tables and docs take their words from here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

GRID = (0.01, 0.1, 1.0, 10.0, 100.0)  # further eps at which rates are measured
# properties that a claim needs of a layer; `why_not` in crate_interp/audits/layer.py tells which
# properties a layer lacks
Need = Literal["subspaces", "series", "several heads", "lasso", "square dictionary"]


@dataclass(frozen=True)
class Number:
    """A number of the audit, kept if it lies in [low, high]; None means no bound.

    null: the baseline whose value is subtracted to give the excess. draws: the random weights whose
    value is subtracted to give the gain. every_eps: whether the number is judged at every eps, not
    only at the main eps. of_weights: whether it needs no data. ceiled: whether an upper limit
    (ceiling) is measured. top: this limit, if a formula gives it. form: how a value is written.
    """

    title: str
    formula: str
    low: float | None = None
    high: float | None = None
    null: str = ""
    draws: str = ""
    every_eps: bool = False
    of_weights: bool = False
    ceiled: bool = False
    top: float | None = None
    form: str = "{:.2g}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns (low, high); a missing bound is -inf or inf."""
        low = float("-inf") if self.low is None else self.low
        return low, float("inf") if self.high is None else self.high

    @property
    def better(self) -> int:
        """Returns -1 if low values are better, 1 if high values are, 0 if values in between are."""
        if self.low is None:
            return -1
        return 1 if self.high is None else 0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the audit: a claim of a paper about layers, and the numbers that decide it.

    title: its heading on a page. short: its heading in a table. says: the paper's claim in our
    words; where: its place in the paper. needs: the properties that a layer must have. held,
    missed, still: the words in the column `on` if the claim holds, if it fails, and if nothing
    changes.
    """

    title: str
    short: str
    says: str
    where: str
    group: str
    needs: tuple[Need, ...]
    numbers: dict[str, Number]
    held: str = "holds"
    missed: str = "does not hold"
    still: str = ""


@dataclass(frozen=True)
class Null:
    """What replaces a layer's update or weights in a random baseline.

    says: what it is, for a page. words: how the reason of a verdict names it.
    """

    says: str
    words: str = ""


_CRATE, _TOST, _CBSA = "arXiv 2306.01129", "arXiv 2412.17810", "arXiv 2509.16875"
_defect = partial(Number, high=0.1, of_weights=True, top=0.0)
_beside_random_d = partial(Number, null="random D", draws="random D")
_beside_shuffled = partial(Number, null="shuffled", draws="random map")
_attention = partial(Claim, group="Attention", needs=("subspaces",))
_sparse_step = partial(Claim, group="The sparse step", needs=("lasso",))
_weights = partial(Claim, group="What the derivation assumes", needs=("subspaces",))

CLAIMS: dict[str, Claim] = {
    "compresses": _attention(
        title="Attention lowers its objective", short="objective falls",
        says="Attention compresses the tokens against the layer's subspaces: MSSA lowers R^c, TSSA "
        "its variational bound at fixed memberships, CBSA the rate of its representatives at a "
        "fixed contraction.",
        where=f"{_CRATE}, section 2.3; {_TOST}, eq. 6-10; {_CBSA}, eq. 4-8",
        numbers={
            "compresses": _beside_shuffled(
                "objective falls", "(J(Z^{l+1/2}) - J(Z^l)) / J(Z^l), J the objective", high=-1e-6,
                every_eps=True, ceiled=True, form="{:+.0%}",
            ),
        },
        held="falls", missed="rises", still="does not change",
    ),
    "gradient": _attention(
        title="Attention is a gradient step on its objective", short="a gradient step",
        says="The update of attention is approximately a step of gradient descent on its "
        "objective, small enough to descend.",
        where=f"{_CRATE}, eq. 8-12 and section 2.3; {_TOST}, eq. 6-10; {_CBSA}, eq. 7",
        numbers={
            "gradient": _beside_shuffled(
                "along -grad",
                "cosine of Z^{l+1/2} - Z^l and -grad J(Z^l), both along the frame, J the objective",
                low=0.5, top=1.0,
            ),
            "step": Number(
                "step size",
                "kappa L: kappa = -<update, grad> / |grad|^2, L = 9 alpha / 4 |sum U_k "
                "U_k^T|_2, alpha = p / (N eps^2) for MSSA, K p / (N eps^2) max pi for TSSA, and p "
                "/ (m eps^2) max |A_k|_2^2 for CBSA with m representatives A_k Z U_k",
                low=1e-6, high=2.0,
            ),
        },
    ),
    "neumann": _attention(
        title="Attention follows the Neumann form", short="Neumann form",
        says="(I + alpha C^T C)^{-1} is about I - alpha C^T C, alpha = p / (N eps^2), and "
        "attention follows the gradient in that form. The form needs alpha |C|^2 < 1. CBSA has it "
        "for the codes of m representatives and alpha = p / (m eps^2); TSSA needs no such form.",
        where=f"{_CRATE}, eq. 9-12; {_CBSA}, eq. 8", needs=("subspaces", "series"),
        numbers={
            "neumann": Number(
                "beyond the series",
                "share of the eigenvalues of alpha C_k^T C_k above 1, alpha = p / (N eps^2), "
                "C_k = Z U_k, mean over heads",
                high=0.0, top=0.0,
            ),
            "neumann_direction": _beside_shuffled(
                "along Neumann",
                "cosine of Z^{l+1/2} - Z^l and minus the Neumann form, both along the frame",
                low=0.5, top=1.0,
            ),
        },
    ),
    "output_map": _attention(
        title="Heads write as they read: W_O is U", short="W_O is U",
        says="Attention writes with the subspaces that it reads with: the output map of head k is "
        "U_k^T.",
        where=f"{_CRATE}, eq. 11; arXiv 2411.17182, section 4.2",
        numbers={
            "output_map": Number(
                "W_O is U", "cosine of W_O,k and U_k^T, mean over heads; -1 is CRATE-N", low=0.5,
                of_weights=True, top=1.0,
            ),
        },
    ),
    "descends": _sparse_step(
        title="The sparse step lowers the lasso", short="lasso falls",
        says="The sparse step lowers 1/2 |Y - DZ|^2 + lambda |Z|_1 from its start.",
        where=f"{_CRATE}, eq. 15-17",
        numbers={
            "descends": _beside_random_d(
                "lasso falls",
                "(F(code) - F(start)) / F(start), F summed over tokens; the start is the "
                "positive part of the step's input, or 0 if D is wide",
                high=-1e-6, ceiled=True, form="{:+.0%}",
            ),
        },
        held="falls", missed="rises", still="does not change",
    ),
    "solves": _sparse_step(
        title="The sparse step solves the lasso", short="lasso solved",
        says="One or two steps go most of the way to the sparse code of Z^{l+1/2}.",
        where=f"{_CRATE}, section 2.4 and eq. 15",
        numbers={
            "share": Number(
                "share of the way", "(F(start) - F(code)) / (F(start) - F(solution))", low=0.5,
                ceiled=True, top=1.0,
            ),
            "converged": Number(
                "near the solution", "|code - solution| / max(|code|, |solution|)", high=0.1,
                top=0.0,
            ),
            "kkt": _beside_random_d(
                "KKT", "KKT residual of the code divided by the start's", high=0.1, top=0.0,
            ),
        },
    ),
    "threshold": _sparse_step(
        title="Zeros come from the threshold", short="by the threshold",
        says="The code is sparse because of the penalty lambda.", where=f"{_CRATE}, section 2.4",
        numbers={
            "threshold": _beside_random_d(
                "by the threshold",
                "share of the zeros that disappear if lambda is 0; the other zeros come from "
                "LayerNorm and ReLU",
                low=0.5, top=1.0,
            ),
        },
    ),
    "reconstructs": _sparse_step(
        title="D Z is the step's input", short="D Z is the input",
        says="The dictionary decodes the code: LN(Z^{l+1/2}) is about D code.",
        where=f"{_CRATE}, eq. 15",
        numbers={
            "reconstruction": _beside_random_d(
                "D Z is the input",
                "|LN(Z^{l+1/2}) - D code| / |LN(Z^{l+1/2})|; a code of zeros has 1", high=0.5,
            ),
        },
    ),
    "rate_kept": _sparse_step(
        title="The sparse step keeps R", short="R is kept",
        says="The sparse step does not change R: R(Z^{l+1}) is about R of the step's input, and "
        "about R(D Z^{l+1}).",
        where=f"{_CRATE}, section 2.4", needs=("lasso", "square dictionary"),
        numbers={
            "rate_kept": Number(
                "R is kept", "(R(Z^{l+1}) - R(LN(Z^{l+1/2}))) / R(LN(Z^{l+1/2}))", low=-0.1,
                high=0.1,
            ),
            "decoded": Number(
                "R(DZ) = R(Z)", "(R(DZ) - R(Z)) / R(Z) of the code Z", low=-0.1, high=0.1,
            ),
        },
    ),
    "orthonormal": _weights(
        title="Each U_k is orthonormal", short="U_k orthonormal",
        says="The bases U_k have orthonormal columns.", where=f"{_CRATE}, section 2.2",
        numbers={
            "orthonormal": _defect("U_k orthonormal", "|U_k^T U_k - I| / sqrt(p), mean over heads"),
            "orthonormal_scaled": _defect(
                "U_k orthonormal up to scale",
                "|U_k^T U_k - c I| / (c sqrt(p)), c the mean of the diagonal, mean over heads",
            ),
        },
    ),
    "complete": _weights(
        title="The U_k cover the space", short="U complete",
        says="The subspaces together cover the space: sum U_k U_k^T = I.",
        where=f"{_CRATE}, section 2.2",
        numbers={
            "complete": _defect("U complete", "|sum U_k U_k^T - I| / sqrt(d)"),
            "complete_scaled": _defect(
                "U complete up to scale",
                "|sum U_k U_k^T - c I| / (c sqrt(d)), c the mean of the diagonal",
            ),
        },
    ),
    "incoherent": _weights(
        title="The U_k are incoherent", short="U_k incoherent",
        says="The subspaces of different heads are nearly orthogonal.",
        where=f"{_CRATE}, section 2.2", needs=("subspaces", "several heads"),
        numbers={
            "incoherent": _defect(
                "U_k incoherent",
                "|Q_i^T Q_j|^2 / p, mean over pairs of heads; random subspaces have p / d",
            ),
        },
    ),
    "dictionary": _weights(
        title="D is orthonormal", short="D orthonormal",
        says="The dictionary is orthonormal: D^T D = I.", where=f"{_CRATE}, section 2.4",
        needs=("square dictionary",),
        numbers={
            "dictionary": _defect("D orthonormal", "|D^T D - I| / sqrt(d)"),
            "dictionary_scaled": _defect(
                "D orthonormal up to scale",
                "|D^T D - c I| / (c sqrt(d)), c the mean of the diagonal",
            ),
        },
    ),
}  # fmt: skip

NUMBERS = {name: number for claim in CLAIMS.values() for name, number in claim.numbers.items()}
# number -> the claim it belongs to
CLAIM_OF = {number: name for name, claim in CLAIMS.items() for number in claim.numbers}

# Numbers that are measured in addition to those of the claims.
BESIDE: dict[str, str] = {
    "rate_before": "J(Z^l), the objective of attention, nats per token",
    "rate_after": "J(Z^{l+1/2}), nats per token",
    "zeros": "share of zeros in the code",
    "zeros_without_threshold": "the share of zeros with lambda = 0",
    "zeros_without_norm": "the share of zeros if the step reads Z^{l+1/2} without LayerNorm",
    "best_scaled": "|LN(Z^{l+1/2}) - c D code| / |LN(Z^{l+1/2})| at the best c",
    "unsolved": "KKT residual of the computed solution divided by the start's: how well the "
    "lasso was solved",
}

NULLS: dict[str, Null] = {
    "shuffled": Null(
        "the update of another token of the sample (CLS keeps its own), mean of 8 draws at the "
        "main eps with U as stored and all tokens, of 2 draws in other settings",
        "a shuffled update",
    ),
    "negated": Null("the update with the opposite sign"),
    "next sample": Null("the update of the next sample"),
    "random": Null("a random direction for each token, as long as the token's update"),
    "random map": Null(
        "a random output map with the singular values of W_O, 32 draws", "random output maps",
    ),
    "random D": Null(
        "a random dictionary with the singular values of D, 8 draws, on 32 tokens drawn anew for "
        "each sample", "random dictionaries",
    ),
}  # fmt: skip
IN_VERDICTS = {name for number in NUMBERS.values() for name in (number.null, number.draws) if name}
LIMITS: dict[str, str] = {
    "ceiling": "a bound that no update of this length passes, and that may be out of reach; for "
    "the sparse step, the most that the same number of steps of any size reaches with this D",
    "construction": "an ideal layer on these tokens: its kind of attention on orthonormal "
    "subspaces, or the sparse step with D at the scale at which it goes furthest on the tokens "
    "where the lasso is solved",
    "gradient step": "the exact gradient step at the length of the update",
    "Neumann step": "the Neumann form of the gradient step at the length of the update",
    "+U": "attention with the output map U_k^T, at the length of the update",
    "-U": "attention with the output map -U_k^T, at the length of the update",
    "lasso solution": "the solution of the lasso in place of the code",
}
