"""Each lab as a whole, in its quick form: how many claims it answers, and the first of them."""

from importlib import import_module

import lab
import pytest
import zoo

YES, NO = "supported", "not supported"
# lab -> (what makes it smaller still, number of claims or None, the answers known before)
LABS = {
    "aot_denoising": ({}, 6, [YES, NO, YES, NO, NO, YES]),
    "costs": ({}, None, [YES]),
    "denoising": ({}, None, [YES, YES]),
    "group_sparse": ({"ITERATIONS": 100}, 6, []),
    "joma_entropy": ({"COUNT": {"quick": 5}}, 1, []),
    "joma_tree": ({"SEEDS": 2, "ITERATIONS": {"quick": 20}}, 4, []),
    "max_margin": ({"ITERATIONS": 200}, 3, []),
    "mixture": ({}, 6, []),
    "nearest_neighbour": ({"ITERATIONS": 400}, 5, []),
    "random_walk": ({"CERTAIN_SEEDS": 3, "SEEDS": {"quick": 2}}, None, []),
    "reconstruction": ({}, None, [YES]),
    "scan_and_snap": ({"ITERATIONS": 600}, 3, []),
    "sparsity_ablation": ({}, 7, []),
    "srr_regularizer": ({"STEPS": {"quick": 7}}, 4, []),
    "training_lens": ({}, 3, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LABS)
def test_the_lab_as_a_whole(name, tmp_path, monkeypatch):
    module, (smaller, count, answers) = import_module(name), LABS[name]
    monkeypatch.setattr(zoo, "STEPS", 180)
    for setting, value in smaller.items():
        old = getattr(module, setting)
        monkeypatch.setattr(module, setting, old | value if isinstance(old, dict) else value)
    found = module.run("quick", lab.Steps(tmp_path))
    table = found.table()
    assert len(table) == (count or len(table)) and not table["ours"].isna().any()
    assert table["answer"].tolist()[: len(answers)] == answers
    assert module.draw(found).axes


@pytest.mark.slow
def test_two_theorems_of_joma_do_not_hold_as_printed(tmp_path):
    import joma_dynamics

    table = joma_dynamics.run("quick", lab.Steps(tmp_path)).table().set_index("rule")
    assert {table.loc[f"joma_dynamics.theorem_{number}", "answer"] for number in (2, 5)} == {NO}
