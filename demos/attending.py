"""What keeps the attention of a small CRATE-LM from staying even: its start and a term of the loss.

Query, key and value are one code. Heads that begin even get almost no gradient that would make them
differ, so they stay even unless the start or the loss says otherwise.
"""

import math
from typing import Any

import torch

from crate_interp import HookedCrateLM

SELF_LOGIT = 2.5  # of a token with itself: what the official initialisation gives at width 768
EVEN, ROWS = 0.8, 6  # heads more even than this cost; on so many windows of a batch


def positions(model: HookedCrateLM) -> torch.Tensor:
    """Returns positions that are waves, as large as the official ones, [n_ctx, d_model]."""
    slow = torch.linspace(0, math.log(model.cfg.n_ctx / 2), model.cfg.d_model // 2)
    angles = torch.arange(model.cfg.n_ctx)[:, None] * math.pi * torch.exp(-slow)
    return 0.02 * math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)


def self_scale(model: HookedCrateLM) -> float:
    """Returns how much wider than the official one U is if a token's own logit is SELF_LOGIT."""
    return math.sqrt(SELF_LOGIT / (model.cfg.d_model * math.sqrt(model.cfg.d_head))) / 0.02


@torch.no_grad()
def start(model: HookedCrateLM) -> None:
    """Replaces the start of the positions, of U, of the output maps and of the dictionaries.

    Positions are waves, so that near ones are alike. U is so wide that a token's logit with itself
    is SELF_LOGIT, and the output map as much narrower, or attention would drown the token. A
    dictionary is [W, -W] with W W^T = 1: two steps on it are nearly the identity, and what a token
    is reaches the last layer.
    """
    width, wider = model.cfg.d_model, self_scale(model)
    model.pos_embed.copy_(positions(model))
    blocks: Any = model.blocks
    for block in blocks:
        block.attn.u_proj.weight.mul_(wider)
        block.attn.out_proj.weight.div_(wider)
        half = torch.nn.init.orthogonal_(torch.empty(width, model.cfg.d_mlp // 2))
        block.mlp.D.copy_(torch.cat([half, -half], dim=1))


def evenness(pattern: torch.Tensor) -> torch.Tensor:
    """Returns each head's entropy as a share of the largest, that of even attention, [head]."""
    rows = pattern.float()  # [batch, head, query, key]
    entropy = -(rows * (rows + 1e-9).log()).sum(dim=-1).mean(dim=(0, 2))
    return entropy / torch.arange(1, rows.shape[-1] + 1).log().mean()


class Gathered:
    """The evenness of each head, gathered on some windows of a batch while the model runs."""

    def __init__(self, model: HookedCrateLM) -> None:
        self.heads: list[torch.Tensor] = []
        blocks: Any = model.blocks
        for block in blocks:
            block.attn.hook_pattern.register_forward_hook(self._gather)

    def _gather(self, _module: object, _inputs: object, pattern: torch.Tensor) -> None:
        self.heads.append(evenness(pattern[:ROWS]))

    def pop(self) -> torch.Tensor:
        """Returns the evenness [layer, head] of the last run."""
        shares, self.heads[:] = torch.stack(self.heads), []
        return shares


@torch.no_grad()
def evenness_of(model: HookedCrateLM, tokens: torch.Tensor) -> list[float]:
    """Returns the evenness of each layer, a mean over its heads and over windows."""
    total = torch.zeros(model.cfg.n_layers)
    for batch in tokens.split(32):
        _, cache = model.run_with_cache(batch, names_filter=lambda name: "hook_pattern" in name)
        layers = [evenness(cache["pattern", layer]).mean() for layer in range(len(total))]
        total += torch.stack(layers) * len(batch) / len(tokens)
    return total.tolist()


@torch.no_grad()
def cost_of_even(model: HookedCrateLM, tokens: torch.Tensor) -> list[float]:
    """Returns for each layer by how much the loss rises if its attention is made even."""

    def made_even(pattern: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.ones_like(pattern).tril() / torch.arange(1, pattern.shape[-1] + 1)[:, None]

    points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    losses = []
    for point in [None, *points]:
        hooks: Any = [(point, made_even)] if point else []
        parts = [
            model.run_with_hooks(batch, return_type="loss", fwd_hooks=hooks).item() * len(batch)
            for batch in tokens.split(32)
        ]
        losses.append(sum(parts) / len(tokens))
    return [loss - losses[0] for loss in losses[1:]]


def too_even(shares: torch.Tensor) -> torch.Tensor:
    """Returns by how much heads [layer, head] are more even than EVEN, a mean over all."""
    return (shares - EVEN).clamp_min(0).mean()


def groups(model: HookedCrateLM, decay: float) -> list[dict]:
    """Returns the groups of AdamW; U, positions and norms do not decay, as that evens attention."""
    parts: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, value in model.named_parameters():
        parts[value.ndim < 2 or "u_proj" in name or "pos_embed" in name].append(value)
    kept = dict(params=parts[True], weight_decay=0.0)
    return [dict(params=parts[False], weight_decay=decay), kept]
