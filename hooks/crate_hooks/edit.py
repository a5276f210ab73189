"""Edits of activations: functions that return a `(tensor, hook) -> tensor` for a hook point.

    with model.hooks([("blocks.3.attn.hook_z", edit.zero(heads=2))]):
        logits = model(images)

An edit returns a new tensor, never writes into its input, and lets gradients through. `heads`,
`atoms` and `positions` limit it to a part of the tensor; each is a number, several numbers, or None
for all. heads: numbers along the head axis of codes, patterns and results. atoms: numbers along the
last axis of codes such as mlp.hook_post. positions: numbers of tokens, CLS and prompts included; at
a pattern or at scores these tokens are queries. `patch_positions` returns the positions of an
image's patches.

When its hook is called, an edit raises ValueError, with the name of the point, if the tensor there
lacks the axis, or if the axis is too short for one of the numbers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_hooks.reading import HEADS_FIRST, position_axis
from crate_hooks.threads import owner_of

__all__ = [
    "clamp", "compose", "mean", "noise", "patch", "patch_positions", "project_onto", "project_out",
    "resample", "scale", "sparse_step", "steer", "threshold", "zero",
]  # fmt: skip

Edit = Callable[[Tensor, Any], Tensor]
Chosen = int | Collection[int] | Tensor | None  # which heads, atoms or positions; None for all
Subspace = Float[Tensor, "*head d_model width"]


class Where(TypedDict, total=False):
    """The part of a tensor that an edit changes; all of it if none is named."""

    heads: Chosen
    atoms: Chosen
    positions: Chosen


def zero(**where: Unpack[Where]) -> Edit:
    """Returns an edit that sets heads, atoms or positions to 0.

    At attn.hook_z this removes a head, as zeroing its rows of W_O does. At mlp.hook_post it removes
    an atom.

    Args:
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If a selection is not of whole numbers.
    """
    return _edited(lambda tensor, hook: torch.zeros_like(tensor), **where)


def mean(source: Tensor, **where: Unpack[Where]) -> Edit:
    """Returns an edit that replaces a part by its mean over the samples of another run.

    This removes the differences between samples from the part.

    Args:
        source: The activations at the same point in that run, batch first; each position has a
            separate mean.
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If the source is not a tensor with the batch first, or if a selection is not of
            whole numbers.
    """
    _require_source(source)
    average = source.detach().mean(dim=0, keepdim=True)
    return _edited(lambda tensor, hook: _like(average, tensor, hook), **where)


def resample(source: Tensor, *, seed: int = 0, **where: Unpack[Where]) -> Edit:
    """Returns an edit that replaces a part by the activations of another sample.

    One sample of the source is drawn for each sample of a batch; the same seed gives the same draw.
    If source and batch have equally many samples, sample i of the batch never gets sample i of the
    source. So you can shuffle a run's own cache.

    Args:
        source: The activations at the same point for samples that represent the data, batch first.
        seed: The same seed gives the same draw.
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If the source has fewer than two samples, or if the seed or a selection is not
            of whole numbers.
    """
    _require_source(source)
    if len(source) < 2:
        raise ValueError("source has one sample, so no other can be drawn: give several samples.")
    _require_seed(seed)

    def value(tensor: Tensor, hook: Any) -> Tensor:
        count, batch = len(source), len(tensor)
        generator = torch.Generator().manual_seed(int(seed))
        if count == batch and batch > 1:
            # samples are put in a random circle, and each gets the next sample
            order = torch.randperm(batch, generator=generator)
            drawn = torch.empty_like(order)
            drawn[order] = order.roll(1)
        else:
            drawn = torch.randint(count, (batch,), generator=generator)
        return _like(source[drawn.to(source.device)], tensor, hook)

    return _edited(value, **where)


def patch(source: Tensor, **where: Unpack[Where]) -> Edit:
    """Returns an edit that replaces a part by the activations of another run.

    Args:
        source: The activations at the same point in that run: one sample for each sample of the
            batch, or one sample for all.
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If the source is not a tensor with the batch first, or if a selection is not of
            whole numbers.
    """
    _require_source(source)
    return _edited(lambda tensor, hook: _like(source, tensor, hook), **where)


def scale(factor: float, **where: Unpack[Where]) -> Edit:
    """Returns an edit that multiplies a part by a number.

    Args:
        factor: The number.
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If the factor is not finite, or if a selection is not of whole numbers.
    """
    _require_number("factor", factor)
    return _edited(lambda tensor, hook: tensor * factor, **where)


def clamp(low: float | None = None, high: float | None = None, **where: Unpack[Where]) -> Edit:
    """Returns an edit that replaces values below `low` by `low`, and above `high` by `high`.

    low = high sets a value.

    Args:
        low: The least value, or None.
        high: The largest value, or None.
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If neither bound is given, if a bound is not finite, if low is above high, or if
            a selection is not of whole numbers.
    """
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            _require_number(name, bound)
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        raise ValueError(f"low={low!r}, high={high!r}: give one or both, with low <= high.")
    return _edited(lambda tensor, hook: tensor.clamp(low, high), **where)


def threshold(by: float, *, atoms: Chosen = None, positions: Chosen = None) -> Edit:
    """Returns an edit that thresholds a code again, `ReLU(code - by)`.

    At mlp.hook_post this has the effect of a larger eta lambd in the last step.

    Args:
        by: At least 0, in the unit of the code. Before the ReLU (mlp.hook_pre) use `sparse_step`
            instead, which changes all steps.
        atoms: The numbers of the atoms, None for all.
        positions: The tokens, None for all.

    Raises:
        ValueError: If `by` is negative or not finite, or if a selection is not of whole numbers.
    """
    _require_number("by", by)
    if by < 0:
        raise ValueError(f"by={by}: a threshold must not be negative, give a number of at least 0.")
    return _edited(lambda tensor, hook: (tensor - by).relu(), atoms=atoms, positions=positions)


def noise(std: float, *, seed: int = 0, **where: Unpack[Where]) -> Edit:
    """Returns an edit that adds Gaussian noise of standard deviation `std` to a part.

    Args:
        std: The standard deviation.
        seed: The same seed and shape give the same noise on every device.
        where: `heads`, `atoms`, `positions`: numbers of the part to change, None for all.

    Raises:
        ValueError: If std is not finite, or if the seed or a selection is not of whole numbers.
    """
    _require_number("std", std)
    _require_seed(seed)

    def value(tensor: Tensor, hook: Any) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        return tensor + std * drawn.to(tensor)

    return _edited(value, **where)


def steer(
    direction: Float[Tensor, " d_model"],
    strength: float,
    *,
    unit: bool = True,
    positions: Chosen = None,
) -> Edit:
    """Returns an edit that adds `strength` times a direction of the stream.

    The edit fits points whose last axis is d_model.

    Args:
        direction: `[d_model]`, such as an atom `mlp.D[:, j]` or a column of `attn.U[k]`.
        strength: How far to go along the direction.
        unit: Whether the direction is scaled to length 1 first, so that strength is in the unit of
            the stream.
        positions: The tokens, None for all.

    Raises:
        ValueError: If the direction is not a finite vector or, with `unit`, is zero, if strength is
            not finite, or if the positions are not whole numbers.
    """
    _require_number("strength", strength)
    right = isinstance(direction, Tensor) and direction.ndim == 1 and direction.is_floating_point()
    if not right or not direction.isfinite().all():
        raise ValueError(
            f"direction is {_described(direction)}: give finite floats [d_model], such as "
            "model.blocks[0].mlp.D[:, 0]."
        )
    length = torch.linalg.vector_norm(direction.detach())
    if unit and not length > 0:
        raise ValueError("direction is zero: give a nonzero direction.")
    step = direction / length * strength if unit else direction * strength

    def value(tensor: Tensor, hook: Any) -> Tensor:
        _require_width(tensor, hook, len(step), "direction")
        return tensor + step.to(tensor)

    return _edited(value, positions=positions)


def project_out(subspace: Subspace, *, orthonormal: bool = True, positions: Chosen = None) -> Edit:
    """Returns an edit that removes a subspace from each token, `x - Q Q^T x`.

    Q is an orthonormal basis of the span of `subspace`: `[d_model, width]` such as `attn.U[k]`, or
    `[head, d_model, width]` for the span of several heads.

    At ln1.hook_normalized the codes of head k are then 0. If U is orthonormal over all heads
    together, the codes of the other heads do not change; trained subspaces overlap, so other heads
    lose what they share with head k. In the stream (hook_resid_pre) neither statement holds:
    LayerNorm subtracts a mean and scales, which mixes the span with the rest, and the skip path
    loses the span too. Compare with a random subspace.

    Args:
        subspace: `[d_model, width]` such as `attn.U[k]`, or `[head, d_model, width]` for the span
            of several heads.
        orthonormal: False takes U as stored, `x - U U^T x`, which is a projection only if U has
            orthonormal columns.
        positions: The tokens, None for all.

    Raises:
        ValueError: If the subspace is not a finite tensor of these shapes or spans nothing, or if
            the positions are not whole numbers.
    """
    onto = _projection(subspace, orthonormal)
    return _edited(lambda tensor, hook: tensor - onto(tensor, hook), positions=positions)


def project_onto(subspace: Subspace, *, orthonormal: bool = True, positions: Chosen = None) -> Edit:
    """Returns an edit that keeps only a subspace of each token, `Q Q^T x`.

    Args:
        subspace: As in `project_out`.
        orthonormal: As in `project_out`.
        positions: The tokens, None for all.

    Raises:
        ValueError: In the same cases as `project_out`.
    """
    return _edited(_projection(subspace, orthonormal), positions=positions)


def compose(*edits: Edit) -> Edit:
    """Returns an edit that applies several edits at one point, in their order.

    Raises ValueError if there are none, or if one is not callable.
    """
    others = [edit for edit in edits if not callable(edit)]
    if others or not edits:
        got = repr(others[0]) if others else "none"
        raise ValueError(f"compose takes functions (tensor, hook) -> tensor, got {got}.")

    def run(tensor: Tensor, hook: Any = None) -> Tensor:
        for edit in edits:
            tensor = edit(tensor, hook)
        return tensor

    return run


@contextmanager
def sparse_step(
    block: nn.Module, *, lambd: float | None = None, eta: float | None = None
) -> Iterator[nn.Module]:
    """Sets another lambd or eta in one layer while its context is open, and yields the layer.

        with edit.sparse_step(model.blocks[3], lambd=0.5):
            logits = model(images)  # model.blocks[3].mlp.lambd is 0.5
        logits = model(images)  # and here what it was before

    Args:
        block: A layer of the model, whose sparse step is `block.mlp`. An MLP has neither lambd nor
            eta; nanochat-crate has a learned threshold for each atom instead, to which
            `edit.threshold` adds.
        lambd: The sparsity penalty, at least 0. Default: as it is.
        eta: The step size, at least 0. Default: as it is.

    Yields:
        The layer.

    Raises:
        ValueError: If neither lambd nor eta is given, if a value is negative or not finite, or if
            the layer lacks the lambd or eta that is given.
        RuntimeError: If another thread has such a context open on the layer. While this context is
            open, other threads that run the layer get this error.
    """
    step: Any = getattr(block, "mlp", None)
    wanted = {name: value for name, value in (("lambd", lambd), ("eta", eta)) if value is not None}
    if not wanted:
        raise ValueError("sparse_step changes nothing: give lambd=NUMBER, eta=NUMBER, or both.")
    for name, value in wanted.items():
        _require_number(name, value)
        if value < 0:
            raise ValueError(f"{name}={value}: give a number of at least 0.")
        if not isinstance(getattr(step, name, None), Real):
            raise ValueError(
                f"the sparse step of this layer, {type(step).__name__}, has no {name}: put "
                "edit.threshold on mlp.hook_post instead."
            )
    owner = owner_of(step)
    with owner.context():
        before = {name: getattr(step, name) for name in wanted}
        outer = getattr(step, "edited", {})
        guard = step.register_forward_pre_hook(owner.check)
        try:
            for name, value in wanted.items():
                setattr(step, name, float(value))
            step.edited = outer | wanted  # results record the edit
            yield block
        finally:
            guard.remove()
            step.edited = outer
            for name, value in before.items():
                setattr(step, name, value)


def patch_positions(patches: Iterable[tuple[int, int]], grid: tuple[int, int]) -> list[int]:
    """Returns the token positions of an image's patches; CLS is token 0.

    patches: pairs (row, column). grid: the numbers of rows and columns, `cfg.grid`. Raises
    ValueError if a patch lies outside the grid.
    """
    positions = []
    for row, column in patches:
        integers = isinstance(row, Integral) and isinstance(column, Integral)
        if not integers or not (0 <= int(row) < grid[0] and 0 <= int(column) < grid[1]):
            raise ValueError(
                f"patch ({row}, {column}) is not in the grid: give rows from 0 to {grid[0] - 1} "
                f"and columns from 0 to {grid[1] - 1}."
            )
        positions.append(1 + int(row) * grid[1] + int(column))
    return positions


def _like(source: Tensor, tensor: Tensor, hook: Any) -> Tensor:
    """Returns a copy of another run's tensor in this tensor's shape, dtype and device."""
    same = source.ndim == tensor.ndim and source.shape[1:] == tensor.shape[1:]
    if not same or len(source) not in (1, len(tensor)):
        raise ValueError(
            f"the source is {list(source.shape)}, but {_at(hook)} is {list(tensor.shape)}: give "
            "activations of this point in a run of the same shape, or of one sample."
        )
    return source.to(tensor).expand_as(tensor).clone()  # a hook after this one may write into it


def _projection(subspace: Subspace, orthonormal: bool) -> Edit:
    """Returns the edit that projects onto a subspace, `Q Q^T x`."""
    basis = _basis(subspace, orthonormal)

    def projected(tensor: Tensor, hook: Any) -> Tensor:
        _require_width(tensor, hook, len(basis), "subspace")
        q = basis.to(tensor)
        return (tensor @ q) @ q.T

    return projected


def _basis(subspace: Subspace, orthonormal: bool) -> Float[Tensor, "d_model rank"]:
    """Returns an orthonormal basis of the subspace or, if not `orthonormal`, the stored columns."""
    right = isinstance(subspace, Tensor) and subspace.ndim in (2, 3) and 0 not in subspace.shape
    if not right or not subspace.isfinite().all() or not subspace.is_floating_point():
        raise ValueError(
            f"subspace is {_described(subspace)}: give finite floats [d_model, width], such as "
            "model.blocks[0].attn.U[2], or [head, d_model, width]."
        )
    columns = subspace.detach()
    if columns.ndim == 3:
        columns = columns.transpose(0, 1).flatten(1)  # [d_model, head * width]
    if not orthonormal:
        return columns
    left, values, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    # smaller singular values come from rounding of linearly dependent columns
    rank = int((values > values[0] * 4 * torch.finfo(columns.dtype).eps).sum())
    if not rank:
        raise ValueError("subspace is zero: give a nonzero subspace.")
    return left[:, :rank].to(columns.dtype)


def _edited(value: Edit, **where: Any) -> Edit:
    """Returns an edit that writes `value(tensor, hook)` into the chosen part only."""
    for name in where.keys() - Where.__annotations__.keys():
        raise TypeError(f"{name}={where[name]!r}: an edit takes heads=, atoms= or positions=.")
    wanted = {name: _numbers(name, which) for name, which in where.items() if which is not None}

    def run(tensor: Tensor, hook: Any = None) -> Tensor:
        new = value(tensor, hook)
        if not wanted:
            return new
        mask = torch.ones((), dtype=torch.bool, device=tensor.device)
        for name, numbers in wanted.items():
            axis = _axis(name, tensor, hook)
            count = tensor.shape[axis]
            wrong = [number for number in numbers if not -count <= number < count]
            if wrong:
                raise ValueError(f"{name}={wrong[0]}: {_at(hook)} has {name} 0 to {count - 1}.")
            on = torch.zeros(count, dtype=torch.bool, device=tensor.device)
            on[list(numbers)] = True
            mask = mask & on.view(-1, *[1] * (tensor.ndim - 1 - axis))
        return torch.where(mask, new, tensor)

    return run


def _axis(name: str, tensor: Tensor, hook: Any) -> int:
    """Returns which axis of the tensor at a point holds the heads, atoms or positions."""
    point = str(getattr(hook, "name", ""))
    first, place = point.endswith(HEADS_FIRST), position_axis(point)
    if name == "heads" and (first or tensor.ndim == 4):
        return 1 if first else 2
    if name == "atoms" and tensor.ndim == 3 and not first:
        return 2
    if name == "positions" and tensor.ndim in (3, 4) and place is not None:
        return place
    axes = {"heads": "head, ...", "atoms": "atom", "positions": "..."}[name]
    said = f"{_at(hook)} is {list(tensor.shape)} and has no {name}"
    raise ValueError(f"{said}: give a point with axes [batch, pos, {axes}].")


def _numbers(name: str, which: Chosen) -> list[int]:
    """Returns a number or several numbers as a list."""
    values: Any = getattr(which, "tolist", lambda: which)()  # for a tensor or an array
    values = [values] if isinstance(values, Integral) else values
    integers = isinstance(values, (list, tuple, range, set)) and all(
        isinstance(value, Integral) and not isinstance(value, bool) for value in values
    )
    if not integers or not values:
        raise ValueError(f"{name}={which!r}: give a whole number, a list of them, or None for all.")
    return [int(value) for value in values]


def _require_width(tensor: Tensor, hook: object, width: int, what: str) -> None:
    """Raises ValueError unless the last axis of a tensor at a point is `width` long.

    what: the name of the argument of this width, for the error.
    """
    if tensor.shape[-1] != width:
        raise ValueError(
            f"{_at(hook)} is {list(tensor.shape)}, but the {what} has {width} dimensions: put the "
            "edit on a point whose last axis is d_model."
        )


def _require_source(source: Tensor) -> None:
    """Raises ValueError unless the source of an edit is a tensor with at least one sample."""
    if not isinstance(source, Tensor) or source.ndim < 2 or not len(source):
        raise ValueError(
            f"source is {_described(source)}: give the activations at the point in another run, "
            "such as cache[...], with the batch first."
        )


def _require_number(name: str, value: float) -> None:
    """Raises ValueError, with the argument's `name`, unless `value` is a finite number."""
    if not isinstance(value, Real) or isinstance(value, bool) or not -1e38 < float(value) < 1e38:
        raise ValueError(f"{name}={value!r}: give a finite number.")


def _require_seed(seed: int) -> None:
    """Raises ValueError unless the seed is an integer."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: give a whole number.")


def _at(hook: object) -> str:
    """Returns the name of a point for an error."""
    name = getattr(hook, "name", None)
    return f"the tensor at {name!r}" if name else "the tensor"


def _described(value: object) -> str:
    """Returns a description of a wrong argument for an error: its shape, or its type."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
