"""The lab of the watch: its rules on made-up curves, and a short training."""

import numpy as np
import pytest
import zoo
from training_lens import CHANGE, FRAMES, at, change_words, of_attention, of_training


def curves(ends):
    """Rows of three seeds and two layers that go from 1 to the ends of each frame."""
    rows = []
    for frame, end in zip(FRAMES, ends, strict=True):
        for seed in range(3):
            for layer in range(2):
                name, where = f"{CHANGE}_{frame}", f"layer {layer}"
                value = end + 0.01 * seed + layer
                rows.append([name, where, seed, 0, 1.0])
                rows.append([name, where, seed, zoo.STEPS, value])
    return rows


@pytest.mark.parametrize(
    "ends, answer, lowers",
    [
        ((-2.0, -3.0, -4.0), "supported", "supported"),
        ((0.2, -3.0, -4.0), "depends", "supported"),
        ((2.0, 2.0, 2.0), "not supported", "not supported"),
        ((-0.51, -3.0, -4.0), "undecided", "supported"),
    ],
)
def test_a_claim_holds_in_all_frames_or_depends(ends, answer, lowers):
    rows = curves(ends)
    mean = np.mean([end for end in at(rows, f"{CHANGE}_stream", zoo.STEPS).values()])
    assert mean == pytest.approx(ends[0] + 0.51)
    found = of_attention(rows)
    assert found["answer"] == answer and found["ours"] == pytest.approx(mean)
    assert found["baseline"] == 1.0
    assert of_training(rows, CHANGE)["answer"] == lowers
    assert of_training(rows, CHANGE)["ours"] == pytest.approx(mean - 1)


def test_changes_are_counted():
    pairs = [["a", 0, seed, 20, p] for seed in range(3) for p in (0.01, 0.02, 0.5, 0.9)]
    assert "6 of 12 curves change their course once, half of them by step 20" in change_words(pairs)
