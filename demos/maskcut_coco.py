r"""Scores MaskCut on the codes of a layer as COCO does: class-agnostic average precision.

    python demos/maskcut_coco.py            # the embedded composites and model
    python demos/maskcut_coco.py --source model.pth --config n_heads=6 --size 480 \
        --coco instances_val2017.json --images val2017

--config has fields of the config, --size the side of the square that images are resized to, --coco
annotations (default: the embedded composites).

Prints AP and AP50, by pycocotools, of the trained network and of the same network with random
weights. Writes results.json, which pycocotools' COCO.loadRes reads. The score of a mask is its
order, because MaskCut finds the clearest cut first. Masks at the resolution of patches cannot have
a high AP: the edge of every object is a staircase.
"""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import encode
from torch import Tensor
from tqdm.auto import tqdm
from training import arguments

import crate_interp as ci
from crate_interp.measures import maskcut
from crate_interp.questions.untrained_twins import twin


def masks_of(model: ci.HookedCrate, image: Tensor, layer: int, affinity: str) -> Tensor:
    """Returns masks of patches, bool [3, h, w], from the codes of all heads of one layer."""
    point = f"blocks.{layer}.attn.hook_k"
    with torch.no_grad():
        _, cache = model.run_with_cache(image, names_filter=[point])
    codes = cache[point].flatten(2)[0, 1:]  # [patch, head * d_head]
    grid = (image.shape[2] // model.cfg.patch_size[0], image.shape[3] // model.cfg.patch_size[1])
    return maskcut(codes, grid, n_masks=3, affinity=affinity)


def coco_results(
    masks: Tensor | np.ndarray, image_id: int, scores: Sequence[float]
) -> list[dict[str, Any]]:
    """Returns masks of an image as pycocotools' loadRes reads them; all have the category 1."""
    same, results = {"image_id": int(image_id), "category_id": 1}, []
    for mask, score in zip(np.asarray(masks), scores, strict=True):
        if mask.any():
            one: Any = encode(np.asfortranarray(mask.astype(np.uint8)))
            drawn = {"size": list(map(int, one["size"])), "counts": one["counts"].decode("ascii")}
            results.append(same | {"segmentation": drawn, "score": float(score)})
    return results


def at_size(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the masks at the size (height, width) of the image, by nearest neighbour."""
    wide = [
        Image.fromarray(mask.numpy()).resize((size[1], size[0]), Image.Resampling.NEAREST)
        for mask in masks
    ]
    return torch.stack([torch.from_numpy(np.array(mask)) for mask in wide])


def embedded_annotations() -> tuple[COCO, list[int]]:
    """Returns the embedded composites as COCO annotations, and the ids of the images."""
    images, annotations = [], []
    rows: Any = ci.data.embedded("pictures")
    for index, row in enumerate(rows, 1):
        mask = torch.from_numpy(np.array(row["mask"])) > 127
        height, width = (int(side) for side in mask.shape)
        images.append({"id": index, "width": width, "height": height})
        box = [0, 0, width, height]
        (drawn,) = coco_results(mask[None], index, [1.0])
        annotation = drawn | {"id": index, "bbox": box, "iscrowd": 0}
        annotations.append(annotation | {"area": int(mask.sum())})
    truth: Any = COCO()
    truth.dataset = dict(images=images, annotations=annotations, categories=[{"id": 1}], info={})
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
    return truth, [image["id"] for image in images]


def precision(truth: Any, results: list[dict]) -> tuple[float, float]:
    """Returns AP and AP50 of masks, regardless of classes."""
    if not results:
        return 0.0, 0.0
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(results), "segm")
        evaluation.params.useCats = 0
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])


def main() -> None:
    args = arguments(
        __doc__, out=Path("runs/maskcut"), source="crate-tiny-pictures", config=[""], coco=Path(),
        images=Path(), size=0, layer=-1, affinity=("cosine", "inner"), limit=0,
    )  # fmt: skip
    pairs = (pair.split("=", 1) for pair in args.config)
    fields: dict[str, Any] = {name: json.loads(value) for name, value in pairs}
    if args.size:
        fields |= {"resize": [args.size, args.size], "crop": None, "interpolate_pos": True}
    model = ci.load(args.source, **fields)
    if args.coco.name:
        data = f"coco:{args.coco}:{args.images if args.images.name else args.coco.parent}"
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(args.coco)
        ids = [row["id"] for row in truth.dataset["images"]]  # in the order of the samples
    else:
        data, (truth, ids) = "embedded:pictures", embedded_annotations()
    samples = ci.data.open_data(data, model.preprocess, args.limit or None)
    layer = args.layer % len(model.blocks)
    for name, other in (("trained", model), ("random weights", twin(model, 0))):
        results: list[dict[str, Any]] = []
        for place in tqdm(range(samples.n), desc=name, unit="image"):
            size, image = truth.imgs[ids[place]], samples.read(place, place + 1)
            masks = masks_of(other, image, layer, args.affinity)
            wide = at_size(masks, (size["height"], size["width"]))
            results += coco_results(wide, ids[place], [1.0, 0.5, 0.25])
        if other is model:
            # before loadRes, which changes the results
            (args.out / "results.json").write_text(json.dumps(results))
        precisions = precision(truth, results)
        print(f"{name}: {len(results)} masks, AP {precisions[0]:.3f}, AP50 {precisions[1]:.3f}")
    print(f"written to {args.out / 'results.json'}")


if __name__ == "__main__":
    main()
