"""Makes the picture of the README: what a head sees, why an answer, what layers do to R^c.

python demos/first_look.py [OUT.png] prints the numbers that it draws. It takes about two minutes.
"""

import io
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

import crate_interp as ci

NAME, DATA, UNTRAINED = "crate-tiny-pictures", "pictures", 5
RANKS = (0.15, 0.3)  # more drawn images, from the highest score (0) to the lowest (1)
CODES = 36  # of the graph
FRAMES = {  # name, colour, marker; apart for colour-blind eyes
    "stream": ("stream as it is", "#d55e00", "o"),
    "unit": ("at a fixed norm", "#009e73", "^"),
    "read": ("as attention reads it\n(through LayerNorm)", "#0072b2", "s"),
}


def main(out: Path) -> None:
    model = ci.load(NAME)
    audit = ci.audit(model, f"embedded:{DATA}", untrained=UNTRAINED, progress=False)
    print(audit.headline())
    table = audit.table("cells").query("number == 'compresses' and eps == 0.1")
    table = table.query("basis == 'stored' and tokens == 'all'")
    rates = table.assign(maps=table["value"] - table["gain"]).set_index(["frame", "layer"])
    rates = 100 * rates[["value", "low", "high", "maps", "untrained", "shuffled"]].loc[list(FRAMES)]
    print(
        f"change of R^c by MSSA in per cent, {audit.meta['n_samples']} images, eps .1, 95 % "
        f"intervals; maps: less the gain over random output maps, on 8 images; untrained: mean of "
        f"{UNTRAINED} networks on 64 images; shuffled: on 16"
    )
    print((rates.round(2) + 0).to_string())  # + 0: no "-0.00"
    segments = ci.segment(model, f"embedded:{DATA}", untrained=1, progress=False)
    print(segments.headline())
    ranked = ranked_rows(model, segments)
    first, graph = explained(model, ranked[:8])
    others = [ranked[round(rank * (len(ranked) - 1))] for rank in RANKS]
    chosen = [first, *(row for row in others if row is not first)]
    save(draw(rates, segments, chosen, graph), out)
    print(out)


def ranked_rows(model: ci.HookedCrate, segments: ci.SegmentResult) -> list[Any]:
    """Returns the rows of the images with the right answer, the highest score first."""
    data = ci.data.embedded(DATA)
    with torch.no_grad():
        answers = model(model.preprocess(data["image"])).argmax(dim=-1)
    right = (answers == torch.tensor(data["label"])).nonzero()[:, 0].tolist()
    table: Any = segments.table("images")
    table = table[table["sample"].isin(right)]
    return table.sort_values("score", ascending=False).to_dict("records")


def explained(model: ci.HookedCrate, rows: list[Any]) -> tuple[Any, ci.AttributionGraph]:
    """Returns the first row whose graph keeps half of the answer, and this graph, or the last."""
    data = ci.data.embedded(DATA)
    found: list[tuple[Any, ci.AttributionGraph]] = []
    for row in rows:
        graph = ci.graph(model, model.preprocess([data[int(row["sample"])]["image"]])[0])
        print(graph.headline())
        found.append((row, graph))
        if graph.faithful():
            break
    return found[-1]


def draw(
    rates: Any, segments: ci.SegmentResult, chosen: list[Any], graph: ci.AttributionGraph
) -> Figure:
    figure = Figure(figsize=(12.4, 4.1), layout="constrained")
    parts: Any = figure.subfigures(1, 3, width_ratios=(1, 1.05, 1.12))
    draw_masks(parts[0], segments, chosen)
    draw_graph(parts[1], graph)
    draw_rates(parts[2].subplots(), rates)
    return figure


@torch.no_grad()
def draw_masks(part: Any, segments: ci.SegmentResult, chosen: list[Any]) -> None:
    """Draws images, what the chosen head attends to in them, and the mask that this makes."""
    model, row, data = ci.load(NAME), segments.overall(), ci.data.embedded(DATA)
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
        dark = torch.where(mask, 0.0, 0.8)
        axes[2].imshow(torch.zeros_like(dark), cmap="gray", alpha=dark, extent=(0, side, side, 0))
        axes[2].text(side - 1, side - 1.5, f"{one['score']:.2f}", color="w", ha="right", fontsize=9)
    words = ("picture", f"head {segments.named()}", "its mask")
    for axis, name in zip(panels[0], words, strict=True):
        axis.set_title(name, fontsize=10)
    part.suptitle(
        f"What does a head look at? Jaccard {row['value']:.2f},\na blind guess "
        f"{max(row['centre'], row['all_foreground']):.2f}, colours {row[row['strongest']]:.2f}",
        fontsize=11,
    )


def draw_graph(part: Any, graph: ci.AttributionGraph) -> None:
    """Draws the graph of an answer."""
    axes = part.subplots()
    ci.viz.graph_figure(graph, most=CODES, ax=axes)
    whole = graph.of("whole").set_index("edit")
    keep = whole.loc["keep"]
    axes.set_title(
        f"Why {graph.answer.strip(chr(39))}? {int(keep['nodes'])} codes alone give "
        f"{keep['logit']:.2f}\nof {graph.meta['target']['logit']:.2f}, as many random ones "
        f"{keep['random_mean']:.2f}",
        fontsize=11,
    )


def draw_rates(axes: Any, rates: Any) -> None:
    """Draws a line for each frame, its random output maps, and random networks in grey."""
    for frame, (name, colour, marker) in FRAMES.items():
        rows = rates.loc[frame]
        ends = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
        look = {"color": colour, "marker": marker, "ms": 4.5, "lw": 2, "capsize": 2}
        axes.errorbar(rows.index, rows["value"], ends, label=name, **look)
        axes.plot(rows.index, rows["maps"], color=colour, ls=":", lw=1.6)
        axes.plot(rows.index, rows["untrained"], color="0.45", ls="--", lw=1.3)
    axes.plot([], [], color="0.2", ls=":", lw=1.6, label="random output maps")
    read = rates.loc["read"]
    axes.plot(read.index, read["shuffled"], color="0.6", lw=1.3, label="weights shuffled, as read")
    axes.plot([], [], color="0.45", ls="--", lw=1.3, label="untrained, in all three")
    low = min(rates[["low", "maps"]].min().min(), read["shuffled"].min(), -1.0) * 1.08
    axes.axhspan(low, 0, color="0.95", zorder=0)
    axes.axhline(0, color="0.3", lw=0.8)
    top = 1.8 * rates[["high", "maps"]].max().max()  # room for the legend
    axes.set(ylim=(low, top), xticks=sorted(set(rates.index.get_level_values(1))), xlabel="layer")
    axes.set_ylabel("change of $R^c$ by attention, per cent", fontsize=10)
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    axes.set_title(
        "Does each layer compress (below 0)?\nThat depends on how tokens are scaled", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, out: Path) -> None:
    """Saves 2,000 pixels across in 256 colours, so that the file stays small."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=2000 / figure.get_size_inches()[0], format="png")
    picture = Image.open(drawn, formats=("PNG",)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("first_look.png"))
