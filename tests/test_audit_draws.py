"""A verdict of the audit does not hang on which random weights were drawn."""

import itertools

import numpy as np
import pandas as pd
import pytest

import crate_interp as ci
from crate_interp.audits import verdicts
from crate_interp.stats.contrasts import by_group
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
    "name, data, limit",
    [
        ("crate-tiny-fashion", "embedded:fashion", 64),
        ("crate-tiny-pictures", "embedded:pictures", 64),
        ("crate-tiny-lm", "embedded:held-out-text", 141),  # ten texts
    ],
)
def test_another_seed_of_the_nulls_turns_few_cells(name, data, limit, monkeypatch):
    """All draws of another seed together say the same of all decided cells but one at most."""
    model, found = ci.load(name), []
    for seed in range(2):
        result = ci.audit(model, data, limit=limit, untrained=0, seed=seed, progress=False)
        found.append((result, result.table()["verdict"]))
    monkeypatch.setattr(verdicts, "_GROUP", 1000)
    for (_, decided), (other, _) in itertools.permutations(found, 2):
        together = ci.AuditResult(other.stored, other.meta).table()["verdict"]
        assert ((decided != "undecided") & (decided != together)).sum() <= 1


def test_verdicts_of_texts_are_over_texts():
    """Intervals over windows of 22 texts; nulls are measured on the first ten texts."""
    lm = ci.load("crate-tiny-lm")
    texts = [text[:1400] for text in ci.data.embedded("held-out-text")["text"]][:12]
    result = ci.audit(lm, texts, untrained=0, grid=False, lasso_tokens=2, progress=False)
    assert result.independent == (12, "texts")
    place = "number == 'compresses' and frame == 'read' and layer == 1"
    row = result.table().query(place).iloc[0]
    own = result.table("numbers").query("of == 'layer' and frame == 'read' and layer == 1")
    own = own.dropna(subset=["compresses"])
    groups = result.groups_at(own["sample"])
    free = by_group(own[["compresses"]].to_numpy(), groups)
    low, high = verdicts.studentised(free).interval()
    assert [row["low"], row["high"]] == pytest.approx([low[0], high[0]], rel=1e-9)
    narrow = verdicts.studentised(own[["compresses"]].to_numpy()).interval()
    assert row["low"] < narrow[0][0] and not np.isnan(row["excess_low"])
    few = ci.audit(lm, texts[:9], untrained=0, grid=False, lasso_tokens=2, progress=False)
    cells = few.table().query("number == 'compresses'")
    assert cells["low"].isna().all() and cells["excess_low"].isna().all()
