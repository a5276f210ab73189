"""Ways to break the layer of planted.py one at a time, and the claims that each breaks.

planted = ideal(n_layers=1)
DEFECTS["uphill"].change(planted)
with planted.working():
    result = ci.audit(planted.model, planted.images, eps=EPS, untrained=0)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from planted import FRAMES, D, Planted, Step, set_bases
from torch import Tensor


@dataclass(frozen=True)
class Defect:
    """A change to `planted.ideal(n_layers=1)`, the claims it breaks at `planted.EPS`, and why.

    Claims have the names of the audit, with the frames in which they break if they have frames.
    Besides, "excess" is that R^c falls more than by updates shuffled over the tokens, and "overlap"
    that U_k spans a planted subspace (`planted.matched_overlap`). unsure: claims that depend on the
    sample. Every other claim is kept.
    """

    change: Callable[[Planted], None]
    breaks: dict[str, tuple[str, ...]]
    why: str
    unsure: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _of_update(edit: Callable[[Step, Tensor, Tensor], Tensor]) -> Callable[[Planted], None]:
    """Returns the defect that edits the step; what attention adds and Z are `[batch, pos, d]`."""

    def change(planted: Planted) -> None:
        step = planted.step
        planted.step = lambda out, z: edit(step, out, z)

    return change


def _shuffled(step: Step, out: Tensor, z: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(100)
    return step(out, z)[:, torch.randperm(z.shape[1], generator=random)]


def _mean(step: Step, out: Tensor, z: Tensor) -> Tensor:
    return step(out, z).mean(dim=1, keepdim=True).expand_as(z)


def _of_blocks(edit: Callable[[Any], object]) -> Callable[[Planted], None]:
    """Returns the defect that edits each block, without gradients."""

    def change(planted: Planted) -> None:
        blocks: Any = planted.model.blocks
        with torch.no_grad():
            for block in blocks:
                edit(block)

    return change


def _of_bases(edit: Callable[[Tensor], Tensor]) -> Callable[[Planted], None]:
    """Returns the defect that edits U `[head, d_model, p]`; W_O goes with it."""
    return _of_blocks(lambda block: set_bases(block, edit(block.attn.U.detach().clone())))


def _turned(u: Tensor) -> Tensor:
    square = torch.randn(D, D, generator=torch.Generator().manual_seed(101), dtype=torch.float64)
    return torch.linalg.qr(square)[0].to(u) @ u


def _crossed(block: Any) -> None:
    heads = block.attn.out_proj.weight.unflatten(1, (block.attn.cfg.n_heads, -1))
    block.attn.out_proj.weight.copy_(heads.roll(1, dims=1).flatten(1))


def _short(eta: float) -> Callable[[Any], None]:
    def edit(block: Any) -> None:
        block.mlp.D.copy_(torch.eye(D))
        block.mlp.eta = eta

    return edit


def _long_dictionary(block: Any) -> None:
    block.mlp.D.mul_(1.2)
    block.mlp.eta = 1 / 1.44


def _enlarged(block: Any) -> None:
    block.mlp.hook_post.add_perma_hook(lambda code, hook: 3 * code)


_LAW = ("compresses", "excess", "gradient", "step")  # claims about the update that have frames
_NORMED = ("read", "unit")


def _in(frames: tuple[str, ...], *claims: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(claims, frames)


def _all(*claims: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(claims, ())


DEFECTS: dict[str, Defect] = {
    # ---- the update
    "uphill": Defect(
        _of_update(lambda step, out, z: -step(out, z)),
        _in(FRAMES, *_LAW) | _all("neumann_direction"),
        "The update has the wrong sign, so R^c rises in every frame.",
    ),
    "too long": Defect(
        _of_update(lambda step, out, z: 9 * step(out, z)),
        _in(FRAMES, "step") | _in(_NORMED, "compresses", "excess"),
        "Nine steps in one turn the noise round. R^c of the stream falls: most of Z is gone.",
    ),
    "shuffled": Defect(
        _of_update(_shuffled),
        _in(FRAMES, "compresses", "excess", "gradient") | _all("neumann_direction"),
        "Each token gets the update of another one.",
        _in(FRAMES, "step"),
    ),
    "next sample": Defect(
        _of_update(lambda step, out, z: step(out, z).roll(1, dims=0)),
        _in(FRAMES, "compresses", "excess", "gradient") | _all("neumann_direction"),
        "Each sample gets the update of the one before it, in which other subspaces are used.",
        _in(FRAMES, "step"),
    ),
    "mean update": Defect(
        _of_update(_mean),
        _in(FRAMES, "excess", "gradient") | _in(_NORMED, "compresses") | _all("neumann_direction"),
        "All tokens get the same update. It takes their mean away, and shuffling cannot change it.",
        _in(FRAMES, "step"),
    ),
    "nothing": Defect(
        _of_update(lambda step, out, z: torch.zeros_like(z)),
        _in(FRAMES, *_LAW) | _all("neumann_direction"),
        "Attention adds nothing.",
    ),
    "grows": Defect(
        _of_update(lambda step, out, z: out),
        _in(("stream",), *_LAW) | _all("neumann_direction"),
        "MSSA alone, as in CRATE-C: what a token shares with its subspace grows, the rest stays. "
        "The frames without a length see compression, and the stream grows.",
    ),
    "against": Defect(
        _of_update(lambda step, out, z: -out),
        _in(_NORMED, *_LAW),
        "MSSA subtracted, as in CRATE-N: what a token shares with its subspace shrinks, the noise "
        "stays. The stream shrinks; at a fixed norm R^c rises.",
    ),
    "shrinks": Defect(
        _of_update(lambda step, out, z: step(0 * out, z)),
        _in(_NORMED, "compresses", "gradient", "step"),
        "Only the length of the stream changes, which the next norm undoes. Shuffled, the update "
        "is noise and R^c rises, so an excess proves nothing without a fall.",
        _in(_NORMED, "excess"),
    ),
    "crossed": Defect(
        _of_blocks(_crossed),
        _in(_NORMED, "compresses", "excess", "gradient"),
        "Each head writes into the subspace of the next; the skip connection shrinks the stream.",
        _in(_NORMED, "step"),
    ),
    # ---- the subspaces
    "turned": Defect(
        _of_bases(_turned),
        _all("overlap"),
        "U is another orthonormal basis, W_O goes with it. The layer compresses against its own "
        "U, and no claim about the layer alone tells that these are not the planted subspaces.",
    ),
    "bases too long": Defect(
        _of_bases(lambda u: 1.2 * u),
        _all("orthonormal", "complete"),
        "A longer basis is neither orthonormal nor a cover of the space.",
    ),
    "one subspace": Defect(
        _of_bases(lambda u: u[:1].expand_as(u)),
        _in(_NORMED, *_LAW) | _all("complete", "overlap"),
        "All heads have one subspace: MSSA counts five times there, and four fifths of the space "
        "are covered by none.",
        _in(("stream",), *_LAW) | _all("neumann_direction"),
    ),
    # ---- the sparse step
    "dictionary too long": Defect(
        _of_blocks(_long_dictionary),
        _all("dictionary", "rate_kept"),
        "D is 1.2 times as long; eta = 1 / 1.44 still solves the lasso. R(DZ) is R at a larger "
        "scale.",
    ),
    "short step": Defect(
        _of_blocks(_short(0.4)),
        _all("converged", "kkt", "threshold"),
        "Two fifths of a step, with D = I: .64 of the decrease, and most zeros come from ReLU.",
    ),
    "tiny step": Defect(
        _of_blocks(_short(0.05)),
        _all("share", "converged", "kkt", "threshold"),
        "A twentieth of a step, with D = I, hardly applies the penalty.",
    ),
    "zeros by sign": Defect(
        _of_blocks(lambda block: block.ln2.bias.zero_()),
        _all("threshold"),
        "LN2 without bias leaves half the entries negative: those zeros are not the threshold's.",
    ),
    "code too large": Defect(
        _of_blocks(_enlarged),
        _all("descends", "share", "converged", "kkt"),
        "Three times the solution is worse than the start.",
    ),
}
