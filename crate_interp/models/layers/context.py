"""The inputs of attention besides the stream: visible keys, rotations, earlier tokens, padding."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crate_interp.config import CrateConfig
from crate_interp.models.layers import Ids, Mask
from crate_interp.models.runtimes import readable


@dataclass
class Past:
    """Keys and values `[batch, pos, head, d_head]` of the tokens that a language model has seen.

    They are stored layer by layer; for ToST, only sums over the tokens are. mask: which of these
    tokens are real, `[batch, pos]`; None means that all are.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mask: Bool[Tensor, "batch pos"] | None = None
    # for TSSA, which needs no key and no value: by layer and name, sums over all tokens so far
    sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # by layer, the tokens in these sums

    @property
    def length(self) -> int:
        """The number of tokens that are stored."""
        if self.layers:
            return next(iter(self.layers.values()))[0].shape[1]
        return next(iter(self.counts.values()), 0)

    def count(self, layer: int, n_new: int) -> None:
        """Adds to the number of tokens in a layer's sums."""
        self.counts[layer] = self.counts.get(layer, 0) + n_new

    def continued(self, layer: int, name: str, sums: Tensor) -> Tensor:
        """Returns running sums `[batch, head, pos, any]` of new tokens after those of earlier ones.

        Keeps the last of them for the next call.
        """
        key = layer, name
        sums = sums + self.sums[key] if key in self.sums else sums
        self.sums[key] = sums[:, :, -1:]
        return sums

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens, and returns the keys and values of all tokens."""
        if layer in self.layers:
            before = self.layers[layer]
            k, v = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        self.layers[layer] = k, v
        return k, v


@dataclass(frozen=True)
class Padding:
    """Which tokens of a batch are real, `[batch, key]`; tokens of the past come first.

    All other tokens are padding: no token sees them, and no position or loss counts them.
    """

    real: Bool[Tensor, "batch key"]

    @property
    def positions(self) -> Int[Tensor, "batch key"]:
        """Returns the number of real tokens before each token."""
        return self.real.cumsum(dim=1) - self.real.long()

    def of_new(self, count: int) -> Bool[Tensor, "batch pos"]:
        """Returns which of the last `count` tokens are real."""
        return self.real[:, self.real.shape[1] - count :]


@dataclass(frozen=True)
class Context:
    """The inputs of one layer's attention besides the stream.

    mask: True where a query sees a key. blind: the queries that see no key at all, because they are
    padding before the first real token; None without padding. rotation: (cos, sin) for the new
    tokens. cut: the keys whose weights are set to 0 after the softmax. start: the number of tokens
    before the new ones. TSSA, which has no queries, reads `padding` and `start`; its mask is None.
    """

    mask: Bool[Tensor, "*batch_one query key"] | None
    blind: Bool[Tensor, "batch one query one"] | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    past: Past | None = None
    layer: int = 0
    padding: Padding | None = None
    start: int = 0
    cut: Bool[Tensor, "batch_or_one one query_one key"] | None = None


def contexts(
    cfg: CrateConfig,
    n_new: int,
    past: Past | None,
    device: torch.device,
    padding: Padding | None = None,
) -> list[Context]:
    """Returns the context of every layer for `n_new` tokens after those in `past`.

    Without padding a mask is `[query, key]`, with padding `[batch, 1, query, key]`.
    """
    if not cfg.causal:
        if past is not None:
            raise ValueError("this model reads a text both ways: give the whole text, no past.")
        mask = None if padding is None else padding.real[:, None, None]
        if cfg.attention_mask == "meant":
            return [Context(mask)] * cfg.n_layers
        every = torch.ones(1, 1, 1, n_new, dtype=torch.bool, device=device)
        return [Context(None, cut=every if mask is None else mask)] * cfg.n_layers
    start = past.length if past else 0
    if cfg.facts["attention"] == "tssa":
        layers = range(cfg.n_layers)
        return [Context(None, None, None, past, layer, padding, start) for layer in layers]
    places, windows, rotation = torch.arange(start + n_new, device=device), window_sizes(cfg), None
    if padding is not None:
        places = padding.positions
    if cfg.rotary:  # cos and sin of place / base^(2 i / d_head), in bfloat16 as in nanochat's code
        steps = torch.arange(0, cfg.d_head, 2, dtype=torch.float32, device=device)
        inverse = 1.0 / (cfg.rotary_base ** (steps / cfg.d_head))
        angles = places[..., start:].float()[..., None, None] * inverse
        rotation = angles.cos().bfloat16(), angles.sin().bfloat16()  # [*batch, pos, 1, half]
    seen = {window: _visible_mask(places, start, window, padding) for window in set(windows)}
    return [Context(*seen[window], rotation, past, layer) for layer, window in enumerate(windows)]


def _visible_mask(
    places: Int[Tensor, "*batch key"], start: int, window: int | None, padding: Padding | None
) -> tuple[Bool[Tensor, "*batch_one query key"], Bool[Tensor, "batch one query one"] | None]:
    """Returns the mask of a layer and, with padding, the queries that see no key.

    Query i sees key j if 0 <= i - j and, with a window, places[i] - places[j] <= window. With
    padding a query sees only real keys, and a window counts only real tokens.
    """
    order = torch.arange(places.shape[-1], device=places.device)
    mask = order[start:, None] >= order
    if window is not None:
        mask = mask & (places[..., start:, None] - places[..., None, :] <= window)
    if padding is None:
        return mask, None
    mask = mask & padding.real[:, None]
    return mask[:, None], ~mask.any(dim=-1)[:, None, :, None]


def window_sizes(cfg: CrateConfig) -> list[int | None]:
    """Returns how many tokens back each layer sees: n_ctx // 2 for S, None (no limit) for L.

    The last layer always has no limit. Code: nanochat-crate `nanochat/crate.py`. The code of
    January applies the window; in the code of March the mask has no effect without a cache, so
    `cfg.window` is off by default.
    """
    pattern = cfg.window_pattern if cfg.window else "L"
    letters = [pattern[layer % len(pattern)] for layer in range(cfg.n_layers - 1)] + ["L"]
    return [cfg.n_ctx // 2 if letter == "S" else None for letter in letters]


def rotate(
    codes: Float[Tensor, "batch pos *rest d_head"], rotation: tuple[Tensor, Tensor], eps: float
) -> Float[Tensor, "batch pos *rest d_head"]:
    """Returns codes rotated and then divided by their root mean square, head by head.

    This is nanochat's order: the norm comes last.
    """
    return torch.nn.functional.rms_norm(turned(codes, rotation), (codes.shape[-1],), eps=eps)


def turned(
    codes: Float[Tensor, "*batch d_head"], rotation: tuple[Tensor, Tensor]
) -> Float[Tensor, "*batch d_head"]:
    """Returns codes rotated by their positions."""
    cos, sin = (table.to(codes.dtype) for table in rotation)
    left, right = codes.chunk(2, dim=-1)
    return torch.cat([left * cos + right * sin, right * cos - left * sin], dim=-1)


def padding_of(
    mask: Tensor | None, batch: int, n_new: int, past: Past | None, device: torch.device
) -> Padding | None:
    """Returns the padding that an attention mask describes, or None if every token is real.

    mask: `[batch, pos]` of 0 and 1, or False and True, over the past tokens followed by the new
    tokens. Without a mask, the past keeps its own mask and the new tokens are real. Zeros may be at
    any position. Raises ValueError for a wrong shape, values other than 0 and 1, a row without any
    real token, and a mask that contradicts the mask of the past.
    """
    before, length = past.mask if past else None, past.length if past else 0
    if mask is None:
        if before is None:
            return None
        return Padding(torch.cat([before, before.new_ones(batch, n_new)], dim=1))

    mask = mask[None] if mask.ndim == 1 else mask
    if mask.shape != (batch, length + n_new):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}: give shape [{batch}, {length + n_new}], "
            "1 for tokens and 0 for padding, past tokens first. It does not say what a token sees."
        )
    real = mask.to(device).bool()
    if readable(mask):
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("attention_mask: give 1 for real tokens and 0 for padding.")
        if not bool(real.any(dim=1).all()):
            raise ValueError("attention_mask hides every token of a row: leave the row out.")
        known = torch.ones_like(real[:, :length]) if before is None else before
        if not torch.equal(real[:, :length], known):
            raise ValueError("attention_mask differs from the past's: repeat it, or give no mask.")
        if before is None and bool(real.all()):
            return None  # so that bits and cost are the same as without a mask
    return Padding(real)


def after_past(mask: Tensor, past: Past | None) -> Tensor:
    """Returns the attention mask of the past, followed by the mask of the new tokens."""
    if past is None or not past.length:
        return mask
    before = past.mask if past.mask is not None else mask.new_ones(len(mask), past.length)
    return torch.cat([before.to(mask), mask], dim=1)


def check_side(side: str | None) -> None:
    """Raises ValueError for anything but "left", "right" and None."""
    if side not in (None, "left", "right"):
        raise ValueError(f"padding_side={side!r}: give 'left' or 'right'.")


def padded(rows: list[list[int]], pad: int, side: Literal["left", "right"]) -> tuple[Ids, Mask]:
    """Returns rows of token ids as one padded tensor, and which tokens are real."""
    ids = [torch.tensor(row) for row in rows]
    tokens = pad_sequence(ids, batch_first=True, padding_value=pad, padding_side=side)
    ones = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return tokens, pad_sequence(ones, batch_first=True, padding_side=side)


def mask_from_pads(tokens: Ids, pad: int, side: str, separator: int | None) -> Ids:
    """Returns the attention mask of tokens that are already padded.

    Pad tokens at the beginning of a row (side "left") or at its end ("right") count as padding.
    separator: the id with which texts begin, or None. If the pad token is also the separator, the
    last pad token at the beginning counts as the separator, not as padding. This is the rule of
    TransformerLens' `get_attention_mask`.
    """
    other = (tokens != pad).long()
    if side == "right":
        return (other.flip(1).cumsum(dim=1).flip(1) > 0).long()
    leading = other.cumsum(dim=1) == 0
    if separator == pad:
        leading = leading & leading.roll(-1, dims=1)
        leading[:, -1] = False
    return (~leading).long()
