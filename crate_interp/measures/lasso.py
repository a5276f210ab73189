"""The problem a sparse step takes a step of: the non-negative lasso, `min_{z >= 0} 1/2 |y - D z|^2 + lambd |z|_1`.

Tokens are rows: y `[..., pos, d_model]`, z `[..., pos, d_mlp]`, d `[d_model, d_mlp]`; lambd a number or one per atom `[d_mlp]`.
arXiv 2306.01129 eq. 15-16 print it without the 1/2 that their step (eq. 17) needs.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, require_floats


@in_full_precision
def lasso_objective(
    z: Float[Tensor, "*batch pos d_mlp"],
    y: Float[Tensor, "*batch pos d_model"],
    d: Float[Tensor, "d_model d_mlp"],
    lambd: float | Tensor,
) -> Float[Tensor, "*batch pos"]:
    """`1/2 |y - D z|^2 + sum_j lambd_j |z_j|` of each token.

    -> `[..., pos]`, >= 0 for lambd >= 0, in squared units of y. Defined for negative z too, which the problem forbids. NaN or Inf in
    a token gives NaN. Raises ValueError for tensors that do not fit each other.
    """
    _check(z, y, d)
    return _nan(0.5 * (y - z @ d.mT).square().sum(dim=-1) + (lambd * z.abs()).sum(dim=-1))


@in_full_precision
def lasso_kkt_residual(
    z: Float[Tensor, "*batch pos d_mlp"],
    y: Float[Tensor, "*batch pos d_model"],
    d: Float[Tensor, "d_model d_mlp"],
    lambd: float | Tensor,
) -> Float[Tensor, "*batch pos"]:
    """How far a code is from solving the lasso: `|z - ReLU(z - g)|_2`, g = D^T (D z - y) + lambd.

    -> `[..., pos]`, >= 0, in units of the code; 0 iff z >= 0, g >= 0 and z g = 0, the conditions of Karush, Kuhn and Tucker. Errors
    as in `lasso_objective`.
    """
    _check(z, y, d)
    gradient = (z @ d.mT - y) @ d + lambd
    return _nan(torch.linalg.vector_norm(z - torch.relu(z - gradient), dim=-1))


@in_full_precision
@torch.no_grad()
def lasso_solution(
    y: Float[Tensor, "*batch pos d_model"],
    d: Float[Tensor, "d_model d_mlp"],
    lambd: float | Tensor,
    tol: float = 1e-6,
    max_steps: int = 2000,
) -> Float[Tensor, "*batch pos d_mlp"]:
    """A solution of the lasso for each token, by accelerated proximal gradient steps (FISTA) that restart when they overshoot.

    y `[..., pos, d_model]`, d `[d_model, d_mlp]` -> `[..., pos, d_mlp]`, >= 0. Stops where no token's step is longer than tol
    times the length of D^T y, or after max_steps: read `lasso_kkt_residual` to see how well it is solved. The minimum is
    unique, the code where D has independent columns. Beck and Teboulle 2009; O'Donoghue and Candes 2015 for the restart.
    Not differentiable. Raises ValueError for tensors that do not fit, NaN, Inf, negative lambd.
    """
    require_floats(d, "d_model d_mlp")
    require_floats(y, "pos d_model")
    if not bool(torch.as_tensor(lambd >= 0).all()):
        raise ValueError(f"lambd={lambd}: a penalty is at least 0.")
    if not (bool(y.isfinite().all()) and bool(d.isfinite().all())):
        raise ValueError("y or d holds NaN or Inf: there is nothing to solve.")
    rows = y.reshape(-1, y.shape[-1])
    corr = rows @ d  # [token, d_mlp]
    largest = float(torch.linalg.matrix_norm(d.double(), ord=2)) ** 2
    if largest == 0:
        return torch.zeros(*y.shape[:-1], d.shape[1], dtype=y.dtype, device=y.device)
    solution = _fista(corr, d, lambd, 1 / largest, tol, max_steps)
    return solution.reshape(*y.shape[:-1], d.shape[1])


def _fista(
    corr: Float[Tensor, "token d_mlp"],
    d: Float[Tensor, "d_model d_mlp"],
    lambd: float | Tensor,
    eta: float,
    tol: float,
    max_steps: int,
) -> Float[Tensor, "token d_mlp"]:
    # through D twice where it is wide, through its Gram where that is smaller
    gram = d.mT @ d if d.shape[1] <= 2 * d.shape[0] else None
    times = (lambda x: x @ gram) if gram is not None else (lambda x: (x @ d.mT) @ d)
    code = corr.new_zeros(corr.shape)
    ahead, momentum = code, corr.new_ones(len(corr), 1)
    shortest = tol * torch.linalg.vector_norm(corr, dim=-1)
    shift = eta * (corr - lambd)
    for _ in range(max_steps):
        new = torch.relu(ahead - eta * times(ahead) + shift)
        step = new - code
        if bool((torch.linalg.vector_norm(new - ahead, dim=-1) <= eta * shortest).all()):
            return new
        over = ((ahead - new) * step).sum(dim=-1, keepdim=True) > 0  # the step goes uphill: momentum is lost
        momentum = momentum.masked_fill(over, 1)
        grown = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = new + ((momentum - 1) / grown) * step
        code, momentum = new, grown
    return code


def _nan(value: Float[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos"]:
    return value.masked_fill(~value.isfinite(), torch.nan)


def _check(z: Tensor, y: Tensor, d: Tensor) -> None:
    require_floats(z, "pos d_mlp")
    require_floats(y, "pos d_model")
    require_floats(d, "d_model d_mlp")
    if z.shape[:-1] != y.shape[:-1] or (y.shape[-1], z.shape[-1]) != tuple(d.shape):
        raise ValueError(
            f"code {list(z.shape)}, target {list(y.shape)} and dictionary {list(d.shape)} do not fit: wanted "
            "[..., pos, d_mlp], [..., pos, d_model] and [d_model, d_mlp]."
        )
