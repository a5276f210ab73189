"""What the labs share, and each lab as a whole, in its quick form."""

import math
from importlib import import_module

import both_ways
import lab
import numpy as np
import pytest
import rules
import zoo


def row(**changes):
    """A row by the rule of a cosine: above 0, of a range from -1 to 1, each setting for itself."""
    given = dict(why="It is.", size="published size", n=3, baseline=0.0, name="A model") | changes
    return lab.claim("denoising.cosine", given.pop("ours", 0.5), **given)


def test_a_claim_is_answered_by_its_rule():
    found = row(cases={"a": (0.1, 0.2), "b": (-0.2, -0.1)}, interval=(0.0, 0.5))
    assert list(found) == lab.CLAIMS and found["answer"] == "depends"
    assert found["claim"].startswith("A model: MSSA steps") and "section 2.2" in found["where"]
    assert found["baseline_is"] == "the baseline that reaches highest"
    assert row(cases={"a": (-0.1, 0.2)}, baseline_is="chance")["answer"] == "undecided"
    values = row(ours=[0.9, 0.99, 0.999])
    assert values["answer"] == "supported" and values["high"] < 1  # Student's is 1.08
    assert values["ours"] == pytest.approx(2.889 / 3)
    with pytest.raises(ValueError, match="leaves the possible range -1 1"):
        row(interval=(0.5, 1.1))
    with pytest.raises(KeyError):
        lab.claim("nowhere", 1.0, why="", size="", n=1, baseline=0.0)


def test_a_limit_must_be_nearer_and_closing():
    def answer(*far):
        wiggled = [[at * (1 + 0.001 * k) for k in range(3)] for at in far]
        return rules.answer(rules.rules()["group_sparse.attention"], lab.towards(*wiggled))

    assert answer(0.8, 0.2, 0.1) == answer(0.8, 0.2, 1e-10) == "supported"
    assert answer(0.8, 0.1, 0.2) == answer(0.1, 0.4, 0.2) == "not supported"


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, math.inf)])
def test_an_interval_stays_in_its_range_and_is_students_far_from_the_ends(bounds):
    random = np.random.default_rng(0)
    for values in (random.random(5) ** 9, [0.0, 0.0, 1e-9], [0.5, 0.9, 0.999]):
        mean, (low, high) = lab.mean_and_interval(list(values), bounds)
        assert bounds[0] <= low <= mean <= high <= bounds[1]
    near = [0.5 + 1e-5 * k for k in range(7)]
    plain, inside = lab.mean_and_interval(near)[1], lab.mean_and_interval(near, bounds)[1]
    assert inside == pytest.approx(plain, abs=1e-8)


def test_an_interval_is_students():
    mean, (low, high) = lab.mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert high - mean == pytest.approx(4.302653 / math.sqrt(3)) == mean - low
    assert all(math.isnan(end) for end in lab.mean_and_interval([1.0])[1])


def test_steps_are_done_once_and_belong_to_their_settings(tmp_path):
    done = []
    for _ in range(2):
        steps = lab.Steps(tmp_path / "steps", form="quick")
        assert steps.do("one", lambda: done.append(1) or {"a": (1, 2)}) == {"a": [1, 2]}
    assert len(done) == 1
    with pytest.raises(SystemExit, match="was made with"):
        lab.Steps(tmp_path / "steps", form="full").do("one", lambda: 2)
    assert lab.Steps(None).do("one", lambda: (3,)) == [3]


def loud_network(kind, seed):
    """A network of both_ways that was not trained, and whose answers differ."""
    model = both_ways.make(kind, seed)
    model.embed.weight.data *= 20
    return model


YES, NO = "supported", "not supported"
# lab -> (what makes it smaller still, number of claims or None, the answers known before)
LABS = {
    "aot_denoising": ({}, 6, [YES, NO, YES, NO, NO, YES]),
    "both_ways": ({"SEEDS": {"quick": (1, 2)}, "trained": loud_network}, 6, []),
    "costs": ({}, None, [YES]),
    "denoising": ({}, None, [YES, YES]),
    "group_sparse": ({"ITERATIONS": 100, "WIDTHS": (4, 6)}, 9, []),
    "joma_dynamics": (
        {},
        14,
        [YES] * 3 + ["undecided", YES, NO, YES, YES, "depends"] + [YES] * 4 + [NO],
    ),
    "joma_entropy": ({"COUNT": {"quick": 5}}, 1, []),
    "joma_tree": ({"SEEDS": 2, "ITERATIONS": {"quick": 20}}, 4, []),
    "max_margin": ({"ITERATIONS": 200}, 3, []),
    "mixture": ({}, 6, []),
    "nearest_neighbour": ({"ITERATIONS": 400}, 5, []),
    "norm_ladder": ({"STEPS": {"quick": 3}, "SCALES": {"quick": (0.02,)}}, 8, [YES, YES, YES]),
    "random_walk": ({"CERTAIN_SEEDS": 3, "SEEDS": {"quick": 2}, "LATER": (400, 500)}, 13, []),
    "reconstruction": ({}, None, [YES]),
    "robustness": ({"COUNT": {"quick": 9}}, 5, []),
    "scan_and_snap": ({"ITERATIONS": 600}, 3, []),
    "sparsity_ablation": ({}, 7, []),
    "srr_regularizer": ({"STEPS": {"quick": 7}}, 6, []),
    "srr_toy": ({}, 4, ["depends"]),
    "srr_zoo": ({}, 14, []),
    "training_lens": ({}, 3, []),
    "truth": ({"SEEDS": {"quick": 2}, "TEXTS": 32}, 11, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LABS)
def test_the_lab_as_a_whole(name, tmp_path, monkeypatch):
    module, (smaller, count, answers) = import_module(name), LABS[name]
    if name != "srr_zoo":  # it reads weights of these steps
        monkeypatch.setattr(zoo, "STEPS", 180)
    for setting, value in smaller.items():
        old = getattr(module, setting)
        monkeypatch.setattr(module, setting, old | value if isinstance(old, dict) else value)
    found = module.run("quick", lab.Steps(tmp_path))
    table = found.table()
    assert len(table) == (count or len(table)) and not table["ours"].isna().any()
    assert table["answer"].tolist()[: len(answers)] == answers
    assert module.draw(found).axes
