"""Names of the hook points in a block, as presets for `names_filter` and for `read`.

`read` takes activations while the model runs, and keeps only the results of a function on them.
hooks/README.md is the catalogue of points.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from torch import Tensor, nn

RESID = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
CODES = ("attn.hook_u", "mlp.hook_post")
PATTERN = ("attn.hook_pattern",)
ATTENTION = ("attn.hook_u", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")
MEMBERSHIP = ("attn.hook_pi", "attn.hook_moment", "attn.hook_weight")  # of ToST
CONTRACTION = (  # of CBT
    "attn.hook_rep", "attn.hook_contract", "attn.hook_rep_post", "attn.hook_rep_pattern",
)  # fmt: skip

# The axis of tokens, where it is not 1; None: the point has none. Patterns have one for queries.
_POSITION_AXES: dict[str, int | None] = {
    "hook_attn_scores": 2, "hook_pattern": 2, "hook_pi": 2, "hook_moment": 2, "hook_weight": 2,
    "hook_contract": 3, "hook_rep": None, "hook_rep_post": None, "hook_rep_pattern": None,
    "hook_pooled": None, "hook_features": None, "hook_mask": None, "hook_pred": None,
}  # fmt: skip
# the points [batch, head, ...]; all others with heads are [batch, any, head, ...]
HEADS_FIRST = (
    "hook_attn_scores", "hook_pattern", "hook_pi", "hook_moment", "hook_weight", "hook_contract",
    "hook_rep_pattern",
)  # fmt: skip


def position_axis(name: str) -> int | None:
    """Returns the axis of a point's activation that counts the tokens, or None if it has none.

    Points of ToST's class attention return None: their tokens are CLS and the patches, one more
    than in the stream.
    """
    if "cls_blocks." in name:
        return None
    return _POSITION_AXES.get(name.rsplit(".", 1)[-1], 1)


def full_name(point: str, layer: int, blocks: str = "blocks") -> str:
    """Returns the name of a block's point in the whole model.

    `full_name("attn.hook_u", 3)` is "blocks.3.attn.hook_u".

    Args:
        point: The point's name inside a block.
        layer: The block's number.
        blocks: The name of the list of layers.
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

    Args:
        model: The model.
        points: Names of points inside a block.
        layers: The numbers of the layers, None for all.
        blocks: The name of the list of layers, "decoder_blocks" for the decoder of a masked
            autoencoder.

    Raises:
        KeyError: If the model lacks the list or a point.
    """
    wanted = [points] if isinstance(points, str) else list(points)
    try:
        indices = layer_numbers(model, blocks) if layers is None else list(layers)
    except AttributeError:
        raise KeyError(f"the model has no {blocks}: give a tower, such as model.visual.") from None
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


Result = TypeVar("Result")


@contextmanager
def read(
    model: nn.Module,
    points: str | Sequence[str],
    function: Callable[[int, dict[str, Tensor]], Result],
    layers: Sequence[int] | None = None,
    blocks: str = "blocks",
) -> Iterator[dict[int, Result]]:
    """Calls a function on each layer's activations while the context is open; keeps the results.

        with read(model, ["attn.hook_z"], lambda layer, acts: acts["attn.hook_z"].norm()) as norms:
            model(images)
        norms[0]

    `read` holds the activations of one layer at a time; `run_with_cache` holds the activations of
    all layers. The hooks only read. They are removed when the context closes, also after an
    exception; other hooks on the model stay. Forwards of other threads are not read.

    Args:
        model: A model with hook points.
        points: Names inside a block, such as ("hook_resid_pre", "attn.hook_pattern").
        function: `function(layer, acts)` is called once per forward and layer, as soon as the last
            of the points has fired, with `acts[point]` detached, `[batch, ...]`; then the tensors
            are released. The function must not keep or edit them, because they are the model's
            tensors, not copies.
        layers: Numbers of the layers to read. Default: all.
        blocks: The name of the list of layers, "decoder_blocks" for the decoder of a masked
            autoencoder.

    Yields:
        `{layer: result of function}`, which each forward overwrites.

    Raises:
        ValueError: If there are no points.
        KeyError: If the model lacks a point.
        RuntimeError: When the context closes without an exception, if a layer fired some of its
            points but not all.
    """
    names = (points,) if isinstance(points, str) else tuple(dict.fromkeys(points))
    if not names:
        raise ValueError("read needs at least one hook point, such as 'hook_resid_pre'.")
    indices = layer_numbers(model, blocks) if layers is None else list(layers)
    every_layer(model, names, indices, blocks)  # raises KeyError before any hook is set
    results: dict[int, Result] = {}
    # the activations of a layer whose other points have not fired yet
    acts_of: dict[int, dict[str, Tensor]] = {layer: {} for layer in indices}

    reader = get_ident()

    def collect(module: nn.Module, inputs: Any, output: Tensor, layer: int, point: str) -> None:
        if get_ident() != reader:  # another thread runs the same model
            return
        acts = acts_of[layer]
        acts[point] = output.detach()
        if len(acts) == len(names):
            acts_of[layer] = {}
            results[layer] = function(layer, acts)

    handles = [
        model.get_submodule(full_name(point, layer, blocks)).register_forward_hook(
            partial(collect, layer=layer, point=point)
        )
        for layer in indices
        for point in names
    ]
    try:
        yield results
        for layer, acts in acts_of.items():
            if acts:
                missing = [point for point in names if point not in acts]
                raise RuntimeError(
                    f"layer {layer} fired {', '.join(acts)} but not {', '.join(missing)}: switch "
                    "the missing points on, for example with model.set_use_attn_result(True)."
                )
    finally:
        for handle in handles:
            handle.remove()
