"""Reads our own format: a folder that save_pretrained wrote (crate_interp/models/saving.py)."""

from pathlib import Path
from typing import Any

from crate_interp.checkpoints.read_weights import read_json
from crate_interp.config import CrateConfig
from crate_interp.core.errors import CheckpointError
from crate_interp.core.folders import differs, listed
from crate_interp.models.sae import SAEConfig
from crate_interp.models.saving import CONFIG, WEIGHTS

STEPS = "steps"  # subfolder of files step-N.safetensors: the weights after step N of a training

# Fields that decide which tensors exist and what the tensors mean. A given field must not
# contradict the folder's config.
STRUCTURE = (
    "family", "d_model", "n_layers", "n_heads", "d_head", "d_mlp", "variant", "sparse_step",
    "n_classes", "d_features", "channels", "n_ctx", "d_vocab", "bias", "decoder_n_layers",
    "decoder_n_heads", "d_embed", "text_d_model", "text_n_layers", "text_n_heads",
    "window_pattern", "output_matrix", "stem", "class_layers",
)  # fmt: skip


def read_config(folder: Path, given: dict[str, Any]) -> CrateConfig | SAEConfig:
    """Returns the config of a folder, with the given fields in place of the folder's.

    Raises CheckpointError if the folder was not written by save_pretrained, or if a given field
    that decides the shapes of tensors contradicts the folder's config.
    """
    path = folder / CONFIG
    content = read_json(path)
    if not isinstance(content, dict) or content.get("library") != "crate_interp":
        raise CheckpointError(
            f"{path} was not written by crate_interp: give the weight file in that folder instead."
        )
    fields = content.get("config")
    if content.get("format") != 1 or not isinstance(fields, dict):
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}; this version reads format 1."
        )
    try:
        if fields.get("family") == "sae":
            return SAEConfig(**fields)
        stored = CrateConfig.from_dict(fields)
        sure: dict[str, Any] = {"grid_guessed": False} if "image_size" in given else {}
        sure["assumed"] = [name for name in stored.assumed if name not in given]
        cfg = CrateConfig.from_dict(fields | sure | given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{error} The other fields come from {path}.") from None
    for name in STRUCTURE:
        headless = name == "n_classes" and cfg.kind == "vision" and cfg.n_classes == 0
        if name in given and getattr(cfg, name) != getattr(stored, name) and not headless:
            raise CheckpointError(
                f"{name}={given[name]!r} contradicts {path}, which says {getattr(stored, name)!r}."
            )
    return cfg


def weights_of(folder: Path, revision: str | None, elsewhere: str | None = None) -> Path:
    """Returns the path of a folder's weights, or of the weights after a step of training.

    elsewhere: the end of the error's text if the folder has no steps. Raises CheckpointError, with
    a list of the folder's steps, for a revision that is none of these steps.
    """
    steps = {path.stem: path for path in (folder / STEPS).glob("step-*.safetensors")}
    names = sorted(steps, key=lambda name: (len(name), name))
    if revision is None:
        if steps and not (folder / WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} has no {WEIGHTS}: give revision={names[0]!r}, or another of "
                f"{', '.join(names)}."
            )
        return folder / WEIGHTS
    if revision not in steps:
        ways = f"give one of {', '.join(names)}, or None." if names else elsewhere
        raise CheckpointError(
            f"{folder.name} has no revision {revision!r}: {ways or 'it has no steps.'}"
        )
    return steps[revision]


def check_files(folder: Path) -> None:
    """Raises CheckpointError if a file of a folder has changed since save_pretrained wrote it.

    A folder of an earlier version, whose config.json holds no digests, passes.
    """
    wrong = differs(folder, listed(folder / CONFIG))
    if wrong:
        raise CheckpointError(
            f"{folder / wrong[0]} does not belong to {folder / CONFIG}, which lists another "
            "digest for it. Save or download the folder again; or remove `files` from the config "
            "to load the file as it is."
        )
