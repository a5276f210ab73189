"""Builds a model from the contents of a file: first its config, then its parameters."""

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints import native_format, sae_formats, trainer_files
from crate_interp.checkpoints.formats.tensor_files import Contents, check_dense, check_weights
from crate_interp.checkpoints.layouts import find_layout
from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes, check_depth
from crate_interp.config import FAMILIES, CrateConfig
from crate_interp.core.errors import CheckpointError
from crate_interp.models.autoencoder import HookedCrateMAE
from crate_interp.models.clip import HookedCrateCLIP, HookedTextTower
from crate_interp.models.language import HookedCrateLM
from crate_interp.models.sae import SAEConfig, SparseAutoencoder
from crate_interp.models.vision import HookedCrate

_MODELS = {
    "vision": HookedCrate,
    "mae": HookedCrateMAE,
    "text": HookedCrateLM,
    "clip": HookedCrateCLIP,
}
_TOWERS = {  # prefix of a tower's parameters -> the field with its number of layers
    "vision": {"": "n_layers", "cls_": "class_layers"},
    "mae": {"": "n_layers", "decoder_": "decoder_n_layers"},
    "text": {"": "n_layers"},
    "clip": {"visual.": "n_layers", "text.": "text_n_layers"},
}
# config, tensors in the shapes of the parameters, and a map from each key to its parameter
Parameters = tuple[CrateConfig | SAEConfig, dict[str, Tensor], dict[str, str]]
_HEAD = ("unembed.", "features.")  # beginnings of the parameters of a classifier's head
_PUBLISHED = (224, 224)  # the size of all published models: not a guess
_SHOWN = 12  # maximum number of keys to list on each side of a mismatch
_SMALL = 2**16  # maximum count of numbers in a tensor that a tolerant layout leaves out


def build(contents: Contents, dtype: torch.dtype) -> Any:
    """Returns the model of `contents`, in eval mode and in `dtype`; empties `contents`.

    No random number is drawn. Raises CheckpointError unless every key is used once, every parameter
    is filled, and each tensor has the shape of its parameter.
    """
    cfg, tensors, target_of = _parameters(contents)
    contents.tensors.clear()  # so that each tensor is released as soon as it is copied
    if isinstance(cfg, CrateConfig) and cfg.kind == "vision" and cfg.n_classes == 0:
        _leave_head_out(tensors, target_of, contents.where)
    named = {target_of[key]: key for key in tensors if key in target_of}  # parameter -> source key
    what = f"{contents.where} does not fit a {cfg.family} model"
    if isinstance(cfg, CrateConfig):
        what += f" of {cfg.n_layers} layers"
        for prefix, count in _TOWERS[cfg.kind].items():
            check_depth(named, re.escape(prefix) + r"blocks\.(\d+)\.", getattr(cfg, count))
    model = _on_meta(cfg, contents.where)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    _check_keys(tensors, target_of, wanted, what)
    check_weights(tensors, contents.where, dtype)
    _check_variances(named, tensors, contents.where)
    model.load_state_dict(_take(tensors, named, dtype, contents.owned), assign=True)
    return model.eval()


def _parameters(contents: Contents) -> Parameters:
    """Returns the config, the tensors, and the parameter that each key fills.

    Raises CheckpointError if the tensors belong to no known model, or contradict the config.
    """
    tensors, cfg = dict(contents.tensors), contents.cfg
    is_sae = contents.family is None and sae_formats.is_sae(contents)
    if isinstance(cfg, SAEConfig) or (cfg is None and (is_sae or contents.family == "sae")):
        cfg = sae_formats.config_of(contents)
    elif cfg is None:
        alone = [name for name in sae_formats.GIVEN_FIELDS if name in contents.given]
        if alone:
            raise CheckpointError(
                f"{alone[0]} is an option of sparse autoencoders only: leave it out, or give "
                "family='sae' if the file holds an autoencoder."
            )
        if not trainer_files.is_hooked(tensors):
            return _published_parameters(contents)
        cfg = trainer_files.config_of(contents)
    return cfg, tensors, {key: key for key in tensors}


