"""How far attribution graphs go: agreement with ablations, and what few nodes keep of an answer.

    python demos/how_far_graphs_go.py [--inputs 20] [--out demos/how_far_graphs_go.png]

For each embedded model, graphs of 20 inputs: a table in Markdown, and a figure of how much of the
answer is left if only k nodes of each layer stay, beside random nodes, rotated axes and untrained
networks. `make graphs`; about six minutes on one core.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm
from train_tiny_cutouts import SHIPPED, composites, loaded

import crate_interp as ci

MODELS = ("crate-tiny-lm", "crate-tiny-induction", "crate-tiny-fashion", SHIPPED.name)
WINDOW = 48  # tokens of a text
BLUE, GREY, ORANGE = "#1f66a3", "#808890", "#a8500f"


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


def measured(name: str, count: int) -> tuple[list[Any], pd.DataFrame]:
    """Returns the row of a model in the table, and its curves: k, kind, share of the answer."""
    model: Any = loaded(name)
    found: dict[str, list[float]] = {}
    curves: list[Any] = []
    for sample in tqdm(inputs_of(name, model, count), total=count, desc=name):
        graph = ci.graph(model, sample)
        target = {"model": graph.meta["target"]["logit"], "untrained": graph.meta["untrained"]}
        whole = graph.of("whole").set_index("edit")
        rival = graph.of("whole", "rival").set_index("edit").loc["keep", "logit"]
        numbers = {
            "r": graph.predicts,
            "both held": ci.graph(model, sample, freeze=("pattern", "norm")).predicts,
            "untrained r": graph.of("agreement", "untrained")["pearson"].mean(),
            "codes": float(whole.loc["keep", "nodes"]),
            "alone": whole.loc["keep", "logit"] / target["model"],
            "random": whole.loc["keep", "random_mean"] / target["model"],
            "next alone": rival / target["model"],
            "next whole": graph.meta["rival"]["logit"] / target["model"],
            "without": whole.loc["remove", "logit"] / target["model"],
            "without random": whole.loc["remove", "random_mean"] / target["model"],
        }
        for key, value in numbers.items():
            found.setdefault(key, []).append(float(value))
        for network, kind in (("model", "largest"), ("untrained", "untrained")):
            table = graph.of("sufficiency", network)
            curves.append(table.assign(share=table["logit"] / target[network], kind=kind))
        own = graph.of("sufficiency")
        for kind, column in (("random", "random_mean"), ("rotated", "rotated")):
            curves.append(own.assign(share=own[column] / target["model"], kind=kind))
    joined: Any = pd.concat(curves)[["k", "kind", "share"]]
    return [name, *map(spread, found.values())], joined


def spread(values: list[float]) -> str:
    """Returns the mean and its 95 % interval over inputs."""
    mean, half = np.mean(values), 2.09 * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})"


def draw(curves: dict[str, pd.DataFrame], out: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(curves), figsize=(11, 2.9), sharey=True, layout="constrained"
    )
    looks = {
        "largest": (BLUE, "-", "largest attribution"), "random": (GREY, ":", "random nodes"),
        "rotated": (ORANGE, "--", "rotated axes"), "untrained": (GREY, "-", "untrained, largest"),
    }  # fmt: skip
    for ax, (name, table) in zip(axes, curves.items(), strict=True):
        for kind, (colour, dashes, words) in looks.items():
            own: Any = table[table["kind"] == kind].groupby("k")["share"]
            mean, half = own.mean(), 2.09 * own.sem()
            ax.plot(mean.index, mean, color=colour, ls=dashes, label=words)
            ax.fill_between(mean.index, mean - half, mean + half, color=colour, alpha=0.15, lw=0)
        ax.axhline(1, color="#1a1d20", lw=0.6)
        ax.set(title=name, xscale="log", xlabel="nodes kept in each layer", ylim=(-0.8, 1.6))
    axes[0].set_ylabel("share of the answer")
    axes[0].legend(fontsize=7, loc="lower right")
    figure.savefig(out, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    asked = parser.parse_args()
    head = [
        "model", "r with ablations", "pattern and norm held", "untrained", "codes", "alone",
        "random alone",
        "the next answer, its codes alone", "the next answer, whole",
        "without them", "without random",
    ]  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    curves = {}
    for name in MODELS:
        row, curves[name] = measured(name, asked.inputs)
        print(f"| {' | '.join(row)} |", flush=True)
    draw(curves, asked.out)


if __name__ == "__main__":
    main()
