"""Scores of masks that need no network, because they are made of the picture alone."""

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_interp.data import Samples
from crate_interp.measures import input_maps, mass_mask, top_mask
from crate_interp.measures.maps import MAPS
from crate_interp.probes.segmentation_probe import RESOLUTIONS, RULES, Targets
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.runs.batches import Chunk

WITHOUT_NETWORK = {"all_foreground": "all foreground"} | MAPS
LEAST = 4  # fewest images with an object


def constants_of(chunk: Chunk, mass: float, fraction: float) -> Tables:
    """Returns a row per image: sample, label, and the scores of masks that need no network.

    Columns: `{name}_{resolution}` of the whole image as foreground (name "all"), and
    `{map}_{rule}_{resolution}` of each of `MAPS`. NaN means that the image has no object.
    """
    patch_size = chunk.model.cfg.patch_size
    parts: dict[str, list[Tensor]] = {}
    for batch in chunk.batches():
        assert batch.masks is not None  # the stage has masks
        parts.setdefault("sample", []).append(torch.arange(batch.start, batch.last + 1))
        targets = Targets(batch.masks, patch_size)
        maps = input_maps(batch.inputs.cpu().double(), patch_size)
        shapes = {"mass": mass_mask(maps, mass), "top": top_mask(maps, fraction)}
        whole = torch.ones_like(shapes["top"][:, :1])
        for resolution in RESOLUTIONS:
            every = targets.mean(targets.jaccard(whole, resolution))
            parts.setdefault(f"all_{resolution}", []).append(every[:, 0])
            for rule, shape in shapes.items():
                scores = targets.mean(targets.jaccard(shape, resolution))
                for name, column in zip(MAPS, scores.T, strict=True):
                    parts.setdefault(f"{name}_{rule}_{resolution}", []).append(column)
    if not parts:
        return {"constants": pd.DataFrame({"sample": []})}
    columns = {name: torch.cat(values).numpy() for name, values in parts.items()}
    labels = _labels(chunk.samples)
    table = pd.DataFrame(columns)
    own = [labels[number - chunk.samples.start] for number in columns["sample"]]
    table.insert(1, "label", pd.Series(own, dtype=object))
    return {"constants": table.infer_objects()}


def without_network(constants: pd.DataFrame, rule: str, resolution: str) -> pd.DataFrame:
    """Returns the scores by one rule and resolution, a column for each of `WITHOUT_NETWORK`."""
    columns = {"all_foreground": constants[f"all_{resolution}"]}
    columns |= {name: constants[f"{name}_{rule}_{resolution}"] for name in MAPS}
    return pd.DataFrame(columns)


def check_objects(constants: pd.DataFrame) -> None:
    """Raises ValueError if fewer than 4 images have an object."""
    kept = int(constants["all_token"].notna().to_numpy().sum())
    if kept < LEAST:
        raise ValueError(
            f"{kept} of {len(constants)} images have an object: give at least {LEAST} such images, "
            "two in each half."
        )


def check_maps(constants: pd.DataFrame) -> None:
    """Raises ValueError if an image with an object lacks the scores of a map that needs no network.

    Versions before these maps scored a centred map alone.
    """
    names = [f"{name}_{rule}_{end}" for name in MAPS for rule in RULES for end in RESOLUTIONS]
    judged: Any = constants.reindex(columns=["all_token", *names]).dropna(subset=["all_token"])
    missing = [name for name in MAPS if judged.filter(like=f"{name}_").isna().to_numpy().any()]
    if missing:
        raise ValueError(
            f"the table 'constants' lacks scores of {', '.join(missing)}: an older version "
            "measured it, without maps made of the picture alone. Run ci.segment again, in a new "
            "folder."
        )


def _labels(samples: Samples) -> list[Any]:
    """Returns the names of the labels, one for each image; None if there are no labels."""
    labels: list[Any] = samples.labels or [None] * samples.n
    if samples.names is None:
        return labels
    return [None if label is None else samples.names[label] for label in labels]
