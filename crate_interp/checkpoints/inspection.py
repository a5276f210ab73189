"""What a checkpoint holds: its layout, its settings and where each comes from, what is left out."""

import json
import warnings
from collections.abc import Iterator

import torch

from crate_interp.checkpoints.build import build, parts_of
from crate_interp.checkpoints.sources import Source, contents_of
from crate_interp.core.safe_text import plain


def inspect_lines(source: Source) -> Iterator[str]:
    """Yields the lines that `crate-interp inspect` prints.

    A setting is "assumed" if no tensor and no file gives it, so that a published default stands for
    it. Raises CheckpointError if the source cannot be read, or, after the settings, if its keys do
    not fit the model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contents = contents_of(source)
        parts = parts_of(contents)
        cfg = parts.cfg
        numbers = sum(value.numel() for value in parts.tensors.values())
        yield plain(contents.where)
        yield f"layout: {parts.layout}"
        yield f"tensors: {len(parts.tensors)}, with {numbers:,} numbers"
        yield "settings:"
        for name, value in cfg.to_dict().items():
            if name in ("assumed", "grid_guessed") or value is None:
                continue
            found = (origin for origin, settings in parts.origins.items() if name in settings)
            origin = next(found, "published default")
            if name in getattr(cfg, "assumed", ()):
                origin = "assumed: published default"
            elif name == "image_size" and getattr(cfg, "grid_guessed", False):
                origin = "a guess: the number of patches is a square"
            yield f"  {name} = {json.dumps(value)}  ({origin})"
        notes = contents.notes
        build(contents, torch.float32)  # raises unless every key has its place
    texts = dict.fromkeys([*notes, *(str(one.message) for one in caught)])
    yield "left out:"
    yield from (f"  {plain(text)}" for text in texts or ["nothing"])
