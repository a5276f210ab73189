"""The audit's numbers by another way: autograd, loops over heads, tokens and samples, NumPy."""

from functools import partial

import numpy as np
import torch

import reference
from crate_interp.audits import layer as layers
from crate_interp.audits.layer import Bases


def rate(z, u, eps):
    """R^c of tokens, head by head, by singular values."""
    alpha = u.shape[-1] / (len(z) * eps**2)
    return sum(0.5 * torch.log1p(alpha * torch.linalg.svdvals(z @ uk) ** 2).sum() for uk in u)


def normalised(z, norm):
    """LayerNorm without its gains, token by token."""
    rows = [(x - x.mean()) / torch.sqrt(x.var(correction=0) + norm.eps) for x in z]
    return torch.stack(rows)


def unit(z):
    return z * (z.numel() ** 0.5 / z.norm())


def framed(frame, z, norm):
    """Tokens in the coordinates of a frame, and what leads from them to what attention sees."""
    if frame == "stream":
        return z, lambda x: x
    if frame == "unit":
        return unit(z), lambda x: x
    return normalised(z, norm), lambda x: x * norm.weight.detach() + norm.bias.detach()


def along(frame, x, step):
    """A step without what leaves the frame: token by token, or along the sample."""
    if frame == "stream":
        return step
    if frame == "unit":
        return step - x * (x * step).sum() / (x * x).sum()
    out = []
    for token, move in zip(x, step, strict=True):
        move = move - move.mean()
        out.append(move - token * (token @ move) / (token @ token))
    return torch.stack(out)


def bound(pi):
    """The bound that TSSA descends: of the codes at memberships pi, head by head."""

    def of(z, u, eps):
        total, d = 0.0, u.shape[0] * u.shape[2]
        for weight, uk in zip(pi, u, strict=True):
            held = weight.sum()
            for column in (z @ uk).T:
                moment = (weight * column**2).sum() / held
                total = total + held / (2 * len(z)) * torch.log(1 + d / eps**2 * moment)
        return total

    return of


def contracted(maps):
    """The rate that CBSA descends: of the representatives that the maps make, head by head."""
    return lambda z, u, eps: sum(
        rate(made @ (z @ uk), torch.eye(uk.shape[1])[None].double(), eps)
        for made, uk in zip(maps, u, strict=True)
    )


def attention(z, after, u, norm, eps, rate=rate, most=None):
    """The numbers of an update in each frame at one eps.

    rate: the objective. most: what takes the place of p / N in L.
    """
    found = {}
    for frame in ("stream", "read", "unit"):
        x, see = framed(frame, z, norm)
        moved = framed(frame, after, norm)[0]
        before, then = rate(see(x), u, eps), rate(see(moved), u, eps)
        leaf = x.clone().requires_grad_()
        gains = norm.weight.detach() if frame == "read" else torch.ones(z.shape[1]).double()
        (grad,) = torch.autograd.grad(rate(see(leaf), u, eps), leaf)
        series = torch.as_tensor(reference.neumann_gradient(see(x).numpy(), u.numpy(), eps)) * gains
        step = along(frame, x, moved - x)
        grad, series = along(frame, x, grad), along(frame, x, series)
        alpha = (u.shape[-1] / len(z) if most is None else most) / eps**2
        wide = torch.cat([gains[:, None] * uk for uk in u], dim=1)
        bend = 9 / 4 * alpha * torch.linalg.matrix_norm(wide, 2) ** 2
        values = [alpha * torch.linalg.svdvals(see(x) @ uk) ** 2 for uk in u]
        found[frame] = {
            "compresses": (then - before) / before,
            "rate_before": before,
            "rate_after": then,
            "gradient": -(step * grad).sum() / step.norm() / grad.norm(),
            "step": -(step * grad).sum() / (grad * grad).sum() * bend,
            "neumann": torch.stack([(x > 1).double().mean() for x in values]).mean(),
            "neumann_direction": -(step * series).sum() / step.norm() / series.norm(),
        }
    return found


