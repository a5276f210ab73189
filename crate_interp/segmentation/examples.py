"""Example images with the highest, middle and lowest scores of the fixed head, with maps."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

from crate_hooks import full_name
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable
from crate_interp.probes.segmentation_probe import IGNORED, head_maps, points_of

SHOWN, MEDIAN = 3, 2  # images in each of "best" and "worst"; images in "median"
_LONGEST = 224  # pixels of the longer side of a stored picture
COLUMNS = [
    "group", "sample", "label", "layer", "head", "score", "picture", "mask", "map", "rows",
    "columns",
]  # fmt: skip


def no_examples() -> pd.DataFrame:
    """Returns the table of examples without rows."""
    return pd.DataFrame(columns=COLUMNS, dtype=object)


def examples(
    images: pd.DataFrame, model: HookedModel, samples: Samples, settings: Mapping[str, Any]
) -> pd.DataFrame:
    """Returns a row per example: group, sample, label, layer, head, score, and the pictures.

    The groups are "best", "median" and "worst"; "median" means a score near the median.

    picture and mask: PNG bytes; the mask is 255 where the data has a class. map: the head's
    attention, row by row over a grid of rows x columns. The model runs once for each example.
    """
    ranked: Any = images.sort_values(["score", "sample"], ascending=[False, True])
    rest = ranked.iloc[SHOWN:]
    groups = {
        "best": ranked.head(SHOWN),
        "median": _middle(rest.iloc[: max(len(rest) - SHOWN, 0)]),
        "worst": rest.tail(SHOWN).iloc[::-1],
    }
    rows = [
        {"group": group, **row._asdict(), **_pictures(row, model, samples, settings)}
        for group, table in groups.items()
        for row in table.itertuples(index=False)
    ]
    return pd.DataFrame(rows, columns=COLUMNS) if rows else no_examples()


def merged_examples(
    mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]
) -> pd.DataFrame:
    """Returns the best, median and worst among the examples of both results.

    Each example keeps the head and score of its own result. The median examples are two of the four
    median examples of both results.
    """
    both: Any = pd.concat([table for table in (mine, theirs) if len(table)] or [mine])
    ranked = both.sort_values(["score", "sample"], ascending=[False, True], ignore_index=True)
    middle = _middle(ranked[ranked["group"] == "median"])
    others = ranked[ranked["group"] != "median"]
    best, worst = others.head(SHOWN), others.iloc[SHOWN:].tail(SHOWN).iloc[::-1]
    parts = [best.assign(group="best"), middle, worst.assign(group="worst")]
    return pd.concat(parts, ignore_index=True)


def _middle(ranked: Any) -> Any:
    """Returns the MEDIAN rows in the middle of ranked rows."""
    start = max((len(ranked) - MEDIAN) // 2, 0)
    return ranked.iloc[start : start + MEDIAN]


def _pictures(
    row: Any, model: Any, samples: Samples, settings: Mapping[str, Any]
) -> dict[str, Any]:
    image = samples.read(row.sample, row.sample + 1).to(model.cfg.device)
    assert samples.masks is not None
    mask = samples.masks(row.sample, row.sample + 1)[0].numpy()
    whole = settings["scaled"] and settings["cls_key"]
    points = points_of(model.cfg.facts["attention"], whole)
    names = [full_name(point, row.layer) for point in points]
    run: dict[str, Any] = {"mask_ratio": 0.0} if model.cfg.kind == "mae" else {}
    with torch.no_grad():
        _, cache = model.run_with_cache(image, names_filter=names, **run)
    options: Any = {name: settings[name] for name in ("query", "scaled", "cls_key")}
    height, width = (
        side // patch for side, patch in zip(image.shape[2:], model.cfg.patch_size, strict=True)
    )
    acts = {point: cache.at(point, row.layer) for point in points}
    values = head_maps(acts, model.cfg.n_special, **options)[0, row.head]
    picture = (displayable(image[0], model.cfg) * 255).round().astype(np.uint8)
    judged = ((mask != 0) & (mask != IGNORED)).astype(np.uint8) * 255
    return {
        "picture": _png(Image.fromarray(picture), Image.Resampling.LANCZOS),
        "mask": _png(Image.fromarray(judged), Image.Resampling.NEAREST),
        "map": values.double().cpu().flatten().numpy(),  # an array, as in a loaded result
        "rows": height,
        "columns": width,
    }


def _png(image: Image.Image, resample: Image.Resampling) -> bytes:
    scale = _LONGEST / max(image.size)
    if scale < 1:
        image = image.resize([max(1, round(side * scale)) for side in image.size], resample)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
