"""What happens to the rates of a CRATE while it is trained, by `ci.watch`?

    python demos/labs/training_lens.py [--quick | --full] --out DIR

A CRATE of the zoo (zoo.py) is trained on scikit-learn's digits while a watch measures 32 test
images every 20 updates: what attention does to R^c in the three frames of the audit, and the
objective of each layer. The papers say that attention lowers R^c and that layers lower the
objective; they show trained networks. Here the step 0 is the baseline. The finding says how many
curves change their course, beside how many would by chance.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import zoo
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, result, values
from layerwise import FRAMES
from training import learning_rate

import crate_interp as ci

SEEDS = {"quick": 2, "full": 5}
EVERY, IMAGES, LIKELY = 20, 32, 0.05
CHANGE, OBJECTIVE = "frames.change", "objective.count"
SHOWN = {
    "frames.change_stream": "attention adds to R^c of Z, nats",
    "frames.change_read": "... of LN(Z)",
    "frames.change_unit": "... of Z at unit mean square",
    "objective.count_stream": "objective of a layer's output, nats",
}


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
    rows = {}
    for key, table, value in (("means", found.layers(), "mean"), ("changes", found.changes(), "p")):
        table["name"] = table["probe"] + "." + table["statistic"]
        kept: Any = table[table["name"].isin(wanted) & table[value].notna()]  # what can be tested
        rows[key] = kept[["name", "layer", "step", value]].values.tolist()
    return rows


def over_layers(rows: list[list], name: str, step: int) -> dict[str, np.ndarray]:
    """Returns the means over layers of a statistic at a step, by seed, for each frame."""
    return {
        frame: values(rows, f"{name}_{frame}", None, step).reshape(-1, zoo.LAYERS).mean(axis=1)
        for frame in FRAMES
    }


def below_0(rule: str, found: dict[str, np.ndarray], begun: dict[str, np.ndarray]) -> dict:
    """Returns the claim that a number lies below 0, its mean over layers by seed in each frame.

    The numbers shown are those of the stream. begun: the baseline.
    """
    ends = {frame: ends_of(each) for frame, each in found.items()}
    below = ", ".join(frame for frame, (_, high) in ends.items() if high < 0)
    above = ", ".join(frame for frame, (low, _) in ends.items() if low > 0)
    return claim(
        f"training_lens.{rule}", found["stream"], cases=ends, baseline=begun["stream"].mean(),
        updates=zoo.STEPS, below=below or "no frame", above=above or "none",
    )  # fmt: skip


def change_words(pairs: list[list]) -> str:
    """Returns in how many series the course changes once, by `WatchResult.changes`.

    pairs: (statistic, layer, seed, step, p). No paper claims it, so it is no row of the table.
    """
    found = [row[3] for row in pairs if row[4] <= LIKELY]
    when = f", half of them by step {np.median(found):.0f}" if found else ""
    return f"{len(found)} of {len(pairs)} curves change their course once{when}"


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the trainings."""
    jobs = {f"seed-{seed}": partial(watched, seed) for seed in range(SEEDS[form])}
    rows, pairs = [], []
    for seed, found in enumerate(steps.all(jobs, "trainings").values()):
        rows += [[name, f"layer {layer}", seed, step, v] for name, layer, step, v in found["means"]]
        pairs += [
            [f"p of {name}", f"layer {layer}", seed, step, p]
            for name, layer, step, p in found["changes"]
        ]
    claims, (before, after) = [], (over_layers(rows, CHANGE, step) for step in (0, zoo.STEPS))
    claims.append(below_0("lowers", after, before))
    for rule, name in (("brings", CHANGE), ("objective", OBJECTIVE)):
        begun, ended = (over_layers(rows, name, step) for step in (0, zoo.STEPS))
        claims.append(
            below_0(rule, {frame: ended[frame] - begun[frame] for frame in FRAMES}, begun)
        )
    said = ", ".join(
        f"{before[frame].mean():+.2f} to {after[frame].mean():+.2f} ({frame})" for frame in FRAMES
    )
    words = {"said": said, "seeds": SEEDS[form], "changes": change_words(pairs), "likely": LIKELY}
    return result("training_lens", form, claims, [*rows, *pairs], **words)


def draw(found: LabResult) -> Any:
    """Draws each statistic along training, a line a layer, the mean over seeds."""
    figure, axes = panels(len(SHOWN), size=(15, 4))
    for axis, (name, words) in zip(axes, SHOWN.items(), strict=True):
        for layer, rows in found.numbers(name).groupby("setting"):
            curve(axis, rows, label=layer)
        level(axis, 0)
        tidy(axis, legend=8 * (axis is axes[0]), xlabel="updates", title=words)
    said = {}
    for frame in ("stream", "read"):
        means = found.numbers(f"{CHANGE}_{frame}").groupby("place")["value"].mean()
        said[frame] = f"from {means.iloc[0]:+.2f} to {means.iloc[-1]:+.2f} nats"
    seeds = found.numbers("frames.change_stream")["seed"].nunique()
    return titled(figure, found, seeds=seeds, **said)


if __name__ == "__main__":
    main(run, draw)
