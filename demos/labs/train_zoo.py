"""Trains the models of zoo.py, one after the other, and writes what the labs read.

    python demos/labs/train_zoo.py --out runs/zoo

A model takes 10 to 60 seconds of one CPU core, all 62 about 20 minutes. Each is saved as soon as it
is done, in float16: the same command goes on after them. --publish then measures the models
along their training, which takes 5 minutes, and writes weights and tables to demos/weights/zoo.
The data come with scikit-learn.
"""

import argparse
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import complexity
import layerwise
import pandas as pd
import zoo
from torch import nn
from tqdm.auto import tqdm

from crate_interp.core.files import write_text


def digest(model: nn.Module) -> str:
    """Returns the SHA-256 of a model's weights, in the order of their names."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def train(recipe: zoo.Recipe, out: Path) -> dict[str, Any]:
    """Trains one model, saves it, and returns a row of the table of trainings.

    The scores are those of the saved weights, in float16. Along the training of a model of the zoo
    its weights are saved as NAME-step-N.
    """
    begun, steps = time.perf_counter(), zoo.STEPS
    if recipe.family == "zoo":
        model = zoo.fit_zoo(
            recipe,
            lambda model, step: zoo.save(model, out / f"{recipe.name}-step-{step}.safetensors"),
        )
    else:
        model, steps = zoo.fit_grid(recipe)
    path = out / f"{recipe.name}.safetensors"
    zoo.save(model, path)
    seconds = time.perf_counter() - begun
    images, labels, test_images, test_labels = zoo.digits()
    saved = zoo.load(recipe, path)
    train_ce, train_accuracy = zoo.scores(saved, images, labels)
    test_ce, test_accuracy = zoo.scores(saved, test_images, test_labels)
    untrained = zoo.start(recipe)
    row = dict(vars(recipe), name=recipe.name, steps=steps, seconds=round(seconds, 1))
    row |= dict(train_ce=train_ce, test_ce=test_ce, train_accuracy=train_accuracy)
    row |= dict(test_accuracy=test_accuracy, start=digest(untrained))
    return row | dict(untrained_accuracy=zoo.scores(untrained, test_images, test_labels)[1])


def noise(recipe: zoo.Recipe, out: Path) -> dict[str, float]:
    """Returns the sigma of a model of the grid, the slow part of the study of complexity."""
    if recipe.family == "zoo":
        return {}
    images, labels, _, _ = zoo.digits()
    model = zoo.load(recipe, out / f"{recipe.name}.safetensors")
    return {"sigma": complexity.noise_level(model, images, labels)}


def readings(recipe: zoo.Recipe, out: Path) -> list[dict[str, Any]]:
    """Returns the measures of a model of the zoo along its training, a row a step and layer."""
    _, _, images, _ = zoo.digits()
    rows, key = [], {"variant": recipe.variant, "seed": recipe.seed}
    for step in zoo.READ_AT:
        path = out / f"{recipe.name}-step-{step}.safetensors"
        model = zoo.load(recipe, path) if step else zoo.start(recipe)
        found = layerwise.reading(model, images[: zoo.READ_ON])
        rows += [{**key, "step": step, **row} for row in found]
    return rows


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as CSV, numbers with six digits."""
    text = pd.DataFrame(rows).to_csv(index=False, float_format="%.6g", lineterminator="\n")
    write_text(path, text)


def publish(rows: list[dict[str, Any]], out: Path) -> None:
    """Writes the weights and the tables to where the labs look for them."""
    zoo.WEIGHTS.mkdir(parents=True, exist_ok=True)
    recipes = [*zoo.zoo(), *zoo.grid()]
    for recipe in recipes:
        name = f"{recipe.name}.safetensors"
        shutil.copyfile(out / name, zoo.WEIGHTS / name)
    bar = tqdm(zip(recipes, rows, strict=True), total=len(rows), desc="noise", unit="model")
    write_table([row | noise(recipe, out) for recipe, row in bar], zoo.TRAININGS)
    bar = tqdm(zoo.zoo(), desc="readings", unit="model")
    write_table([row for recipe in bar for row in readings(recipe, out)], zoo.READINGS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--publish", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    recipes, rows = [*zoo.zoo(), *zoo.grid()], []
    for recipe in tqdm(recipes, desc="training", unit="model"):
        path = given.out / f"{recipe.name}.json"
        if not path.exists():
            write_text(path, json.dumps(train(recipe, given.out)))
        rows.append(json.loads(path.read_text()))
    if given.publish:
        publish(rows, given.out)


if __name__ == "__main__":
    main()