def least_rate(x, distance, weights=None):
    """The dual bound: the minimum for each value by the roots of its cubic, nu by bisection."""
    weights = np.ones(len(x)) if weights is None else weights

    def moved(nu):
        best = []
        for value, w in zip(x, weights, strict=True):
            roots = np.roots([1, -value, 1 + w / (2 * nu), -value])
            real = np.append(roots[np.abs(roots.imag) < 1e-6].real, 0.0).clip(0, value)
            best.append(min(real, key=lambda t: w / 2 * np.log1p(t * t) + nu * (value - t) ** 2))
        return np.array(best)

    def dual(nu):
        t = moved(nu)
        return (weights / 2 * np.log1p(t**2) + nu * (x - t) ** 2).sum() - nu * distance**2

    low, high = -30.0, 20.0
    while high - low > 1e-13 * max(abs(low), 1):
        middle = (low + high) / 2
        far = ((x - moved(np.exp(middle))) ** 2).sum() > distance**2
        low, high = (middle, high) if far else (low, middle)
    return max(dual(np.exp(low)), dual(np.exp(high)), 0.0)


def ceiling(z, after, u, norm, eps):
    """The lowest relative change of R^c that an update of this length can have, in each frame."""
    found = {}
    alpha = u.shape[-1] / (len(z) * eps**2)
    whole = float(torch.linalg.matrix_norm(sum(uk @ uk.T for uk in u), 2))
    for frame in ("stream", "read", "unit"):
        (x, see), moved = framed(frame, z, norm), framed(frame, after, norm)[0]
        values = np.concatenate([np.linalg.svd((see(x) @ uk).numpy())[1] for uk in u])
        length = float((see(moved) - see(x)).norm())
        least = least_rate(alpha**0.5 * values, (alpha * whole) ** 0.5 * length)
        before = 0.5 * np.log1p(alpha * values**2).sum()
        found[frame] = (least - before) / before
    return found


def mssa(z, u, norm):
    """MSSA with the output map U_k^T, head by head."""
    x = framed("read", z, norm)
    seen = x[1](x[0])
    out = torch.zeros_like(z)
    for uk in u:
        code = seen @ uk
        out += torch.softmax(code @ code.T / code.shape[1] ** 0.5, dim=1) @ code @ uk.T
    return out


def polar(u):
    """The orthonormal subspaces nearest to all U_k together."""
    wide = np.concatenate(list(u.numpy()), axis=1)
    values, vectors = np.linalg.eigh(wide.T @ wide)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    return torch.as_tensor(np.stack(np.split(wide @ root, len(u), axis=1)))


def number(result, of, name, frame, eps, basis="stored", tokens="all", layer=1):
    table = result.table("numbers")
    at = (table["layer"] == layer) & (table["of"] == of) & (table["frame"] == frame)
    at &= (table["eps"] == eps) & (table["basis"] == basis) & (table["tokens"] == tokens)
    return table[at].sort_values("sample")[name].to_numpy()


def same(found, wanted, what):
    np.testing.assert_allclose(found, float(wanted), rtol=1e-9, atol=1e-11, err_msg=str(what))


def drawn(matrix, null, draw):
    """A draw of random weights, whose bases are those of every layer."""
    return list(Bases(partial(layers._generator, 0, null, 0)).like(matrix, draw + 1))[draw]


def sparse_numbers(y, code, d, lasso):
    """The numbers of a code of one sample's tokens, by loops."""
    start = np.maximum(y, 0) if lasso.warm else np.zeros_like(code)
    lambd = float(lasso.lambd)
    best = reference.lasso_solution(y, d, lambd)
    values = [sum(reference.lasso_objective(z, y, d, lambd)) for z in (start, code, best)]
    residual = [
        sum(np.linalg.norm(z - np.maximum(z - g, 0)) for z, g in zip(zs, grads, strict=True))
        for zs, grads in ((zs, (zs @ d.T - y) @ d + lambd) for zs in (start, code))
    ]
    decoded = code @ d.T
    scale = (decoded * y).sum() / (decoded**2).sum()
    return {
        "descends": (values[1] - values[0]) / values[0],
        "share": (values[0] - values[1]) / (values[0] - values[2]),
        "kkt": residual[1] / residual[0],
        "reconstruction": np.linalg.norm(y - decoded) / np.linalg.norm(y),
        "best_scaled": np.linalg.norm(y - scale * decoded) / np.linalg.norm(y),
    }


def steps_of(lasso, y, d, sizes, lambd=None):
    z = y if lasso.warm else np.zeros((len(y), d.shape[1]))
    for size in sizes:
        lambd = float(lasso.lambd) if lambd is None else lambd
        z = np.maximum(z - size * ((z @ d.T - y) @ d) - size * lambd, 0)
    return z
