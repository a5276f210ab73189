"""A report on a checkpoint: digests, config, checks, and what cannot be checked."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints import fixed_input, hub, native_format
from crate_interp.checkpoints.layouts.layout import PER_HEAD
from crate_interp.checkpoints.load import load
from crate_interp.checkpoints.sources import Given
from crate_interp.checkpoints.state_dicts import LeftOutWarning
from crate_interp.core.errors import CheckpointError
from crate_interp.core.progress import tqdm
from crate_interp.core.safe_text import plain
from crate_interp.models.hooked import HookedModel
from crate_interp.models.sae import SparseAutoencoder
from crate_interp.models.weight_cache import model_digest

_LAYER, _MOST_LAYERS = re.compile(r"blocks\.(\d+)\."), 48
_LOADED = (
    "every key that the published code reads is used once, every parameter filled, "
    "shapes equal, no NaN or Inf"
)
_KNOWN = ("name", "repo", "file", "revision", "licence", "status")  # columns of the registry
_UNKNOWABLE = {
    "vision": (
        "eta and lambd: no tensor holds them",
        "eps of each LayerNorm",
        "the order of the classes",
        "how the training images were prepared",
    ),
    "mae": (
        "eta and lambd: no tensor holds them, and two releases of the code differ in lambd",
        "eps of each LayerNorm",
    ),
    "text": (
        "eta and lambd, where the step has them",
        "eps of each norm",
        "whether the tokenizer is the one that the model was trained with",
    ),
    "clip": (
        "eta and lambd: no tensor holds them",
        "eps of each LayerNorm",
        "whether the tokenizer is the one that the model was trained with",
    ),
}


def verify(source: Given, *, progress: bool = True, **options: Any) -> dict[str, Any]:
    """Loads a checkpoint and returns a report of plain JSON values; options are those of `ci.load`.

    Keys: source, ok, config, params, digests (sha256 of the file or files, and of config and
    weights together), known (the row of the table of models, or None), fingerprint (the first
    numbers of the output on a fixed input), checks (name, ok and detail of each), cannot_check.
    If the checkpoint does not load, ok is False, and the only check holds the text of the error.
    """
    name = str(source) if isinstance(source, (str, Path)) else "a state dict"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = load(source, **options)
    except CheckpointError as error:
        failed = _check("loads strictly", False, str(error))
        return {"source": name, "ok": False, "checks": [failed], "cannot_check": []}
    out = fixed_input.output(model)
    same = torch.equal(out, fixed_input.output(model))
    checks = [
        _check("loads strictly", True, _LOADED),
        _check("same output twice", same, "bit for bit, on a fixed input"),
    ]
    hooked, row = isinstance(model, HookedModel), _row(source, options)
    try:
        checks += [_patterns(model), _edits(model, progress)] if hooked else []
    except (RuntimeError, MemoryError) as error:  # an input of full size may not fit in memory
        checks.append(_check("runs on an input of full size", False, plain(error)))
    checks += [
        _check("tensors that are no part of the model", True, str(one.message))
        for one in caught
        if issubclass(one.category, LeftOutWarning)
    ]
    others = (one for one in caught if not issubclass(one.category, LeftOutWarning))
    warned = [one.message for one in others if issubclass(one.category, UserWarning)]
    notes = [" ".join(str(message).split()) for message in warned] if hooked else []
    digests = _digests(source, options.get("revision"))
    return {
        "source": name,
        "ok": all(check["ok"] for check in checks),
        "config": model.cfg.to_dict(),
        "params": sum(value.numel() for value in model.parameters()),
        "digests": digests | {"config and weights": model_digest(model)},
        "known": None if row is None else {column: row[column] for column in _KNOWN},
        "fingerprint": [float(f"{value:.6g}") for value in out.flatten()[:8].tolist()],
        "checks": checks,
        "cannot_check": notes + _limits(source, model, row, options),
    }


def _limits(
    source: Given,
    model: HookedModel | SparseAutoencoder,
    row: dict[str, Any] | None,
    options: Mapping[str, Any],
) -> list[str]:
    """Returns a text for each property that cannot be checked."""
    if isinstance(model, HookedModel):
        limits = list(_UNKNOWABLE[model.cfg.kind])
    else:
        limits = ["which language model the autoencoder was trained on"]
    if model.cfg.family == "gpt-baseline":
        limits.append(
            "whether it is CRATE-LM's baseline (ReLU): "
            "nanoGPT's own checkpoints have the same keys, but use GELU"
        )
    # a saved folder only repeats the n_heads that the folder's writer gave
    saved = isinstance(source, (str, Path)) and Path(source).expanduser().is_dir()
    told = options.get("n_heads") is not None or (row is None and saved)
    shown = {f"blocks.0.{name}" for name in PER_HEAD} & dict(model.named_parameters()).keys()
    if isinstance(model, HookedModel) and told and not shown:
        limits.append(f"n_heads={model.cfg.n_heads}: no tensor's shape reveals it")
    if getattr(model.cfg, "grid_guessed", False):
        size: Any = model.cfg
        limits.append(f"image_size={size.image_size}: a guess from the number of patches")
    if row is None or not row["sha256"]:
        limits.append(
            "whether the authors published these bytes: no digest of the published file is known"
        )
    return limits


def _check(name: str, ok: bool, detail: str) -> dict[str, Any]:
    return {"name": name, "ok": bool(ok), "detail": detail}


def _row(source: Given, options: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the row of the registry for the loaded bytes, or None.

    A local file is recognised by its digest. For other sources, the loader has compared the bytes
    with the row.
    """
    if not isinstance(source, (str, Path)):
        return None
    path = Path(source).expanduser()
    if path.exists():  # an existing file or folder takes precedence over a name
        return hub.of_digest(path) if path.is_file() else None
    row = hub.find(str(source))
    rows = hub.of_repo(str(source), options.get("file")) if row is None else [row]
    pinned = len(rows) == 1 and (
        rows[0]["embedded"] or options.get("revision") in (None, rows[0]["revision"])
    )
    return rows[0] if pinned else None


