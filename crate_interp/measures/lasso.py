"""The non-negative lasso, the problem that a sparse step solves in part.

`min_{z >= 0} 1/2 |y - D z|^2 + lambd |z|_1`. Tokens are rows: y `[..., pos, d_model]`, z `[...,
pos, d_mlp]`, d `[d_model, d_mlp]`; lambd is a number, or one number for each atom `[d_mlp]`. arXiv
2306.01129 eq. 15-16 print the problem without the 1/2 that their step (eq. 17) needs.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core.device_waits import waits
from crate_interp.measures.checks import Code, Tokens, in_full_precision, require_floats

__all__ = ["lasso_kkt_residual", "lasso_objective", "lasso_solution"]

_LOOK = 10  # steps between two checks for solved tokens


@in_full_precision
def lasso_objective(
    z: Code, y: Tokens, d: Float[Tensor, "d_model d_mlp"], lambd: float | Tensor
) -> Float[Tensor, "*batch pos"]:
    """Returns the lasso's objective at a code, for each token.

    `1/2 |y - D z|^2 + sum_j lambd_j |z_j|`.

    It is defined for negative z too, which the problem forbids. NaN or Inf in a token gives NaN.

    Args:
        z: `[..., pos, d_mlp]`.
        y: `[..., pos, d_model]`.
        d: `[d_model, d_mlp]`.
        lambd: A number or `[d_mlp]`.

    Returns:
        `[..., pos]`, >= 0 for lambd >= 0, in squared units of y.

    Raises:
        ValueError: If the shapes of z, y and d do not fit each other.
    """
    check_lasso(z, y, d)
    return _nan(0.5 * (y - z @ d.mT).square().sum(dim=-1) + (lambd * z.abs()).sum(dim=-1))


@in_full_precision
def lasso_kkt_residual(
    z: Code, y: Tokens, d: Float[Tensor, "d_model d_mlp"], lambd: float | Tensor
) -> Float[Tensor, "*batch pos"]:
    """Returns how far a code is from solving the lasso, for each token.

    `|z - ReLU(z - g)|_2`, where g = D^T (D z - y) + lambd.

    It is 0 if and only if z >= 0, g >= 0 and z g = 0, the conditions of Karush, Kuhn and Tucker.
    NaN or Inf in a token gives NaN.

    Args:
        z: As in `lasso_objective`.
        y: As in `lasso_objective`.
        d: As in `lasso_objective`.
        lambd: As in `lasso_objective`.

    Returns:
        `[..., pos]`, >= 0, in units of the code.

    Raises:
        ValueError: If the shapes of z, y and d do not fit each other.
    """
    check_lasso(z, y, d)
    gradient = (z @ d.mT - y) @ d + lambd
    return _nan(torch.linalg.vector_norm(z - torch.relu(z - gradient), dim=-1))


@in_full_precision
@torch.no_grad()
def lasso_solution(
    y: Tokens,
    d: Float[Tensor, "d_model d_mlp"],
    lambd: float | Tensor,
    tol: float = 1e-6,
    max_steps: int = 2000,
) -> Code:
    """Returns a solution of the lasso for each token, by accelerated proximal gradient steps.

    The steps are FISTA's (Beck and Teboulle 2009), which restart when they overshoot (O'Donoghue
    and Candes 2015), with the step size eta = 1 / |D|_2^2. They stop when every token's step is at
    most eta tol |D^T y| long, or after max_steps: `lasso_kkt_residual` tells how well the problem
    is solved. The minimum is unique; the code is unique if D has independent columns. Not
    differentiable.

    Args:
        y: `[..., pos, d_model]`.
        d: `[d_model, d_mlp]`.
        lambd: A number or `[d_mlp]`.
        tol: The steps stop when all are as short as this share of |D^T y|.
        max_steps: How many steps, at most.

    Returns:
        `[..., pos, d_mlp]`, >= 0; computed in float64.

    Raises:
        ValueError: If the shapes do not fit, if y or d holds NaN or Inf, or if lambd is negative.
    """
    require_floats(d, "d_model d_mlp")
    require_floats(y, "pos d_model")
    penalty = torch.as_tensor(lambd).to(d.device)
    good = torch.stack([(penalty >= 0).all(), y.isfinite().all() & d.isfinite().all()]).tolist()
    if not good[0]:
        raise ValueError(f"lambd={lambd}: give penalties of at least 0.")
    if not good[1]:
        raise ValueError("y or d holds NaN or Inf: give finite targets and a finite dictionary.")
    return lasso_solutions_at(y, d, lambd, (1.0,), steepest(d), tol, max_steps)[0]


def steepest(d: Float[Tensor, "d_model d_mlp"]) -> float:
    """Returns the squared spectral norm of a matrix, in float64."""
    small = d if d.shape[0] < d.shape[1] else d.mT
    return float(torch.linalg.eigvalsh(small.double() @ small.mT.double())[-1])


@torch.no_grad()
def lasso_solutions_at(
    y: Tokens,
    d: Float[Tensor, "d_model d_mlp"],
    lambd: float | Tensor,
    scales: Sequence[float],
    largest: float,
    tol: float = 1e-6,
    max_steps: int = 2000,
) -> list[Code]:
    """Returns `lasso_solution` for the dictionary D times each of the scales, solved in parallel.

    The code for c D is 1 / c times the code for D with the penalty lambd / c, at every step.
    largest: `steepest(d)`.
    """
    # in float64, because a float32 gradient stops short of the minimum
    rows, wide = y.reshape(-1, y.shape[-1]).double(), d.double()
    shape = (*y.shape[:-1], d.shape[1])
    if largest == 0:
        return [torch.zeros(shape, dtype=y.dtype, device=y.device) for _ in scales]
    penalty = torch.as_tensor(lambd, dtype=torch.float64, device=d.device)
    corr = (rows @ wide).repeat(len(scales), 1)  # [scale * token, d_mlp]
    by_row = rows.new_tensor(scales).repeat_interleave(len(rows))[:, None]
    found = _fista(corr, wide, penalty / by_row, 1 / largest, tol, max_steps) / by_row
    return [part.reshape(shape).to(y.dtype) for part in found.split(len(rows))]


def _fista(
    corr: Float[Tensor, "token d_mlp"],
    d: Float[Tensor, "d_model d_mlp"],
    lambd: Float[Tensor, "token atoms"],
    eta: float,
    tol: float,
    max_steps: int,
) -> Float[Tensor, "token d_mlp"]:
    """Returns the code of each token from corr = Y D; lambd: the penalties by token and atom."""
    # D^T D is used if one product with it reads no more entries than two products with D
    gram = d.mT @ d if d.shape[1] <= 2 * d.shape[0] else None
    solved = corr.new_zeros(corr.shape)
    open_ = torch.arange(len(corr), device=corr.device)  # indices of tokens that are not solved yet
    closed = torch.zeros_like(open_, dtype=torch.bool)
    code = ahead = solved
    momentum, shift = corr.new_ones(len(corr), 1), eta * (corr - lambd)
    enough = eta * tol * torch.linalg.vector_norm(corr, dim=-1)
    for turn in range(1, max_steps + 1):
        down = ahead @ gram if gram is not None else (ahead @ d.mT) @ d
        new = torch.relu(ahead - eta * down + shift)
        step = new - code
        if turn % _LOOK == 0 or turn == max_steps:
            left = torch.linalg.vector_norm(new - ahead, dim=-1) > enough
            if waits(left):  # an accelerator goes on with tokens that are solved, and drops that
                solved = torch.where(closed[:, None], solved, new)
                closed = closed | ~left
                left = ~closed
            else:
                solved[open_] = new
            if not bool(left.any()):
                break
            if not waits(left) and not bool(left.all()):
                open_, momentum = open_[left], momentum[left]
                shift, enough = shift[left], enough[left]
                new, ahead, step = new[left], ahead[left], step[left]
        # momentum restarts for tokens that have overshot
        uphill = ((ahead - new) * step).sum(dim=-1, keepdim=True) > 0
        momentum = momentum.masked_fill(uphill, 1)
        grown = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = new + ((momentum - 1) / grown) * step
        code, momentum = new, grown
    return solved


def _nan(value: Float[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos"]:
    return value.masked_fill(~value.isfinite(), torch.nan)


def check_lasso(z: Tensor, y: Tensor, d: Tensor) -> None:
    """Raises ValueError unless a code, a target and a dictionary fit each other."""
    require_floats(z, "pos d_mlp")
    require_floats(y, "pos d_model")
    require_floats(d, "d_model d_mlp")
    if z.shape[:-1] != y.shape[:-1] or (y.shape[-1], z.shape[-1]) != tuple(d.shape):
        shapes = f"code {list(z.shape)}, target {list(y.shape)} and dictionary {list(d.shape)}"
        raise ValueError(f"{shapes} do not fit: a dictionary is [d_model, d_mlp].")
