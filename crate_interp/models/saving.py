"""Writes our own format: a folder with model.safetensors, config.json and a model card."""

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from crate_interp.errors import CheckpointError
from crate_interp.files import write, write_text
from crate_interp.models.tokenizer import Tokenizer

WEIGHTS, CONFIG, CARD, TOKENIZER = "model.safetensors", "config.json", "README.md", "tokenizer.json"

_CARD = """---
library_name: crate_interp
tags: [{family}, white-box-transformer]
---
# {name}

A `{family}` model of {params:,} parameters.

| field | value |
|---|---|
{fields}

Load it with

```python
import crate_interp as ci

model = ci.load("path/to/this/folder")  # or "owner/repo" on the Hub
```
"""


def save(model: nn.Module, folder: Path) -> Path:
    """Writes the folder and returns it. An existing model card is left alone.

    Each file takes its place when it is complete. model: a hooked model or a sparse autoencoder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # made before anything is replaced
    cfg: Any = model.cfg
    values = cfg.to_dict()
    config = {"library": "crate_interp", "format": 1, "config": values}
    text = json.dumps(config, indent=2) + "\n"
    weights = _own_memory(model.state_dict())
    write(folder / WEIGHTS, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    tokenizer = _tokenizer(model)
    if tokenizer is not None:
        write_text(folder / TOKENIZER, tokenizer.to_json())
    else:
        (folder / TOKENIZER).unlink(missing_ok=True)  # of the model that was here before
    write_text(folder / CONFIG, text)
    if not (folder / CARD).exists():
        params = sum(value.numel() for value in weights.values())
        shown = {
            name: value
            for name, value in values.items()
            if value is not None and name not in ("labels", "family")
        }
        fields = "\n".join(f"| {name} | {value} |" for name, value in shown.items())
        name = cfg.model_name or folder.resolve().name
        card = _CARD.format(name=name, params=params, family=values["family"], fields=fields)
        write_text(folder / CARD, card)
    return folder


def _tokenizer(model: nn.Module) -> Tokenizer | None:
    """Returns the tokenizer that belongs in the folder, or None.

    One that lay beside the weights does, one from the Hub does not.
    """
    text: Any = getattr(model, "text", model)
    if getattr(text.cfg, "tokenizer", None) != "file":
        return None
    try:
        return text.tokenizer or (text.fetch_tokenizer and text.fetch_tokenizer())
    except CheckpointError as error:
        warnings.warn(f"the tokenizer is not saved: {error}", stacklevel=4)
        return None


def _own_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters on the CPU, no two in the same memory.

    safetensors does not write tensors that share memory.
    """
    seen: set[int] = set()
    kept = {}
    for name, value in state.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        kept[name] = value.clone() if place in seen else value
        seen.add(place)
    return kept


def save_new(model: nn.Module, folder: Path) -> Path:
    """Writes a folder that is not there yet, and returns it.

    An interrupted call leaves nothing behind. Raises ValueError if the folder is there.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
        part = save(model, Path(place) / folder.name)
        os.replace(part, folder)
    return folder


def check_new(folder: Path) -> None:
    """Raises ValueError unless the folder is empty or not there."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already: give the name of a new folder.")
