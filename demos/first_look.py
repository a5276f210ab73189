"""Makes the picture of the README: what one head sees, and what MSSA does to R^c in three frames.

python demos/first_look.py [OUT.png] prints the numbers that it draws. It takes about 40 seconds.
"""

import io
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

import crate_interp as ci

NAME, DATA, UNTRAINED = "crate-tiny-fashion", "embedded:fashion", 3
SEEING, SEEN = "crate-tiny-cutouts", "cutouts"
RANKS = (0.02, 0.25, 0.5)  # the drawn images, from the highest score (0) to the lowest (1)
FRAMES = {  # name, colour, marker and side of its name; apart for colour-blind eyes
    "stream": ("stream as it is", "#d55e00", "o", "center"),
    "unit": ("at a fixed norm", "#009e73", "^", "bottom"),
    "read": ("through LayerNorm", "#0072b2", "s", "top"),
}


def main(out: Path) -> None:
    model = ci.load(NAME)
    # grid=False measures the frames at eps 0.1 alone
    audit = ci.audit(model, DATA, untrained=UNTRAINED, grid=False, progress=False)
    table = audit.table()
    rates = table[table["number"] == "compresses"].set_index(["frame", "layer"])
    rates = 100 * rates[["value", "low", "high", "untrained"]].loc[list(FRAMES)]
    print(
        f"change of R^c by MSSA in per cent, {audit.meta['n_samples']} images, 95 % intervals; "
        f"untrained: mean of {UNTRAINED} networks on 64 images"
    )
    print(rates.round(2).to_string())
    segments = ci.segment(ci.load(SEEING), f"embedded:{SEEN}", untrained=1, progress=False)
    print(segments.headline())
    save(draw(rates, segments), out)
    print(out)


def draw(rates: Any, segments: ci.SegmentResult) -> Figure:
    figure = Figure(figsize=(8.6, 3.7), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 1.16))
    draw_masks(halves[0], segments)
    draw_rates(halves[1].subplots(), rates)
    return figure


@torch.no_grad()
def draw_masks(part: Any, segments: ci.SegmentResult) -> None:
    """Draws images, what the chosen head attends to in them, and the mask that this makes."""
    model, row = ci.load(SEEING), segments.overall()
    ranked = segments.table("images").sort_values("score", ascending=False, ignore_index=True)
    chosen = [ranked.loc[round(rank * (len(ranked) - 1))] for rank in RANKS]
    data = ci.data.embedded(SEEN)
    panels = part.subplots(len(chosen), 3, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    for axes, one in zip(panels, chosen, strict=True):
        sample = data[int(one["sample"])]
        _, cache = model.run_with_cache(model.preprocess([sample["image"]]))
        attention = ci.maps.attention(cache, int(one["layer"]))[0, int(one["head"])]
        mask = ci.measures.mass_mask(attention.flatten(), 0.6).reshape(attention.shape)
        side = sample["image"].size[0]
        for axis in axes:
            axis.set_axis_off()
            axis.imshow(sample["image"], extent=(0, side, side, 0))
        axes[1].imshow(attention, cmap="magma", vmin=0, extent=(0, side, side, 0))
        dark = torch.where(mask, 0.0, 0.72)
        axes[2].imshow(torch.zeros_like(dark), cmap="gray", alpha=dark, extent=(0, side, side, 0))
        axes[2].text(side - 1, side - 1.5, f"{one['score']:.2f}", color="w", ha="right", fontsize=9)
    words = ("picture", f"head {segments.named()}", "its mask")
    for axis, name in zip(panels[0], words, strict=True):
        axis.set_title(name, fontsize=10)
    part.suptitle(
        f"One head finds objects: Jaccard {row['value']:.2f}\na centred map {row['centre']:.2f}, "
        f"colour contrast {row['border_colour']:.2f}",
        fontsize=11,
    )


def draw_rates(axes: Any, rates: Any) -> None:
    """Draws a line for each frame, named at its end, and the untrained networks in grey."""
    for frame, (name, colour, marker, side) in FRAMES.items():
        rows = rates.loc[frame]
        last = rows["value"].iloc[-1]
        ends = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
        look = {"color": colour, "marker": marker, "ms": 4.5, "lw": 2, "capsize": 2}
        axes.errorbar(rows.index, rows["value"], ends, **look)
        axes.plot(rows.index, rows["untrained"], color="0.45", ls="--", lw=1.3)
        text = f"{name}\n{last:+.1f} %".replace("-", "\N{MINUS SIGN}")
        axes.text(rows.index[-1] + 0.2, last, text, color=colour, fontsize=10, va=side)
    axes.text(5.2, -0.3, "untrained,\nin all three", color="0.35", fontsize=10, va="center")
    axes.axhspan(-27, 0, color="0.95", zorder=0)
    axes.axhline(0, color="0.3", lw=0.8)
    axes.text(-0.2, -26, "below 0: compressed", fontsize=10, color="0.25")
    axes.text(-0.2, 10.2, "above 0: expanded", fontsize=10, color="0.25")
    axes.set(xlim=(-0.35, 8.4), ylim=(-27, 12.5), xticks=range(6), xlabel="layer")
    axes.xaxis.set_label_coords(2.85 / 8.75, -0.1)
    axes.set_ylabel("change by attention, per cent", fontsize=10)
    axes.set_title("Does attention compress ($R^c$)?\nIt depends on the normalisation", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, out: Path) -> None:
    """Saves 1,720 pixels across in 256 colours, so that the file stays small."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=200, format="png")
    picture = Image.open(drawn, formats=("PNG",)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("first_look.png"))
