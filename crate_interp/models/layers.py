"""Running a stack of layers from one to another."""

from typing import Any

from torch import Tensor


def layer_range(
    n_layers: int, start_at_layer: int | None, stop_at_layer: int | None
) -> tuple[int, int | None]:
    """The first layer and the one before which to stop (None: run to the end), negative ones counted from the end.

    ValueError where there is no such layer, or where the stop lies before the start.
    """
    start = 0 if start_at_layer is None else _layer(n_layers, start_at_layer, "start_at_layer")
    stop = None if stop_at_layer is None else _layer(n_layers, stop_at_layer, "stop_at_layer")
    if stop is not None and stop < start:
        raise ValueError(
            f"stop_at_layer={stop_at_layer} lies before start_at_layer={start_at_layer}."
        )
    return start, stop


def _layer(n_layers: int, layer: int, name: str) -> int:
    if not -n_layers <= layer <= n_layers:
        raise ValueError(
            f"{name}={layer}: the model has layers 0 to {n_layers - 1}; give {-n_layers} to {n_layers}."
        )
    return layer + n_layers if layer < 0 else layer


def check_stream(model: Any, z: Tensor) -> Tensor:
    """The stream that `start_at_layer` takes; ValueError where it is none."""
    if z.ndim != 3 or z.shape[2] != model.cfg.d_model:
        raise ValueError(
            f"start_at_layer takes the stream [batch, pos, {model.cfg.d_model}], got shape {tuple(z.shape)}."
        )
    return z
