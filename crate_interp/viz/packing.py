"""What a head's map is, and how maps are packed as text: as deflated bytes in base64.

A head of ToST has no attention pattern, but memberships; one of CBT has representatives. If the
page can compute attention from codes, only the codes are stored, because they are fewer numbers:
for 197 tokens, the codes of a head are 197 x 64 numbers, its attention 197 x 197.
"""

import base64
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from crate_interp.models.hooked import HookedModel

LIMIT = 0.01  # the largest error of recomputed attention, relative to a row's largest share
_CHUNK = 256  # queries whose maps are checked at once


class MapKind(NamedTuple):
    """The kind of the heads' maps.

    name: "attention", "membership" or "shared". point: the hook point of the maps. codes: the
    points of the codes of queries and keys.
    """

    name: str
    point: str
    codes: tuple[str, ...]


_ATTENTION = MapKind("attention", "attn.hook_pattern", ("attn.hook_q", "attn.hook_k"))
KINDS = {
    "mssa": _ATTENTION,
    "self": _ATTENTION,
    "tssa": MapKind("membership", "attn.hook_pi", ("attn.hook_u",)),
    "cbsa": MapKind("shared", "attn.hook_contract", ("attn.hook_u",)),
}


def map_kind(model: HookedModel) -> MapKind:
    """Returns what the maps of a model's heads are."""
    return KINDS[model.cfg.facts["attention"]]


@dataclass(frozen=True)
class Attention:
    """The maps of one layer's heads as a page stores them: attention, or what takes its place.

    parts: name -> text. "codes" holds the codes of the queries, and "keys" holds the codes of the
    keys if these differ: float16 `[head, pos, d_head]`, packed by `planes`. If the attention is not
    the softmax of the codes, "rows" and "largest" hold the attention itself. "rows" has bytes
    `[head, query, key]`, in steps of 1/255 of a row's largest share; "largest" has the largest
    share of each row as float16 `[head, query]`, packed by `planes`. With a single query, the row
    holds for all of them. "contract" has what each representative of CBT reads as float16
    `[head, rep, pos]`, packed by `planes`. error: the largest error of a
    share, relative to the largest share in its row. most: the largest share of each head.
    """

    parts: dict[str, str]
    error: float
    most: list[float]


def packed(values: Shaped[np.ndarray, "..."]) -> str:
    """Returns the bytes of an array, deflated, as base64. Numbers have their lowest byte first."""
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    return base64.b64encode(zlib.compress(data, 9)).decode()


def planes(values: Float[np.ndarray, "..."]) -> str:
    """Returns numbers as packed float16: the low bytes of all numbers, then their high bytes.

    High bytes are similar, so they compress well when they are stored together.
    """
    pairs = values.astype("<f2").reshape(-1).view(np.uint8).reshape(-1, 2)
    return packed(np.ascontiguousarray(pairs.T))


def pack_attention(
    pattern: Float[np.ndarray, "head pos pos"],
    codes: Float[np.ndarray, "head pos d_head"] | None,
    keys: Float[np.ndarray, "head pos d_head"] | None,
    causal: bool,
) -> Attention:
    """Returns a layer's attention as text: codes if their softmax errs by at most 1 %, else rows.

    codes: the queries' codes, None if unknown. keys: the keys' codes, None if they equal `codes`.
    causal: True if a query sees no later keys.
    """
    most = [float(f"{value:.4g}") for value in pattern.max(axis=(1, 2))]
    if codes is None or not _fits(codes):
        return pack_rows(pattern, {})
    parts, other = {"codes": planes(codes)}, codes if keys is None else keys
    error = _worst(pattern, codes, other, causal) if _fits(other) else np.inf
    if error > LIMIT:
        return pack_rows(pattern, parts)
    return Attention(parts if keys is None else parts | {"keys": planes(keys)}, error, most)


