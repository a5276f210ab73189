"""Running a stack of layers from one to another."""

from torch import Tensor

from crate_interp.models.hooked import HookedModel


def layer_range(
    n_layers: int, start_at_layer: int | None, stop_at_layer: int | None
) -> tuple[int, int | None]:
    """Returns the first layer and the one before which to stop; None is a run to the end.

    Negative layers count from the end. Raises ValueError for a layer that the model does not have,
    and for a stop before the start.
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
            f"{name}={layer}: the model has layers 0 to {n_layers - 1}; give {-n_layers} to "
            f"{n_layers}."
        )
    return layer + n_layers if layer < 0 else layer


def check_stream(model: HookedModel, z: Tensor) -> Tensor:
    """Returns the stream that `start_at_layer` takes.

    Raises ValueError for a tensor of another shape than `[batch, pos, d_model]`.
    """
    if z.ndim != 3 or z.shape[2] != model.cfg.d_model:
        raise ValueError(
            f"start_at_layer takes the stream [batch, pos, {model.cfg.d_model}], got shape "
            f"{tuple(z.shape)}."
        )
    return z
