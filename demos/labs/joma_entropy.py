"""Does attention in trained CRATEs first sharpen and then spread, as JoMA says of transformers?

    python demos/labs/joma_entropy.py [--quick | --full] --out DIR

JoMA (arXiv 2310.00535, Figures 4, 6, 7, 8): along the training of a layer the entropy of attention
falls and bounces back, and the stable rank of the lower MLP matrix falls. Here: the checkpoints of
three tiny CRATEs, whose lower matrix is the dictionary D, and the first and last of a GPT.

The bounce of a curve is the smaller of the fall from the first step to the lowest and the rise from
there to the last, a mean over layers. A curve that only falls or only rises has none. No claim is
asked of it: each network has one training of 8 checkpoints or fewer, and whether a curve with a
trend turns is a test of its increments that needs 20 (`WatchResult.changes`).
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawing import level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

import crate_interp as ci
from crate_interp.measures import attention_entropy, causal_uniform_entropy, stable_rank

DEMOS = Path(__file__).parent.parent
sys.path.append(str(DEMOS))

SERIES = {
    "crate-tiny-fashion": (0, 10, 40, 160, 640, 2560),
    "crate-tiny-induction": (0, 40, 160, 320, 640, 1280, 2560),
    "crate-tiny-lm": (0, 160, 640, 2560),
    "gpt-tiny-induction": (0,),
}
LAST = dict(zip(SERIES, (4280, 5000, 7200, 5000), strict=True))  # the step of the model itself
COUNT = {"quick": 64, "full": 512}  # samples


def inputs(name: str, count: int, model: Any) -> Tensor:
    """Returns images of embedded:fashion, held-out texts or sequences, as the model reads them."""
    if name == "crate-tiny-lm":
        return model.windows(ci.data.embedded("held-out-text")["text"])[:count]
    if name.endswith("induction"):
        from train_tiny_induction import HELD_OUT, sequences

        return sequences(count, HELD_OUT, torch.Generator().manual_seed(10_000))
    return model.preprocess(ci.data.embedded("fashion")["image"][:count])


@torch.no_grad()
def measured(model: Any, samples: Tensor) -> tuple[NDArray, NDArray]:
    """Returns each layer's entropy of attention, and stable rank of D, or of a GPT's lower matrix.

    entropy: [layer, sample] in nats, means over heads and queries, as in the paper; [layer].
    """
    only = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    _, cache = model.run_with_cache(samples, names_filter=only)
    entropy = [attention_entropy(cache[point]).mean(dim=(1, 2)) for point in only]
    lower = "D" if hasattr(model.blocks[0].mlp, "D") else "fc_in.weight"
    ranks = [stable_rank(block.mlp.get_parameter(lower)).item() for block in model.blocks]
    return torch.stack(entropy).numpy(), np.array(ranks)


def bounce(curves: NDArray) -> NDArray:
    """Returns the smaller of fall to the lowest and rise from it, `[...]` of curves [..., step]."""
    lowest = curves.min(axis=-1)
    return np.minimum(curves[..., 0], curves[..., -1]) - lowest


def measure_series(name: str, count: int) -> dict[str, Any]:
    """Returns entropies [step, layer, sample] and ranks [step, layer] of an embedded series."""
    place = str(DEMOS / "weights" / name) if name == "crate-tiny-lm" else name  # of its steps
    models = [ci.load(place, revision=f"step-{step}") for step in tqdm(SERIES[name], desc=name)]
    models.append(ci.load(name))
    samples = inputs(name, count, models[-1])
    found = [measured(model, samples) for model in models]
    entropy, ranks = (np.stack(each) for each in zip(*found, strict=True))
    positions = models[-1].cfg.n_ctx
    images = name == "crate-tiny-fashion"
    uniform = float(np.log(positions)) if images else causal_uniform_entropy(positions)
    return {"entropy": entropy.tolist(), "ranks": ranks.tolist(), "uniform": uniform}


def pair_shares() -> list[float]:
    """Returns the stable rank of D over that before training, mean over layers, by seed.

    Of the five CRATEs of demos/pairs.py, whose starts are known.
    """
    import pairs

    shares = []
    for seed in pairs.SEEDS:
        after: Any = ci.load(str(pairs.WEIGHTS / pairs.name_of("crate", seed)))
        before: Any = pairs.make_model("crate", seed)
        ranks = [
            np.array([stable_rank(block.mlp.D.detach()).item() for block in model.blocks])
            for model in (before, after)
        ]
        shares.append(float((ranks[1] / ranks[0]).mean()))
    return shares


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the embedded checkpoints."""
    rows, bounces, falls = [], [], []
    for name in SERIES:
        found = steps.do(name, partial(measure_series, name, COUNT[form]))
        entropy, ranks = np.array(found["entropy"]), np.array(found["ranks"])
        means = entropy.mean(axis=-1).T  # [layer, step]
        if len(ranks) > 2:
            bounces.append(f"{bounce(means).mean():.3f} nats in {name}")
        falls.append(f"{ranks[-1].mean() / ranks[0].mean():.2f} in {name}")
        for at, step in enumerate([*SERIES[name], LAST[name]]):
            for layer in range(ranks.shape[1]):
                where = f"{name}, layer {layer}"
                rows.append(["entropy", where, 0, step, entropy[at, layer].mean()])
                rows.append(["stable rank", where, 0, step, ranks[at, layer]])
        rows.append(["uniform entropy", name, 0, 0, found["uniform"]])
    shares = steps.do("pairs", pair_shares)
    rows += [["share of stable rank", "pairs", seed, 0, v] for seed, v in enumerate(shares)]
    words: Any = {"falls": ", ".join(falls), "bounces": ", ".join(bounces)}
    rank = claim("joma_entropy.rank", shares, baseline=1.0, **words)
    return result("joma_entropy", form, [rank], rows, **words)


def draw(found: LabResult) -> Any:
    """Draws entropy and stable rank of each layer against the step, a row for each model."""
    figure, axes = panels(len(SERIES), 2, size=(17, 7.5))
    for name, (left, right) in zip(SERIES, axes.T, strict=True):
        for axis, quantity in ((left, "entropy"), (right, "stable rank")):
            table = found.numbers(quantity)
            mine = table[table["setting"].str.startswith(name)]
            for setting, rows in mine.groupby("setting"):
                axis.plot(rows["place"], rows["value"], "o-", label=str(setting).split(", ")[1])
            axis.set_xscale("symlog", linthresh=10)
        uniform = found.numbers("uniform entropy", setting=name)["value"][0]
        level(left, uniform, "uniform")
        tidy(left, xlabel="step", title=name, ylabel="entropy of attention, nats")
        tidy(right, legend=0, xlabel="step", title=name, ylabel="stable rank, lower matrix")
    return titled(figure, found, headline=found.headline().replace("; ", ";\n"))


if __name__ == "__main__":
    main(run, draw)
