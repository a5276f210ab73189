"""ci.segment: do attention maps segment? Scores of a model, its untrained copies, and chance."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack, cast

import numpy as np
import pandas as pd
import torch
from PIL import Image

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.core.run_options import Run, RunOptions, run_options
from crate_interp.data import Data
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable
from crate_interp.models.runtimes import with_weights
from crate_interp.probes import Probe, maps, segmentation
from crate_interp.probes.segmentation_probe import IGNORED, points_of
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Chunk, check_model, samples_of
from crate_interp.questions.experiment import Opened, Pass, Plan, Question, Tables, copies
from crate_interp.questions.provenance import probes_meta
from crate_interp.questions.untrained_twins import stacked, twin
from crate_interp.results.result import first
from crate_interp.segmentation.result import SHOWN, SegmentResult, middle_rows
from crate_interp.segmentation.scores import constants_of
from crate_interp.sweeps.run import check_masks, sweep_pass

LEAST = 4  # fewest images with an object
_LONGEST = 224  # pixels of the longer side of a stored picture
_COLUMNS = "group sample label layer head score picture mask map rows columns".split()


@with_weights
def segment(
    model: HookedModel,
    data: Data,
    *,
    mass: float = 0.6,
    fraction: float = 0.6,
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
    size: int | Sequence[int] | None = None,
    untrained: int = 5,
    **run: Unpack[Run],
) -> Perhaps[SegmentResult]:
    """Scores the attention masks of every head against the masks of `data`, compared with chance.

    The score is the Jaccard index. Maps become masks by two rules, "mass" and "top"
    (`ci.measures.mass_mask`, `top_mask`), and the masks are judged at two resolutions
    (`ci.probes.segmentation`).

    A layer is scored in three ways. "best head for each image" is the published mIoU (arXiv
    2308.16271 eq. 13-14): the data's mask chooses the head. "fixed head" takes the head that is
    best on the other half of the images, over 50 random splits. "mean over heads" averages all
    heads.

    Two chance levels are scored in the same three ways, with the same fixed heads. The first judges
    the same maps by the mask of the next image, so it keeps what maps know of where objects usually
    are. The second puts the patches of the same maps in random order. A third level is the mean of
    untrained networks, each with its own choice of heads (`untrained` says how many networks).

    The map of a head is the attention of CLS; in ToST the membership of each patch, in CBT the
    row of CLS in A^T A (`ci.probes.segmentation`).

    Six masks need no network: the whole image, and the masks of five maps made of the picture alone
    (a centred map, colour contrast to the border and to the mean, local variance, and two colour
    clusters; see `SegmentResult`). If a head is no better than the strongest of these masks, it
    shows nothing that the network has learned. Intervals are over images, and for a fixed head over
    splits too. The data is read once for each network.

    Args:
        model: A hooked model of images.
        data: Images with masks, such as "embedded:pictures", "cutouts:DIR", "voc:DIR", "coco:FILE"
            or a datasets.Dataset with an image and a mask column.
        mass: The share of an attention map that its mask holds.
        fraction: For the other rule (top): the share of the patches that a mask holds.
        query: The token whose attention is the map; 0 is CLS.
        scaled: Whether scores are divided by sqrt(d_head).
        cls_key: Whether CLS is among the keys.
        size: The side, or (h, w), of larger images, for finer maps of the same model.
        untrained: How many untrained copies to measure as well.
        run: As in `ci.sweep`.

    Returns:
        The scores of each layer and head, with their chance levels.

    Raises:
        ValueError: Before work starts, if the data has no masks or fewer than 4 images with an
            object, if the model is not of images, or if a measure refuses a setting. With several
            shards, the number of images with an object is checked by the last shard.
    """
    checks.count("untrained", untrained, least=0)
    check_model(model)
    if model.cfg.kind not in ("vision", "mae"):
        raise ValueError("the model reads text, which has no patches: give a model of images.")
    _ = model.cfg.known_grid  # raises if it is a guess
    model = model if size is None else cast(Any, model).resized(size)
    scaled, cls_key = checks.flag("scaled", scaled), checks.flag("cls_key", cls_key)
    probe = segmentation(mass, fraction, query, scaled, cls_key, model.cfg.facts["attention"])
    return ask(Segment(probe, untrained), model, data, run_options(segment, run))


@dataclass(frozen=True)
class Segment(Question):
    """Scores how well heads segment. probe: the probe of segmentation, with its settings."""

    probe: Probe
    untrained: int
    result = SegmentResult

    def opened(self, model: HookedModel, data: Data, options: RunOptions) -> Opened:
        """Opens the data, and fills in what model and samples decide."""
        samples = samples_of(model, data, options)
        check_masks([self.probe], samples, options.skip_bad)
        return self, samples

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        probes = probes_meta([self.probe], model)["probes"]
        facts = {"probes": probes, "blocks": "blocks", "controls": 0, "untrained": self.untrained}
        return facts | model.full_options

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        settings = run.meta["probes"]["segmentation"]["settings"]
        mass, fraction = settings["mass"], settings["fraction"]
        constants = Pass(
            "constants", partial(constants_of, mass=mass, fraction=fraction),
            {"constants": SegmentResult.STORED["constants"]}, masks=True, check=check_objects,
        )  # fmt: skip
        own = sweep_pass("segment", [self.probe])
        twins = copies(own, self.untrained, "untrained", twin, run.samples, most=None)
        tables, scores, *others = yield [constants, own, *twins]
        for name in ("samples", "head_samples"):
            tables[name] = scores[name]
            tables[f"untrained_{name}"] = stacked([one[name] for one in others if name in one])
        blank = {"examples": pd.DataFrame(columns=_COLUMNS, dtype=object)}
        images = SegmentResult(tables | blank, run.facts_of("segment")).table("images")
        shown = partial(_examples, images=images, settings=settings)
        return tables | (yield Pass("examples", shown, {"examples": first}, whole=True, masks=True))

    def noted(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Returns the meta that the result keeps."""
        # without the seconds, two runs write the same bytes
        return {name: value for name, value in meta.items() if name not in ("counts", "seconds")}


