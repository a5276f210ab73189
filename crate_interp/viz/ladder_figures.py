"""The staircase of norms: where the tokens of a tied head stand, and at which others they look."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from crate_interp import measures
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import check_pattern
from crate_interp.viz import canvas
from crate_interp.viz.cache_views import activation, model_of, numbers
from crate_interp.viz.canvas import CHANCE, PAGE, SMALL, TEXT, TRAINED

_WORDS = 16  # the most tokens whose words stand below the axis


def norm_ladder(
    cache: CrateCache,
    layer: int,
    head: int,
    *,
    sample: int = 0,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of the staircase of norms of one head.

    A dot is a token: to the right its position, upwards its score with itself, |u|^2 / sqrt(d_head)
    in nats, which is the height of its norm. An arrow goes from a token to another that it looks at
    more than at itself, the one it looks at most; a grey dot looks most at itself. On the left is
    the head as it is, on the right the same codes with equal norms. An arrow can only climb, so
    that there is none on the right (`ci.measures.norm_ladder`).

    Args:
        cache: From `model.run_with_cache(x)`, with attn.hook_q and attn.hook_pattern of the layer.
        layer: The layer's number.
        head: The head's number.
        sample: The sample's number in the cache.
        tokens: A word for each token, which stands below it if they are few.
        ax: The Axes to draw into, instead of a new figure.
        title: None means the number of arrows in words, "" means no title.
        dpi: The resolution of the figure.

    Raises:
        KeyError: For a point that was not cached.
        ValueError: For a head whose query and key are two codes, and for a layer, head or sample
            that does not exist.
    """
    model = model_of(cache)
    check_pattern(model.cfg, "a norm ladder")
    layer = numbers("layer", layer, model.cfg.n_layers)[0]
    head = numbers("head", head, model.cfg.n_heads)[0]
    if not model.cfg.tied:
        raise ValueError("a norm ladder is of heads whose query and key are one code.")
    codes = activation(cache, layer, "attn.hook_q", sample)[:, head].double()  # [pos, d_head]
    pattern = activation(cache, layer, "attn.hook_pattern", sample)[head]
    if pattern.shape != (len(codes), len(codes)) or len(tokens or codes) != len(codes):
        raise ValueError(f"give a cache of all tokens, and {len(codes)} tokens to stand below it.")
    visible = (pattern > 0) | torch.eye(len(codes), dtype=torch.bool, device=pattern.device)
    norms = torch.linalg.vector_norm(codes, dim=-1)
    flat = measures.with_norms(codes[None], norms.mean())[0]
    figure, ((left, right),) = canvas.panels(ax, (1, 2), (PAGE, 2.6), (0.0, 0.12), dpi)
    count = f"{_stairs(left, codes, visible)} of {len(codes)} tokens look up to another"
    equal = f"With equal norms: {_stairs(right, flat, visible)} of {len(codes)}"
    right.set_ylim(left.get_ylim())
    for axes, text in ((left, f"L{layer}H{head}: {count}"), (right, equal)):
        canvas.set_title(axes, title if axes is left else None, text)
        axes.set_xlabel("token", fontsize=TEXT)
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
        if tokens is not None and len(codes) <= _WORDS:
            axes.set_xticks(range(len(codes)), map(canvas.label, tokens), fontsize=SMALL)
    left.set_ylabel("squared length |u|², as a score (nats)", fontsize=TEXT)
    return canvas.as_written(figure, *([] if ax is None else [left, right]))


def _stairs(axes: Any, codes: Float[Tensor, "pos d_head"], visible: Bool[Tensor, "pos pos"]) -> int:
    """Draws dots and arrows, and returns the number of arrows."""
    scores = codes @ codes.T * codes.shape[-1] ** -0.5
    height = scores.diagonal().cpu().numpy()
    # equal up to rounding is no look elsewhere
    margin = scores - scores.diagonal()[:, None] - 1e-9 * scores.diagonal().abs().max()
    best = margin.masked_fill(~visible, -torch.inf).max(dim=1)
    looks = [(p, int(best.indices[p])) for p in range(len(codes)) if best.values[p] > 0]
    axes.step(range(len(codes)), height, where="mid", color=CHANCE, lw=0.6, alpha=0.5)
    arrow: Any = {"arrowstyle": "-|>", "color": TRAINED, "lw": 0.7, "shrinkA": 2, "shrinkB": 2}
    arrow |= {"connectionstyle": "arc3,rad=0.25", "mutation_scale": 6, "alpha": 0.8}
    for p, j in looks:
        axes.annotate("", (j, height[j]), (p, height[p]), arrowprops=arrow)
    climbing = {p for p, _ in looks}
    colours = [TRAINED if p in climbing else CHANCE for p in range(len(codes))]
    axes.scatter(range(len(codes)), height, s=9, c=colours, zorder=3)
    return len(looks)