def _published_parameters(contents: Contents) -> Parameters:
    """Returns the same three values as `_parameters`, for a file in a published layout."""
    where = contents.where
    for key, value in contents.tensors.items():
        check_dense(key, value, where)
    shapes = Shapes({key: tuple(value.shape) for key, value in contents.tensors.items()})
    layout = find_layout(shapes, contents.family, where)
    tensors = layout.with_originals(contents.tensors)
    shapes |= {key: tuple(value.shape) for key, value in tensors.items()}
    cfg = _config(layout, shapes, contents)
    tensors = layout.as_parameters(tensors)
    counts = {name: getattr(cfg, name) for name in _TOWERS[cfg.kind].values()}
    target_of = layout.key_map(counts)
    if layout.tolerant:
        _leave_out(tensors, target_of, where)
    for key, value in layout.optional.items():
        tensors.setdefault(key, torch.full((cfg.n_layers,), value))
    return cfg, tensors, target_of


def _config(layout: Layout, shapes: Shapes, contents: Contents) -> CrateConfig:
    """Returns the config of a file in a published layout.

    A field has the value of the first source that gives one: the caller, the registry, the file's
    own config, the shapes of the tensors, the default. Raises CheckpointError if the file's config
    contradicts the caller or the registry in a field that decides the shapes of tensors.
    """
    checked = CrateConfig.classes[FAMILIES[layout.family]["kind"]].checked_values
    row, where = contents.row or {}, contents.where
    told = contents.config | (contents.namespace if layout.namespace else {})
    given, in_file = checked(contents.given), checked(layout.translate(told))
    for name, value in in_file.items():
        if name not in native_format.STRUCTURE:
            continue
        if given.get(name, value) != value:
            raise CheckpointError(
                f"{name}={given[name]!r} contradicts the config in {where}, which says {value!r}."
            )
        if name not in given and row.get(name, value) != value:
            raise CheckpointError(
                f"the config in {where} says {name}={value!r}, but the table of models says "
                f"{row[name]!r}."
            )
    known = {**in_file, **checked(row), **given}
    if layout.any_size and "crop" in given and "image_size" not in given:
        known["image_size"] = given["crop"]  # what the model will see says more than a default
    inferred = layout.infer_config(shapes, known, where)
    if row or inferred.get("image_size") == _PUBLISHED:
        inferred.pop("grid_guessed", None)
    values = {**layout.defaults, **inferred, **known}
    cfg = CrateConfig(
        family=layout.family, **values | _output_matrix(layout, shapes, values, where)
    )
    if contents.row is None:
        cfg.assume({**inferred, **known})
    return cfg


def _output_matrix(layout: Layout, shapes: Shapes, values: Fields, where: str) -> Fields:
    """Returns {"output_matrix": True} if the file has an output matrix but the default has none.

    Otherwise returns {}. With one head as wide as the residual stream, the torch code has no output
    matrix, but the JAX code has one.
    """
    outputs = [
        layout.source_of("attn.out_proj.weight", layer) for layer in range(values["n_layers"])
    ]
    has_output = any(key in shapes for key in outputs)
    whole_stream = values["n_heads"] == 1 and values["d_head"] == values["d_model"]
    open_variant = layout.family in ("crate", "crate-alpha") and "variant" not in values
    if open_variant and not has_output and not whole_stream:
        raise CheckpointError(
            f"variant cannot be inferred from {where}: the file has no output matrix "
            f"({outputs[0]}), so its variant is one of c, n, t, identity. "
            "Give the variant: ci.load(..., variant='c')."
        )
    own = values.get("variant", "crate") in ("crate", "fix")
    told = whole_stream and has_output and own and "output_matrix" not in values
    return {"output_matrix": True} if told else {}


