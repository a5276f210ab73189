"""The kinds of attention that an audit knows: what a kind descends, and what it writes.

The operators are those of the papers, on codes in float64 and without hook points.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from crate_interp.core.device_waits import holds_somewhere
from crate_interp.models.layers.attention import Attention
from crate_interp.models.layers.patternless import CBSA, TSSA

Stream = Float[Tensor, "batch pos d_model"]
SparseCode = Float[Tensor, "batch pos d_mlp"]
PerToken = Float[Tensor, "batch pos"]
PerSample = Float[Tensor, "batch"]
Codes = Float[Tensor, "batch head pos d_head"]
Gram = Float[Tensor, "batch head n n"]
Values = Float[Tensor, "batch head n"]
PerEps = Float[Tensor, "batch eps"]
Again = Callable[[Tensor], Tensor]  # which samples -> their codes, for a rate that is not trusted
_MANY = 4  # from so many eps on, eigenvalues cost less than Cholesky factors
# a rate is trusted if the largest ratio of eigenvalues of I + alpha G, or of diagonal entries to
# squared pivots, is below this, by the dtype of the codes
TRUSTED = {torch.float32: 1e4, torch.float64: 1e9}


@dataclass(frozen=True)
class Objective:
    """The rate that MSSA descends, R^c, and what other objectives change.

    Each is a sum over heads, of w_k / 2 logdet(I + alpha (F_k C_k)^T F_k C_k) with the codes C_k of
    the tokens. F_k and w_k stay as they were in the forward pass, whatever becomes of the tokens.
    In R^c (arXiv 2306.01129 eq. 8) F_k = I, w_k = 1 and alpha = p / (N eps^2). plain: whether F_k =
    I.
    """

    plain = True

    def after(self, first: int) -> "Objective":
        """Returns the objective of the tokens from `first` on; it slices the last axis."""
        if not first:
            return self
        parts = {one.name: getattr(self, one.name)[..., first:] for one in fields(self)}
        return replace(self, **parts)

    def size(self, width: int, pos: int) -> float:
        """Returns alpha eps^2; width: p, the width of a head; pos: the number of tokens."""
        return width / pos

    def mixed(self, codes: Codes) -> Tensor:
        """Returns F_k C_k, `[batch, head, rows, d_head]`."""
        return codes

    def returned(self, codes: Codes) -> Tensor:
        """Returns F_k^T F_k C_k, `[batch, head, pos, d_head]`."""
        return codes

    @property
    def weights(self) -> Float[Tensor, "some head"] | None:
        """The w_k of each sample; None if all are 1."""
        return None

    @property
    def stretch(self) -> tuple[Float[Tensor, "some"], Float[Tensor, "some"]]:
        """The largest |F_k|_2^2 over heads, and the largest w_k |F_k|_2^2, by sample."""
        one = torch.ones(1, dtype=torch.float64)
        return one, one

    def rate(self, gram: Gram, alpha: PerEps, trusted: float, again: Again) -> PerEps:
        """Returns the objective for Gram matrices of F_k C_k; others: as in `rates_of_grams`."""
        return rates_of_grams(gram, alpha, trusted, again)

    def values(self, gram: Gram) -> Values:
        """Returns the numbers whose log1p the objective sums."""
        return torch.linalg.eigvalsh(gram).clamp_min(0)

    def axes(self, gram: Gram) -> tuple[Values, Gram]:
        """Returns the numbers whose log1p the objective sums, and the axes that they belong to."""
        values, vectors = torch.linalg.eigh(gram)
        return values.clamp_min(0), vectors


@dataclass(frozen=True)
class VariationalBound(Objective):
    """The upper bound of R^c that TSSA descends, at fixed memberships (arXiv 2412.17810 eq. 6-10).

    `measures.variational_rate`: only the diagonals of the Gram matrices count, F_k is diagonal with
    the squares N pi_ki / n_k, w_k = n_k / N, and alpha = K p / (N eps^2).
    """

    pi: Float[Tensor, "batch head pos"]
    plain = False

    def size(self, width: int, pos: int) -> float:
        """Returns K p / N."""
        return self.pi.shape[1] * width / pos

    @cached_property
    def _squares(self) -> Float[Tensor, "batch head pos"]:
        count = self.pi.sum(dim=-1, keepdim=True)
        return self.pi * self.pi.shape[-1] / count.where(count > 0, 1.0)

    def mixed(self, codes: Codes) -> Tensor:
        """Returns the codes times the roots of the weights."""
        return codes * self._squares.sqrt()[..., None].to(codes)

    def returned(self, codes: Codes) -> Tensor:
        """Returns the codes times the weights."""
        return codes * self._squares[..., None]

    @property
    def weights(self) -> Float[Tensor, "batch head"]:
        """The share of the tokens in each subspace, n_k / N."""
        return self.pi.mean(dim=-1)

    @property
    def stretch(self) -> tuple[PerSample, PerSample]:
        """The largest N pi_ki / n_k, and the largest pi_ki."""
        return self._squares.amax(dim=(1, 2)), self.pi.amax(dim=(1, 2))

    def rate(self, gram: Gram, alpha: PerEps, trusted: float, again: Again) -> PerEps:
        """Returns the bound from the diagonals."""
        moments = gram.double().diagonal(dim1=-2, dim2=-1)[:, None]
        terms = torch.log1p(alpha[..., None, None] * moments).sum(dim=-1)  # [batch, eps, head]
        return 0.5 * (self.weights[:, None] * terms).sum(dim=-1)

    def values(self, gram: Gram) -> Values:
        """Returns the diagonals."""
        return gram.diagonal(dim1=-2, dim2=-1)

    def axes(self, gram: Gram) -> tuple[Values, Gram]:
        """Returns the diagonals, and the axes of the codes themselves."""
        return self.values(gram), torch.eye(gram.shape[-1]).to(gram).expand_as(gram)


@dataclass(frozen=True)
class RepresentativesRate(Objective):
    """The rate of representatives that CBSA descends, at a fixed contraction (arXiv 2509.16875).

    `measures.contracted_rate`: F_k makes the codes of the m representatives from those of the
    tokens, w_k = 1, and alpha = p / (m eps^2).
    """

    contraction: Float[Tensor, "batch head rep pos"]
    plain = False

    def size(self, width: int, pos: int) -> float:
        """Returns p / m."""
        return width / self.contraction.shape[2]

    def mixed(self, codes: Codes) -> Tensor:
        """Returns the codes of the representatives."""
        return self.contraction.to(codes) @ codes

    def returned(self, codes: Codes) -> Tensor:
        """Returns the codes of the representatives, broadcast back to the tokens."""
        return self.contraction.mT @ (self.contraction @ codes)

    @property
    def stretch(self) -> tuple[PerSample, PerSample]:
        """The largest squared spectral norm of a head's contraction, twice."""
        square = torch.linalg.eigvalsh(self.contraction @ self.contraction.mT)
        largest = square[..., -1].amax(dim=1)
        return largest, largest


