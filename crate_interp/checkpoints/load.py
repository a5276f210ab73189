"""ci.load: a hooked model from a file, a folder, a name, a repo on the Hub or a state dict."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints import native_format, sae_formats, saelens_format
from crate_interp.checkpoints.build import build, from_layout
from crate_interp.checkpoints.formats.tensor_files import (
    DTYPES,
    Contents,
    model_args,
    read_file,
    state_dict_of,
)
from crate_interp.checkpoints.hub import fetch, registry
from crate_interp.checkpoints.key_renaming import Rename, renamed
from crate_interp.checkpoints.output_check import check_output
from crate_interp.checkpoints.tokenizer_files import TOKENIZER_FILES, attach
from crate_interp.checkpoints.trained_weights import (
    Told,
    fields_of,
    from_hooked,
    is_hooked,
    trained_folder,
)
from crate_interp.config import check_names
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.models.hooked import hooked_part
from crate_interp.models.sae import SAEConfig
from crate_interp.models.saving import CONFIG, TOKENIZER, WEIGHTS


def load(
    source: str | Path | Mapping[str, Any] | torch.nn.Module,
    *,
    family: str | None = None,
    file: str | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    config: Told | None = None,
    rename: Rename | None = None,
    **fields: Any,
) -> Any:
    """Loads a hooked model in eval mode, from whatever holds its weights.

    source, the first that fits: an existing file in a published layout (torch, safetensors or
    npz), or a folder made by save_pretrained; a name of ci.list_models(); "owner/repo" on the
    Hub, with `file` where it has several; a state dict or module in a published layout.
    family: "crate", "crate-alpha", "crate-mae", "crate-lm", "gpt-baseline", "nanochat-crate",
    "clipa", or "sae" for a sparse autoencoder. None: the keys decide.
    revision: a branch, tag or commit on the Hub (None: the one in the table of models), or
    "step-N" of an embedded model, or of a folder that has steps/step-N.safetensors.
    dtype: None is float32. cache_dir, local_files_only, token: as in huggingface_hub.
    fields: any field of a CrateConfig. It takes precedence over the table of models, the file's
    own config and the shapes of the tensors. Shapes do not reveal `n_heads` (but in npz files),
    nor `variant` where there is no output matrix. config: all fields at once, as a CrateConfig, a
    dict or the path of a config.json. Files with a hooked model's own names need it: the state
    dict of one, a Lightning checkpoint (under any attribute), and the folder of a Hugging Face
    Trainer, of which the last checkpoint-N is taken, unless a config.json of ours lies there.
    rename: for a file or state dict of a fork, a function from key to published key, or None.

    Loading is strict: every source key is used once, every parameter is filled, shapes are
    equal, and a file of the table must have its digest. Nothing in a file is executed.
    Raises CheckpointError for everything that can be wrong with a source or an argument.
    """
    dtype = torch.float32 if dtype is None else dtype
    _check_arguments(source, dtype)
    place = _device(device)
    net = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
    try:
        check_names({name: value for name, value in fields.items() if name != "hook_name"})
        if config is not None:
            fields = fields_of(config, fields, family)
            family = fields.pop("family")
        made = _resolve(source, rename, family, file, revision, net, fields, dtype)
        model = check_output(made, _short(source))
    except CheckpointError:
        raise
    except ValueError as error:  # a config the tensors allow and CrateConfig does not
        raise CheckpointError(str(error)) from None
    except (RuntimeError, TypeError, AttributeError, OverflowError) as error:
        # from an argument or a tensor of an unexpected kind
        raise CheckpointError(f"{_short(source)} cannot be loaded: {error}") from error
    try:
        return model.to(place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(f"device={str(place)!r} cannot take the model: {error}") from None


def _check_arguments(source: object, dtype: object) -> None:
    if dtype not in DTYPES:
        raise CheckpointError(
            f"dtype={dtype!r}: give a floating torch dtype, such as torch.float32."
        )
    if not isinstance(source, (str, Path, Mapping, torch.nn.Module)) or source == "":
        raise CheckpointError(
            f"cannot load {source!r}: "
            "give a file, a folder, a name of ci.list_models(), or a state dict."
        )


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type == "meta":
        raise CheckpointError(
            f"device={device!r} is no device that torch can compute on: "
            "give 'cpu', 'cuda' or 'cuda:1'."
        )
    return place


def _short(source: str | Path | Mapping[str, Any] | torch.nn.Module) -> str:
    return str(source) if isinstance(source, (str, Path)) else "the state dict"


def _resolve(
    source: str | Path | Mapping[str, Any] | torch.nn.Module,
    rename: Rename | None,
    family: str | None,
    file: str | None,
    revision: str | None,
    net: dict,
    given: dict,
    dtype: torch.dtype,
) -> Any:
    if isinstance(source, (Mapping, torch.nn.Module)):
        _has_no(revision, file, "a state dict")
        inside = hooked_part(source)
        if inside not in (None, "model"):
            raise CheckpointError(f"the source wraps a hooked model: use that one, {inside}.")
        contents = Contents(state_dict_of(source, "the state dict"), model_args(source))
        contents = renamed(contents, rename)
        return attach(
            _from_contents(contents, family, {}, given, "the state dict", dtype), None, net
        )
    path = Path(source).expanduser()
    if rename is not None and not os.path.isfile(path):
        raise CheckpointError(
            f"rename= is for a weight file or a state dict, and {_short(source)!r} is neither."
        )
    if os.path.isdir(path):  # pathlib would raise for a name that is too long for a file
        _has_no(None, file, str(path))
        return _from_directory(path, family, revision, given, dtype, net)
    if os.path.exists(path):
        _has_no(revision, file, str(path))
        row = registry.of_digest(path) or {}
        return _from_file(
            path, family or row.get("family"), row.get("config", {}), given, dtype, net, rename
        )
    row = registry.find(str(source))
    if row is not None and row["embedded"]:
        _has_no(None, file, row["name"])
        folder = registry.folder_of(row)
        weights = native_format.weights_of(folder, revision, row["note"])
        return _from_folder(folder, weights, family, given, dtype, net)
    if row is not None:
        _has_no(None, file, row["name"])
        return _from_row(row, family, revision, net, given, dtype)
    if (
        str(source).count("/") == 1
        and not path.is_absolute()
        and path.suffix not in (".pth", ".pt", ".safetensors", ".npz")
    ):
        return _from_repo(str(source), family, file, revision, net, given, dtype)
    raise CheckpointError(_unknown(str(source)))


def _has_no(revision: str | None, file: str | None, where: str) -> None:
    if revision is not None:
        raise CheckpointError(
            f"revision={revision!r} has no meaning for {where}: "
            "it chooses a step of a training, or a commit on the Hub."
        )
    if file is not None:
        raise CheckpointError(
            f"file={file!r} has no meaning for {where}: it chooses a file of a repo on the Hub."
        )


def _unknown(source: str) -> str:
    hint = checks.did_you_mean(source, registry.names())
    shown = source if len(source) <= 200 else source[:200] + "..."
    text = (
        f"{shown!r} is no file, no folder, no known model and no owner/repo on the Hub. "
        f"{hint} ci.list_models() lists the known ones."
    )
    return text.replace("  ", " ")


def _from_row(
    row: dict[str, Any],
    family: str | None,
    revision: str | None,
    net: dict,
    given: dict,
    dtype: torch.dtype,
) -> Any:
    """Loads a file of the table from the Hub.

    Where the file lies elsewhere the error says how to go on.
    """
    if row["file"] is None:
        if row["link"] is None:
            raise CheckpointError(
                f"{row['name']}: {row['note']}. "
                f"Give a file of it: ci.load({row['repo']!r}, file='...')."
            )
        fields = ", ".join(f"{name}={value!r}" for name, value in row["config"].items())
        raise CheckpointError(
            f"{row['name']} is not on the Hub: download it from {row['link']} and load the file: "
            f"ci.load('path/to/the/file', {fields})."
        )
    wanted = row["revision"] if revision is None else revision
    told = row if revision in (None, row["revision"]) else None
    path = fetch.fetch(row["repo"], row["file"], revision=wanted, row=told, **net)
    folder = Path(row["file"]).parent
    for name in row["beside"]:
        fetch.fetch(row["repo"], str(folder / name), revision=wanted, **net)
    return _from_file(path, family or row["family"], row["config"], given, dtype, net)


def _from_repo(
    repo: str,
    family: str | None,
    file: str | None,
    revision: str | None,
    net: dict,
    given: dict,
    dtype: torch.dtype,
) -> Any:
    if file is not None:
        fetch.check_file(file)
    rows = registry.of_repo(repo, file)
    if len(rows) == 1 and (file is not None or len(registry.of_repo(repo)) == 1):
        return _from_row(rows[0], family, revision, net, given, dtype)
    if file is None and rows:
        files = ", ".join(row["file"] for row in rows)
        raise CheckpointError(
            f"{repo} has several files: give one of them, ci.load({repo!r}, file='...'). "
            f"Known: {files}."
        )
    if file is None:
        return _own_repo(repo, family, revision, net, given, dtype)
    path = fetch.fetch(repo, file, revision=revision, **net)
    beside = "config.json" if file.endswith(".safetensors") else f"{Path(file).stem}_cfg.json"
    _try_fetch(repo, str(Path(file).with_name(beside)), revision, net)
    return _from_file(path, family, {}, given, dtype, net)


def _own_repo(
    repo: str, family: str | None, revision: str | None, net: dict, given: dict, dtype: torch.dtype
) -> Any:
    """Loads a repo that push_to_hub made."""
    try:
        config = fetch.fetch(repo, CONFIG, revision=revision, **net)
    except fetch.MissingFile:
        raise CheckpointError(
            f"{repo} has no {CONFIG}, so it was not made by push_to_hub: "
            f"name a weight file of it, ci.load({repo!r}, file='...')."
        ) from None
    weights = fetch.fetch(repo, WEIGHTS, revision=revision, **net)
    if not native_format.is_foreign(config):
        _try_fetch(repo, TOKENIZER, revision, net)
        return _from_folder(config.parent, weights, family, given, dtype, net)
    for name in TOKENIZER_FILES:
        _try_fetch(repo, name, revision, net)
    return _from_file(weights, family, {}, given, dtype, net)


def _try_fetch(repo: str, file: str, revision: str | None, net: dict) -> None:
    """Downloads a file that may lie beside the weights, if it is there."""
    with suppress(fetch.MissingFile, fetch.NotCached):
        fetch.fetch(repo, file, revision=revision, **net)


def _from_directory(
    path: Path, family: str | None, revision: str | None, given: dict, dtype: torch.dtype, net: dict
) -> Any:
    if (path / native_format.STEPS).is_dir() and (path / CONFIG).exists():
        weights = native_format.weights_of(path, revision)
        return _from_folder(path, weights, family, given, dtype, net)
    _has_no(revision, None, str(path))
    if family in (None, "sae") and saelens_format.is_lens(path):
        return saelens_format.from_folder(path, given, dtype)
    weights = path / WEIGHTS
    if native_format.is_foreign(path / CONFIG) and weights.exists():  # such as nanochat's repo
        return _from_file(weights, family, {}, given, dtype, net)
    if not (path / CONFIG).exists():
        return _from_trainer(path, family, given, dtype, net)
    return _from_folder(path, weights, family, given, dtype, net)


def _from_folder(
    folder: Path, weights: Path, family: str | None, given: dict, dtype: torch.dtype, net: dict
) -> Any:
    state = native_format.state(folder / CONFIG, weights)
    cfg = native_format.read_config(folder, given | ({"family": family} if family else {}))
    if not weights.exists():
        raise CheckpointError(f"{weights} is missing: the folder has a config but no weights.")
    if weights == folder / WEIGHTS:  # not a step along the training
        native_format.check_files(folder)
    contents = read_file(weights)
    if native_format.state(folder / CONFIG, weights) != state:
        raise CheckpointError(f"{folder} was replaced while it was read: load it again.")
    if isinstance(cfg, SAEConfig) and family not in (None, "sae"):
        raise CheckpointError(f"family={family!r} contradicts {folder / CONFIG}, which says 'sae'.")
    if isinstance(cfg, SAEConfig):
        return sae_formats.from_own(cfg, contents.tensors, given, str(weights), dtype)
    return attach(
        build(cfg, contents.tensors, None, str(weights), dtype, contents.owned), folder, net
    )


def _from_trainer(
    path: Path, family: str | None, given: dict, dtype: torch.dtype, net: dict
) -> Any:
    """Loads what a Trainer wrote into a folder without a config of its own."""
    found = trained_folder(path)
    if found is None:
        raise CheckpointError(
            f"{path} has no {CONFIG}: "
            "give the weight file in it, or a folder made by save_pretrained."
        )
    weights, config = found
    if config is not None:
        given = fields_of(config, given, family)
        family = given.pop("family")
    return _from_file(weights, family, {}, given, dtype, net)


def _from_file(
    path: Path,
    family: str | None,
    row: dict,
    given: dict,
    dtype: torch.dtype,
    net: dict,
    rename: Rename | None = None,
) -> Any:
    contents = renamed(read_file(path), rename)
    model = _from_contents(contents, family, row, given, str(path), dtype)
    return attach(model, path.parent, net)


def _from_contents(
    contents: Contents, family: str | None, row: dict, given: dict, where: str, dtype: torch.dtype
) -> Any:
    if family == "sae" or (family is None and sae_formats.is_sae(contents)):
        return sae_formats.from_contents(contents, given, where, dtype)
    if "hook_name" in given:
        raise CheckpointError("hook_name belongs to family 'sae', a sparse autoencoder.")
    if is_hooked(contents.tensors):
        return from_hooked(contents, fields_of(None, given, family), where, dtype)
    return from_layout(contents, family, row, given, where, dtype)
