"""What an attention layer needs beside the stream: visible keys, rotations, and earlier tokens."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.config import CrateConfig


@dataclass
class Past:
    """Keys and values `[batch, pos, head, d_head]` of the tokens that a language model has seen.

    They are kept layer by layer.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return next(iter(self.layers.values()))[0].shape[1] if self.layers else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens and returns those of all tokens."""
        if layer in self.layers:
            before = self.layers[layer]
            k, v = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        self.layers[layer] = k, v
        return k, v


@dataclass(frozen=True)
class Context:
    """What one layer needs: `mask`, True where a query sees a key; `rotation`, (cos, sin); `past`.

    The rotation is that of the new tokens.
    """

    mask: Bool[Tensor, "query key"]
    rotation: tuple[Tensor, Tensor] | None = None
    past: Past | None = None
    layer: int = 0


def contexts(
    cfg: CrateConfig, n_new: int, past: Past | None, device: torch.device
) -> list[Context]:
    """Returns the context of every layer for `n_new` tokens after those in `past`."""
    start = past.length if past else 0
    rotation = rotary_table(cfg, start, n_new, device) if cfg.rotary else None
    windows = window_sizes(cfg)
    masks = {window: causal_mask(start, n_new, window, device) for window in set(windows)}
    return [Context(masks[window], rotation, past, layer) for layer, window in enumerate(windows)]


def causal_mask(
    start: int, n_new: int, window: int | None, device: torch.device
) -> Bool[Tensor, "query key"]:
    """Returns whether query i sees key j: 0 <= i - j, and i - j <= window if there is a window."""
    ahead = torch.arange(start, start + n_new, device=device)[:, None] - torch.arange(
        start + n_new, device=device
    )
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead <= window)


def window_sizes(cfg: CrateConfig) -> list[int | None]:
    """Returns how far back each layer sees: n_ctx // 2 for S, all the way for L.

    The last layer sees all the way. nanochat-crate: `nanochat/crate.py`. Its January code applies
    the window; in its March code the mask never masks anything without a cache, so `cfg.window` is
    a switch and off by default.
    """
    pattern = cfg.window_pattern if cfg.window else "L"
    letters = [pattern[layer % len(pattern)] for layer in range(cfg.n_layers - 1)] + ["L"]
    return [cfg.n_ctx // 2 if letter == "S" else None for letter in letters]


def rotary_table(
    cfg: CrateConfig, start: int, n_new: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin `[pos, 1, d_head / 2]` of position / base^(2 i / d_head).

    They are rounded to bfloat16 as the code's tables are.
    """
    steps = torch.arange(0, cfg.d_head, 2, dtype=torch.float32, device=device)
    angles = torch.outer(
        torch.arange(start, start + n_new, dtype=torch.float32, device=device),
        1.0 / (cfg.rotary_base ** (steps / cfg.d_head)),
    )
    return angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None]


def rotate(
    codes: Float[Tensor, "batch pos *rest d_head"], rotation: tuple[Tensor, Tensor], eps: float
) -> Float[Tensor, "batch pos *rest d_head"]:
    """Returns rotated codes, then divided by their root mean square head by head.

    That is nanochat's order: the norm comes last.
    """
    cos, sin = (table.to(codes.dtype) for table in rotation)
    left, right = codes.chunk(2, dim=-1)
    turned = torch.cat([left * cos + right * sin, right * cos - left * sin], dim=-1)
    return torch.nn.functional.rms_norm(turned, (codes.shape[-1],), eps=eps)