def pack_rows(pattern: Float[np.ndarray, "head query pos"], parts: dict[str, str]) -> Attention:
    """Returns maps as text, in 255 steps of each row's largest value.

    pattern: values of at least 0; with one query, its row holds for all. parts: what the page
    stores besides.
    """
    most = [float(f"{value:.4g}") for value in pattern.max(axis=(1, 2))]
    largest = pattern.max(axis=2)
    steps = (pattern / largest.clip(min=1e-30)[..., None] * 255).round().astype(np.uint8)
    parts = parts | {"rows": packed(steps), "largest": planes(largest)}
    kept = largest.astype(np.float16).astype(np.float32)[..., None] * (steps / 255)
    return Attention(parts, float(_relative(kept, pattern).max()), most)


def pack_contraction(
    contract: Float[np.ndarray, "head rep pos"], parts: dict[str, str]
) -> Attention:
    """Returns the contraction A of a layer of CBT as text, from which a page computes `A^T A`.

    The row of a query, scaled to sum to 1, is its map. parts: what the page stores besides.
    """
    most, worst = [], 0.0
    kept = contract.astype(np.float16).astype(np.float32)
    for exact, rounded in zip(contract, kept, strict=True):
        largest = 0.0
        for start in range(0, exact.shape[1], _CHUNK):  # a large picture has many pairs of tokens
            wanted, found = (
                (one[:, start : start + _CHUNK].T @ one)
                / one[:, start : start + _CHUNK].sum(axis=0)[:, None].clip(min=1e-30)
                for one in (exact, rounded)
            )
            largest = max(largest, float(wanted.max()))
            worst = max(worst, float(_relative(found, wanted).max()))
        most.append(float(f"{largest:.4g}"))
    return Attention(parts | {"contract": planes(contract)}, worst, most)


def pack_tops(
    values: Float[np.ndarray, "pos any"], totals: Float[np.ndarray, "pos"], count: int
) -> str:
    """Returns the `count` largest numbers of each row, and the row's total, as text.

    The text has the places of the numbers as uint32 `[pos, count]`, their values as float32
    `[pos, count]` and the totals as float32 `[pos]`, in this order. Equal numbers keep their order
    in the row.
    """
    count = min(count, values.shape[1])
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return pack_ranked(order, np.take_along_axis(values, order, axis=1), totals)


def pack_ranked(
    places: Int[np.ndarray, "pos count"],
    values: Float[np.ndarray, "pos count"],
    totals: Float[np.ndarray, "pos"],
) -> str:
    """Packs numbers that are ranked already, in the format of `pack_tops`.

    The lowest byte of each float is 0, which compresses: its error is at most 2^-16 of the number.
    """
    floats = np.concatenate([values.ravel(), totals.ravel()]).astype("<f4").view("<u4")
    return packed(np.concatenate([places.ravel().astype("<u4"), (floats + 128) & 0xFFFFFF00]))


def _fits(values: np.ndarray) -> bool:
    """Tells whether float16 can hold the numbers."""
    return bool(np.isfinite(values).all() and np.abs(values).max(initial=0) < 65_504)


def _worst(pattern: np.ndarray, codes: np.ndarray, keys: np.ndarray, causal: bool) -> float:
    """Returns the largest error of the attention that the softmax of float16 codes gives.

    The error of a share is relative to the largest share in its row.
    """
    worst = 0.0
    for head in range(len(pattern)):  # one head at a time: a long text has large patterns
        q, k = (each[head].astype(np.float16).astype(np.float32) for each in (codes, keys))
        scores = q @ k.T * q.shape[1] ** -0.5
        if causal:
            scores[np.triu_indices(len(scores), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        worst = max(worst, float(_relative(shares, pattern[head]).max()))
    return worst


def _relative(numbers: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns the error of each entry, divided by the largest exact entry in its row."""
    return np.abs(numbers - exact) / exact.max(axis=-1, keepdims=True).clip(min=1e-30)
