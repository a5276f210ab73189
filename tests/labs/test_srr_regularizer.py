"""The lab of the regulariser: differences paired by seed, its rule, and weight 0."""

import pandas as pd
import pytest
import srr_regularizer
import torch
import zoo
from srr_regularizer import MAIN, gains, of_variant, spread


def table(values):
    """Accuracies by seed: (without, with) each; the measure falls by its seed."""
    rows = []
    for seed, pair in enumerate(values):
        for weight, value in zip((0.0, MAIN[0]), pair, strict=True):
            row = {"variant": "n", "seed": seed, "weight": weight, "penalty": "l0"}
            rows.append(row | {"accuracy": value, "measure": -seed if weight else 0.0})
    return pd.DataFrame(rows)


def test_differences_are_paired_by_seed():
    found = table([(90.0, 91.0), (80.0, 81.1), (85.0, 85.9)])
    assert gains(found, "n", MAIN, "accuracy") == pytest.approx([1.0, 1.1, 0.9])
    shuffled = gains(found.sample(frac=1, random_state=0), "n", MAIN, "accuracy")
    assert sorted(shuffled) == pytest.approx([0.9, 1.0, 1.1])
    assert spread(found, "n") == pytest.approx(20 / 3)
    better = of_variant(found, "n", 7)
    assert better["answer"] == "supported" and better["ours"] == pytest.approx(1.0)
    worse = of_variant(table([(90.0, 89.0), (80.0, 78.9), (85.0, 84.1)]), "n", 7)
    assert worse["answer"] == "not supported"


def test_weight_0_is_the_training_without_it():
    recipe = zoo.Recipe("zoo", "crate", zoo.LAYERS, zoo.LR, 11, 3)
    looks = lambda *_: False  # noqa: E731
    plain = zoo.fit(recipe, 3, lambda step: 1e-3, looks)

    def term(model):
        return srr_regularizer.ci.SRRRegularizer(model, 0.0)

    same = zoo.fit(recipe, 3, lambda step: 1e-3, looks, term)
    for one, other in zip(plain.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)
