"""How sparse a code is, token by token."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core.device_waits import waits
from crate_interp.measures import checks

__all__ = [
    "firing_rate", "gini", "hoyer", "l0_norm", "l1_l2_ratio", "l1_norm", "mean_magnitude",
    "support_for_energy", "zero_fraction",
]  # fmt: skip

_EMPTY = "there is no code to measure"


def zero_fraction(z: checks.Code, tol: float = 0.0) -> Float[Tensor, "*batch pos"]:
    """Returns the share of entries with |z| <= tol; exact zeros by default.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1]. The authors' script counts exact zeros and
    takes the mean over tokens (CRATE `vis_utils/plot.py` `cal_sparsity`; it plots one minus this
    mean, and the population standard deviation over the batch). NaN in a token gives NaN. Raises
    ValueError if tol is below 0 or if the code is empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    if not tol >= 0:
        raise ValueError(f"tol={tol}: give a number of at least 0.")
    with torch.no_grad():  # a count has no gradient
        zeros = torch.empty_like(z)  # floats, because booleans are slow to sum
        torch.eq(z, 0, out=zeros) if tol == 0 else torch.le(z.abs(), tol, out=zeros)
    return _valid(zeros.sum(dim=-1) / z.shape[-1], z, z.sum(dim=-1))


def l1_norm(z: checks.Code) -> Float[Tensor, "*batch pos"]:
    """Returns the sum of absolute values, `|z|_1`, which ISTA's threshold penalises.

    z `[..., pos, d_mlp]` -> `[..., pos]`, >= 0, in units of the code. NaN in a token gives NaN.
    Raises ValueError if the code is empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    size = z.abs().sum(dim=-1)
    return _valid(size, z, size)


def l0_norm(z: checks.Code) -> Float[Tensor, "*batch pos"]:
    """Returns the number of entries that are not zero, `|z|_0`.

    z `[..., pos, d_mlp]` -> `[..., pos]`, 0 to d_mlp. It is a count, so its gradient is zero
    everywhere. arXiv 2306.01129 eq. 1. NaN in a token gives NaN. Raises ValueError if the code is
    empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    # z * 0 gives a gradient of zeros instead of none, so that training on the count does not fail
    return _valid((z.detach() != 0).to(z.dtype).sum(dim=-1) + (z * 0).sum(dim=-1), z, z.sum(dim=-1))


def mean_magnitude(z: checks.Code) -> Float[Tensor, "*batch pos"]:
    """Returns the mean absolute value, `|z|_1 / d_mlp`, which compares codes of different widths.

    z `[..., pos, d_mlp]` -> `[..., pos]`, >= 0, in units of the code. NaN in a token gives NaN.
    Raises ValueError if the code is empty.
    """
    return l1_norm(z) / z.shape[-1]


