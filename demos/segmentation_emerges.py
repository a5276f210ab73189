"""Does segmentation emerge in training? Attention masks of crate-tiny-cutouts along its training, beside chance and a plain ViT.

    python demos/segmentation_emerges.py --out runs/emerges
    python demos/segmentation_emerges.py --out runs/emerges --vit runs/vit-tiny-cutouts

128 composites of objects and backgrounds that training never saw, the backgrounds zoomed 2.2 times as far as any in training (the
strips kept for them are narrower); no mask was seen in training either. A score is the mean
Jaccard index of the head that is best on the other half of the images (mass rule, patches). --vit: the folder that
`demos/train_tiny_cutouts.py --model vit` writes.
"""

import argparse
from pathlib import Path
from typing import Any

from plain_vit import PlainViT
from safetensors.torch import load_file
from train_tiny_cutouts import SAVED_STEPS, make_model

import crate_interp as ci
from crate_interp.segmentation import SegmentResult
from crate_interp.segmentation.result import CELL

DATA = "embedded:cutouts"
COLUMNS = ("value", "low", "high", "other_image", "random", "untrained", "all_foreground", "centre")


def crates() -> list[tuple[str, ci.HookedCrate]]:
    """The model along its training."""
    steps = [
        (f"step {step}", ci.load("crate-tiny-cutouts", revision=f"step-{step}"))
        for step in SAVED_STEPS
    ]
    return [*steps, ("trained", ci.load("crate-tiny-cutouts"))]


def vits(folder: Path) -> list[tuple[str, PlainViT]]:
    """The plain ViT along its training, in the same way."""
    files = [
        (f"step {step}", folder / "steps" / f"step-{step}.safetensors") for step in SAVED_STEPS
    ]
    models = []
    for name, file in [*files, ("trained", folder / "model.safetensors")]:
        model = make_model("vit")
        model.load_state_dict({key: value.float() for key, value in load_file(file).items()})
        models.append((name, model.eval()))
    return models


def measured(models: list[tuple[str, Any]]) -> list[tuple[str, SegmentResult]]:
    """What ci.segment finds in each, beside three networks of random weights (which train_tiny_cutouts begins with the first of)."""
    return [(name, ci.segment(model, DATA, untrained=3, progress=False)) for name, model in models]


def told(title: str, results: list[tuple[str, SegmentResult]]) -> str:
    """A line for each checkpoint, and the trained model's layers."""
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


def picture(found: dict[str, list[tuple[str, SegmentResult]]], path: Path) -> None:
    """The scores along the training, with intervals, and what chance has."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for (title, results), colour in zip(found.items(), ("#1f6fb4", "#c05a1a"), strict=False):
        rows = [result.overall() for _, result in results]
        values = [row["value"] for row in rows]
        bars = [
            [row["value"] - row["low"] for row in rows],
            [row["high"] - row["value"] for row in rows],
        ]
        axes.errorbar(
            range(len(rows)), values, yerr=bars, marker="o", markersize=4, color=colour, label=title
        )
        other = [row["other_image"] for row in rows]
        axes.plot(
            range(len(rows)), other, ":", color=colour, label=f"{title}, mask of another image"
        )
    names, last = [name for name, _ in found["CRATE"]], found["CRATE"][-1][1].overall()
    for name, style in (("all_foreground", "--"), ("centre", "-.")):
        axes.axhline(
            last[name],
            linestyle=style,
            linewidth=0.8,
            color="#777777",
            label=name.replace("_", " "),
        )
    axes.set(xticks=range(len(names)), xticklabels=names, ylabel="Jaccard index of the fixed head")
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/emerges"))
    parser.add_argument("--vit", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"CRATE": measured(crates())}
    if args.vit:
        found["ViT"] = measured(vits(args.vit))
    for title, results in found.items():
        print(told(title, results))
    picture(found, args.out / "emerges.png")
    print(f"written to {args.out / 'emerges.png'}")


if __name__ == "__main__":
    main()
