"""spliced: a context with autoencoders at hook points; their features can be read and edited."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel
from crate_interp.saes.coders import Coder, check_coder, decoded, encoded, flat, matched

# the points added to a spliced point, with SAELens' names
INPUT, ACTS, RECONS = "hook_sae_input", "hook_sae_acts_post", "hook_sae_recons"
ERROR, OUTPUT = "hook_sae_error", "hook_sae_output"
Model = HookedRootModule


@contextmanager
def spliced(model: Model, saes: Mapping[str, Coder], *, error: bool = False) -> Iterator[Model]:
    """Puts autoencoders in place of activations at hook points, while the context is open.

        point = "blocks.3.hook_resid_post"
        with ci.saes.spliced(model, {point: sae}, error=True):
            _, cache = model.run_with_cache(images)
            acts = cache[f"{point}.hook_sae_acts_post"]  # [batch, pos, feature]

    saes: autoencoders by the names of points. error: whether the reconstruction error is added
    back, `decode(acts) + (x - decode(encode(x)))`, with the term in brackets as a constant. Then
    the model's answers stay the same bit for bit until a hook changes something. Without error,
    the reconstruction replaces the activation.

    Each point gets further points, with SAELens' names, that can be cached and hooked:
    hook_sae_input, hook_sae_acts_post (features), hook_sae_recons (`decode(acts)`), hook_sae_error
    (only with `error`) and hook_sae_output. Hooks on features change the reconstruction and leave
    the error as it is. Hooks that were on the point before see x; later hooks see its replacement.

    Heads `[batch, pos, head, d_head]` are flattened, which is how SAELens' autoencoders read
    hook_z. Activations are cast to the dtype of a module's weights and back. Everything is removed
    when the context closes, also after an exception; contexts for different points can be nested.

    Raises KeyError for a point that the model does not have. Raises ValueError for an object
    without encode and decode, for a point that already has an autoencoder, and, in the forward, for
    a width, device or shape that is not the autoencoder's.
    """
    checks.flag("error", error)
    if not isinstance(model, HookedRootModule):
        raise ValueError(
            f"cannot splice into {type(model).__name__}: give a hooked model, such as ci.load "
            "returns."
        )
    check_saes(model, saes)
    for point in saes:
        if isinstance(getattr(model.hook_dict[point], INPUT, None), HookPoint):
            raise ValueError(f"{point!r} already has an autoencoder: close its context first.")
    with ExitStack() as stack:
        for point, sae in saes.items():
            stack.enter_context(_at(model, point, sae, error))
        yield model


def check_saes(model: Model, saes: Mapping[str, Coder]) -> None:
    """Raises ValueError or KeyError unless `saes` maps points of the model to autoencoders."""
    if not isinstance(saes, Mapping) or not saes:
        raise ValueError(
            f"saes is {checks.shown(saes)}: give a dictionary from points to autoencoders, "
            "{'blocks.0.hook_resid_post': sae}."
        )
    for point, sae in saes.items():
        check_point(model, point)
        check_coder(sae, point)


def check_point(model: Model, point: str) -> None:
    """Raises KeyError, with the nearest names, if a model has no such hook point."""
    if isinstance(model, HookedModel):
        model.check_point(point)
    elif point not in model.hook_dict:
        hint = checks.did_you_mean(str(point), model.hook_dict, "See model.hook_dict.")
        raise KeyError(f"there is no hook point {checks.shown(point)}. {hint}")


@contextmanager
def _at(model: Model, name: str, sae: Coder, error: bool) -> Iterator[None]:
    """Splices one autoencoder into one point."""
    point: nn.Module = model.hook_dict[name]
    beside = [INPUT, ACTS, RECONS, *([ERROR] if error else []), OUTPUT]
    handle = point.register_forward_hook(partial(_replace, name=name, sae=sae, error=error))
    try:
        for part in beside:
            child = HookPoint()
            child.name = f"{name}.{part}"
            point.add_module(part, child)
            model.hook_dict[child.name] = child
            model.mod_dict[child.name] = child
        yield
    finally:
        handle.remove()
        for part in beside:
            if part in point._modules:
                delattr(point, part)
            model.hook_dict.pop(f"{name}.{part}", None)
            model.mod_dict.pop(f"{name}.{part}", None)


def _replace(
    point: nn.Module, given: object, x: Tensor, name: str, sae: Coder, error: bool
) -> Tensor:
    """Returns the replacement of x at a point."""
    x = _hooked(point, INPUT, x)
    read = matched(sae, flat(sae, x, name))
    if not error:
        acts = _hooked(point, ACTS, encoded(sae, read, name))
        recons = _hooked(point, RECONS, decoded(sae, acts, read, name))
        return _hooked(point, OUTPUT, recons.reshape(x.shape).to(x.dtype))
    constant = x.detach().clone()  # a hook may write into the tensor that it gets
    with torch.no_grad():
        # some autoencoders store during encode how decode is to undo a normalisation, so encode
        # runs before each decode
        clean = decoded(sae, encoded(sae, read, name), read, name).clone()
        lost = constant - clean.reshape(x.shape).to(x.dtype)
        change = _hooked(point, ERROR, lost.clone()) - lost
    acts = _hooked(point, ACTS, encoded(sae, read, name))
    recons = _hooked(point, RECONS, decoded(sae, acts, read, name))
    # x plus the hooks' changes; without changes the added term is exactly 0: nothing is rounded
    changed = (recons - clean).reshape(x.shape).to(x.dtype)
    return _hooked(point, OUTPUT, constant + changed + change)


def _hooked(point: nn.Module, part: str, value: Tensor) -> Tensor:
    return point.get_submodule(part)(value)
