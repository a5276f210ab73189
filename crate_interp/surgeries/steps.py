"""The steps that can replace a layer's own, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp import measures
from crate_interp.core import checks
from crate_interp.measures.checks import in_full_precision
from crate_interp.measures.gradients import written
from crate_interp.measures.rates import check_rate, head_codes
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.block import CrateBlock
from crate_interp.models.layers.context import contexts
from crate_interp.models.layers.sparse_steps import Lasso
from crate_interp.probes.layer_reading import tied_subspaces
from crate_interp.results.grouped_samples import counted

ATTENTION = ("gradient", "neumann", "plus", "minus")
SOLUTION = "solution"
Replacement = str | int  # a name, or a number of proximal steps
Acts = Mapping[str, Tensor]  # activations of one layer, by point
# takes (block, activations, visible tokens, eps), returns the step
Make = Callable[[CrateBlock, Acts, Tensor | None, float], Tensor]


@dataclass(frozen=True)
class Step:
    """A step that can replace a layer's own.

    name: its name in tables. point: the hook point of the layer's own step, which is replaced.
    reads: the points needed to compute the new step, in addition to `point`. make(block, acts,
    visible, eps) computes the new step. lacking(block) returns why a layer cannot take it, or "".
    """

    name: str
    point: str
    reads: tuple[str, ...]
    make: Make
    lacking: Callable[[CrateBlock], str]


def attention_step(name: str) -> Step:
    """Returns the step of this name that replaces attention.

    Raises ValueError for an unknown name.
    """
    checks.one_of("attention", name, ATTENTION)
    return Step(
        name, "hook_attn_out", ("hook_resid_pre", "attn.hook_z"), partial(_attention, name), _no_u
    )


def sparse_step(what: Replacement) -> Step:
    """Returns a replacement of the sparse step: n proximal steps, or the lasso's solution.

    Raises ValueError for anything but a whole number of at least 1 or "solution".
    """
    reads = ("ln2.hook_normalized",)
    if what == SOLUTION:
        return Step(SOLUTION, "mlp.hook_post", reads, _solution, _no_lasso)
    if not checks.is_int(what):
        raise ValueError(f"sparse={what!r}: give a number of proximal steps, or 'solution'.")
    count = checks.count("sparse", what)
    return Step(counted(count, "steps"), "mlp.hook_post", reads, partial(_steps, count), _no_lasso)


def any_step(what: Replacement) -> Step:
    """Returns the step for a name or a number of proximal steps.

    Raises ValueError for an unknown name.
    """
    if checks.is_int(what):
        return sparse_step(what)
    name = checks.one_of("replacement", what, (*ATTENTION, SOLUTION))
    return sparse_step(name) if name == SOLUTION else attention_step(name)


def visible_tokens(model: HookedModel, layer: int, pos: int) -> Tensor | None:
    """Returns which tokens each token sees in a layer, `[pos, pos]`; None if each sees all."""
    if not model.cfg.facts.get("causal", False):
        return None
    return contexts(model.cfg, pos, None, torch.device(model.cfg.device))[layer].mask


def _attention(
    name: str, block: CrateBlock, acts: Acts, visible: Tensor | None, eps: float
) -> Float[Tensor, "batch pos d_model"]:
    u = tied_subspaces(block)
    assert u is not None  # _no_u has checked this
    u = u.detach()
    if name in ("plus", "minus"):
        update = written(acts["attn.hook_z"].transpose(1, 2), u)
        update = -update if name == "minus" else update
    elif visible is None:
        form = (
            measures.subspace_coding_rate_gradient
            if name == "gradient"
            else measures.neumann_gradient
        )
        update = -form(acts["hook_resid_pre"], u, eps)
    else:
        update = -visible_gradient(
            acts["hook_resid_pre"], u, eps, visible, exact=name == "gradient"
        )
    return _at_length(update, acts["hook_attn_out"])


@in_full_precision
def visible_gradient(
    z: Float[Tensor, "batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    visible: Bool[Tensor, "pos pos"],
    exact: bool = True,
) -> Float[Tensor, "batch pos d_model"]:
    """Returns, for each token, the gradient in that token of R^c of the tokens that it sees.

    `sum_k a_i c_i (I + a_i G_i)^{-1} U_k^T` for token i, where c_i is its code in head k, G_i the
    sum of c_j^T c_j over the N_i tokens j that it sees, and a_i = p / (N_i eps^2). exact=False
    takes the first two terms of its Neumann series, `sum_k (a_i c_i - a_i^2 c_i G_i) U_k^T`.

    visible: True where a token (row) sees another (column); each token sees itself. If every token
    sees all, the result is that of `subspace_coding_rate_gradient`. That gradient mixes all tokens,
    so in a language model it would reveal later tokens. On 32 windows of the first crate-tiny-lm (6
    layers), with the gradient over all tokens in every layer, the loss seems to fall (slope -.24,
    95 % interval -.36 to -.12); with the gradient over visible tokens it does not fall measurably
    (-.09, -.24 to .04). Raises ValueError as `coding_rate` does.
    """
    check_rate(z, eps)
    wide, term = u.double(), _exact if exact else _series
    scale = (u.shape[-1] / (visible.sum(dim=-1).double() * eps**2))[:, None]  # [pos, 1]
    heads = head_codes(z.double(), wide).unbind(dim=-3)  # one head at a time, to save memory
    terms = [term(codes, _grams(codes, visible), scale) for codes in heads]
    return written(torch.stack(terms, dim=-3), wide).to(z.dtype)


def _grams(
    codes: Float[Tensor, "batch pos d_head"], visible: Bool[Tensor, "pos pos"]
) -> Float[Tensor, "batch pos d_head d_head"]:
    """Returns, for each token, the Gram matrix of the codes that it sees."""
    squares = (codes[..., :, None] * codes[..., None, :]).flatten(2)
    return (visible.to(codes) @ squares).unflatten(2, (codes.shape[-1], codes.shape[-1]))


def _exact(codes: Tensor, grams: Tensor, scale: Tensor) -> Tensor:
    eye = torch.eye(codes.shape[-1], dtype=codes.dtype, device=codes.device)
    factors = torch.linalg.cholesky(eye + scale[..., None] * grams)
    return torch.cholesky_solve((scale * codes)[..., None], factors)[..., 0]


def _series(codes: Tensor, grams: Tensor, scale: Tensor) -> Tensor:
    return scale * codes - scale**2 * (codes[..., None, :] @ grams)[..., 0, :]


def _at_length(
    update: Float[Tensor, "batch pos d_model"], own: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    """Returns an update scaled, per sample, to the length of `own`; an update of 0 stays 0."""
    length, wanted = (
        torch.linalg.vector_norm(x.double(), dim=(1, 2), keepdim=True) for x in (update, own)
    )
    scale = wanted / length.where(length > 0, 1.0)
    return (update.double() * scale).to(own.dtype)


def _steps(
    count: int, block: CrateBlock, acts: Acts, visible: Tensor | None, eps: float
) -> Float[Tensor, "batch pos d_mlp"]:
    lasso = replace(_lasso(block), count=count)
    return lasso.run(acts["ln2.hook_normalized"], lasso.lambd)


def _solution(
    block: CrateBlock, acts: Acts, visible: Tensor | None, eps: float
) -> Float[Tensor, "batch pos d_mlp"]:
    lasso = _lasso(block)
    return measures.lasso_solution(acts["ln2.hook_normalized"], lasso.d, lasso.lambd, tol=3e-4)


def _lasso(block: CrateBlock) -> Lasso:
    lasso = block.mlp.lasso()
    assert isinstance(lasso, Lasso), lasso  # _no_lasso has checked this
    return lasso


def _no_u(block: CrateBlock) -> str:
    if tied_subspaces(block) is not None:
        return ""
    return "queries, keys and values are three codes: the layer has no subspaces U"


def _no_lasso(block: CrateBlock) -> str:
    lasso = block.mlp.lasso()
    return lasso if isinstance(lasso, str) else ""