def check_objects(tables: Tables) -> None:
    """Raises ValueError if fewer than 4 images have an object."""
    constants = tables["constants"]
    kept = int(constants["all_token"].notna().to_numpy().sum())
    if kept < LEAST:
        raise ValueError(f"{kept} of {len(constants)} images have an object: give {LEAST} or more.")


def _examples(chunk: Chunk, images: pd.DataFrame, settings: Mapping[str, Any]) -> Tables:
    """Returns the images with the highest, middle and lowest scores, with mask and map.

    picture and mask: PNG bytes; the mask is 255 where the data has a class. map: the head's
    attention, row by row over a grid of rows x columns. The model runs once for each example.
    """
    ranked: Any = images.sort_values(["score", "sample"], ascending=[False, True])
    rest = ranked.iloc[SHOWN:]
    groups = {
        "best": ranked.head(SHOWN),
        "median": middle_rows(rest.iloc[: max(len(rest) - SHOWN, 0)]),
        "worst": rest.tail(SHOWN).iloc[::-1],
    }
    model, samples, rows = chunk.model, chunk.samples, []
    assert samples.masks is not None
    options: Any = {name: settings[name] for name in ("query", "scaled", "cls_key")}
    points = points_of(model.cfg.facts["attention"], settings["scaled"] and settings["cls_key"])
    for group, table in groups.items():
        for row in table.itertuples(index=False):
            image = samples.read(row.sample, row.sample + 1).to(model.cfg.device)
            mask = samples.masks(row.sample, row.sample + 1)[0].numpy()
            names = [full_name(point, row.layer) for point in points]
            with torch.no_grad():
                _, cache = model.run_with_cache(image, names_filter=names, **model.full_options)
            sides = zip(image.shape[2:], model.cfg.patch_size, strict=True)
            grid = [side // patch for side, patch in sides]
            values = maps.attention(cache, row.layer, grid=grid, **options)[0, row.head]
            picture = (displayable(image[0], model.cfg) * 255).round().astype(np.uint8)
            judged = ((mask != 0) & (mask != IGNORED)).astype(np.uint8) * 255
            flat = values.double().cpu().flatten().numpy()  # an array, as in a loaded result
            found = {"group": group, "map": flat, "rows": grid[0], "columns": grid[1]}
            found["picture"] = _png(picture, Image.Resampling.LANCZOS)
            found["mask"] = _png(judged, Image.Resampling.NEAREST)
            rows.append(row._asdict() | found)
    chunk.advance(samples.n)
    return {"examples": pd.DataFrame(rows, columns=_COLUMNS)}


def _png(pixels: np.ndarray, resample: Image.Resampling) -> bytes:
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((_LONGEST, _LONGEST), resample, reducing_gap=None)
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
