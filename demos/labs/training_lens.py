"""What happens to the rates of a CRATE while it is trained, by `ci.watch`?

    python demos/labs/training_lens.py [--quick | --full] --out DIR

A CRATE of the zoo (zoo.py) is trained on scikit-learn's digits while a watch measures 32 test
images every 20 updates: what attention does to R^c in the three frames of the audit, and the
objective of each layer. The papers say that attention lowers R^c and that layers lower the
objective; they show trained networks. Here the step 0 is the baseline. The finding says how many
curves change their course, beside how many would by chance.
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import zoo
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from layerwise import FRAMES
from tqdm.auto import tqdm
from training import learning_rate
from training_lens_drawing import draw

import crate_interp as ci

SEEDS = {"quick": 2, "full": 5}
EVERY, IMAGES, LIKELY = 20, 32, 0.05
CHANGE, OBJECTIVE = "frames.change", "objective.count"
RULES = {CHANGE: "brings", OBJECTIVE: "objective"}

HEADLINE = (
    "What attention adds to R^c goes with training from {words} nats, mean over layers and {seeds} "
    "seeds; {changes}, at most {likely:.0%} would by chance."
)


def watched(seed: int) -> dict[str, list]:
    """Returns the means (statistic, layer, step, value), and the p of each series, of a training.

    A series is a statistic in a layer.
    """
    _, _, images, _ = zoo.digits()
    recipe = zoo.Recipe("zoo", "crate", zoo.LAYERS, zoo.LR, zoo.BATCH, seed)
    with ExitStack() as stack:
        watches: list[ci.Watch] = []

        def look(model: zoo.HookedCrate, step: int) -> bool:
            if not step:
                probes = ["frames", "objective"]
                watch = ci.watch(model, images, every=EVERY, probes=probes, limit=IMAGES)
                watches.append(stack.enter_context(watch))
            else:
                watches[0].step()
            return False

        zoo.fit(recipe, zoo.STEPS, lambda step: learning_rate(step, zoo.STEPS, recipe.lr), look)
    found = watches[0].result()
    wanted = [f"{name}_{frame}" for name in (CHANGE, OBJECTIVE) for frame in FRAMES]
    layers: Any = found.layers()
    layers["name"] = layers["probe"] + "." + layers["statistic"]
    layers = layers[layers["name"].isin(wanted)]
    changes: Any = found.changes()
    changes["name"] = changes["probe"] + "." + changes["statistic"]
    changes = changes[changes["name"].isin(wanted) & changes["p"].notna()]  # what can be tested
    return {
        "means": layers[["name", "layer", "step", "mean"]].values.tolist(),
        "changes": changes[["name", "layer", "step", "p"]].values.tolist(),
    }


def at(rows: list[list], name: str, step: int) -> dict[int, float]:
    """Returns the mean over layers of a statistic at a step, by seed."""
    seeds = sorted({row[2] for row in rows})
    return {
        seed: float(np.mean([r[4] for r in rows if r[0] == name and r[2] == seed and r[3] == step]))
        for seed in seeds
    }


def below_0(rule: str, values: dict[str, list[float]], begun: float) -> dict:
    """Returns the claim that a number lies below 0, its mean over layers by seed in each frame.

    The numbers shown are those of the stream. begun: the baseline.
    """
    ends = {frame: mean_and_interval(each)[1] for frame, each in values.items()}
    below = [frame for frame, (_, high) in ends.items() if high < 0]
    above = [frame for frame, (low, _) in ends.items() if low > 0]
    return claim(
        f"training_lens.{rule}", values["stream"], cases=ends, baseline=begun, size=size(),
        n=len(values["stream"]),
        why=f"Below 0: {', '.join(below) or 'no frame'}; above: {', '.join(above) or 'none'}. The "
        "numbers are those of the stream.",
    )  # fmt: skip


def over_seeds(rows: list[list], name: str, step: int) -> dict[str, list[float]]:
    """Returns the means over layers of a statistic at a step, by seed, for each frame."""
    return {frame: list(at(rows, f"{name}_{frame}", step).values()) for frame in FRAMES}


def of_training(rows: list[list], name: str) -> dict:
    """Returns the claim that training lowers a statistic: last step minus first."""
    begun, ended = (over_seeds(rows, name, step) for step in (0, zoo.STEPS))
    moved = {
        frame: [last - first for first, last in zip(begun[frame], ended[frame], strict=True)]
        for frame in FRAMES
    }
    return below_0(RULES[name], moved, float(np.mean(begun["stream"])))


def of_attention(rows: list[list]) -> dict:
    """Returns the claim that attention lowers R^c after training."""
    begun, ended = (over_seeds(rows, CHANGE, step) for step in (0, zoo.STEPS))
    return below_0("lowers", ended, float(np.mean(begun["stream"])))


def change_words(pairs: list[list]) -> str:
    """Returns in how many series the course changes once, by `WatchResult.changes`.

    pairs: (statistic, layer, seed, step, p). No paper claims it, so it is no row of the table.
    """
    found = [row[3] for row in pairs if row[4] <= LIKELY]
    when = f", half of them by step {np.median(found):.0f}" if found else ""
    return f"{len(found)} of {len(pairs)} curves change their course once{when}"


def size() -> str:
    return f"digits 8x8, d = 32, 4 layers, {zoo.STEPS} updates (published: ImageNet, no steps)"


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the trainings."""
    rows, pairs = [], []
    for seed in tqdm(range(SEEDS[form]), desc="trainings", unit="training"):
        found = steps.do(f"seed-{seed}", lambda seed=seed: watched(seed))
        rows += [[name, f"layer {layer}", seed, step, v] for name, layer, step, v in found["means"]]
        pairs += [[name, layer, seed, step, p] for name, layer, step, p in found["changes"]]
    claims = [of_attention(rows), of_training(rows, CHANGE), of_training(rows, OBJECTIVE)]
    before, after = (
        {frame: np.mean(each) for frame, each in over_seeds(rows, CHANGE, step).items()}
        for step in (0, zoo.STEPS)
    )
    words = ", ".join(f"{before[frame]:+.2f} to {after[frame]:+.2f} ({frame})" for frame in FRAMES)
    changes = change_words(pairs)
    headline = HEADLINE.format(words=words, seeds=SEEDS[form], changes=changes, likely=LIKELY)
    numbers = [*rows, *([f"p of {n}", f"layer {la}", s, st, p] for n, la, s, st, p in pairs)]
    return result("training_lens", form, headline, claims, numbers)


if __name__ == "__main__":
    main(run, draw)
