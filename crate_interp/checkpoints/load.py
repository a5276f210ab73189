"""ci.load: a hooked model from a file, a folder, a name, a repo on the Hub or a state dict.

Loading takes three steps. sources.py reads the source that the caller gave: a Source becomes
Contents. build.py makes a model of the Contents, in the wanted dtype. Then the model is moved to
the device.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints.build import build, parts_of
from crate_interp.checkpoints.model_folders import GivenConfig, fields_of
from crate_interp.checkpoints.read_weights import DTYPES
from crate_interp.checkpoints.sae_formats import GIVEN_FIELDS
from crate_interp.checkpoints.sources import Given, Source, attach, contents_of
from crate_interp.checkpoints.state_dicts import WEIGHTS_TO_TAKE, LeftOutWarning, Rename
from crate_interp.config import CrateConfig, check_names
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.core.folders import is_free, locked
from crate_interp.core.run_options import note
from crate_interp.core.safe_text import plain
from crate_interp.models.saving import CONFIG, save


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

        model = ci.load("crate-tiny-fashion")
        model = ci.load("run/last.pth", eta=0.1)  # a field that the file does not tell

    A wrapper's words in the keys, and one prefix before all keys, are removed. Loading is strict:
    every key is used once, or a warning says that the model does not contain it; every parameter is
    filled, shapes are equal, and a file in the table of models must have the digest listed there.
    Nothing in a file is executed.

    Args:
        source: The first of these that fits: an existing file in a published layout (torch,
            safetensors or npz), a folder made by save_pretrained, or a folder of several files with
            their index; a name in ci.list_models(); "owner/repo" on the Hub; a state dict or module
            in a published layout.
        family: "crate", "crate-alpha", "crate-mae", "crate-lm", "gpt-baseline", "nanochat-crate",
            "clipa", or "sae" for a sparse autoencoder. Default: the keys of the tensors decide.
        file: The file to load, if a repo on the Hub has several.
        revision: A branch, tag or commit on the Hub, or "step-N" for an embedded model, or for a
            folder that has steps/step-N.safetensors. Default: the one in the table of models.
        device: Where the model is put, such as "cuda".
        dtype: The dtype of the parameters. Default: float32.
        cache_dir: The folder of downloads, as in huggingface_hub.
        local_files_only: Download nothing.
        token: Your token of the Hub, for repos that are not public.
        config: All fields at once, as a CrateConfig, a dict or the path of a config.json. It is
            needed for tensors that have a hooked model's own names but no config.json of ours next
            to them: the state dict of a hooked model, a Lightning checkpoint (under any attribute),
            or the folder of a Hugging Face Trainer, from which the last checkpoint-N is loaded.
        rename: For a file or state dict of a fork, a function from a key to the published key. If
            it returns None for a key, the tensor is left out. Or a text as in sed, such as
            r"s/^net\.//".
        weights: "ema" for the averaged weights of a training that saved plain ones beside them.
        head: False gives an image classifier without its head, also if the file has none. Such a
            model returns features `[batch, d_model]`, and its config has n_classes=0.
        fields: Any field of a CrateConfig. It takes precedence over the table of models, the file's
            own config and the shapes of the tensors. Shapes do not reveal `n_heads` (except in npz
            files), nor `variant` if there is no output matrix.

    Returns:
        The model, whose class is that of its kind, such as HookedCrate or HookedCrateLM.

    Raises:
        CheckpointError: For anything that is wrong with a source or an argument.
    """
    dtype = dtype or torch.float32
    place = _checked_arguments(source, dtype, device)
    fields |= {} if checks.flag("head", head) else {"n_classes": 0}
    net = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
    wanted = Source(source, family, file, revision, rename, fields, net, weights)
    try:
        return _load(wanted, config, dtype).to(place)
    except CheckpointError:
        raise
    except ValueError as error:  # the tensors allow such a config, but CrateConfig does not
        raise CheckpointError(str(error)) from None
    except (RuntimeError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{wanted.name} cannot be loaded: {error}") from error


def _checked_arguments(source: object, dtype: object, device: Any) -> torch.device:
    """Returns the device; raises CheckpointError for an argument that cannot be used."""
    if not isinstance(source, (str, Path, Mapping, torch.nn.Module)) or source == "":
        wanted = "give a file, a folder, a name of ci.list_models(), or a state dict."
        raise CheckpointError(f"cannot load {source!r}: {wanted}")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype!r}: give a floating torch dtype, as torch.float32.")
    try:
        torch.empty(1, device=device).cpu()  # raises where there is no such device, or no numbers
        return torch.device(device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        ways = "give 'cpu', 'cuda' or 'cuda:1'."
        if not torch.cuda.is_available():
            ways = f"torch {torch.__version__} sees no GPU here: give 'cpu'."
        raise CheckpointError(f"torch cannot compute on device={device!r}: {ways}") from None


def _load(source: Source, config: GivenConfig | None, dtype: torch.dtype) -> Any:
    """Returns the model of a source, and says what of it is left out, guessed or assumed."""
    if source.weights is not None:
        checks.one_of("weights", source.weights, WEIGHTS_TO_TAKE)
    check_names({name: 0 for name in source.fields if name not in GIVEN_FIELDS})
    if config is not None:
        fields = fields_of(config, source.fields, source.family)
        source = replace(source, family=fields.pop("family"), fields=fields)
    contents = contents_of(source)
    left_out = "; ".join(contents.notes)
    try:
        model = build(contents, dtype)
    except CheckpointError as error:
        before = f" Before that, {left_out}." if left_out else ""
        raise CheckpointError(f"{error}{before}") from None
    if left_out:
        warnings.warn(f"{contents.where}: {left_out}.", LeftOutWarning, stacklevel=3)
    model = attach(model, contents.folder, source.hub)
    cfg, name = model.cfg, plain(source.name, 200)
    if getattr(cfg, "grid_guessed", False):
        note(f"{name}: image_size={cfg.image_size} is a guess: give image_size if it is another.")
    values = {field: getattr(cfg, field) for field in getattr(cfg, "assumed", ())}
    if values:
        listed = ", ".join(f"no {x}" if one is None else f"{x} {one}" for x, one in values.items())
        first = next(iter(values))
        note(
            f"{name}: assumed {listed} (published defaults). Give what you trained otherwise, "
            f"such as ci.load(..., {first}={values[first]!r})."
        )
    return model


def convert(source: Given, folder: str | Path, **options: Any) -> Any:
    """Loads a checkpoint, writes it as a new folder that `ci.load` reads, and returns the model.

    The folder holds model.safetensors, config.json and a model card; after an interrupt there is no
    folder. If the model has no `model_name`, the folder's name becomes its name, which pages and
    tables show.

    Args:
        source: As in `ci.load`.
        folder: The new folder.
        options: Those of `ci.load`.

    Raises:
        ValueError: Before work starts, if the folder already exists or cannot be written.
        CheckpointError: As `ci.load` does.
    """
    folder = Path(folder)
    if not is_free(folder, CONFIG):  # unfinished files of a process that died do not count
        raise ValueError(f"{str(folder)!r} exists already: give a new folder, or remove it.")
    with locked(folder):
        model = load(source, **options)
        if isinstance(model.cfg, CrateConfig) and model.cfg.model_name is None:
            model.cfg.set_model_name(plain(folder.resolve().name))
        save(model, folder)
    return model


def inspect_lines(source: Source) -> Iterator[str]:
    """Yields the lines that `crate-interp inspect` prints.

    A setting is "assumed" if no tensor and no file gives it, so that a published default stands for
    it. Raises CheckpointError if the source cannot be read, or, after the settings, if its keys do
    not fit the model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contents = contents_of(source)
        parts = parts_of(contents)
        cfg = parts.cfg
        numbers = sum(value.numel() for value in parts.tensors.values())
        yield plain(contents.where)
        yield f"layout: {parts.layout}"
        yield f"tensors: {len(parts.tensors)}, with {numbers:,} numbers"
        yield "settings:"
        for name, value in cfg.to_dict().items():
            if name in ("assumed", "grid_guessed") or value is None:
                continue
            found = (origin for origin, settings in parts.origins.items() if name in settings)
            origin = next(found, "published default")
            if name in getattr(cfg, "assumed", ()):
                origin = "assumed: published default"
            elif name == "image_size" and getattr(cfg, "grid_guessed", False):
                origin = "a guess: the number of patches is a square"
            yield f"  {name} = {json.dumps(value)}  ({origin})"
        notes = contents.notes
        build(contents, torch.float32)  # raises unless every key has its place
    texts = dict.fromkeys([*notes, *(str(one.message) for one in caught)])
    yield "left out:"
    yield from (f"  {plain(text)}" for text in texts or ["nothing"])
