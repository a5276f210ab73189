"""The hook points inside a block, as presets for `names_filter` and for `read`; the catalogue is hooks/README.md."""

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

RESID = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
CODES = ("attn.hook_u", "mlp.hook_post")
PATTERN = ("attn.hook_pattern",)
ATTENTION = ("attn.hook_u", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")


def full_name(point: str, layer: int, blocks: str = "blocks") -> str:
    """The name of a block's point in the whole model: `full_name("attn.hook_u", 3)` is "blocks.3.attn.hook_u"."""
    return f"{blocks}.{layer}.{point}"


def every_layer(
    model: nn.Module,
    points: str | Sequence[str],
    layers: Iterable[int] | None = None,
    blocks: str = "blocks",
) -> list[str]:
    """The full names of `points` in all layers (or in `layers`), a list that `names_filter` takes.

    `model.run_with_cache(x, names_filter=every_layer(model, RESID))`. blocks: the list of layers, "decoder_blocks" for the
    decoder of a masked autoencoder. Raises KeyError for a point the model lacks.
    """
    wanted = [points] if isinstance(points, str) else list(points)
    try:
        indices = (
            range(len(list(model.get_submodule(blocks).children())))
            if layers is None
            else list(layers)
        )
    except AttributeError:
        raise KeyError(
            f"the model has no {blocks} of its own: give one of its towers, such as model.visual."
        ) from None
    names = [full_name(point, layer, blocks) for layer in indices for point in wanted]
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError:
            near = difflib.get_close_matches(
                name, [known for known, _ in model.named_modules()], n=3
            )
            hint = (
                f"Did you mean {', '.join(near)}?"
                if near
                else "Its points are listed by model.hook_dict."
            )
            raise KeyError(f"the model has no hook point {name!r}. {hint}") from None
    return names
