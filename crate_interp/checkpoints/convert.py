"""ci.convert: a published checkpoint as a folder of our own format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints.load import load
from crate_interp.config.base import CrateConfig
from crate_interp.core.folders import locked
from crate_interp.core.safe_text import plain
from crate_interp.models.saving import check_new, save


def convert(
    source: str | Path | Mapping[str, Any] | torch.nn.Module, folder: str | Path, **options: Any
) -> Any:
    """Loads a checkpoint, writes it as a new folder that `ci.load` reads, and returns the model.

    options: of `ci.load`. The folder holds model.safetensors, config.json and a model card; an
    interrupt leaves nothing of it. A model without a `model_name` is called as the folder, which
    is what pages and tables call it. Raises ValueError, before work starts, if the folder already
    exists or cannot be written, and CheckpointError as `ci.load` does.
    """
    folder = Path(folder)
    check_new(folder)
    with locked(folder):
        model = load(source, **options)
        if isinstance(model.cfg, CrateConfig) and model.cfg.model_name is None:
            model.cfg.set_model_name(plain(folder.resolve().name))
        save(model, folder)
    return model
