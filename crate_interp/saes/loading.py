"""ci.saes.load: a sparse autoencoder from a folder, a file, or the Hub."""

import os
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints import saelens_format
from crate_interp.checkpoints.formats.tensor_files import DTYPES
from crate_interp.checkpoints.hub import fetch, registry
from crate_interp.checkpoints.load import load as load_any
from crate_interp.core.errors import CheckpointError
from crate_interp.models.sae import SparseAutoencoder

_SUFFIXES = (".pt", ".pth", ".safetensors", ".npz")


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

    SAELens' architectures standard, topk, jumprelu, gated, batchtopk and matryoshka_batchtopk are
    known, in the layouts before and since version 6. hook_name: the point that it reads, where the
    config does not say so, or instead of what it says. scaling_factor: what activations are
    multiplied by before encoding (and divided by after decoding), for autoencoders that want it
    (`normalize_activations` "expected_average_only_in"). dtype: None is float32. revision,
    cache_dir, local_files_only, token: as in `ci.load`.

    Nothing in a file is executed. Raises CheckpointError for an architecture or an option that is
    not known, and for everything that is wrong with a file.
    """
    given = {"hook_name": hook_name, "scaling_factor": scaling_factor}
    given = {name: value for name, value in given.items() if value is not None}
    net: dict[str, Any] = {
        "cache_dir": cache_dir, "local_files_only": local_files_only, "token": token
    }  # fmt: skip
    files = _files(source, revision, net)
    if files is None:
        options: dict[str, Any] = {"revision": revision, "device": device, "dtype": dtype, **net}
        return load_any(source, family="sae", **options, **given)
    wanted = torch.float32 if dtype is None else dtype
    if wanted not in DTYPES:
        raise CheckpointError(
            f"dtype={dtype!r}: give a floating torch dtype, such as torch.float32."
        )
    sae = saelens_format.from_files(*files, given, wanted)
    try:
        return sae.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(f"device={str(device)!r} cannot take it: {error}") from None


def _files(
    source: str | Path, revision: str | None, net: dict[str, Any]
) -> tuple[Path, Path] | None:
    """Returns config and weights in SAELens' format, or None where there are none."""
    path, parts = Path(source).expanduser(), str(source).split("/")
    if saelens_format.is_lens(path):
        if revision is not None:
            raise CheckpointError(f"revision={revision!r} has no meaning for the folder {path}.")
        return path / saelens_format.CONFIG, path / saelens_format.WEIGHTS
    local = path.is_absolute() or os.path.exists(path) or path.suffix in _SUFFIXES
    if local or len(parts) < 2 or not all(parts):
        return None
    repo, folder = "/".join(parts[:2]), "/".join(parts[2:])
    if not folder and registry.of_repo(repo):  # a published one, in another format
        return None
    names = [
        f"{folder}/{name}".lstrip("/") for name in (saelens_format.CONFIG, saelens_format.WEIGHTS)
    ]
    config, weights = (fetch.fetch(repo, name, revision=revision, **net) for name in names)
    return config, weights
