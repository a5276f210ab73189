"""ci.saes.load: a sparse autoencoder from a folder, a file, or the Hub."""

import os
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints import hub
from crate_interp.checkpoints.load import load as load_any
from crate_interp.checkpoints.sae_formats import SAELENS_CONFIG, SAELENS_WEIGHTS
from crate_interp.checkpoints.sources import WEIGHT_SUFFIXES
from crate_interp.models.sae import SparseAutoencoder


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

    source: a folder in SAELens' format (cfg.json, sae_weights.safetensors); "owner/repo/folder" or
    "owner/repo" on the Hub with these two files; or anything that `ci.load` takes for family "sae".

    SAELens' architectures standard, topk, jumprelu, gated, batchtopk and matryoshka_batchtopk can
    be loaded, in the layouts before and since version 6. hook_name: the point that the autoencoder
    reads, instead of the config's; it is needed if the config has none. scaling_factor: the number
    that multiplies activations before encoding (and divides them after decoding), for autoencoders
    that need it (`normalize_activations` "expected_average_only_in"). dtype: None means float32.
    revision, cache_dir, local_files_only, token: as in `ci.load`.

    Nothing in a file is executed. Raises CheckpointError for an unknown architecture or option, and
    for any defect of a file.
    """
    options: dict[str, Any] = {
        "cache_dir": cache_dir, "local_files_only": local_files_only, "token": token
    }  # fmt: skip
    given = {"hook_name": hook_name, "scaling_factor": scaling_factor}
    given = {name: value for name, value in given.items() if value is not None}
    folder = _downloaded(source, revision, options)
    if folder is not None:
        source, revision = folder, None
    return load_any(
        source, family="sae", revision=revision, device=device, dtype=dtype, **options, **given
    )


def _downloaded(source: str | Path, revision: str | None, options: dict[str, Any]) -> Path | None:
    """Downloads a repo's autoencoder in SAELens' format and returns its folder.

    Returns None if the source is not a repo, or holds another format.
    """
    path, parts = Path(source).expanduser(), str(source).split("/")
    local = path.is_absolute() or os.path.exists(path) or path.suffix in WEIGHT_SUFFIXES
    if local or len(parts) < 2 or not all(parts):
        return None
    repo, folder = "/".join(parts[:2]), parts[2:]
    if not folder and hub.of_repo(repo):
        return None
    config = hub.fetch(repo, "/".join([*folder, SAELENS_CONFIG]), revision=revision, **options)
    # the commit of the config, since a branch may move in the meantime
    commit = config.parents[len(folder)].name
    hub.fetch(repo, "/".join([*folder, SAELENS_WEIGHTS]), revision=commit, **options)
    return config.parent
