"""ci.load: a file, a folder, a name, a state dict or a module -> a hooked model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints import own, registry
from crate_interp.checkpoints.errors import CheckpointError
from crate_interp.checkpoints.layouts import (
    Layout,
    as_parameters,
    check_depth,
    find_layout,
    infer_config,
    key_map,
    source_of,
)
from crate_interp.checkpoints.tensors import check_weights, read_file, state_dict_of
from crate_interp.config import CrateConfig, check_names, check_sizes
from crate_interp.hints import did_you_mean
from crate_interp.models.hooked import set_runtime
from crate_interp.models.vision import HookedCrate

_SHOWN = 12  # keys listed on each side of a mismatch
# config, tensors by their key, key -> the parameter it fills (None: its own name), and how to call the source
Source = tuple[CrateConfig, dict[str, Tensor], dict[str, str] | None, str]


def load(
    source: str | Path | Mapping[str, Any] | torch.nn.Module,
    *,
    family: str | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    **config: Any,
) -> HookedCrate:
    """A hooked model in eval mode, from whatever holds its weights.

    source, the first that fits: an existing file in a published layout (CRATE, CRATE-alpha; torch, safetensors or npz), a
    folder made by save_pretrained, a name of ci.models(), or a state dict or module in a published layout.
    family: "crate" or "crate-alpha"; None tells it from the keys. revision: "step-N", a checkpoint along the training
    of an embedded model. dtype: None is float32. config: any CrateConfig field; it comes before what the file says.
    Tensors cannot tell `n_heads` (but in npz files), nor `variant` where there is no output matrix.

    Strict: every source key is used once, every parameter is filled, shapes are equal. Raises CheckpointError.
    """
    dtype = torch.float32 if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype={dtype!r}: give a floating torch dtype, such as torch.float32.")
    if not isinstance(source, (str, Path, Mapping, torch.nn.Module)) or source == "":
        raise CheckpointError(f"cannot load {source!r}: give a file, a folder, a name of ci.models(), or a state dict.")
    try:
        device = torch.device(device)
    except RuntimeError:
        raise CheckpointError(f"device={device!r} is none torch knows: give 'cpu', 'cuda' or 'cuda:1'.") from None
    try:
        check_names(config)
        cfg, tensors, target_of, where = _resolve(source, family, revision, config)
    except CheckpointError:
        raise
    except ValueError as error:  # a config the tensors allow and CrateConfig does not
        raise CheckpointError(str(error)) from None
    return _build(cfg, tensors, target_of, where, dtype).to(device)


def _resolve(source: Any, family: str | None, revision: str | None, given: dict) -> Source:
    if isinstance(source, (Mapping, torch.nn.Module)):
        _no_revision(revision, "a state dict")
        return _from_layout(state_dict_of(source, "the state dict"), family, given, "the state dict")
    path = Path(source).expanduser()
    if os.path.isdir(path):  # os.path says no where pathlib raises: a name too long for a file is no file
        _no_revision(revision, str(path))
        return _from_folder(path, path / own.WEIGHTS, family, given)
    if os.path.exists(path):
        _no_revision(revision, str(path))
        return _from_layout(read_file(path), family, given, str(path))
    row = registry.find(str(source))
    if row is None:
        raise CheckpointError(_unknown(str(source)))
    weights = registry.ASSETS / row["file"]
    return _from_folder(weights.parent, _step_file(row, weights, revision), family, given)


def _no_revision(revision: str | None, where: str) -> None:
    if revision is not None:
        raise CheckpointError(
            f"revision={revision!r} has no meaning for {where}: it chooses a step of an embedded model."
        )


def _unknown(source: str) -> str:
    hint = did_you_mean(source, registry.names())
    return (
        f"{source!r} is no file, no folder and no known model. {hint} Known: {', '.join(registry.names())} "
        "(ci.models()). Loading from the Hub is not built yet: download the file and give its path."
    ).replace("  ", " ")


def _step_file(row: dict[str, Any], weights: Path, revision: str | None) -> Path:
    if revision is None:
        return weights
    known = [f"step-{step}" for step in row["steps"]]
    if revision not in known:
        raise CheckpointError(f"{row['name']} has no revision {revision!r}: give one of {', '.join(known)}, or None.")
    return weights.parent / "steps" / f"{revision}.safetensors"


def _from_folder(folder: Path, weights: Path, family: str | None, given: dict) -> Source:
    cfg = own.read_config(folder, given | ({"family": family} if family else {}))
    if not weights.exists():
        raise CheckpointError(f"{weights} is missing: the folder has a config but no weights.")
    tensors = read_file(weights)
    return cfg, tensors, None, str(weights)


def _from_layout(tensors: dict[str, Tensor], family: str | None, given: dict, where: str) -> Source:
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    layout = find_layout(shapes, family, where)
    given = check_sizes(given)
    values = {**layout.defaults, **infer_config(layout, shapes, given, where), **given}
    _check_variant(layout, shapes, values, where)
    cfg = CrateConfig(family=layout.family, **values)
    return cfg, as_parameters(layout, tensors), key_map(layout, cfg.n_layers), where


def _check_variant(layout: Layout, shapes: dict, values: dict, where: str) -> None:
    outputs = [source_of(layout, "attn.out_proj.weight", layer) for layer in range(values["n_layers"])]
    has_output = any(key in shapes for key in outputs)
    whole_stream = values["n_heads"] == 1 and values["d_head"] == values["d_model"]
    if not has_output and not whole_stream and "variant" not in values:
        raise CheckpointError(
            f"variant cannot be inferred from {where}: it has no output matrix ({outputs[0]}), so it is one of c, n, t, "
            "identity. Give it: ci.load(..., variant='c')."
        )


def _build(
    cfg: CrateConfig, tensors: dict[str, Tensor], target_of: dict[str, str] | None, where: str, dtype: torch.dtype
) -> HookedCrate:
    """The model with its parameters taken from `tensors`; no random number is drawn."""
    target_of = {key: key for key in tensors} if target_of is None else target_of
    named = {target_of[key]: key for key in tensors if key in target_of}  # parameter -> source key
    check_depth(named, r"blocks\.(\d+)\.", cfg.n_layers)
    with torch.device("meta"):
        model = HookedCrate(cfg)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    key_of = {target: key for key, target in target_of.items()}
    unused = [key for key in tensors if target_of.get(key) not in wanted]
    missing = [f"{key_of.get(name, name)} {list(shape)}" for name, shape in wanted.items() if name not in named]
    wrong = [
        f"{key} is {list(tensors[key].shape)}, wanted {list(wanted[name])}"
        for name, key in named.items()
        if name in wanted and tuple(tensors[key].shape) != wanted[name]
    ]
    _raise_leftovers(f"{where} does not fit a {cfg.family} model of {cfg.n_layers} layers", unused, missing, wrong)
    check_weights(tensors, where, dtype)
    weights = {}
    for name, key in named.items():  # each source tensor is let go before the next is copied
        weights[name] = tensors.pop(key).detach().to("cpu", dtype, copy=True).contiguous()
    model.load_state_dict(weights, assign=True)
    set_runtime(model.cfg, device=torch.device("cpu"), dtype=dtype)
    return model.eval()


def _raise_leftovers(what: str, unused: list[str], missing: list[str], wrong: list[str]) -> None:
    """One error that lists what is left over on both sides, or nothing."""
    sides = (("keys not used", unused), ("keys missing", missing), ("wrong shapes", wrong))
    parts = [
        f"{title} ({len(keys)}): {', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        for title, keys in sides
        if keys
    ]
    if parts:
        raise CheckpointError(f"{what}. {'; '.join(parts)}.")
