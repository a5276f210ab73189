"""How far attribution graphs go: agreement with ablations, and what few nodes keep of an answer.

    python demos/how_far_graphs_go.py [--inputs 20] [--out demos/how_far_graphs_go.png]

For each embedded model, graphs of 20 inputs: a table in Markdown of whether attributions choose
better than size, and a figure of how much of the answer is left if only k nodes of each layer stay,
by attribution, by size, at random, along rotated axes, and in untrained networks. `make graphs`;
about five minutes on one core.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm
from train_tiny_cutouts import SHIPPED, composites, loaded
from training import arguments

import crate_interp as ci
from crate_interp.circuits.graphs.derivatives import Explained, values
from crate_interp.circuits.graphs.question import ask_answer
from crate_interp.circuits.graphs.trust import agreement, without
from crate_interp.core.safe_text import in_markdown
from crate_interp.stats.intervals import mean_interval

MODELS = ("crate-tiny-lm", "crate-tiny-induction", "crate-tiny-fashion", SHIPPED.name)
WINDOW = 48  # tokens of a text
SINGLE = 48  # codes of a layer that are ablated one at a time
BLUE, GREY, ORANGE, PURPLE = "#1f66a3", "#808890", "#a8500f", "#7a4fa3"


def inputs_of(name: str, model: Any, count: int) -> Iterator[torch.Tensor]:
    """Yields samples that the model was not trained on: texts, repeated strings, or pictures."""
    if name == "crate-tiny-lm":
        for row in range(count):
            yield model.to_tokens(ci.data.embedded("held-out-text")[row]["text"][:300])[:, :WINDOW]
    elif name == "crate-tiny-induction":
        for seed in range(count):
            generator = torch.Generator().manual_seed(seed)
            period = int(torch.randint(9, 21, (), generator=generator))
            body = torch.randint(32, (period,), generator=generator).repeat(2)
            yield torch.cat([torch.tensor([32]), body])[None, :-3]
    else:
        data = composites() if name == SHIPPED.name else ci.data.embedded("fashion")
        images = model.preprocess(data[:count]["image"])
        yield from images.split(1)


def with_both_held(graph: ci.AttributionGraph, case: Explained) -> float:
    """Returns r of attributions with pattern and norm held, with the ablations of the graph."""
    held = values(case.model, case.sample, case.question, ("pattern", "norm"))
    tests = graph.of("ablations")
    places = tests[["layer", "pos", "atom"]].itertuples(index=False)
    slopes = [float(held.attribution(layer)[pos, atom]) for layer, pos, atom in places]
    by_layer: Any = agreement(tests.assign(attribution=slopes))
    return float(by_layer["pearson"].mean())


def single_codes(case: Explained) -> dict[str, float]:
    """Returns how attribution and size agree with real effects of single codes, mean over layers.

    Codes are drawn at random among those that are not 0, which favours neither. Size says nothing
    of a sign; beside it is the more frequent sign of the layer's effects.
    """
    generator = torch.Generator().manual_seed(0)
    layers = []
    for layer, code in enumerate(case.codes):
        active = code.nonzero()
        nodes = active[torch.randperm(len(active), generator=generator)[:SINGLE]]
        effect = pd.Series(case.target - without(case, layer, nodes).numpy())
        at = nodes[:, 0], nodes[:, 1]
        attribution = pd.Series(case.attribution(layer)[at].numpy())
        size = pd.Series(code[at].abs().numpy())
        helps = float((effect > 0).mean())
        found = {
            "one code, rank: attribution": effect.abs().corr(attribution.abs(), "spearman"),
            "one code, rank: size": effect.abs().corr(size, "spearman"),
            "one code, sign: attribution": float(((effect > 0) == (attribution > 0)).mean()),
            "one code, sign: one for all": max(helps, 1 - helps),
        }
        layers.append(found)
    table: Any = pd.DataFrame(layers)
    return table.mean().to_dict()


def shares(graph: ci.AttributionGraph) -> dict[str, float]:
    """Returns what sets of codes give alone, and what is left without them, over the answer."""
    answer = graph.meta["target"]["logit"]
    whole = {who: graph.of("whole", who).set_index("edit") / answer for who in (
        "model", "rival", "rival_nodes",
    )}  # fmt: skip
    found = {}
    for edit, words in (("keep", "alone"), ("remove", "without")):
        row, other = whole["model"].loc[edit], whole["rival_nodes"].loc[edit, "logit"]
        found |= {
            f"{words}: graph": row["logit"],
            f"{words}: largest activations there": row["largest"],
            f"{words}: graph less largest": row["logit"] - row["largest"],
            f"{words}: random codes there": row["random_mean"],
            f"{words}: codes of the next answer's graph": other,
            f"{words}: graph less next answer's": row["logit"] - other,
        }
    found["the next answer: its graph alone"] = whole["rival"].loc["keep", "logit"]
    found["the next answer: whole"] = graph.meta["rival"]["logit"] / answer
    return found


def curves_of(graph: ci.AttributionGraph) -> pd.DataFrame:
    """Returns the share of the answer if k nodes of each layer stay, [k, kind]."""
    table = graph.of("sufficiency").set_index("k") / graph.meta["target"]["logit"]
    untrained = graph.of("sufficiency", "untrained").set_index("k")["logit"]
    return table.assign(untrained=untrained / graph.meta["untrained"])


def measured(name: str, count: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the numbers of a model, [input, measure], and its curves, [(input, k), kind]."""
    model: Any = loaded(name)
    rows, curves = [], {}
    for sample in tqdm(inputs_of(name, model, count), total=count, desc=name):
        graph = ci.graph(model, sample)
        question = ask_answer(model, model(sample).detach(), None, None)
        case = values(model, sample, question, ())
        curve = curves[len(rows)] = curves_of(graph)
        beyond: Any = curve["logit"] - curve["largest"]
        numbers = {
            "r with ablations": graph.predicts,
            "r, pattern and norm held": with_both_held(graph, case),
            "r, untrained": graph.of("agreement", "untrained")["pearson"].mean(),
            "codes": graph.of("whole")["nodes"].iloc[0],
            **shares(graph),
            "k codes at any token: attribution less size": beyond.mean(),
        }
        single = single_codes(case)
        for what, other in (("rank", "size"), ("sign", "one for all")):
            gain = single[f"one code, {what}: attribution"] - single[f"one code, {what}: {other}"]
            single[f"one code, {what}: attribution less {other}"] = gain
        rows.append(numbers | single)
    return pd.DataFrame(rows), pd.concat(curves, names=["input"])


