"""Why a head looks there: parts that add up to the score, and forwards without atoms."""

import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm, refuses
from crate_hooks import full_name
from crate_interp.circuits.attention_reasons import DRAWS

IMAGE = torch.randn(1, 3, 6, 20, generator=torch.Generator().manual_seed(1)).double()
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
# family -> layer, head, query, key
PLACES = {
    "crate": (2, 1, 0, 5),
    "crate-alpha": (2, 3, 4, 4),
    "crate-lm": (1, 2, 6, 3),
    "nanochat-crate": (2, 0, 5, 2),
    "gpt-baseline": (1, 1, 6, 1),
    "cbt": (1, 2, 7, 3),
}


def network(name):
    if name in ("crate-lm", "nanochat-crate", "gpt-baseline"):
        return make_lm(name).double(), TOKENS
    if name == "cbt":
        square = dict(image_size=(10, 10), patch_size=(2, 2), stem="linear")
        return make(name, **square).double(), torch.randn(1, 3, 10, 10).double()
    return make(name).double(), IMAGE


@pytest.fixture(scope="module", params=PLACES)
def case(request):
    model, sample = network(request.param)
    place = PLACES[request.param]
    return model, sample, place, ci.circuits.why_attends(model, sample, *place)


def test_parts_add_up_to_the_score(case):
    *_, reason = case
    assert reason.table("pairs")["part"].sum() == pytest.approx(reason.meta["score"], abs=1e-9)
    sums = reason.table("pieces").groupby("side")["part"].sum()
    assert sums.tolist() == pytest.approx([reason.meta["score"]] * 2, abs=1e-9)
    pairs = reason.table("pairs")
    atoms = pairs[(pairs["query_atom"] >= 0) & (pairs["key_atom"] >= 0)]
    assert len(atoms) > 20 and (atoms["query_layer"] < case[2][0]).all()
    if len(pairs) < 1000:  # every pair has a row
        assert atoms["part"].sum() == pytest.approx(reason.meta["score_of_atoms"], abs=1e-9)


def test_a_part_is_what_the_score_loses_with_the_atom(case):
    """In a forward without the atom at its token, with the norm's scale held."""
    model, sample, (layer, head, query, key), reason = case
    if model.cfg.facts["attention"] == "cbsa" or query == key or model.cfg.rotary:
        return  # a query of many tokens, one token on both sides, or a second norm
    point, scores = full_name("hook_resid_pre", layer), full_name("attn.hook_attn_scores", layer)
    norm = full_name("ln1.hook_scale", layer)
    _, cache = model.run_with_cache(sample)
    pieces = reason.table("pieces")
    for side, token in (("query", query), ("key", key)):
        rows = pieces[(pieces["side"] == side) & (pieces["atom"] >= 0) & (pieces["value"] != 0)]
        assert len(rows) > 3
        for row in rows.iloc[::7].itertuples():
            stream = cache[point].clone()
            written = model.blocks[row.layer].mlp.written()[row.atom]
            stream[0, token] -= row.value * written
            seen = []
            hooks = [
                (point, lambda value, hook, stream=stream: stream),
                (norm, lambda value, hook: cache[norm]),
                (scores, lambda value, hook, seen=seen: seen.append(value[0, head, query, key])),
            ]
            with torch.no_grad():
                model.run_with_hooks(sample, fwd_hooks=hooks)
            lost = reason.meta["score"] - float(seen[0])
            assert row.part == pytest.approx(lost, abs=1e-9)


def test_effects_are_forwards_without_atoms(case):
    model, sample, (layer, head, query, key), reason = case
    table = reason.table("effects")
    own = table[table["network"] == "model"]
    assert own["attention"].iloc[0] == pytest.approx(reason.meta["attention"], abs=1e-12)
    assert set(own["k"]) >= {0, 3} and set(table["network"]) == {"model", "untrained"}
    random = own[own["kind"] == "random"]
    assert DRAWS > 1 and (random["low"] <= random["attention"]).all()
    assert (random["low"] < random["high"]).any() and (own["k"] == 0).sum() == 1
    point, pattern = (full_name(name, layer) for name in ("hook_resid_pre", "attn.hook_pattern"))
    if pattern not in model.hook_dict:
        return
    pieces = reason.table("pieces")
    rows = pieces[(pieces["side"] == "key") & (pieces["atom"] >= 0)]
    stream = model.run_with_cache(sample)[1][point].clone()
    for row in rows.nlargest(3, "part").itertuples():
        stream[0, key] -= row.value * model.blocks[row.layer].mlp.written()[row.atom]
    seen = []
    hooks = [(point, lambda value, hook: stream), (pattern, lambda value, hook: seen.append(value))]
    with torch.no_grad():
        model.run_with_hooks(sample, fwd_hooks=hooks)
    rows = reason.table("effects").query("network == 'model' and side == 'key' and k == 3")
    found = rows.set_index("kind").loc["strongest", "attention"]
    assert found == pytest.approx(float(seen[0][0, head, query, key]), abs=1e-12)
    runs = own[own["side"] == "key"].pivot(index="k", columns="kind", values="attention")
    gaps = (runs["strongest"] - runs[["largest", "random", "rotated"]].min(axis=1)).abs()
    assert f"{3 if 10 not in gaps or gaps[3] > gaps[10] else 10} random atoms" in reason.finding()
    shares = model.run_with_cache(sample)[1][pattern][0, head, query]
    assert reason.meta["most_share"] == pytest.approx(float(shares.max()), abs=1e-12)


def test_what_has_no_reason():
    model, lm = make("crate").double(), make_lm("crate-lm").double()
    why = ci.circuits.why_attends
    refuses("layer=0: give 1 to", lambda: why(model, IMAGE, 0, 0, 0, 1))
    shallow = make("crate", n_layers=1).double()
    refuses("layer=1: layer 0, the only one", lambda: why(shallow, IMAGE, 1, 0, 0, 1))
    refuses("head=9: give 0 to", lambda: why(model, IMAGE, 1, 9, 0, 1))
    refuses("query=99: give 0 to", lambda: why(model, IMAGE, 1, 0, 99, 1))
    refuses("token 2 does not see token 5", lambda: why(lm, TOKENS, 1, 0, 2, 5))
    refuses("give one sample", lambda: why(model, IMAGE.expand(2, 3, 6, 20), 1, 0, 0, 1))
    refuses("ToST's heads have no scores", lambda: why(make_lm("tost-lm"), TOKENS, 1, 0, 5, 1))
    assert why(model.float(), IMAGE.float(), 1, 0, 0, 1).finding()
    assert why(model, IMAGE.float(), 1, 0).meta["places"][0] == 0  # CLS
    assert why(lm, TOKENS, 1, 0).meta["places"][0] == TOKENS.shape[1] - 1
    with model.hooks([("blocks.1.attn.hook_attn_scores", lambda value, hook: value + 5)]):
        refuses("a hook changes", lambda: why(model, IMAGE.float(), 1, 0, 0, 1))