def _leave_out(tensors: dict[str, Tensor], target_of: dict[str, str], where: str) -> None:
    # unknown keys of a known module are not left out: they would change the module's output
    ours = {key.split(".")[0] for key in target_of}
    small = [
        key
        for key, value in tensors.items()
        if key not in target_of and value.numel() <= _SMALL and key.split(".")[0] not in ours
    ]
    if small:
        warnings.warn(
            f"{where}: {len(small)} small tensors that no published code describes are left out: "
            f"{', '.join(small[:8])}.",
            stacklevel=2,
        )
    for key in small:
        del tensors[key]


def _leave_head_out(tensors: dict[str, Tensor], target_of: dict[str, str], where: str) -> None:
    head = [key for key in tensors if target_of.get(key, "").startswith(_HEAD)]
    if head:
        warnings.warn(f"{where}: the head is left out: {', '.join(head)}.", stacklevel=2)
    for key in head:
        del tensors[key]


def _check_keys(
    tensors: dict[str, Tensor],
    target_of: dict[str, str],
    wanted: dict[str, tuple[int, ...]],
    what: str,
) -> None:
    """Raises one CheckpointError for all surplus keys, missing keys and wrong shapes.

    wanted: the shape of each parameter. what: the beginning of the error's text.
    """
    key_of = {target: key for key, target in target_of.items()}
    filled = {target_of[key]: key for key in tensors if key in target_of}
    unused = [key for key in tensors if target_of.get(key) not in wanted]
    missing = [
        f"{key_of.get(name, name)} {list(shape)}"
        for name, shape in wanted.items()
        if name not in filled
    ]
    wrong = [
        f"{key} is {list(tensors[key].shape)}; expected {list(wanted[name])}"
        for name, key in filled.items()
        if name in wanted and tuple(tensors[key].shape) != wanted[name]
    ]
    sides = (("keys not used", unused), ("keys missing", missing), ("wrong shapes", wrong))
    listed = [
        f"{title} ({len(keys)}): {', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        for title, keys in sides
        if keys
    ]
    if listed:
        raise CheckpointError(f"{what}. {'; '.join(listed)}.")


def _check_variances(named: dict[str, str], tensors: dict[str, Tensor], where: str) -> None:
    """Raises CheckpointError for a batch norm with a variance below 0."""
    for parameter, key in named.items():
        if parameter.endswith("running_var") and bool((tensors[key] < 0).any()):
            least = float(tensors[key].min())
            raise CheckpointError(f"{where}: {key} holds {least:g}, but no variance is below 0.")


def _on_meta(cfg: CrateConfig | SAEConfig, where: str) -> Any:
    """Returns the model on the meta device.

    Raises CheckpointError if the model is too large for any memory.
    """
    try:
        with torch.device("meta"):
            if isinstance(cfg, SAEConfig):
                return SparseAutoencoder(cfg)
            return HookedTextTower(cfg) if cfg.family == "clipa-text" else _MODELS[cfg.kind](cfg)
    except (RuntimeError, TypeError, OverflowError):  # the product of some sizes is too large
        raise CheckpointError(
            f"the config of {where} describes a model that is too large for any memory."
        ) from None


def _take(
    tensors: dict[str, Tensor], named: dict[str, str], dtype: torch.dtype, owned: bool
) -> dict[str, Tensor]:
    """Returns the parameters by name, each in memory of its own.

    Releases each source tensor before taking the next one.
    """
    weights, places = {}, set()
    for name, key in named.items():
        value = tensors.pop(key).detach()
        place = value.untyped_storage().data_ptr()
        taken = value.to("cpu", dtype, copy=not owned or place in places).contiguous()
        if taken.untyped_storage().nbytes() > taken.nbytes:
            taken = taken.clone()  # a view would keep the whole larger tensor in memory
        places.add(taken.untyped_storage().data_ptr())
        weights[name] = taken
    return weights
