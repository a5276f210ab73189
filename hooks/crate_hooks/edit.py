"""Edits of activations: each function here returns a plain `(tensor, hook) -> tensor`, to hang on a hook point.

    with model.hooks([("blocks.3.attn.hook_z", edit.zero(heads=2))]):
        logits = model(images)

An edit returns a new tensor, never writes into the one it got, and lets gradients through. heads: the head axis of codes,
patterns and results. atoms: the last axis of codes such as mlp.hook_post. positions: tokens, CLS and prompts included (of a
pattern or of scores, the queries); `patch_positions` numbers the patches of an image. None means all of them. What a point
lacks is a ValueError that names the point, when the hook is called.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

Edit = Callable[[Tensor, Any], Tensor]
_QUERIES = ("hook_pattern", "hook_attn_scores")  # [batch, head, query, key]


def zero(*, heads: Any = None, atoms: Any = None, positions: Any = None) -> Edit:
    """Puts 0 in place of some heads, atoms or positions.

    At attn.hook_z it is a head taken away: the same as zeroing its rows of W_O. At mlp.hook_post it is an atom taken away.
    """
    return _edited(lambda tensor, hook: torch.zeros_like(tensor), heads, atoms, positions)


def mean(source: Any, *, heads: Any = None, atoms: Any = None, positions: Any = None) -> Edit:
    """Puts the mean over the samples of another run in their place: what is left says nothing of the sample at hand.

    source: what the same point held, with the batch first; positions keep a mean each.
    """
    _require_source(source)
    average = source.detach().mean(dim=0, keepdim=True)
    return _edited(lambda tensor, hook: _like(average, tensor, hook), heads, atoms, positions)


def resample(
    source: Any, *, seed: Any = 0, heads: Any = None, atoms: Any = None, positions: Any = None
) -> Edit:
    """Puts what the same point held for another sample in their place, one drawn for each sample of a batch.

    source: of samples that stand for the data, with the batch first. The same seed draws the same samples. Where source has as
    many samples as the batch no sample gets its own: give the run's own cache to shuffle it.
    """
    _require_source(source)
    if len(source) < 2:
        raise ValueError(
            "source has one sample: there is no other to draw. Give the cache of several."
        )
    if not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: give a whole number.")

    def value(tensor: Tensor, hook: Any) -> Tensor:
        count, batch = len(source), len(tensor)
        generator = torch.Generator().manual_seed(int(seed))
        if count == batch and batch > 1:  # round a random circle
            order = torch.randperm(batch, generator=generator)
            drawn = torch.empty_like(order)
            drawn[order] = order.roll(1)
        else:
            drawn = torch.randint(count, (batch,), generator=generator)
        return _like(source[drawn.to(source.device)], tensor, hook)

    return _edited(value, heads, atoms, positions)


def patch(source: Any, *, heads: Any = None, atoms: Any = None, positions: Any = None) -> Edit:
    """Puts what the same point held in another run in their place: sample by sample, or of one sample for all."""
    _require_source(source)
    return _edited(lambda tensor, hook: _like(source, tensor, hook), heads, atoms, positions)


def scale(factor: Any, *, heads: Any = None, atoms: Any = None, positions: Any = None) -> Edit:
    """Multiplies by a number."""
    _require_number("factor", factor)
    return _edited(lambda tensor, hook: tensor * factor, heads, atoms, positions)


def clamp(
    low: Any = None,
    high: Any = None,
    *,
    heads: Any = None,
    atoms: Any = None,
    positions: Any = None,
) -> Edit:
    """Moves what is below `low` up to it and what is above `high` down to it; both the same sets a value."""
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            _require_number(name, bound)
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        raise ValueError(
            f"low={low!r}, high={high!r}: give one of them at least, low not above high."
        )
    return _edited(lambda tensor, hook: tensor.clamp(low, high), heads, atoms, positions)


def threshold(by: Any, *, atoms: Any = None, positions: Any = None) -> Edit:
    """Re-thresholds a code: `ReLU(code - by)`, at mlp.hook_post what a larger eta lambd does in the last step.

    by: in the unit of the code, at least 0. Before the ReLU (mlp.hook_pre) use `sparse_step` instead, which changes all steps.
    """
    _require_number("by", by)
    if by < 0:
        raise ValueError(
            f"by={by}: what a threshold cut off cannot be had back; give a number of at least 0."
        )
    return _edited(lambda tensor, hook: (tensor - by).relu(), None, atoms, positions)


def noise(
    std: Any, *, seed: Any = 0, heads: Any = None, atoms: Any = None, positions: Any = None
) -> Edit:
    """Adds Gaussian noise; the same seed and shape have the same noise, on every device."""
    _require_number("std", std)
    if not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: give a whole number.")

    def value(tensor: Tensor, hook: Any) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(int(seed)))
        return tensor + std * drawn.to(tensor)

    return _edited(value, heads, atoms, positions)


def steer(direction: Any, strength: Any, *, unit: bool = True, positions: Any = None) -> Edit:
    """Adds `strength` times a direction of the stream `[d_model]`, such as an atom `mlp.D[:, j]` or a column of `attn.U[k]`.

    unit: of length 1 before, so that strength is in the unit of the stream. At points whose last axis is d_model.
    """
    _require_number("strength", strength)
    right = isinstance(direction, Tensor) and direction.ndim == 1 and direction.is_floating_point()
    if not right or not _finite(direction):
        raise ValueError(
            f"direction is {_told(direction)}: give finite numbers [d_model], such as model.blocks[0].mlp.D[:, 0]."
        )
    length = torch.linalg.vector_norm(direction.detach())
    if unit and not length > 0:
        raise ValueError("direction is zero: it points nowhere.")
    step = direction / length * strength if unit else direction * strength

    def value(tensor: Tensor, hook: Any) -> Tensor:
        _require_width(tensor, hook, len(step), "direction")
        return tensor + step.to(tensor)

    return _edited(value, None, None, positions)


def project_out(subspace: Any, *, orthonormal: bool = True, positions: Any = None) -> Edit:
    """Takes a subspace out of each token: `x - Q Q^T x`, Q an orthonormal basis of the span.

    subspace `[d_model, width]` such as `attn.U[k]`, or `[head, d_model, width]` for the span of several. orthonormal=False takes
    it as it is, `x - U U^T x`, which is a projection only where U has orthonormal columns. At ln1.hook_normalized the codes of
    head k are then 0, and for orthonormal U of all heads together the other heads' codes are as before; trained subspaces
    overlap, and other heads lose what they share with this one. In the stream (hook_resid_pre) neither holds: LayerNorm subtracts a
    mean and scales, and so mixes the span with the rest, and the skip path loses it too. Compare with a random subspace.
    """
    basis = _basis(subspace, orthonormal)

    def value(tensor: Tensor, hook: Any) -> Tensor:
        _require_width(tensor, hook, len(basis), "subspace")
        q = basis.to(tensor)
        return tensor - (tensor @ q) @ q.T

    return _edited(value, None, None, positions)


def project_onto(subspace: Any, *, orthonormal: bool = True, positions: Any = None) -> Edit:
    """Keeps of each token what lies in a subspace alone: `Q Q^T x`; arguments as in `project_out`."""
    basis = _basis(subspace, orthonormal)

    def value(tensor: Tensor, hook: Any) -> Tensor:
        _require_width(tensor, hook, len(basis), "subspace")
        q = basis.to(tensor)
        return (tensor @ q) @ q.T

    return _edited(value, None, None, positions)


def compose(*edits: Any) -> Edit:
    """One edit after the other at the same point, the first one first."""
    strange = [edit for edit in edits if not callable(edit)]
    if strange or not edits:
        raise ValueError(
            f"compose takes functions (tensor, hook) -> tensor, got {strange[0] if strange else 'none'!r}."
        )

    def run(tensor: Tensor, hook: Any = None) -> Tensor:
        for edit in edits:
            tensor = edit(tensor, hook)
        return tensor

    return run


@contextmanager
def sparse_step(block: nn.Module, *, lambd: Any = None, eta: Any = None) -> Iterator[nn.Module]:
    """Another lambd or eta for one layer, while the context is open: `with edit.sparse_step(model.blocks[3], lambd=0.5): ...`.

    Raises ValueError for a layer without them: an MLP has none, and nanochat-crate learned a threshold for each atom, to which
    `edit.threshold` adds.
    """
    step: Any = getattr(block, "mlp", None)
    wanted = {name: value for name, value in (("lambd", lambd), ("eta", eta)) if value is not None}
    if not wanted:
        raise ValueError("give lambd=... or eta=..., a number.")
    for name, value in wanted.items():
        _require_number(name, value)
        if value < 0:
            raise ValueError(f"{name}={value}: give a number of at least 0.")
        if not isinstance(getattr(step, name, None), Real):
            raise ValueError(
                f"the sparse step of this layer, {type(step).__name__}, has no {name}: hang edit.threshold on mlp.hook_post."
            )
    before = {name: getattr(step, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(step, name, float(value))
        yield block
    finally:
        for name, value in before.items():
            setattr(step, name, value)


def patch_positions(patches: Iterable[Any], grid: Any) -> list[int]:
    """The positions of patches (row, column) among the tokens of an image, CLS being token 0; grid: rows and columns, `cfg.grid`."""
    found = []
    for row, column in patches:
        whole = isinstance(row, Integral) and isinstance(column, Integral)
        if not whole or not (0 <= int(row) < grid[0] and 0 <= int(column) < grid[1]):
            raise ValueError(
                f"patch ({row}, {column}): the grid has rows 0 to {grid[0] - 1} and columns 0 to {grid[1] - 1}."
            )
        found.append(1 + int(row) * grid[1] + int(column))
    return found


def _edited(value: Callable[[Tensor, Any], Tensor], heads: Any, atoms: Any, positions: Any) -> Edit:
    """`value(tensor, hook)` where heads, atoms and positions say, the tensor itself elsewhere."""
    chosen = {"heads": heads, "atoms": atoms, "positions": positions}
    wanted = {name: _numbers(name, which) for name, which in chosen.items() if which is not None}

    def run(tensor: Tensor, hook: Any = None) -> Tensor:
        new = value(tensor, hook)
        if not wanted:
            return new
        mask = torch.ones((), dtype=torch.bool, device=tensor.device)
        for name, numbers in wanted.items():
            axis = _axis(name, tensor, hook)
            on = torch.zeros(tensor.shape[axis], dtype=torch.bool, device=tensor.device)
            on[_inside(name, numbers, tensor.shape[axis], hook)] = True
            mask = mask & on.view(-1, *[1] * (tensor.ndim - 1 - axis))
        return torch.where(mask, new, tensor)

    return run


def _axis(name: str, tensor: Tensor, hook: Any) -> int:
    """Which axis of the tensor at a point holds heads, atoms or positions."""
    queries = str(getattr(hook, "name", "")).endswith(_QUERIES)
    if name == "heads" and tensor.ndim == 4:
        return 1 if queries else 2
    if name == "atoms" and tensor.ndim == 3:
        return 2
    if name == "positions" and tensor.ndim in (3, 4):
        return 2 if queries else 1
    wanted = {
        "heads": "[batch, pos, head, ...]",
        "atoms": "[batch, pos, atom]",
        "positions": "[batch, pos, ...]",
    }[name]
    raise ValueError(
        f"{_at(hook)} is {list(tensor.shape)} and has no {name}: hang the edit on a point {wanted}."
    )


def _numbers(name: str, which: Any) -> list[int]:
    """A number or numbers as a list."""
    values = which.tolist() if hasattr(which, "tolist") else which
    values = [values] if isinstance(values, Integral) else values
    right = isinstance(values, (list, tuple, range, set)) and all(
        isinstance(value, Integral) and not isinstance(value, bool) for value in values
    )
    if not right or not values:
        raise ValueError(f"{name}={which!r}: give a whole number or a list of them, None for all.")
    return [int(value) for value in values]


def _inside(name: str, numbers: Sequence[int], count: int, hook: Any) -> list[int]:
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong:
        raise ValueError(f"{name}={wrong[0]}: {_at(hook)} has {name} 0 to {count - 1}.")
    return list(numbers)


def _like(source: Tensor, tensor: Tensor, hook: Any) -> Tensor:
    """Another run's tensor in the shape, dtype and place of this one's."""
    if (
        source.ndim != tensor.ndim
        or len(source) not in (1, len(tensor))
        or source.shape[1:] != tensor.shape[1:]
    ):
        raise ValueError(
            f"the source is {list(source.shape)}, {_at(hook)} is {list(tensor.shape)}: give what this point held in a run of the "
            "same shape, or of one sample."
        )
    return source.to(tensor).expand_as(tensor).clone()  # a hook after this one may write into it


def _basis(subspace: Any, orthonormal: bool) -> Float[Tensor, "d_model rank"]:
    """An orthonormal basis of the span, of its rank; or the columns as they are."""
    if (
        not isinstance(subspace, Tensor)
        or subspace.ndim not in (2, 3)
        or 0 in subspace.shape
        or not _finite(subspace)
        or not subspace.is_floating_point()
    ):
        raise ValueError(
            f"subspace is {_told(subspace)}: give finite numbers [d_model, width], such as model.blocks[0].attn.U[2], or "
            "[head, d_model, width]."
        )
    columns = subspace.detach()
    columns = (
        columns.transpose(0, 1).flatten(1) if columns.ndim == 3 else columns
    )  # [d_model, head * width]
    if not orthonormal:
        return columns
    left, values, _ = torch.linalg.svd(columns.double(), full_matrices=False)
    rank = int(
        (values > values[0] * 4 * torch.finfo(columns.dtype).eps).sum()
    )  # columns depend on each other to rounding
    if not rank:
        raise ValueError("subspace is zero: it spans nothing.")
    return left[:, :rank].to(columns.dtype)


def _require_width(tensor: Tensor, hook: Any, width: int, what: str) -> None:
    if tensor.shape[-1] != width:
        raise ValueError(
            f"{_at(hook)} is {list(tensor.shape)}, the {what} has {width} dimensions: hang it where d_model comes last."
        )


def _require_source(source: Any) -> None:
    if not isinstance(source, Tensor) or source.ndim < 2 or not len(source):
        raise ValueError(
            f"source is {_told(source)}: give what the point held in another run, cache[...], batch first."
        )


def _require_number(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not -1e38 < float(value) < 1e38:
        raise ValueError(f"{name}={value!r}: give a finite number.")


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _at(hook: Any) -> str:
    return f"what is at {hook.name!r}" if getattr(hook, "name", None) else "the tensor"


def _told(value: Any) -> str:
    return (
        f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
    )
