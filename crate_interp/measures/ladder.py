"""The norm ladder: what a head pays to look elsewhere if query, key and value are one code."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.measures import checks
from crate_interp.measures.checks import HeadCodes

__all__ = ["norm_ladder", "with_norms"]

TokenNumbers = Float[Tensor, "*batch head pos"]


class NormLadder(NamedTuple):
    """What `norm_ladder` returns, each `[..., head, pos]`; its docstring has the formulas."""

    norms: TokenNumbers
    self_share: TokenNumbers
    elsewhere: TokenNumbers
    upward_share: TokenNumbers
    rise: TokenNumbers
    distance: TokenNumbers
    flat_share: TokenNumbers


@checks.in_full_precision
def norm_ladder(codes: HeadCodes, visible: Bool[Tensor, "pos pos"] | None = None) -> NormLadder:
    """Returns how much longer the codes are that tokens look at, and how much longer they must be.

    A tied head scores `s_pj = u_p . u_j / sqrt(d_head)`. So another token scores above the token
    itself by

    `s_pj - s_pp = (|u_j|^2 - |u_p|^2) / (2 sqrt(d_head)) - |u_p - u_j|^2 / (2 sqrt(d_head))`,

    the rise of the norm less the distance of the codes. A token prefers only longer codes to its
    own: looking elsewhere climbs, and codes of one norm look most at themselves.

    Computed in float64. Its own derivation, from the attention of arXiv 2306.01129 eq. 11. NaN or
    Inf in a head gives NaN.

    Args:
        codes: The code u of each token, which is query and key at once.
        visible: True where a token (row) sees another (column). Default: all see all.

    Returns:
        Seven numbers for each token p, with its attention A_pj = softmax_j(s_pj). norms: |u_p|, in
        units of the code. self_share: A_pp. elsewhere: the attention on other tokens. upward_share:
        the attention on longer codes; norms that differ by rounding (1e-6 of the longest) are
        equal. rise and distance: their means over the attention, in nats of score; rise - distance
        is the mean score less the token's score with itself. flat_share: `sum_j min(A_pj, F_pj)`,
        how much of the attention would stay if all codes had their mean norm (F), in [0, 1].

    Raises:
        ValueError: If there are no heads or tokens, if visible is not a square of bool, and if a
            token does not see itself.
    """
    checks.require_floats(codes, "head pos d_head")
    checks.require_entries(codes, "pos d_head", checks.NO_TOKENS)
    pos = codes.shape[-2]
    if not codes.shape[-3]:
        raise ValueError("there are no heads to measure: give codes [..., head, pos, d_head].")
    if visible is not None and (visible.dtype != torch.bool or visible.shape != (pos, pos)):
        raise ValueError(f"visible: give a tensor of bool of shape [{pos}, {pos}].")
    if visible is not None and not bool(visible.diagonal().all()):
        raise ValueError("a token does not see itself, and the ladder compares it with others.")
    heads = [_one_head(one, visible) for one in codes.double().unbind(dim=-3)]
    bad = ~codes.isfinite().all(dim=-1).all(dim=-1)[..., None]
    fields = (torch.stack(one, dim=-2) for one in zip(*heads, strict=True))
    return NormLadder(*(one.masked_fill(bad, torch.nan).to(codes.dtype) for one in fields))


def with_norms(codes: HeadCodes, norms: Float[Tensor, "*lengths"]) -> HeadCodes:
    """Returns codes of the same directions and any other norms; a code of zeros stays.

    Computed in float64.

    Args:
        codes: The codes.
        norms: The norms, which broadcast to `[..., head, pos]`, in units of the code.

    Returns:
        `norms u / |u|`.
    """
    checks.require_floats(codes, "head pos d_head")
    wide = codes.double()
    length = torch.linalg.vector_norm(wide, dim=-1)
    share = norms.double() / length.masked_fill(length == 0, 1)
    return (wide * share[..., None]).to(codes.dtype)


def _one_head(
    u: Float[Tensor, "*batch pos d_head"], visible: Bool[Tensor, "pos pos"] | None
) -> tuple[Float[Tensor, "*batch pos"], ...]:
    norms = torch.linalg.vector_norm(u, dim=-1)
    flat = with_norms(u[..., None, :, :], norms.mean(dim=-1)[..., None, None])[..., 0, :, :]
    pattern, even = (_pattern(one, visible) for one in (u, flat))
    itself = torch.eye(u.shape[-2], dtype=torch.bool, device=u.device)
    others = pattern.masked_fill(itself, 0)
    squares, scale = norms.square(), 0.5 * u.shape[-1] ** -0.5
    # of each token (row) and the token that it looks at (column)
    rises = squares[..., None, :] - squares[..., :, None]
    gaps = squares[..., None, :] + squares[..., :, None] - 2 * (u @ u.mT)
    longer = rises > 1e-6 * squares.amax(dim=-1)[..., None, None]
    return (
        norms,
        pattern.diagonal(dim1=-2, dim2=-1),
        others.sum(dim=-1),
        (others * longer).sum(dim=-1),
        scale * (others * rises).sum(dim=-1),
        scale * (others * gaps.clamp(min=0)).sum(dim=-1),
        torch.minimum(pattern, even).sum(dim=-1),
    )


def _pattern(
    u: Float[Tensor, "*batch pos d_head"], visible: Bool[Tensor, "pos pos"] | None
) -> Float[Tensor, "*batch pos pos"]:
    scores = u @ u.mT * u.shape[-1] ** -0.5
    return (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(dim=-1)
