"""Coders, which are objects with encode and decode, and one pass through a coder."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.core import checks
from crate_interp.models.sae import SparseAutoencoder


@runtime_checkable
class Coder(Protocol):
    """Encodes activations `[..., d_in]` as features `[..., d_sae]`, and decodes features.

    Examples are the autoencoders of `ci.saes.load`, SAELens' objects, and modules of your own.
    """

    def encode(self, x: Tensor, /) -> Tensor:
        """Returns the features of activations."""
        ...

    def decode(self, acts: Tensor, /) -> Tensor:
        """Returns the activations reconstructed from features."""
        ...


def check_coder(sae: object, point: str) -> None:
    """Raises ValueError unless an object has the methods encode and decode."""
    lacking = [name for name in ("encode", "decode") if not callable(getattr(sae, name, None))]
    if lacking:
        raise ValueError(
            f"the {type(sae).__name__} given for {point!r} has no "
            f"{' and no '.join(lacking)}: give an autoencoder with encode(x) and decode(acts), "
            "such as ci.saes.load returns."
        )


def width_of(sae: object) -> int | None:
    """Returns the width of the activations that an autoencoder reads, or None if it does not say.

    It is `cfg.d_in`, or the first axis of `W_enc`.
    """
    said = getattr(getattr(sae, "cfg", None), "d_in", None)
    if checks.is_int(said):
        return int(str(said))
    weight = getattr(sae, "W_enc", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


def flat(sae: object, x: Tensor, point: str) -> Tensor:
    """Returns the activations at a point in the shape that an autoencoder reads.

    Heads `[batch, pos, head, d_head]` become `[batch, pos, head * d_head]`, unless the autoencoder
    reads one head at a time (its width is d_head), or flattens them itself, as SAELens'
    autoencoders may. Raises ValueError, with both widths, if the autoencoder reads another width.
    """
    width, own = width_of(sae), getattr(sae, "hook_z_reshaping_mode", False) is True
    if own or x.shape[-1] == width or (width is None and x.ndim != 4):
        return x
    if x.ndim == 4 and width in (None, x.shape[-2] * x.shape[-1]):
        return x.flatten(-2)
    heads = f" (flat: {x.shape[-2] * x.shape[-1]})" if x.ndim == 4 else ""
    trained = getattr(getattr(sae, "cfg", None), "hook_name", None)
    where = f" It was trained on {checks.shown(trained)}." if isinstance(trained, str) else ""
    raise ValueError(
        f"{point} is {x.shape[-1]} wide{heads}, but the autoencoder reads {width}: check the point "
        f"and that the autoencoder belongs to this model.{where}"
    )


def matched(sae: object, x: Tensor) -> Tensor:
    """Returns activations in the dtype of a module's weights.

    Raises ValueError if the module is on another device.
    """
    weight = next(sae.parameters(), None) if isinstance(sae, nn.Module) else None
    if weight is None:
        return x
    if weight.device != x.device:
        raise ValueError(
            f"the autoencoder is on {weight.device}, the model on {x.device}: "
            f"use sae.to({str(x.device)!r})."
        )
    return x.to(weight.dtype) if weight.is_floating_point() else x


def encoded(sae: Coder, x: Tensor, point: str) -> Float[Tensor, "*batch d_sae"]:
    """Returns the features of activations that `flat` and `matched` have prepared.

    Raises ValueError unless encode returns one row of numbers for each row of x.
    """
    acts = sae.encode(x)
    rows = x.shape[:-2] if getattr(sae, "hook_z_reshaping_mode", False) is True else x.shape[:-1]
    _check_floats(acts, "encode", point)
    if acts.shape[:-1] != rows or not acts.shape[-1]:
        raise ValueError(
            f"encode returned {list(acts.shape)} for {list(x.shape)} at {point}: expected "
            f"{[*rows, 'd_sae']}."
        )
    return acts


def decoded(sae: Coder, acts: Tensor, x: Tensor, point: str) -> Float[Tensor, "..."]:
    """Returns the reconstruction of x from its features, in the shape of x.

    Raises ValueError if decode returns another shape.
    """
    # to undo a normalisation, our autoencoders need x; other coders use what encode stored
    recons = sae.decode(acts, x) if isinstance(sae, SparseAutoencoder) else sae.decode(acts)
    _check_floats(recons, "decode", point)
    if recons.shape != x.shape:
        raise ValueError(
            f"decode returned {list(recons.shape)} for {list(x.shape)} at {point}: expected the "
            "same shape."
        )
    return recons


def _check_floats(value: object, method: str, point: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 1:
        came = f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{method} returned {came} at {point}: expected a tensor of floats.")


def reconstructed(sae: Coder, x: Tensor, point: str) -> tuple[Tensor, Tensor]:
    """Returns features, and the reconstruction in the shape and dtype of x."""
    read = matched(sae, flat(sae, x, point))
    acts = encoded(sae, read, point)
    return acts, decoded(sae, acts, read, point).reshape(x.shape).to(x.dtype)


def active(acts: Tensor) -> Tensor:
    """Returns which features are not 0."""
    return acts.to_dense() != 0 if acts.layout != torch.strided else acts != 0
