"""Autoencoders on hook points: what one is, how to load one, and one pass through it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from crate_interp.checkpoints import hub, sources
from crate_interp.checkpoints.load import load as load_any
from crate_interp.checkpoints.model_folders import SAELENS_CONFIG, SAELENS_WEIGHTS
from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel
from crate_interp.models.sae import SparseAutoencoder

# the points added to a spliced point, with SAELens' names
INPUT, ACTS, RECONS = "hook_sae_input", "hook_sae_acts_post", "hook_sae_recons"
ERROR, OUTPUT = "hook_sae_error", "hook_sae_output"
Model = HookedRootModule


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


def load(
    source: str | Path,
    *,
    hook_name: str | None = None,
    scaling_factor: float | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> SparseAutoencoder:
    """Loads a sparse autoencoder in eval mode.

    SAELens' architectures standard, topk, jumprelu, gated, batchtopk and matryoshka_batchtopk can
    be loaded, in the layouts before and since version 6. Nothing in a file is executed.

    Args:
        source: A folder in SAELens' format (cfg.json, sae_weights.safetensors); "owner/repo/folder"
            or "owner/repo" on the Hub with these two files; or anything that `ci.load` takes for
            family "sae".
        hook_name: The point that the autoencoder reads, instead of the config's; it is needed if
            the config has none.
        scaling_factor: The number that multiplies activations before encoding (and divides them
            after decoding), for autoencoders that need it (`normalize_activations`
            "expected_average_only_in").
        revision: As in `ci.load`; the same holds for device, cache_dir, local_files_only and token.
        device: Where the autoencoder is put.
        dtype: The dtype of the parameters. Default: float32.
        cache_dir: The folder of downloads.
        local_files_only: Download nothing.
        token: Your token of the Hub, for repos that are not public.

    Raises:
        CheckpointError: For an unknown architecture or option, and for any defect of a file.
    """
    options: Any = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
    config = {"hook_name": hook_name, "scaling_factor": scaling_factor}
    config = {name: value for name, value in config.items() if value is not None}
    path, parts = Path(source).expanduser(), str(source).split("/")
    local = path.is_absolute() or os.path.exists(path) or path.suffix in sources.WEIGHT_SUFFIXES
    if not local and len(parts) > 1 and all(parts):
        repo, folder = "/".join(parts[:2]), parts[2:]
        if folder or not hub.of_repo(repo):  # SAELens' format
            names = ["/".join([*folder, name]) for name in (SAELENS_CONFIG, SAELENS_WEIGHTS)]
            file = hub.fetch(repo, names[0], revision=revision, **options)
            # the commit of the config, since a branch may move in the meantime
            hub.fetch(repo, names[1], revision=file.parents[len(folder)].name, **options)
            source, revision = file.parent, None
    options |= config | {"revision": revision, "device": device, "dtype": dtype}
    return load_any(source, family="sae", **options)


def check_saes(model: Model, saes: Mapping[str, Coder]) -> None:
    """Raises ValueError or KeyError unless `saes` maps points of the model to autoencoders."""
    if not isinstance(saes, Mapping) or not saes:
        raise ValueError(f"saes is {checks.quote(saes)}: give a dictionary {{point: autoencoder}}.")
    for point, sae in saes.items():
        if isinstance(model, HookedModel):
            model.check_point(point)
        elif point not in model.hook_dict:
            hint = checks.did_you_mean(str(point), model.hook_dict, "See model.hook_dict.")
            raise KeyError(f"there is no hook point {checks.quote(point)}. {hint}")
        if not isinstance(sae, Coder):
            raise ValueError(f"the {type(sae).__name__} for {point!r} lacks encode or decode.")


def flat(sae: object, x: Tensor, point: str) -> Tensor:
    """Returns the activations at a point in the shape that an autoencoder reads.

    Heads `[batch, pos, head, d_head]` become `[batch, pos, head * d_head]`, unless the autoencoder
    reads one head at a time (its width, cfg.d_in or the first axis of W_enc, is d_head), or
    flattens them itself, as SAELens' autoencoders may. Raises ValueError, with both widths, if the
    autoencoder reads another width.
    """
    config, weight = getattr(sae, "cfg", None), getattr(sae, "W_enc", None)
    width = getattr(config, "d_in", weight.shape[0] if isinstance(weight, Tensor) else None)
    if flattens(sae) or x.shape[-1] == width or (width is None and x.ndim != 4):
        return x
    if x.ndim == 4 and width in (None, x.shape[-2] * x.shape[-1]):
        return x.flatten(-2)
    of = checks.quote(getattr(config, "hook_name", None))
    size = f"{list(x.shape[2:])} wide, but the autoencoder reads {width}"
    raise ValueError(f"{point} is {size}: it was trained on {of}.")


def flattens(sae: object) -> bool:
    """Tells whether an autoencoder flattens heads itself."""
    return getattr(sae, "hook_z_reshaping_mode", False) is True


def prepared(sae: object, x: Tensor, point: str) -> Tensor:
    """Returns the activations at a point in the shape and dtype that an autoencoder reads."""
    read, weights = flat(sae, x, point), sae.parameters() if isinstance(sae, nn.Module) else ()
    first = next(iter(weights), x)
    return read.to(first.dtype) if first.is_floating_point() else read


def encoded(sae: Coder, x: Tensor, point: str) -> Float[Tensor, "*batch d_sae"]:
    """Returns the features of prepared activations.

    Raises ValueError unless encode returns one row of numbers for each row of x.
    """
    acts: Any = sae.encode(x)
    rows = x.shape[:-2] if flattens(sae) else x.shape[:-1]
    _check_shape("encode", acts, [*rows, "d_sae"], point)
    return acts


def decoded(sae: Coder, acts: Tensor, x: Tensor, point: str) -> Float[Tensor, "..."]:
    """Returns the reconstruction of x from its features, in the shape of x.

    Raises ValueError if decode returns another shape.
    """
    # to undo a normalisation, our autoencoders need x; other coders use what encode stored
    recons = sae.decode(acts, x) if isinstance(sae, SparseAutoencoder) else sae.decode(acts)
    _check_shape("decode", recons, [*x.shape], point)
    return recons


def _check_shape(method: str, value: Any, shape: list[Any], point: str) -> None:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    got = [*value.shape] if floats else type(value).__name__
    wanted = [*shape[:-1], *got[-1:]] if floats and shape[-1] == "d_sae" else shape
    if got != wanted:
        raise ValueError(f"{method} returned {got} at {point}: expected floats {shape}.")


def active(acts: Tensor) -> Tensor:
    """Returns which features are not 0."""
    return acts.to_dense() != 0 if acts.layout != torch.strided else acts != 0


@contextmanager
def spliced(model: Model, saes: Mapping[str, Coder], *, error: bool = False) -> Iterator[Model]:
    """Puts autoencoders in place of activations at hook points, while the context is open.

        point = "blocks.3.hook_resid_post"
        with ci.saes.spliced(model, {point: sae}, error=True):
            _, cache = model.run_with_cache(images)
            acts = cache[f"{point}.hook_sae_acts_post"]  # [batch, pos, feature]

    Each point gets further points, with SAELens' names, that can be cached and hooked:
    hook_sae_input, hook_sae_acts_post (features), hook_sae_recons (`decode(acts)`), hook_sae_error
    (only with `error`) and hook_sae_output. Hooks on features change the reconstruction and leave
    the error as it is. Hooks that were on the point before see x; later hooks see its replacement.

    Heads `[batch, pos, head, d_head]` are flattened, which is how SAELens' autoencoders read
    hook_z. Activations are cast to the dtype of a module's weights and back. Everything is removed
    when the context closes, also after an exception; contexts for different points can be nested.

    Args:
        model: A hooked model, of this library or TransformerLens'.
        saes: Autoencoders by the names of points.
        error: Whether the reconstruction error is added back, `decode(acts) + (x -
            decode(encode(x)))`, with the term in brackets as a constant. Then the model's answers
            stay the same bit for bit until a hook changes something. Without error, the
            reconstruction replaces the activation.

    Yields:
        The model.

    Raises:
        KeyError: For a point that the model does not have.
        ValueError: For an object without encode and decode, for a point that already has an
            autoencoder, and, in the forward, for a width, device or shape that is not the
            autoencoder's.
    """
    checks.flag("error", error)
    if not isinstance(model, HookedRootModule):
        raise ValueError(f"cannot splice into {type(model).__name__}: give a hooked model.")
    check_saes(model, saes)
    for point in saes:
        if isinstance(getattr(model.hook_dict[point], INPUT, None), HookPoint):
            raise ValueError(f"{point!r} already has an autoencoder: close its context first.")
    with ExitStack() as stack:
        for point, sae in saes.items():
            stack.enter_context(_at(model, point, sae, error))
        yield model


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
            point._modules.pop(part, None)
            model.hook_dict.pop(f"{name}.{part}", None)
            model.mod_dict.pop(f"{name}.{part}", None)


def _replace(point: nn.Module, _: object, x: Tensor, name: str, sae: Coder, error: bool) -> Tensor:
    """Returns the replacement of x at a point."""

    def hooked(part: str, value: Tensor) -> Tensor:
        return point.get_submodule(part)(value)

    x = hooked(INPUT, x)
    read = prepared(sae, x, name)
    constant, clean, change = x, torch.zeros(()), torch.zeros(())
    if error:
        constant = x.detach().clone()  # a hook may write into the tensor that it gets
        with torch.no_grad():
            # some autoencoders store during encode how decode is to undo a normalisation, so encode
            # runs before each decode
            clean = decoded(sae, encoded(sae, read, name), read, name).clone()
            lost = constant - clean.reshape(x.shape).to(x.dtype)
            change = hooked(ERROR, lost.clone()) - lost
    acts = hooked(ACTS, encoded(sae, read, name))
    recons = hooked(RECONS, decoded(sae, acts, read, name))
    if not error:
        return hooked(OUTPUT, recons.reshape(x.shape).to(x.dtype))
    # x plus the hooks' changes; without changes the added term is exactly 0: nothing is rounded
    changed = (recons - clean).reshape(x.shape).to(x.dtype)
    return hooked(OUTPUT, constant + changed + change)
