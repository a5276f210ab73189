"""Whether heads look at the same part of every picture: W, places and parts, by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import rankdata

import crate_interp as ci
import segments
from conftest import make_lm, refuses
from crate_interp.circuits.head_places import HeadMeaning, kendalls_w

N = 7
QUIET = {"progress": False}


def test_w_is_that_of_a_slow_form_and_of_its_ends():
    draw = np.random.default_rng(5)
    ranks = rankdata(draw.random((11, 5)), axis=1)
    sums = [sum(ranks[i][j] for i in range(11)) for j in range(5)]
    spread = sum((one - sum(sums) / 5) ** 2 for one in sums)
    assert kendalls_w(ranks) == pytest.approx(12 * spread / (11**2 * (5**3 - 5)))
    assert kendalls_w(np.tile(ranks[:1], (11, 1))) == pytest.approx(1)
    assert kendalls_w(np.stack([ranks[0], 6 - ranks[0]])) == pytest.approx(0)
    order = draw.permutation(5)
    assert kendalls_w(ranks[:, order]) == pytest.approx(kendalls_w(ranks))
    null = kendalls_w(draw.permuted(np.tile(ranks, (2000, 1, 1)), axis=2))
    assert null.mean() == pytest.approx(1 / 11, rel=0.05)


def test_heads_that_keep_their_places_agree_and_others_do_not():
    draw = np.random.default_rng(1)
    rows = [
        ("model", sample, layer, head, (head if layer else draw.random()), draw.random())
        for sample in range(13)
        for layer in range(2)
        for head in range(5)
    ]
    names = ["network", "sample", "layer", "head", "row", "column"]
    table = pd.DataFrame(rows, columns=names)
    meta = {"settings": {"parts": {}, "seed": 0}, "model": "m", "n": 13}
    found = HeadMeaning({"places": table}, meta).table().set_index(["layer", "axis"])
    assert found.loc[(1, "row"), "w"] == pytest.approx(1)
    assert found.loc[(1, "row"), "p"] == pytest.approx(0.001)
    rest = found.drop(index=(1, "row"))
    assert (rest["p"] > 0.01).all() and (rest["w"] < 0.4).all()
    assert found["shuffled"].to_numpy() == pytest.approx(1 / 13, rel=0.2)


def test_places_and_parts_are_those_of_the_maps(tmp_path):
    """Parts are numbers of the masks; a picture without a part has no share of it."""
    model, data = segments.model(), segments.dataset(N, binary=False, empty=(2,))
    parts = {"one": 1, "two": 2}
    result = ci.circuits.head_meaning(model, data, parts=parts, untrained=1, **QUIET)
    assert set(result.table()["network"]) == {"model", "untrained-0"}
    places = result.table("places")
    heads, layers = model.cfg.n_heads, model.cfg.n_layers
    assert len(places) == N * (2 * layers * heads + 5)
    masks = np.stack([np.asarray(mask) for mask in data["mask"]])
    there = (masks == 2).any(axis=(1, 2))
    assert 0 < there.sum() < N - 1
    _, cache = model.run_with_cache(model.preprocess(data["image"]))
    (height, width), (rows, columns) = segments.PATCH, segments.GRID
    own = places[(places["network"] == "model") & (places["layer"] == 1)]
    for row in own.itertuples():
        values = cache["pattern", 1][row.sample, row.head, 0, 1:].double()
        shares = (values / values.sum()).reshape(rows, columns).tolist()
        cells = [(y, x) for y in range(rows) for x in range(columns)]
        at = {"row": 0.0, "column": 0.0, "two": 0.0}
        for y, x in cells:
            patch = masks[row.sample, y * height : (y + 1) * height, x * width : (x + 1) * width]
            at["row"] += shares[y][x] * (y + 0.5) / rows
            at["column"] += shares[y][x] * (x + 0.5) / columns
            at["two"] += shares[y][x] * float((patch == 2).mean())
        assert (row.row, row.column) == pytest.approx((at["row"], at["column"]), abs=1e-6)
        held = own.loc[row.Index, "in two"]
        assert held == pytest.approx(at["two"] if there[row.sample] else np.nan, 1e-6, nan_ok=True)
    found = result.table("parts").set_index(["network", "layer", "head", "part"])
    assert found.loc[("model", 1, 0, "two"), "n"] == there.sum()
    mean = own.loc[own["head"] == 0, "in two"].mean()
    assert found.loc[("model", 1, 0, "two"), "share"] == pytest.approx(mean)
    even = (masks[there] == 2).mean()
    assert found.loc[("model", 1, 0, "two"), "even"] == pytest.approx(even)
    result.save(tmp_path)
    assert HeadMeaning.load(tmp_path).digest() == result.digest()


def test_what_is_refused():
    model, plain = segments.model(), torch.rand(N, 3, *segments.SIZE)
    ask = ci.circuits.head_meaning
    refuses("reads text", lambda: ask(make_lm(), torch.zeros(2, 5).long(), **QUIET))
    refuses("names and numbers", lambda: ask(model, plain, parts={"a": 0}, **QUIET))
    refuses("masks", lambda: ask(model, plain, parts={"a": 1}, **QUIET))


def test_even_maps_keep_no_places_and_chunks_change_no_row():
    model, plain = segments.model(), torch.rand(N, 3, *segments.SIZE)
    whole, parts = (
        ci.circuits.head_meaning(model, plain, untrained=1, chunk_size=size, **QUIET).table()
        for size in (N, 2)
    )
    pd.testing.assert_frame_equal(whole, parts)
    for block in model.blocks:
        block.attn.u_proj.weight.data.zero_()
    even = ci.circuits.head_meaning(model, plain, untrained=0, **QUIET)
    assert (even.table().query("layer >= 0")["w"] == 0).all()
    assert "do not keep" in even.sentences()[0]
