"""Makes the picture of the README: what MSSA does to R^c in three frames, and CLS attention.

python demos/first_look.py [OUT.png] prints the numbers that it draws. It takes about 20 seconds.
"""

import io
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

import crate_interp as ci

NAME, DATA, LAYER, UNTRAINED = "crate-tiny-fashion", "embedded:fashion", 4, 3
FRAMES = {  # name, colour, marker and side of its name; apart for colour-blind eyes
    "stream": ("stream as it is", "#d55e00", "o", "center"),
    "unit": ("at one length", "#009e73", "^", "bottom"),
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
    images = model.preprocess(ci.data.embedded("fashion")[:4]["image"])
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    attention = ci.maps.attention(cache, LAYER)  # [image, head, row, column]
    print(f"largest CLS attention of layer {LAYER}, images down, heads across:")
    print(attention.amax(dim=(2, 3)).numpy().round(2))
    save(draw(rates, images[:, 0], attention), out)
    print(out)


def draw(rates: Any, images: torch.Tensor, attention: torch.Tensor) -> Figure:
    figure = Figure(figsize=(8.6, 3.7), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.16, 1))
    left, right = halves
    draw_rates(left.subplots(), rates)
    heads = attention.shape[1]
    panels = right.subplots(len(images), heads + 1, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    right.suptitle(f"Where CLS looks in layer {LAYER}", fontsize=11)
    height, width = images.shape[1:]
    for row, image, maps in zip(panels, images, attention, strict=True):
        for panel in row:
            panel.set_axis_off()
        row[0].imshow(image, cmap="gray")
        for panel, own in zip(row[1:], maps, strict=True):
            box = (-0.5, width - 0.5, height - 0.5, -0.5)
            panel.imshow(own, cmap="magma", vmin=0, extent=box)
    for panel, name in zip(panels[0], ["image", *(f"head {n}" for n in range(heads))], strict=True):
        panel.set_title(name, fontsize=10)
    return figure


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
    axes.set_title("Does attention lower the coding rate $R^c$?\nThe frame decides", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, out: Path) -> None:
    """Saves 1,720 pixels across in 256 colours, so that the file stays small."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=200, format="png")
    picture = Image.open(drawn, formats=("PNG",)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("first_look.png"))
