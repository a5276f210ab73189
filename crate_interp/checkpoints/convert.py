"""ci.convert: a published checkpoint as a folder of our own format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints.load import load
from crate_interp.folders import locked
from crate_interp.models.saving import check_new, save


def convert(
    source: str | Path | Mapping[str, Any] | torch.nn.Module, folder: str | Path, **options: Any
) -> Any:
    """Loads a checkpoint, writes it as a new folder that `ci.load` reads, and returns the model.

    options: of `ci.load`. The folder holds model.safetensors, config.json and a model card; an
    interrupt leaves nothing of it. Raises ValueError, before work starts, if the folder already
    exists or cannot be written, and CheckpointError as `ci.load` does.
    """
    folder = Path(folder)
    check_new(folder)
    with locked(folder):
        model = load(source, **options)
        save(model, folder)
    return model
