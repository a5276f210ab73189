"""The steps that can replace a layer's own, and the context in which layers take them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from crate_hooks import full_name
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
from crate_interp.questions.batches import check_model
from crate_interp.results.sample_ranges import counted
from crate_interp.surgeries.norms import MEANS, NORMS, READS, attention_of_norms, no_pattern
from crate_interp.surgeries.result import LADDER_ONLY

DERIVED = ("gradient", "neumann", "plus", "minus")
ATTENTION = (*DERIVED, *NORMS)
SOLUTION = "solution"
Replacement = str | int  # a name, or a number of proximal steps
Acts = Mapping[str, Tensor]  # activations of one layer, by point
Hook = tuple[str, Callable[..., Any]]


@dataclass(frozen=True)
class Step:
    """A step that can replace a layer's own.

    name: its name in tables. point: the hook point of the layer's own step, which is replaced.
    reads: the points needed to compute the new step, in addition to `point`. make(block, acts,
    visible, eps) computes the new step; visible: which tokens each token sees, None if all.
    lacking(block) returns why a layer cannot take it, or "". means: what ladder_only needs of each
    layer.
    """

    name: str
    point: str
    reads: tuple[str, ...]
    make: Callable[[CrateBlock, Acts, Tensor | None, float], Tensor]
    lacking: Callable[[CrateBlock], str]
    means: Sequence[Tensor] = ()


def any_step(
    what: Replacement,
    name: str = "replacement",
    choices: Sequence[str] = (*ATTENTION, SOLUTION),
    seed: int = 0,
) -> Step:
    """Returns the step for a name or a number of proximal steps. seed: the order of permuted norms.

    Raises ValueError, with the argument's `name`, for any other name or number.
    """
    if SOLUTION in choices and (what == SOLUTION or checks.is_int(what)):
        count = None if what == SOLUTION else checks.count(name, what)
        words = SOLUTION if count is None else counted(count, "steps")
        reads, make = ("ln2.hook_normalized",), partial(_sparse, count)
        return Step(words, "mlp.hook_post", reads, make, no_lasso)
    numbers = ["a number of proximal steps"] if SOLUTION in choices else []
    chosen = checks.one_of(name, what, [*choices, *numbers])
    if chosen in NORMS:
        make = partial(attention_of_norms, chosen, seed)
        return Step(chosen, "hook_attn_out", READS, make, no_pattern)
    reads = ("hook_resid_pre", "attn.hook_z")
    return Step(chosen, "hook_attn_out", reads, partial(_attention, chosen), no_subspaces)


def take_step(model: HookedModel, step: Step, layer: int, acts: Acts, eps: float) -> Tensor:
    """Returns a layer's new step from its activations at the step's point and what it reads."""
    block: Any = model.blocks[layer]
    own, visible = acts[step.point], None  # each token sees all
    acts = {**acts, MEANS: step.means[layer]} if step.means else acts
    if model.cfg.causal:
        device = torch.device(model.cfg.device)
        visible = contexts(model.cfg, own.shape[1], None, device)[layer].mask
    with torch.no_grad():
        return step.make(block, acts, visible, eps).to(own)


@contextmanager
def replaced(
    model: HookedModel,
    *,
    attention: str | None = None,
    sparse: str | int | None = None,
    layers: Sequence[int] | None = None,
    mix: float = 1.0,
    eps: float = 0.1,
) -> Iterator[HookedModel]:
    """Puts another step in place of attention, of the sparse step, or of both, in some layers.

        with ci.surgeries.replaced(model, attention="gradient", layers=[3], mix=0.1):
            logits = model(images)

    While the context is open, the output of attention (hook_attn_out) becomes `(1 - mix) own + mix
    step`, and so does the code of the sparse step (mlp.hook_post).

    A step from the stored U is scaled, sample by sample, to the Frobenius length of the layer's own
    update. In a language model each token takes the gradient of the rate of the tokens that it
    sees, since the gradient over all tokens would reveal later tokens; tokens in a `past` are not
    counted. The steps are constants: gradients flow only through `(1 - mix) own`. The hooks are
    gone when the context closes, also after an exception.

    Args:
        model: A hooked model.
        attention: A step computed from the stored U and the layer's input Z^l. "gradient" is `-grad
            R^c(Z^l)`, the step from which arXiv 2306.01129 derives attention; "neumann" is the
            first two terms of its Neumann series (eq. 9). "plus" and "minus" are MSSA with the
            output map U_k^T (CRATE-C) or -U_k^T (CRATE-N, arXiv 2411.17182) on the layer's own
            attn.hook_z. "flat_norms", "permuted_norms" and "masked_diagonal" are the layer's own
            attention, also of two codes, in which queries and keys have other norms, or tokens do
            not see themselves (surgeries/norms.py).
        sparse: A number n takes n proximal steps on the layer's own lasso, with the layer's eta,
            lambd and start; "solution" takes a solution of this lasso (`measures.lasso_solution` to
            a tolerance of 3e-4).
        layers: Numbers of layers. Default: all.
        mix: The share of the step, in [0, 1].
        eps: The precision of the rate R^c, above 0.

    Yields:
        The model.

    Raises:
        ValueError: If no step is given, for an unknown step, for layers that the model does not
            have, for a mix outside [0, 1], and if a layer has no U or no lasso; the error says why.
    """
    check_model(model)
    if attention == LADDER_ONLY:
        raise ValueError(f"{LADDER_ONLY!r} needs the mean norms of data: use ci.surgery.")
    steps = [] if attention is None else [any_step(attention, "attention", ATTENTION)]
    steps += [] if sparse is None else [any_step(sparse, "sparse", [SOLUTION])]
    if not steps:
        raise ValueError("there is nothing to replace: give attention= or sparse=.")
    chosen = checks.numbers("layers", layers, len(model.blocks))
    check_steps(model, steps, chosen)
    share, eps = check_mix(mix), checks.positive("eps", eps)
    with model.hooks(replacement_hooks(model, steps, chosen, share, eps)):
        yield model


def replacement_hooks(
    model: HookedModel, steps: Sequence[Step], layers: Sequence[int], mix: float, eps: float
) -> list[Hook]:
    """Returns the hooks that compute steps in layers and mix them with the layers' own steps."""

    def keep(tensor: Tensor, hook: Any, point: str, acts: dict[str, Tensor]) -> None:
        acts[point] = tensor.detach()

    def put(tensor: Tensor, hook: Any, step: Step, layer: int, acts: dict[str, Tensor]) -> Tensor:
        new = take_step(model, step, layer, acts | {step.point: tensor.detach()}, eps)
        acts.clear()
        return torch.lerp(tensor, new, mix)

    hooks: list[Hook] = []
    for layer in layers:
        for step in steps:
            acts: dict[str, Tensor] = {}
            for point in step.reads:
                hooks.append((full_name(point, layer), partial(keep, point=point, acts=acts)))
            change = partial(put, step=step, layer=layer, acts=acts)
            hooks.append((full_name(step.point, layer), change))
    return hooks


def check_mix(mix: float) -> float:
    """Returns a mix as a float; raises ValueError unless it lies in [0, 1]."""
    if not checks.is_number(mix) or not 0 <= mix <= 1:
        raise ValueError(f"mix={mix!r}: give a number from 0 (own step) to 1 (the other step).")
    return float(mix)


def check_steps(model: HookedModel, steps: Sequence[Step], layers: Sequence[int]) -> None:
    """Raises ValueError, with the reason, if a layer cannot take a step."""
    blocks: list[Any] = list(model.blocks)
    for step, layer in product(steps, layers):
        if reason := step.lacking(blocks[layer]):
            raise ValueError(f"layer {layer} cannot take {step.name!r}: {reason}.")


def _attention(
    name: str, block: CrateBlock, acts: Acts, visible: Tensor | None, eps: float
) -> Float[Tensor, "batch pos d_model"]:
    u = tied_subspaces(block)
    assert u is not None  # no_subspaces has checked this
    u, z, own = u.detach(), acts["hook_resid_pre"], acts["hook_attn_out"]
    if name in ("plus", "minus"):
        update = written(acts["attn.hook_z"].transpose(1, 2), u)
        update = -update if name == "minus" else update
    elif visible is not None:
        update = -visible_gradient(z, u, eps, visible, exact=name == "gradient")
    elif name == "gradient":
        update = -measures.subspace_coding_rate_gradient(z, u, eps)
    else:
        update = -measures.neumann_gradient(z, u, eps)
    # per sample to the length of the layer's own update; an update of 0 stays 0
    norm = partial(torch.linalg.vector_norm, dim=(1, 2), keepdim=True)
    length, right = norm(update.double()), norm(own.double())
    return (update.double() * (right / length.where(length > 0, 1.0))).to(own.dtype)


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
    wide, width = u.double(), u.shape[-1]
    scale = (width / (visible.sum(dim=-1).double() * eps**2))[:, None]  # [pos, 1]
    eye, terms = torch.eye(width, dtype=torch.float64, device=z.device), []
    for codes in head_codes(z.double(), wide).unbind(dim=-3):  # one at a time, to save memory
        squares = (codes[..., :, None] * codes[..., None, :]).flatten(2)
        grams = (visible.to(codes) @ squares).unflatten(2, (width, width))
        if exact:
            factors = torch.linalg.cholesky(eye + scale[..., None] * grams)
            terms.append(torch.cholesky_solve((scale * codes)[..., None], factors)[..., 0])
        else:
            terms.append(scale * codes - scale**2 * (codes[..., None, :] @ grams)[..., 0, :])
    return written(torch.stack(terms, dim=-3), wide).to(z.dtype)


def _sparse(
    count: int | None, block: CrateBlock, acts: Acts, visible: Tensor | None, eps: float
) -> Float[Tensor, "batch pos d_mlp"]:
    """Returns the code after a number of proximal steps, or a solution of the lasso for None."""
    lasso, x = block.mlp.lasso(), acts["ln2.hook_normalized"]
    assert isinstance(lasso, Lasso), lasso  # no_lasso has checked this
    if count is None:
        return measures.lasso_solution(x, lasso.d, lasso.lambd, tol=3e-4)
    return replace(lasso, count=count).run(x, lasso.lambd)[0]


def no_subspaces(block: CrateBlock) -> str:
    """Returns why a block has no subspaces U, or ""."""
    if tied_subspaces(block) is not None:
        return ""
    return "queries, keys and values are three codes: the layer has no subspaces U"


def no_lasso(block: CrateBlock) -> str:
    """Returns why a block's sparse step has no lasso, or ""."""
    lasso = block.mlp.lasso()
    return lasso if isinstance(lasso, str) else ""