def spread(table: Any) -> pd.DataFrame:
    """Returns mean, low, high of each column: the mean and its 95 % interval over inputs."""
    low, high = mean_interval(table.to_numpy(float))
    return pd.DataFrame({"mean": table.mean(), "low": low, "high": high})


def draw(curves: dict[str, pd.DataFrame], out: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(curves), figsize=(11, 3.2), sharey=True, layout="constrained"
    )
    looks = {
        "logit": (BLUE, "-", "largest attribution"), "largest": (ORANGE, "-", "largest activation"),
        "random_mean": (GREY, ":", "random nodes"), "rotated": (PURPLE, "--", "rotated axes"),
        "untrained": (GREY, "-", "untrained copy, largest attribution"),
    }  # fmt: skip
    for ax, (name, table) in zip(axes, curves.items(), strict=True):
        for kind, (colour, dashes, words) in looks.items():
            line = spread(table[kind].unstack("k"))
            ax.plot(line.index, line["mean"], color=colour, ls=dashes, label=words)
            ax.fill_between(line.index, line["low"], line["high"], color=colour, alpha=0.15, lw=0)
        ax.axhline(1, color="#1a1d20", lw=0.6)
        ax.set(title=name, xscale="log", xlabel="nodes kept in each layer", ylim=(-0.8, 1.6))
    axes[0].set_ylabel("share of the answer")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside lower center")
    figure.savefig(out, dpi=160)


def main() -> None:
    settings = arguments(__doc__, inputs=20, out=Path(__file__).with_suffix(".png"))
    cells, curves = {}, {}
    words = "{mean:.2f} ({low:.2f} to {high:.2f})"
    for name in MODELS:
        numbers, curves[name] = measured(name, settings.inputs)
        cells[name] = spread(numbers).apply(lambda row: words.format(**row), axis=1)
    table = pd.DataFrame(cells)
    print(in_markdown(("", *table), [(measure, *row) for measure, row in table.iterrows()]))
    draw(curves, settings.out)


if __name__ == "__main__":
    main()