def rates_of_codes(codes: Codes, alpha: PerEps) -> PerEps:
    """Returns the sum over heads of 1/2 logdet(I + alpha C^T C), from the smaller Gram matrix."""
    gram = codes.mT @ codes if codes.shape[-2] >= codes.shape[-1] else codes @ codes.mT
    return rates_of_grams(gram, alpha, TRUSTED[codes.dtype], lambda rows: codes[rows])


def rates_of_grams(gram: Gram, alpha: PerEps, trusted: float, again: Again) -> PerEps:
    """Returns the sum over heads of 1/2 logdet(I + alpha G) for Gram matrices G, in float64.

    trusted: that of the dtype of the codes. again: a function that returns the codes of some
    samples. Eigenvalues serve every eps, and a Cholesky factor one; so they are taken for a whole
    grid. Samples whose factorisation cannot be trusted are computed again: from these codes in
    float64 if they are in float32, and from the singular values of the codes otherwise.
    """
    by = _by_eigenvalues if alpha.shape[1] >= _MANY else _by_cholesky
    rate, ratio = by(gram.double(), alpha)
    doubtful = ~(ratio < trusted)
    if holds_somewhere(doubtful):
        codes = again(doubtful)
        if codes.dtype == torch.float32:
            rate[doubtful] = rates_of_codes(codes.double(), alpha[doubtful])
        else:
            values = torch.linalg.svdvals(codes).square()[:, None]
            exact = torch.log1p(alpha[doubtful][..., None, None] * values)
            rate[doubtful] = 0.5 * exact.sum(dim=(-2, -1))
    return rate


