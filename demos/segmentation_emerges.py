"""Does segmentation emerge in training? Scores attention masks along a training.

    python demos/segmentation_emerges.py
    python demos/segmentation_emerges.py --vit runs/vit-tiny-cutouts

The masks are of crate-tiny-cutouts at the checkpoints of its training, beside chance, maps of the
picture alone and a plain ViT. The images are 128 composites of objects and backgrounds that
training never saw. Their backgrounds are zoomed 2.2 times as far as those of training, because the
strips kept for them are narrower. Training saw no masks either. A score is the mean Jaccard index
of the head that is best on the other half of the images (mass rule, patches). --vit: the folder
that `demos/train_tiny_cutouts.py --model vit` writes.
"""

from collections.abc import Sequence
from pathlib import Path

from plain_vit import PlainViT
from safetensors.torch import load_file
from train_tiny_cutouts import SAVED_STEPS, SHIPPED, composites, make_model
from training import arguments

import crate_interp as ci
from crate_interp.segmentation.result import CELL, SegmentResult

COLUMNS = (
    "value", "low", "high", "other_image", "random", "untrained", "all_foreground", "centre",
    "border_colour",
)  # fmt: skip


def crates() -> list[tuple[str, ci.HookedCrate]]:
    """Returns the model at the checkpoints of its training."""
    steps = [(f"step {step}", ci.load(SHIPPED, revision=f"step-{step}")) for step in SAVED_STEPS]
    return [*steps, ("trained", ci.load(SHIPPED))]


def vits(folder: Path) -> list[tuple[str, PlainViT]]:
    """Returns the plain ViT at the checkpoints of its training."""
    names = [f"steps/step-{step}" for step in SAVED_STEPS]
    models = []
    for name in [*names, "model"]:
        model, state = make_model("vit"), load_file(folder / f"{name}.safetensors")
        model.load_state_dict({key: value.float() for key, value in state.items()})
        shown = "trained" if name == "model" else name.removeprefix("steps/").replace("-", " ")
        models.append((shown, model.eval()))
    return models


def measured(models: Sequence[tuple[str, ci.HookedCrate]]) -> list[tuple[str, SegmentResult]]:
    """Returns what ci.segment measures of each model, beside three networks of random weights.

    train_tiny_cutouts starts from the first of the three.
    """
    data = composites()
    return [(name, ci.segment(model, data, untrained=5, progress=False)) for name, model in models]


def table(title: str, results: list[tuple[str, SegmentResult]]) -> str:
    """Returns a line for each checkpoint, and the scores of the trained model's layers, as text."""
    lines = [title, f"{'':>9}  " + "  ".join(f"{name:>14}" for name in COLUMNS)]
    for name, result in results:
        row = result.overall()
        lines.append(f"{name:>9}  " + "  ".join(f"{row[column]:14.3f}" for column in COLUMNS))
    header, rows = results[-1][1].cells()
    lines += [
        "",
        f"trained, by layer: score ({', '.join(CELL.values())})",
        "  ".join(f"{cell:>30}" for cell in header),
    ]
    return "\n".join([*lines, *("  ".join(f"{cell:>30}" for cell in row) for row in rows), ""])


def main() -> None:
    args = arguments(__doc__, vit=Path())
    print(table("CRATE", measured(crates())))
    if args.vit.name:
        print(table("ViT", measured(vits(args.vit))))


if __name__ == "__main__":
    main()
