"""How sparse a code is, token by token."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import largest_entry, require_floats, squares_fit


def zero_fraction(
    z: Float[Tensor, "*batch pos d_mlp"], tol: float = 0.0
) -> Float[Tensor, "*batch pos"]:
    """The share of entries with |z| <= tol; exact zeros by default.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1], without unit. The mean over tokens is what the authors' script
    counts (CRATE `vis_utils/plot.py` `cal_sparsity`; it plots one minus that and takes the population std over the
    batch). NaN in a token gives NaN. Raises ValueError for tol < 0 and for an empty code.
    """
    _check(z)
    if not tol >= 0:
        raise ValueError(f"tol={tol}: give a number of at least 0.")
    with (
        torch.no_grad()
    ):  # a count has no gradient; comparing into numbers, as booleans are slow to sum
        zeros = torch.empty_like(z)
        torch.eq(z, 0, out=zeros) if tol == 0 else torch.le(z.abs(), tol, out=zeros)
    return _valid(zeros.sum(dim=-1) / z.shape[-1], z, z.sum(dim=-1))


def l1_norm(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """The sum of absolute values, `|z|_1`: what ISTA's threshold penalises.

    z `[..., pos, d_mlp]` -> `[..., pos]`, >= 0, in units of the code. Raises ValueError for an empty code.
    """
    _check(z)
    size = z.abs().sum(dim=-1)
    return _valid(size, z, size)


def l0_norm(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """The number of entries that are not zero, `|z|_0`.

    z `[..., pos, d_mlp]` -> `[..., pos]`, 0 to d_mlp. A count: its gradient is zero everywhere. arXiv 2306.01129 eq. 1. NaN in a token
    gives NaN. Raises ValueError for an empty code.
    """
    _check(z)
    # a graph with a gradient of zeros, not none: who trains on it sees that it does nothing
    return _valid((z.detach() != 0).to(z.dtype).sum(dim=-1) + (z * 0).sum(dim=-1), z, z.sum(dim=-1))


def mean_magnitude(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """The mean absolute value, `|z|_1 / d_mlp`: `l1_norm` comparable between widths.

    z `[..., pos, d_mlp]` -> `[..., pos]`, >= 0, in units of the code. Errors as in `l1_norm`.
    """
    return l1_norm(z) / z.shape[-1]


def l1_l2_ratio(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """`|z|_1 / |z|_2`: 1 for one entry, sqrt(d_mlp) for equal entries; does not change when z is scaled.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [1, sqrt(d_mlp)]; 0 for an all-zero token. Raises ValueError for an empty code.
    """
    _check(z)
    ratio, _ = _l1_over_l2(z, z.abs().sum(dim=-1))
    return _valid(ratio, z, ratio)


def hoyer(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """Hoyer's sparsity `(sqrt(n) - |z|_1 / |z|_2) / (sqrt(n) - 1)`, n = d_mlp: 0 for equal entries, 1 for one entry.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1]; does not change when z is scaled. Hoyer, JMLR 2004. An all-zero
    token, for which the formula is 0/0, has 1: nothing is sparser. Raises ValueError for a code narrower than 2.
    """
    return l1_and_hoyer(z)[1]


def l1_and_hoyer(z: Float[Tensor, "*batch pos d_mlp"]) -> tuple[Tensor, Tensor]:
    """`l1_norm` and `hoyer`, for a caller who wants both: the sum of absolute values is made once."""
    _check(z)
    width = z.shape[-1]
    if width < 2:
        raise ValueError(f"hoyer needs codes of at least 2 entries, got {width}.")
    size = z.abs().sum(dim=-1)
    ratio, zero = _l1_over_l2(z, size)
    value = ((width**0.5 - ratio) / (width**0.5 - 1)).masked_fill(zero, 1).clamp(0, 1)
    return _valid(size, z, size), _valid(value, z, value)


def _l1_over_l2(
    z: Float[Tensor, "*batch pos d_mlp"], l1: Float[Tensor, "*batch pos"]
) -> tuple[Tensor, Tensor]:
    """The ratio `[..., pos]`, 0 for a token of zeros, and which tokens these are."""
    l2 = torch.linalg.vector_norm(z, dim=-1)
    if not squares_fit(l2):
        scaled = z / largest_entry(z)
        l1, l2 = scaled.abs().sum(dim=-1), torch.linalg.vector_norm(scaled, dim=-1)
    zero = l2 == 0
    return l1 / l2.masked_fill(zero, 1), zero


def gini(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """The Gini index of absolute values, `sum_i (2i - n - 1) |z|_(i) / (n |z|_1)`, |z|_(1) the smallest: 0 for equal entries.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1 - 1/n], the most for one entry; n = d_mlp; does not change when z is scaled.
    Hurley and Rickard 2009. An all-zero token has the most: nothing is sparser. Raises ValueError for an empty code.
    """
    _check(z)
    width = z.shape[-1]
    sizes = (z / largest_entry(z)).abs().sort(dim=-1).values
    weights = torch.arange(1 - width, width, 2, dtype=z.dtype, device=z.device)
    total = sizes.sum(dim=-1)
    value = (sizes * weights).sum(dim=-1) / (width * total.masked_fill(total == 0, 1))
    return _valid(value.masked_fill(total == 0, 1 - 1 / width), z, total)


def support_for_energy(
    z: Float[Tensor, "*batch pos d_mlp"], energy: float = 0.9
) -> Float[Tensor, "*batch pos"]:
    """The smallest number of entries whose squares hold at least a share of `|z|^2`.

    z `[..., pos, d_mlp]` -> `[..., pos]`, 1 to d_mlp; 0 for an all-zero token. Divide by d_mlp to compare widths. Not
    differentiable. Raises ValueError for energy outside (0, 1] and for an empty code.
    """
    _check(z)
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy}: give a share above 0 and at most 1.")
    squares = (z.detach() / largest_entry(z)).double().square().sort(dim=-1, descending=True).values
    held = squares.cumsum(dim=-1)
    wanted = energy * held[..., -1:] * (1 - 1e-12)  # a sum in another order may end an ulp lower
    count = ((held < wanted).sum(dim=-1) + 1).masked_fill(held[..., -1] == 0, 0)
    return _valid(count.to(z.dtype), z, held[..., -1])


def firing_rate(
    z: Float[Tensor, "*batch pos d_mlp"], tol: float = 0.0
) -> Float[Tensor, "*batch d_mlp"]:
    """The share of tokens in which each entry is on, |z| > tol.

    z `[..., pos, d_mlp]` -> `[..., d_mlp]` in [0, 1]; 0 is an atom that never fires. NaN in an entry gives NaN for its atom.
    Raises ValueError for tol < 0 and for no tokens.
    """
    _check(z)
    if not tol >= 0:
        raise ValueError(f"tol={tol}: give a number of at least 0.")
    rate = (z.detach().abs() > tol).to(z.dtype).mean(dim=-2)
    return rate.masked_fill(~z.detach().isfinite().all(dim=-2), torch.nan)


def _valid(
    value: Float[Tensor, "*batch pos"],
    z: Float[Tensor, "*batch pos d_mlp"],
    seen: Float[Tensor, "*batch pos"],
) -> Float[Tensor, "*batch pos"]:
    """NaN for a token that holds NaN or Inf; `seen` is finite only where the token is, or its sum overflows."""
    finite = seen.detach().isfinite()
    if not finite.all():
        finite = z.isfinite().all(dim=-1)
    return value.masked_fill(~finite, torch.nan)


def _check(z: Tensor) -> None:
    require_floats(z, "pos d_mlp")
    if 0 in z.shape[-2:]:
        raise ValueError(
            f"there is no code to measure: the last two axes (pos, d_mlp) are {list(z.shape[-2:])}."
        )
