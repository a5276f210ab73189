"""Builds a model from the contents of a file: first its config, then its parameters."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from crate_interp.checkpoints import model_folders, sae_formats
from crate_interp.checkpoints.layouts import find_layout
from crate_interp.checkpoints.layouts.layout import Fields, Layout, Shapes
from crate_interp.checkpoints.read_weights import Contents, check_dense, check_weights
from crate_interp.checkpoints.state_dicts import ANCHORS
from crate_interp.config import FAMILIES, CrateConfig, check_names
from crate_interp.core.errors import CheckpointError
from crate_interp.core.run_options import tqdm
from crate_interp.models.autoencoder import HookedCrateMAE
from crate_interp.models.clip import HookedCrateCLIP, HookedTextTower
from crate_interp.models.language import HookedCrateLM
from crate_interp.models.sae import SAEConfig, SparseAutoencoder
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
    cfg: CrateConfig | SAEConfig
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
    kind: Any = SparseAutoencoder
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
        cfg, layout = sae_formats.config_of(contents), "sparse autoencoder"
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
