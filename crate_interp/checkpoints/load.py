"""ci.load: a hooked model from a file, a folder, a name, a repo on the Hub or a state dict.

Loading takes three steps. sources.py reads the source that the caller gave: a Source becomes
Contents. build.py makes a model of the Contents, in the wanted dtype. Then the model is moved to
the device.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints.build import build
from crate_interp.checkpoints.read_weights import DTYPES, Contents
from crate_interp.checkpoints.renaming import Rename
from crate_interp.checkpoints.sae_formats import GIVEN_FIELDS
from crate_interp.checkpoints.sources import Given, Source, contents_of
from crate_interp.checkpoints.state_dicts import WEIGHTS_TO_TAKE, LeftOutWarning
from crate_interp.checkpoints.tokenizer_files import attach
from crate_interp.checkpoints.trainer_files import GivenConfig, fields_of
from crate_interp.config import CrateConfig, check_names
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.core.folders import locked
from crate_interp.core.progress import note
from crate_interp.core.safe_text import plain
from crate_interp.models.saving import check_new, save


def load(
    source: Given,
    *,
    family: str | None = None,
    file: str | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    config: GivenConfig | None = None,
    rename: Rename | str | None = None,
    weights: str | None = None,
    head: bool = True,
    **fields: Any,
) -> Any:
    r"""Loads a hooked model in eval mode from any source of its weights.

    source: the first of these that fits: an existing file in a published layout (torch,
    safetensors or npz), a folder made by save_pretrained, or a folder of several files with their
    index; a name in ci.list_models(); "owner/repo" on the Hub, with `file` if the repo has several;
    a state dict or module in a published layout.
    family: "crate", "crate-alpha", "crate-mae", "crate-lm", "gpt-baseline", "nanochat-crate",
    "clipa", or "sae" for a sparse autoencoder. None: the keys of the tensors decide.
    revision: a branch, tag or commit on the Hub (None: the one in the table of models), or
    "step-N" for an embedded model, or for a folder that has steps/step-N.safetensors.
    dtype: None is float32. cache_dir, local_files_only, token: as in huggingface_hub.
    fields: any field of a CrateConfig. It takes precedence over the table of models, the file's
    own config and the shapes of the tensors. Shapes do not reveal `n_heads` (except in npz files),
    nor `variant` if there is no output matrix.
    config: all fields at once, as a CrateConfig, a dict or the path of a config.json. It is needed
    for tensors that have a hooked model's own names but no config.json of ours next to them: the
    state dict of a hooked model, a Lightning checkpoint (under any attribute), or the folder of a
    Hugging Face Trainer, from which the last checkpoint-N is loaded.
    rename: for a file or state dict of a fork, a function from a key to the published key. If it
    returns None for a key, the tensor is left out. Or a text as in sed, such as r"s/^net\.//".
    weights: "ema" for the averaged weights of a training that saved plain ones beside them.
    head: False gives an image classifier without its head, also if the file has none. Such a model
    returns features `[batch, d_model]`, and its config has n_classes=0.

    A wrapper's words in the keys, and one prefix before all keys, are removed. Loading is strict:
    every key is used once, or a warning names it as no part of the model; every parameter is
    filled, shapes are equal, and a file in the table of models must have the digest listed there.
    Nothing in a file is executed. Raises CheckpointError for anything that is wrong with a source
    or an argument.
    """
    dtype = _checked_dtype(dtype)
    _check_source(source)
    place = _checked_device(device)
    fields = fields if head else _headless(head, fields)
    hub = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
    asked = Source(source, family, file, revision, rename, fields, hub, weights)
    model = _load(asked, config, dtype)
    try:
        return model.to(place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(f"device={str(place)!r} cannot take the model: {error}") from None


def _load(source: Source, config: GivenConfig | None, dtype: torch.dtype) -> Any:
    """Returns the model of a source; every failure becomes a CheckpointError."""
    try:
        if source.weights is not None:
            checks.one_of("weights", source.weights, WEIGHTS_TO_TAKE)
        check_names({name: 0 for name in source.fields if name not in GIVEN_FIELDS})
        if config is not None:
            fields = fields_of(config, source.fields, source.family)
            source = replace(source, family=fields.pop("family"), fields=fields)
        contents = contents_of(source)
        model = attach(_built(contents, dtype), contents.folder, source.hub)
        if getattr(model.cfg, "grid_guessed", False):
            note(
                f"{plain(source.name, 200)}: image_size={model.cfg.image_size} is a guess, because "
                "the number of patches is a square. Give image_size=(height, width) to make sure."
            )
        if getattr(model.cfg, "assumed", ()):
            note(f"{plain(source.name, 200)}: {_assumed(model.cfg)}")
        return model
    except CheckpointError:
        raise
    except ValueError as error:  # the tensors allow such a config, but CrateConfig does not
        raise CheckpointError(str(error)) from None
    except (RuntimeError, TypeError, AttributeError, OverflowError) as error:
        # caused by an argument or a tensor of an unexpected kind
        raise CheckpointError(f"{source.name} cannot be loaded: {error}") from error


def _assumed(cfg: CrateConfig) -> str:
    """Returns which settings only a default gave, and how to give them."""
    values = {name: getattr(cfg, name) for name in cfg.assumed}
    numbers = [f"{name} {value}" for name, value in values.items() if value is not None]
    absent = [name for name, value in values.items() if value is None]
    parts = [f"{', '.join(numbers)} (published defaults)"] * bool(numbers)
    parts += [f"no {', '.join(absent)}"] * bool(absent)
    example = f"{cfg.assumed[0]}={values[cfg.assumed[0]]!r}" if numbers else "mean=[...], std=[...]"
    return f"assumed {', '.join(parts)}. Give what you trained otherwise: ci.load(..., {example})."


def _built(contents: Contents, dtype: torch.dtype) -> Any:
    """Returns the model of `contents`, and says which tensors of the source are no part of it."""
    said = "; ".join(contents.notes)
    try:
        model = build(contents, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Before that, {said}." if said else str(error)) from None
    if said:
        warnings.warn(f"{contents.where}: {said}.", LeftOutWarning, stacklevel=4)
    return model


def _check_source(source: object) -> None:
    if not isinstance(source, (str, Path, Mapping, torch.nn.Module)) or source == "":
        raise CheckpointError(
            f"cannot load {source!r}: "
            "give a file, a folder, a name of ci.list_models(), or a state dict."
        )


def _headless(head: object, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model without a head."""
    if head is not False or fields.get("n_classes", 0) != 0:
        raise CheckpointError(
            f"head={head!r} with n_classes={fields.get('n_classes')!r}: give head=False, without "
            "n_classes, to leave the classifier's head out."
        )
    return fields | {"n_classes": 0}


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in DTYPES:
        raise CheckpointError(
            f"dtype={dtype!r}: give a floating torch dtype, such as torch.float32."
        )
    return dtype


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type == "meta":
        raise CheckpointError(
            f"device={device!r} is not a device that torch can compute on: "
            "give 'cpu', 'cuda' or 'cuda:1'."
        )
    return place


def convert(source: Given, folder: str | Path, **options: Any) -> Any:
    """Loads a checkpoint, writes it as a new folder that `ci.load` reads, and returns the model.

    options: those of `ci.load`. The folder holds model.safetensors, config.json and a model card;
    after an interrupt there is no folder. If the model has no `model_name`, the folder's name
    becomes its name, which pages and tables show. Raises ValueError, before work starts, if the
    folder already exists or cannot be written, and CheckpointError as `ci.load` does.
    """
    folder = Path(folder)
    check_new(folder)
    with locked(folder):
        model = load(source, **options)
        if isinstance(model.cfg, CrateConfig) and model.cfg.model_name is None:
            model.cfg.set_model_name(plain(folder.resolve().name))
        save(model, folder)
    return model
