"""Names of the hook points in a block, as presets for `names_filter` and for `read`.

hooks/README.md is the catalogue.
"""

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

RESID = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
CODES = ("attn.hook_u", "mlp.hook_post")
PATTERN = ("attn.hook_pattern",)
ATTENTION = ("attn.hook_u", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")


def full_name(point: str, layer: int, blocks: str = "blocks") -> str:
    """Returns the name of a block's point in the whole model.

    `full_name("attn.hook_u", 3)` is "blocks.3.attn.hook_u".
    """
    return f"{blocks}.{layer}.{point}"


def every_layer(
    model: nn.Module,
    points: str | Sequence[str],
    layers: Iterable[int] | None = None,
    blocks: str = "blocks",
) -> list[str]:
    """Returns the full names of `points` in all layers, or in `layers`, for `names_filter`.

        model.run_with_cache(x, names_filter=every_layer(model, RESID))

    blocks: the name of the list of layers, "decoder_blocks" for the decoder of a masked
    autoencoder. Raises KeyError if the model lacks the list or a point.
    """
    wanted = [points] if isinstance(points, str) else list(points)
    try:
        indices = layer_numbers(model, blocks) if layers is None else list(layers)
    except AttributeError:
        raise KeyError(
            f"the model itself has no {blocks}: give one of its towers, such as model.visual."
        ) from None
    names = [full_name(point, layer, blocks) for layer in indices for point in wanted]
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError:
            known = [module for module, _ in model.named_modules()]
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {', '.join(near)}?" if near else "model.hook_dict lists them all."
            raise KeyError(f"the model has no hook point {name!r}. {hint}") from None
    return names


def layer_numbers(model: nn.Module, blocks: str) -> list[int]:
    """Returns the numbers of all layers in the list of layers called `blocks`.

    Raises AttributeError if the model has no such list.
    """
    return list(range(len(list(model.get_submodule(blocks).children()))))