def _digests(source: Given, revision: str | None) -> dict[str, str]:
    if not isinstance(source, (str, Path)):
        return {}
    path, row = Path(source).expanduser(), hub.find(str(source))
    if not path.exists() and row and row["embedded"]:
        path = native_format.weights_of(hub.ASSETS / row["name"], revision)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    files = [path] if path.is_file() else files
    return {file.name: f"sha256:{hub.sha256(file)}" for file in files}


def _patterns(model: HookedModel) -> dict[str, Any]:
    """Checks that every row of every attention pattern is a distribution."""
    worst, count = 0.0, 0

    def look(pattern: Tensor, hook: Any) -> None:
        nonlocal worst, count
        worst = max(
            worst, float((pattern.double().sum(dim=-1) - 1).abs().max()), -float(pattern.min())
        )
        count += 1

    with model.hooks(
        fwd_hooks=[(name, look) for name in model.hook_dict if name.endswith("hook_pattern")]
    ):
        fixed_input.output(model)
    bound = 100 * torch.finfo(model.cfg.dtype).eps
    return _check(
        "pattern rows sum to 1",
        worst < bound,
        f"{count} patterns, largest deviation {worst:.2g}, bound {bound:.2g}",
    )


def _edits(model: HookedModel, progress: bool) -> dict[str, Any]:
    """Checks that an edit at every hook point changes the output.

    Points that do not fire for the small input are edited in a run on an input of full size.
    """
    every = model.matching_points(None)
    left, without, tried = _some_layers(every), [], 0
    runs: list[Callable[[HookedModel], Tensor]] = [fixed_input.output]
    if fixed_input.whole_is_small(model):
        runs.append(fixed_input.whole)
    with tqdm(total=len(left), desc="verify", unit="point", disable=not progress) as bar:
        for run in runs:
            plain, seen = _fired(model, run, left)
            for name in seen:
                with model.hooks(fwd_hooks=[(name, _bend)]):
                    if torch.equal(run(model), plain):
                        without.append(name)
                bar.update()
            left, tried = [name for name in left if name not in seen], tried + len(seen)
            if not left:
                break
    if len(runs) == 2:
        without, tried = without + left, tried + len(left)
    detail = f"{tried - len(without)} of {tried} points"
    untried = len(every) - tried
    detail += f", {untried} not tried: the model is too large" if untried else ""
    detail += f"; without effect: {', '.join(without[:8])}" if without else ""
    return _check("each hook edit changes the output", not without, detail)


def _some_layers(names: list[str]) -> list[str]:
    """Returns the hook points of a model; if it has many layers, only the points of a few layers.

    Each point needs a run of the model, so all points would take time quadratic in its depth.
    """
    found = {name: _LAYER.search(name) for name in names}
    layers = sorted({int(match[1]) for match in found.values() if match})
    if len(layers) <= _MOST_LAYERS:
        return names
    chosen = {layers[0], layers[1], layers[len(layers) // 2], layers[-1]}
    return [name for name, match in found.items() if match is None or int(match[1]) in chosen]


def _fired(
    model: HookedModel, run: Callable[[HookedModel], Tensor], names: list[str]
) -> tuple[Tensor, list[str]]:
    """Returns the output, and the points among `names` that fired on the way."""
    seen: dict[str, None] = {}
    watchers: Any = [(name, lambda value, hook, name=name: seen.setdefault(name)) for name in names]
    with model.hooks(fwd_hooks=watchers):
        return run(model), list(seen)


def _bend(value: Tensor, hook: Any) -> Tensor:
    """Returns a changed value; the change is one that no LayerNorm can undo.

    Each number is scaled and shifted by its own amount.
    """
    wave = torch.arange(1, value.shape[-1] + 1, device=value.device).sin().to(value.dtype)
    return value * (1 + 0.5 * wave) + wave


def to_json(report: dict[str, Any]) -> str:
    """Returns the report as JSON text."""
    return json.dumps(report, indent=2, ensure_ascii=False, default=str)