def l1_l2_ratio(z: checks.Code) -> Float[Tensor, "*batch pos"]:
    """Returns `|z|_1 / |z|_2`: 1 for a single nonzero entry, sqrt(d_mlp) for equal entries.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [1, sqrt(d_mlp)]; 0 for an all-zero token. It does not
    depend on the scale of z. NaN in a token gives NaN. Raises ValueError if the code is empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    ratio, _ = _l1_over_l2(z, z.abs().sum(dim=-1))
    return _valid(ratio, z, ratio)


def hoyer(z: checks.Code) -> Float[Tensor, "*batch pos"]:
    """Returns Hoyer's sparsity: 0 for equal entries, 1 for a single nonzero entry.

    `(sqrt(n) - |z|_1 / |z|_2) / (sqrt(n) - 1)`, where n = d_mlp.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1]. It does not depend on the scale of z. Hoyer,
    JMLR 2004. An all-zero token, for which the formula is 0/0, has 1, because nothing is sparser.
    NaN in a token gives NaN. Raises ValueError if the code is empty or has fewer than 2 entries per
    token.
    """
    return l1_and_hoyer(z)[1]


def l1_and_hoyer(z: checks.Code) -> tuple[Tensor, Tensor]:
    """Returns `l1_norm` and `hoyer`, which share the sum of absolute values."""
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    width = z.shape[-1]
    if width < 2:
        raise ValueError(f"hoyer needs codes of at least 2 entries, got {width}.")
    size = z.abs().sum(dim=-1)
    ratio, zero = _l1_over_l2(z, size)
    value = ((width**0.5 - ratio) / (width**0.5 - 1)).masked_fill(zero, 1).clamp(0, 1)
    return _valid(size, z, size), _valid(value, z, value)


def _l1_over_l2(z: checks.Code, l1: Float[Tensor, "*batch pos"]) -> tuple[Tensor, Tensor]:
    """Returns the ratio `[..., pos]`, 0 for a token of zeros, and which tokens are zeros."""
    l2 = torch.linalg.vector_norm(z, dim=-1)
    if not checks.squares_fit(l2):
        scaled = z / checks.largest_entry(z)
        l1, l2 = scaled.abs().sum(dim=-1), torch.linalg.vector_norm(scaled, dim=-1)
    zero = l2 == 0
    return l1 / l2.masked_fill(zero, 1), zero


def gini(z: checks.Code) -> Float[Tensor, "*batch pos"]:
    """Returns the Gini index of absolute values: 0 for equal entries.

    `sum_i (2i - n - 1) |z|_(i) / (n |z|_1)`, where |z|_(1) is the smallest entry and n = d_mlp.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1 - 1/n], with the maximum for a single nonzero
    entry. It does not depend on the scale of z. Hurley and Rickard 2009. An all-zero token has the
    maximum, because nothing is sparser. NaN in a token gives NaN. Raises ValueError if the code is
    empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    width = z.shape[-1]
    sizes = (z / checks.largest_entry(z)).abs().sort(dim=-1).values
    weights = torch.arange(1 - width, width, 2, dtype=z.dtype, device=z.device)
    total = sizes.sum(dim=-1)
    value = (sizes * weights).sum(dim=-1) / (width * total.masked_fill(total == 0, 1))
    return _valid(value.masked_fill(total == 0, 1 - 1 / width), z, total)


def support_for_energy(z: checks.Code, energy: float = 0.9) -> Float[Tensor, "*batch pos"]:
    """Returns the smallest number of entries whose squares hold a share `energy` of `|z|^2`.

    z `[..., pos, d_mlp]` -> `[..., pos]`, 1 to d_mlp; 0 for an all-zero token. Divide by d_mlp to
    compare widths. NaN in a token gives NaN. Not differentiable. Raises ValueError if energy is
    outside (0, 1] or if the code is empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    count, whole = checks.fewest((z / checks.largest_entry(z)).double().square(), "energy", energy)
    return _valid(count.masked_fill(whole == 0, 0).to(z.dtype), z, whole)


def firing_rate(z: checks.Code, tol: float = 0.0) -> Float[Tensor, "*batch d_mlp"]:
    """Returns the share of tokens in which each entry is on, `|z| > tol`.

    z `[..., pos, d_mlp]` -> `[..., d_mlp]` in [0, 1]; 0 means that an atom never fires. NaN in an
    entry gives NaN for its atom. Raises ValueError if tol is below 0 or if the code is empty.
    """
    checks.require_entries(z, "pos d_mlp", _EMPTY)
    if not tol >= 0:
        raise ValueError(f"tol={tol}: give a number of at least 0.")
    rate = (z.detach().abs() > tol).to(z.dtype).mean(dim=-2)
    return rate.masked_fill(~z.detach().isfinite().all(dim=-2), torch.nan)


def _valid(
    value: Float[Tensor, "*batch pos"], z: checks.Code, codes: Float[Tensor, "*batch pos"]
) -> Float[Tensor, "*batch pos"]:
    """Sets the values of tokens that hold NaN or Inf to NaN.

    codes: a number for each token. It is NaN or Inf if the token holds NaN or Inf, and also if the
    number overflows.
    """
    finite = codes.detach().isfinite()
    if waits(finite) or not finite.all():
        finite = z.isfinite().all(dim=-1)
    return value.masked_fill(~finite, torch.nan)
