"""Read activations while the model runs, keeping what a function makes of them instead of the activations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from crate_hooks.names import every_layer, full_name


@contextmanager
def read(
    model: nn.Module,
    points: str | Sequence[str],
    function: Callable[[int, dict[str, Tensor]], Any],
    layers: Sequence[int] | None = None,
    blocks: str = "blocks",
) -> Iterator[dict[int, Any]]:
    """While the context is open, hands each layer's activations to `function` and keeps what it returns.

    points: names inside a block, such as ("hook_resid_pre", "attn.hook_pattern"). `function(layer, acts)` is called
    once per forward and layer, as soon as the last of the points has fired, with `acts[point]` detached; then the
    tensors are let go. blocks: the list of layers, "decoder_blocks" for the decoder of a masked autoencoder. Yields
    `{layer: what function returned}`, filled by the forward, overwritten by the next one.

    The hooks are read-only and are gone when the context closes, also after an exception; hooks that were on the
    model before stay. Forwards of other threads are not read. Do not keep or edit the tensors of
    `acts`: they are the model's own, not copies.

        with read(model, ["mlp.hook_post"], lambda layer, acts: (acts["mlp.hook_post"] == 0).float().mean()) as zeros:
            model(images)
        zeros[0]

    Raises ValueError for no points, KeyError for a point the model lacks; on leaving without an exception,
    RuntimeError for a layer that fired some of its points but never all.
    """
    wanted = (points,) if isinstance(points, str) else tuple(dict.fromkeys(points))
    if not wanted:
        raise ValueError("read needs at least one hook point, such as 'hook_resid_pre'.")
    indices = (
        list(range(len(list(model.get_submodule(blocks).children()))))
        if layers is None
        else list(layers)
    )
    every_layer(model, wanted, indices, blocks)  # KeyError before any hook is set
    results: dict[int, Any] = {}
    waiting: dict[int, dict[str, Tensor]] = {layer: {} for layer in indices}

    reader = get_ident()

    def collect(module: nn.Module, inputs: Any, output: Tensor, layer: int, point: str) -> None:
        if get_ident() != reader:  # a forward of the same model in another thread is not ours
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
    for layer, acts in waiting.items():
        if acts:
            missing = [point for point in wanted if point not in acts]
            raise RuntimeError(
                f"layer {layer} fired {', '.join(acts)} but not {', '.join(missing)}: "
                "a point may need a switch, such as model.set_use_attn_result(True)."
            )
