"""ci.load: a hooked model from a file, a folder, a name, a repo on the Hub or a state dict.

Loading takes three steps. sources.py reads the source that the caller gave: a Source becomes
Contents. `build` makes a model of the Contents, in the wanted dtype. Then the model is moved to
the device.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from crate_interp.checkpoints import model_folders
from crate_interp.checkpoints.layouts import find_layout
from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes
from crate_interp.checkpoints.read_weights import DTYPES, Contents, check_dense, check_weights
from crate_interp.checkpoints.sources import Given, Source, attach, contents_of
from crate_interp.checkpoints.state_dicts import ANCHORS, WEIGHTS_TO_TAKE, LeftOutWarning, Rename
from crate_interp.config import FAMILIES, CrateConfig, check_names
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.core.folders import is_free, locked
from crate_interp.core.run_options import note, tqdm
from crate_interp.core.safe_text import plain
from crate_interp.models.autoencoder import HookedCrateMAE
from crate_interp.models.clip import HookedCrateCLIP, HookedTextTower
from crate_interp.models.language import HookedCrateLM
from crate_interp.models.redunet import ReduNet, ReduNetConfig
from crate_interp.models.sae import SAEConfig, SparseAutoencoder
from crate_interp.models.saving import CONFIG, save
from crate_interp.models.vision import HookedCrate

_MODELS = dict(vision=HookedCrate, mae=HookedCrateMAE, text=HookedCrateLM, clip=HookedCrateCLIP)
_HEAD = ("unembed.", "features.")  # beginnings of the parameters of a classifier's head
_PUBLISHED = (224, 224)  # the size of all published models: not a guess
_SHOWN = 12  # maximum number of keys to list on each side of a mismatch
_SHOWN_FROM = 2**28  # bytes; the bar is invisible for fewer
_SMALL = 2**16  # maximum count of numbers in a tensor that a tolerant layout leaves out
Origins = dict[str, Fields]  # where fields of a config come from -> these fields


@dataclass(frozen=True)
class Parts:
    """What a model is made of.

    layout: how the file names its weights. tensors: in the shapes of the parameters. target_of: the
    parameter that each key fills. origins: where settings can come from, each with the settings
    found there; the first that gives a setting decides.
    """

    layout: str
    cfg: CrateConfig | SAEConfig | ReduNetConfig
    tensors: dict[str, Tensor]
    target_of: dict[str, str]
    origins: Origins


def build(contents: Contents, dtype: torch.dtype) -> Any:
    """Returns the model of `contents`, in eval mode and in `dtype`; empties `contents`.

    No random number is drawn. Raises CheckpointError unless every key is used once, every parameter
    is filled, and each tensor has the shape of its parameter.
    """
    parts = parts_of(contents)
    cfg, tensors, target_of = parts.cfg, parts.tensors, parts.target_of
    contents.tensors.clear()  # so that each tensor is released as soon as it is copied
    what = f"{contents.where} does not fit a {cfg.family} model"
    kind: Any = ReduNet if isinstance(cfg, ReduNetConfig) else SparseAutoencoder
    if isinstance(cfg, CrateConfig):
        what += f" of {cfg.n_layers} layers"
        claimed = max(n for name, n in cfg.to_dict().items() if name.endswith("layers"))
        if claimed > len(tensors):  # before they are made
            raise CheckpointError(f"{what}: it has {len(tensors)} tensors, too few for {claimed}.")
        kind = HookedTextTower if cfg.family == "clipa-text" else _MODELS[cfg.kind]
        if cfg.kind == "vision" and cfg.n_classes == 0:
            head = [key for key in tensors if target_of.get(key, "").startswith(_HEAD)]
            _leave_out(tensors, head, f"{contents.where}: the head is left out")
    with torch.device("meta"), _Undrawn():
        model = kind(cfg)
    wanted = Shapes({name: tuple(one.shape) for name, one in model.state_dict().items()})
    _check_keys(tensors, target_of, wanted, what)
    check_weights(tensors, contents.where, dtype)
    named = {target_of[key]: key for key in tensors if key in target_of}  # parameter -> source key
    weights = {}
    title, total = f"reading {Path(contents.where).name}", sum(x.nbytes for x in tensors.values())
    shown = total >= _SHOWN_FROM
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not shown) as bar:
        for name, key in named.items():  # each in memory of its own
            value = tensors.pop(key).detach()
            weights[name] = torch.empty(value.shape, dtype=dtype, device="cpu").copy_(value)
            bar.update(value.nbytes)
    model.load_state_dict(weights, assign=True)
    return model.eval()


class _Undrawn(TorchFunctionMode):
    """Draws no random number, which on the meta device would first import sympy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.normal_, torch.nn.init.normal_):
            return args[0] if args else (kwargs or {})["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **(kwargs or {}))


def parts_of(contents: Contents) -> Parts:
    """Returns the config, the tensors, and the parameter that each key fills.

    Raises CheckpointError if the tensors belong to no known model, or contradict the config.
    """
    tensors, cfg = dict(contents.tensors), contents.cfg
    is_sae = contents.family is None and {"W_enc", "W_dec"} <= set(tensors)
    if isinstance(cfg, SAEConfig) or (cfg is None and (is_sae or contents.family == "sae")):
        cfg, layout = model_folders.config_of(contents), "sparse autoencoder"
    elif cfg is None:
        check_names(contents.given)  # not the options that only autoencoders have
        if not any(key.endswith(ANCHORS) for key in tensors):
            return _published_parts(contents)
        layout = "state dict of a hooked model"
        fields = model_folders.fields_of(None, contents.given, contents.family)
        if not {"family", "d_model", "n_layers"} <= set(fields):
            raise CheckpointError(
                f"{contents.where} has the names of a hooked model, but no config.json next to it: "
                "put it there, or give the config, ci.load(file, config=model.cfg)."
            )
        cfg = CrateConfig.from_dict(fields)
        cfg.assume(fields)
    else:
        layout = "folder saved by crate_interp"
    origins = {"argument": contents.given, "config": cfg.to_dict()}
    return Parts(layout, cfg, tensors, {key: key for key in tensors}, origins)


def _published_parts(contents: Contents) -> Parts:
    """Returns the parts of a model in a published layout."""
    where = contents.where
    for key, value in contents.tensors.items():
        check_dense(key, value, where)
    shapes = Shapes({key: tuple(value.shape) for key, value in contents.tensors.items()})
    layout = find_layout(shapes, contents.family, where)
    tensors = dict(contents.tensors)
    for copy, original in layout.copies.items():
        if copy in tensors:  # `safetensors.torch.save_model` keeps one key of a tensor
            tensors.setdefault(original, tensors[copy])
    shapes |= {key: tuple(value.shape) for key, value in tensors.items()}
    cfg, origins = _config(layout, shapes, contents)
    tensors = layout.as_parameters(tensors)
    target_of = layout.key_map({stack.count: getattr(cfg, stack.count) for stack in layout.stacks})
    if layout.tolerant:
        # unknown keys of a known module are not left out: they would change the module's output
        ours = {key.split(".")[0] for key in target_of}
        unknown = [key for key in tensors if key.split(".")[0] not in ours]
        small = [key for key in unknown if tensors[key].numel() <= _SMALL]
        _leave_out(tensors, small, f"{where}: {len(small)} small unknown tensors are left out")
    for key, value in layout.optional.items():
        tensors.setdefault(key, torch.full((cfg.n_layers,), value))
    words = f"{layout.family}, with the keys {', '.join(layout.markers)}"
    return Parts(words, cfg, tensors, target_of, origins)


def _config(layout: Layout, shapes: Shapes, contents: Contents) -> tuple[CrateConfig, Origins]:
    """Returns the config of a file in a published layout, and the origins of its settings.

    A field has the value of the first source that gives one: the caller, the registry, the file's
    own config, the shapes of the tensors, the default. Raises CheckpointError if the file's config
    contradicts the caller or the registry in a field that decides the shapes of tensors.
    """
    checked = CrateConfig.classes[FAMILIES[layout.family]["kind"]].checked_values
    row, where = contents.row or {}, contents.where
    told = contents.config | (contents.namespace if layout.namespace else {})
    given, in_file = checked(contents.given), checked(layout.translate(told))
    for name in in_file.keys() & set(model_folders.STRUCTURE):
        value, told = in_file[name], (row | given).get(name, in_file[name])
        if told != value:
            raise CheckpointError(f"{name}={told!r} contradicts {where}, which says {value!r}.")
    known = {**in_file, **checked(row), **given}
    if layout.any_size and "crop" in given and "image_size" not in given:
        known["image_size"] = given["crop"]  # what the model will see says more than a default
    inferred = layout.infer_config(shapes, known, where)
    if row or inferred.get("image_size") == _PUBLISHED:
        inferred.pop("grid_guessed", None)
    values = {**layout.defaults, **inferred, **known}
    # with one head that spans the stream, the torch code has no output matrix, the JAX code has one
    outputs = {layout.source_of("attn.out_proj.weight", n) for n in range(values["n_layers"])}
    whole_stream = values["n_heads"] == 1 and values["d_head"] == values["d_model"]
    usual = values.get("variant", "crate") in ("crate", "fix")
    if whole_stream and usual and outputs & {*shapes}:
        inferred["output_matrix"] = True
    cfg = CrateConfig(family=layout.family, **{**values, **inferred, **known})
    if contents.row is None:
        cfg.assume({**inferred, **known})
    origins = {
        "argument": given,
        "table of models": row,
        "file": in_file,
        "tensors": {"family": layout.family, **inferred},
        "layout": layout.defaults,
    }
    return cfg, origins


def _leave_out(tensors: dict[str, Tensor], keys: list[str], words: str) -> None:
    if keys:
        warnings.warn(f"{words}: {', '.join(keys[:8])}.", stacklevel=3)
    for key in keys:
        del tensors[key]


def _check_keys(
    tensors: dict[str, Tensor], target_of: dict[str, str], model_shapes: Shapes, what: str
) -> None:
    """Raises one CheckpointError for all surplus keys, missing keys and wrong shapes.

    model_shapes: the shape of each parameter. what: the beginning of the error's text.
    """
    key_of = {target: key for key, target in target_of.items()}
    shapes = {target_of[key]: tuple(tensors[key].shape) for key in tensors if key in target_of}
    sides = {
        "keys not used": [key for key in tensors if target_of.get(key) not in model_shapes],
        "keys missing": [
            f"{key_of.get(name, name)} {list(model_shapes[name])}"
            for name in model_shapes
            if name not in shapes
        ],
        "wrong shapes": [
            f"{key_of[name]} is {list(shapes[name])}; expected {list(shape)}"
            for name, shape in model_shapes.items()
            if shapes.get(name, shape) != shape
        ],
    }
    listed = [
        f"{title} ({len(keys)}): {', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        for title, keys in sides.items()
        if keys
    ]
    if listed:
        raise CheckpointError(f"{what}. {'; '.join(listed)}.")


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
    config: model_folders.GivenConfig | None = None,
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
            "clipa", "tost", "tost-lm", "tost-ista", "cbt", "crate-bert", or "sae" for a sparse
            autoencoder. Default: the keys of the tensors decide.
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


def _load(source: Source, config: model_folders.GivenConfig | None, dtype: torch.dtype) -> Any:
    """Returns the model of a source, and says what of it is left out, guessed or assumed."""
    if source.weights is not None:
        checks.one_of("weights", source.weights, WEIGHTS_TO_TAKE)
    check_names({name: 0 for name in source.fields if name not in model_folders.GIVEN_FIELDS})
    if config is not None:
        fields = model_folders.fields_of(config, source.fields, source.family)
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