Rates = tuple[PerEps, PerSample]  # and the largest condition


def _by_eigenvalues(gram: Gram, alpha: PerEps) -> Rates:
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    scaled = alpha[..., None, None] * values[:, None]  # [batch, eps, head, n]
    ratio = (1 + scaled[..., -1]) / (1 + scaled[..., 0])
    return 0.5 * torch.log1p(scaled).sum(dim=(-2, -1)), ratio.amax(dim=(1, 2))


def _by_cholesky(gram: Gram, alpha: PerEps) -> Rates:
    matrix = gram[:, None] * alpha[..., None, None, None]  # [batch, eps, head, n, n]
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += 1
    largest = diagonal.amax(dim=-1)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    ratio = largest / pivots.amin(dim=-1).square()
    ratio = ratio.masked_fill(failed > 0, torch.inf)
    return pivots.log().sum(dim=(-2, -1)), ratio.amax(dim=(1, 2))


# what the heads write before the output map, `[batch, head, pos, d_head]`, and the objective
Made = tuple[Tensor, Objective]


def mssa(attn: Attention, codes: Codes, causal: bool) -> Made:
    """Returns MSSA's heads on codes, and R^c."""
    scores = codes @ codes.mT / codes.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ codes, Objective()


def tssa(attn: TSSA, codes: Codes, causal: bool) -> Made:
    """Returns TSSA's heads on codes with the layer's `temp`, and the bound at their membership."""
    squares, temp = codes.square(), attn.temp.detach().double()
    if causal:
        bias = attn.denom_bias.detach().double()[:, : codes.shape[2]]
        shares = squares / squares.cumsum(dim=-2).clamp_min(1e-12) + bias
    else:
        shares = F.normalize(codes, dim=-2).square()
    pi = (shares.sum(dim=-1) * temp).softmax(dim=1)  # [batch, head, pos]
    weighed, mass = squares * pi[..., None], pi[..., None]
    if causal:
        weighed, mass = weighed.cumsum(dim=-2), mass.cumsum(dim=-2)
    else:
        weighed, mass = weighed.sum(dim=-2, keepdim=True), mass.sum(dim=-2, keepdim=True)
    moment = weighed / (mass + 1e-8)
    return -codes * pi[..., None] / (1 + moment), VariationalBound(pi)


def cbsa(attn: CBSA, codes: Codes, causal: bool) -> Made:
    """Returns CBSA's heads on codes with a step_x of 1, and the rate of the representatives."""
    rep, scale = attn.pooled(codes.transpose(1, 2)).transpose(1, 2), codes.shape[-1] ** -0.5
    contract = (rep @ codes.mT * scale).softmax(dim=-1)
    made = RepresentativesRate(attn.reading(contract))
    rep = made.mixed(codes)
    pattern = (rep @ rep.mT * scale).softmax(dim=-1)
    return contract.mT @ (pattern @ rep), made


@dataclass(frozen=True)
class Kind:
    """What an audit knows of a kind of attention.

    objective: what it descends, in words. no_series: why the claim about the
    Neumann form does not apply; "" if it does. heads: its operator on the codes of a layer. seen:
    makes the objective of a layer's own forward pass from the values at its hook points.
    """

    objective: str
    no_series: str
    heads: Callable[[Any, Codes, bool], Made]
    seen: Callable[[Any, Mapping[str, Tensor]], Objective]


KINDS = {
    "mssa": Kind("R^c", "", mssa, lambda attn, acts: Objective()),
    "tssa": Kind(
        "the variational bound of R^c",
        "TSSA divides by one plus each moment itself, without a Neumann series",
        tssa,
        lambda attn, acts: VariationalBound(acts["attn.hook_pi"].double()),
    ),
    "cbsa": Kind(
        "the rate of the representatives",
        "",
        cbsa,
        lambda attn, acts: RepresentativesRate(attn.reading(acts["attn.hook_contract"].double())),
    ),
}


def kind_of(attn: Attention) -> Kind:
    """Returns the kind of an attention that reads one code of each token."""
    return KINDS[attn.cfg.facts["attention"]]
