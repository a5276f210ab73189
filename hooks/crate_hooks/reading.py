"""Reads activations while the model runs, and keeps only the results of a function on them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from torch import Tensor, nn

from crate_hooks.names import every_layer, full_name, layer_numbers

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

    points: names inside a block, such as ("hook_resid_pre", "attn.hook_pattern"). blocks: the name
    of the list of layers, "decoder_blocks" for the decoder of a masked autoencoder.
    `function(layer, acts)` is called once per forward and layer, as soon as the last of the points
    has fired, with `acts[point]` detached; then the tensors are released. Do not keep or edit them:
    they are the model's own, not copies. Yields `{layer: result of function}`, which each forward
    overwrites.

    The hooks only read. They are removed when the context closes, also after an exception; other
    hooks on the model stay. Forwards of other threads are not read.

    Raises ValueError if there are no points, and KeyError if the model lacks a point. When the
    context closes without an exception, raises RuntimeError if a layer fired some of its points but
    not all.
    """
    wanted = (points,) if isinstance(points, str) else tuple(dict.fromkeys(points))
    if not wanted:
        raise ValueError("read needs at least one hook point, such as 'hook_resid_pre'.")
    indices = layer_numbers(model, blocks) if layers is None else list(layers)
    every_layer(model, wanted, indices, blocks)  # raises KeyError before any hook is set
    results: dict[int, Result] = {}
    waiting: dict[int, dict[str, Tensor]] = {layer: {} for layer in indices}

    reader = get_ident()

    def collect(module: nn.Module, inputs: Any, output: Tensor, layer: int, point: str) -> None:
        if get_ident() != reader:  # another thread runs the same model
            return
        acts = waiting[layer]
        acts[point] = output.detach()
        if len(acts) == len(wanted):
            waiting[layer] = {}
            results[layer] = function(layer, acts)

    handles = [
        model.get_submodule(full_name(point, layer, blocks)).register_forward_hook(
            partial(collect, layer=layer, point=point)
        )
        for layer in indices
        for point in wanted
    ]
    try:
        yield results
        _check_complete(waiting, wanted)
    finally:
        for handle in handles:
            handle.remove()


def _check_complete(waiting: dict[int, dict[str, Tensor]], wanted: tuple[str, ...]) -> None:
    """Raises RuntimeError if a layer fired some of its points but not all."""
    for layer, acts in waiting.items():
        if acts:
            missing = [point for point in wanted if point not in acts]
            raise RuntimeError(
                f"layer {layer} fired {', '.join(acts)} but not {', '.join(missing)}: switch the "
                "missing points on, for example with model.set_use_attn_result(True)."
            )
