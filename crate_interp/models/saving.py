"""Our own format: a folder with model.safetensors, config.json and a model card.

`save` writes it. SharedModel gives models save_pretrained, from_pretrained and push_to_hub, which
extend huggingface_hub's mixin.
"""

import os
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin
from safetensors.torch import save_file
from torch import nn

from crate_interp.core import folders
from crate_interp.core.errors import CheckpointError
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import markdown
from crate_interp.models.text.tokenizer import to_json

LIBRARY = "crate_interp"
WEIGHTS, CONFIG, CARD, TOKENIZER = "model.safetensors", "config.json", "README.md", "tokenizer.json"

# our class -> (model_type, architecture) of its transformers class, which is defined in
# crate_interp/bridge/transformers_models.py
HUGGING_FACE = {
    "HookedCrate": ("crate_vision", "CrateForImageClassification"),
    "HookedCrateLM": ("crate_text", "CrateForCausalLM"),
    "HookedCrateMAE": ("crate_mae", "CrateMAEModel"),
    "HookedCrateCLIP": ("crate_clip", "CrateCLIPModel"),
}

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
    """Writes a model into a folder and returns the folder; an older model there is replaced.

    config.json comes last and holds the digests of the weights and of the tokenizer. An existing
    model card is left alone. model: a hooked model or a sparse autoencoder. Raises ValueError if
    the folder cannot be written, another process is writing it, or it holds a model of another
    library.
    """
    config = folder / CONFIG
    if config.exists() and folders.read_index(config).get("library") != LIBRARY:
        place = f"{str(folder)!r} holds a {CONFIG} of another library"
        raise ValueError(f"{place}, whose model would be overwritten: give another folder.")
    # all contents are made before anything is written
    cfg: Any = model.cfg
    values = cfg.to_dict()
    content: dict[str, Any] = {"library": LIBRARY, "format": 1, "config": values}
    if type(model).__name__ in HUGGING_FACE:  # for AutoConfig and AutoModel
        kind, architecture = HUGGING_FACE[type(model).__name__]
        content |= {"model_type": kind, "architectures": [architecture]}
    tokenizer, weights, places = _tokenizer(model), {}, set()
    for name, value in model.state_dict().items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        # safetensors refuses to write tensors that share memory
        weights[name] = value.clone() if place in places else value
        places.add(place)
    fields = "\n".join(
        f"| {field} | {markdown(value)} |"
        for field, value in values.items()
        if value is not None and field != "family"
    )
    name = cfg.model_name or folder.resolve().name
    params = sum(value.numel() for value in weights.values())
    card = _CARD.format(name=markdown(name), params=params, family=values["family"], fields=fields)
    with folders.replacing(folder, CONFIG, content) as stage:
        save_file(weights, stage / WEIGHTS, metadata={"format": "pt"})
        if tokenizer is not None:
            write_text(stage / TOKENIZER, tokenizer)
    if not os.path.lexists(folder / CARD):
        write_text(folder / CARD, card)
    return folder


def _tokenizer(model: nn.Module) -> str | None:
    """Returns the tokenizer.json to save in the folder, or None.

    A tokenizer that was saved next to the weights is saved again; a tokenizer from the Hub is not.
    """
    text: Any = getattr(model, "text", model)
    if getattr(text.cfg, "tokenizer", None) != "file":
        return None
    try:
        tokenizer = text._find_tokenizer()
        return None if tokenizer is None else to_json(tokenizer)
    except CheckpointError as error:
        warnings.warn(f"the tokenizer is not saved: {error}", stacklevel=4)
        return None


class SharedModel(ModelHubMixin):
    """Models that are saved in folders of our own format."""

    # unlike the mixin's method, this one returns the folder
    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> Path:
        """Writes the model into a folder and returns the folder's path.

        `ci.load(folder, dtype=model.cfg.dtype)` reads it back bit for bit. Unlike in
        huggingface_hub's mixin, config.json is crate_interp's own, and an existing model card is
        left alone.
        """
        model: Any = self
        folder = save(model, Path(save_directory))
        if push_to_hub:
            for name in ("config", "model_card_kwargs"):  # the mixin's, for its own files
                kwargs.pop(name, None)
            self.push_to_hub(repo_id or folder.resolve().name, **kwargs)
        return folder

    # unlike the mixin's method, this one has only the options that ci.load has
    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, pretrained_model_name_or_path: str | Path, **options: Any
    ) -> Any:
        """Loads a model with `ci.load` and the same arguments.

        Raises ValueError if the model is of another class.
        """
        from crate_interp.checkpoints.load import load

        model = load(pretrained_model_name_or_path, **options)
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise ValueError(f"this is a {kind}, not a {cls.__name__}: use {kind}.from_pretrained.")
        return model
