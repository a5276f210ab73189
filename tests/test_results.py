"""Results have one shape: saved, loaded, and merged from two halves, or refused in a line."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, Features, Image
from PIL import Image as Pillow

import crate_interp as ci
from conftest import make, refuses
from crate_interp.circuits import composition
from crate_interp.data import open_data, part
from crate_interp.results.result import Result

N, CUT, BATCH = 11, 6, 3  # the cut lies between two batches, so that both ways see the same ones
QUIET = dict(batch_size=BATCH, progress=False)


def pictures():
    random = np.random.default_rng(0)
    rows = []
    for _ in range(N):
        mask = ((random.random((6, 20)) > 0.6) * 255).astype(np.uint8)
        picture = random.integers(0, 256, (6, 20, 3), dtype=np.uint8)
        rows.append({"image": Pillow.fromarray(picture), "mask": Pillow.fromarray(mask)})
    return Dataset.from_list(rows, features=Features({"image": Image(), "mask": Image()}))


def some_slowly(kinds):
    """The kinds as parameters; some take seconds."""
    slow = ("audit", "surgery", "segment", "atlas")
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind in slow)) for kind in kinds]


@pytest.fixture(scope="module")
def vision():
    model = make("crate-alpha", mean=[0.5] * 3, std=[0.25] * 3)
    return model, open_data(pictures(), model.preprocess, None, model.preprocess_masks)


OF_DATA = {
    "sweep": lambda model, data, **more: ci.sweep(model, data, **QUIET, **more),
    "audit": lambda model, data, **more: ci.audit(
        model, data, grid=False, untrained=2, **QUIET, **more
    ),
    "segment": lambda model, data, **more: ci.segment(model, data, untrained=2, **QUIET, **more),
    "atoms": lambda model, data, **more: ci.atoms(
        model, data, top=5, coactivation=True, **QUIET, **more
    ),
    "atlas": lambda model, data, **more: ci.atlas(model, data, top=4, ablate=0, **QUIET, **more),
    "composition": lambda model, data, **more: composition(
        model, data, through="data", **QUIET, **more
    ),
    "surgery": lambda model, data, **more: ci.surgery(
        model, data, labels=[3] * N, replacements=["gradient", 3], mixes=(0.5,), **QUIET, **more
    ),
}


def same(one, two, rtol, leave_out=()):
    assert list(one.tables) == list(two.tables)
    for name, table in one.tables.items():
        if name not in leave_out:
            pd.testing.assert_frame_equal(table, two.table(name), rtol=rtol, atol=0, obj=name)


@pytest.mark.parametrize("kind", some_slowly(OF_DATA))
def test_two_halves_merge_into_the_whole(vision, kind, tmp_path):
    model, data = vision
    measure = OF_DATA[kind]
    whole = measure(model, data)
    halves = [measure(model, part(data, *ends)) for ends in ((0, CUT), (CUT, N))]
    survives(whole, tmp_path)
    # sums of floats in another order; examples keep the heads that each half had
    leave_out = ("examples",) if kind == "segment" else ()
    for merged in (halves[0].merge(halves[1]), halves[1].merge(halves[0])):
        same(whole, merged, 1e-12, leave_out)
        assert merged.meta["n_samples"] == N
        assert merged.meta["data"] == whole.meta["data"]
        assert merged.meta["data"][0]["start"] == 0 and merged.meta["data"][0]["stop"] == N
        assert "disjoint" not in merged.meta
    refuses("samples 0 to 5 are in both results", lambda: halves[0].merge(whole))


def test_other_data_is_numbered_after_ours(vision):
    model, data = vision
    one = ci.sweep(model, data.read(0, 4), controls=0, **QUIET)
    two = ci.sweep(model, data.read(4, 9), controls=0, **QUIET)
    merged = one.merge(two)
    assert list(merged.samples()["sample"].unique()) == list(range(9))
    prints = [result.meta["data"][0]["fingerprint"] for result in (one, two)]
    assert merged.meta["data"] == [
        {"fingerprint": prints[0], "start": 0, "stop": 4},
        {"fingerprint": prints[1], "start": 0, "stop": 5, "first": 4},
    ]
    assert merged.meta["disjoint"] == "not checked"
    third = ci.sweep(model, data.read(9, 11), controls=0, **QUIET)
    assert list(merged.merge(third).samples()["sample"].unique()) == list(range(11))
    refuses("samples 0 to 4 are in both results", lambda: merged.merge(two))


def test_what_differs_is_named(vision):
    model, data = vision
    one = ci.sweep(model, part(data, 0, CUT), probes="sparsity", **QUIET)
    for field, other in (
        ("probes", ci.sweep(model, part(data, CUT, N), probes="attention", **QUIET)),
        ("model_digest", ci.sweep(make("crate-alpha", seed=1), data.read(6, 8), probes="sparsity")),
        ("dtype", _with(one, dtype="float64")),
        ("versions", _with(one, versions={"torch": "0"})),
    ):
        refuses(f"the results differ in {field}: ", partial(one.merge, other))
    with pytest.raises(ValueError, match="cannot merge AtomResult into SweepResult"):
        one.merge(ci.atoms(model, part(data, CUT, N), **QUIET))


def _with(result, **changes):
    return type(result)(result.stored, result.meta | changes)


def test_tables_have_names_and_are_copies(vision):
    model, data = vision
    result = ci.sweep(model, part(data, 0, 2), probes="sparsity", controls=0, **QUIET)
    table = result.table()
    table["mean"] = 0
    assert (result.table()["mean"] != 0).any()
    refuses("name='layer' is none of .* Did you mean layers", lambda: result.table("layer"))
    with pytest.raises(AttributeError):
        result.meta = {}
    assert isinstance(result, Result)
