"""What an audit says does not hang on which random weights were drawn."""

import itertools

import numpy as np
import pandas as pd
import pytest

import crate_interp as ci
from crate_interp.audits import verdicts
from test_audit import audited, planted


def with_gains(result, gains):
    """The verdict on R^c, read, if random output maps lower it by so much less than the layer."""
    numbers = result.table("numbers").copy()
    keys = ["sample", "layer", "frame", "eps", "basis", "tokens"]
    own = numbers[numbers["of"] == "layer"].set_index(keys)["compresses"]
    for draw, gain in enumerate(gains):
        rows = numbers["of"] == f"random map {draw}"
        index = pd.MultiIndex.from_frame(numbers.loc[rows, keys])
        numbers.loc[rows, "compresses"] = own.reindex(index).to_numpy() + gain
    found = ci.AuditResult({**result.stored, "numbers": numbers}, result.meta).table()
    rows = found[(found["number"] == "compresses") & (found["eps"] == planted.EPS)]
    return set(rows["verdict"])


def test_what_hangs_on_the_draws_is_undecided():
    """All draws together show a gain, and so do three groups of eight; the fourth does not."""
    result = audited(planted.ideal(n_layers=1), grid=False)
    gains = np.full(32, 0.1) + 0.001 * np.arange(32)
    spread = gains.copy()
    spread[::4] += [-0.15, 0.15] * 4
    for sign, word in ((1, "kept"), (-1, "broken")):
        assert with_gains(result, sign * gains) == {word}
        assert with_gains(result, sign * spread) == {"undecided"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, data",
    [
        ("crate-tiny-fashion", "embedded:fashion"),
        ("crate-tiny-pictures", "embedded:pictures"),
        ("crate-tiny-lm", "embedded:held-out-text"),
    ],
)
def test_another_seed_of_the_nulls_turns_few_cells(name, data, monkeypatch):
    """All draws of another seed together say the same of all decided cells but one at most."""
    model, found = ci.load(name), []
    for seed in range(2):
        result = ci.audit(model, data, limit=64, untrained=0, seed=seed, progress=False)
        found.append((result, result.table()["verdict"]))
    monkeypatch.setattr(verdicts, "_GROUP", 1000)
    for (_, decided), (other, _) in itertools.permutations(found, 2):
        together = ci.AuditResult(other.stored, other.meta).table()["verdict"]
        assert ((decided != "undecided") & (decided != together)).sum() <= 1
