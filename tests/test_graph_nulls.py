"""What a graph is compared with: the largest codes, random ones, and those of another graph."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_hooks import full_name
from crate_interp.circuits.graphs.derivatives import CODE
from crate_interp.circuits.graphs.trust import DRAWS, alone_and_gone, random_nodes, sufficiency
from test_graph_results import IMAGE, explained, graph

assert graph  # the fixture


def planted(place):
    """Returns a graph of a model whose answer reads one code: that of rank `place` by size.

    The answer is this code less one that is 0, after the last norm.
    """
    model, sample = make("crate", n_layers=1).double(), IMAGE.double()
    code = model.run_with_cache(sample)[1][full_name(CODE, 0)][0, 0].detach()
    active = code.argsort(descending=True)[: int((code != 0).sum())]
    weight = torch.zeros_like(model.unembed.weight)
    weight[0, active[place]], weight[0, (code == 0).nonzero()[0]] = 5.0, -5.0
    plain = {"unembed.weight": weight, "unembed.bias": torch.zeros(len(weight))}
    plain["ln_final.weight"] = torch.ones_like(model.ln_final.weight)
    plain["ln_final.bias"] = torch.zeros_like(model.ln_final.bias)
    model.load_state_dict(model.state_dict() | plain)
    return ci.graph(model, sample, target=0, nodes=0.3, freeze="norm"), int(active[place])


def test_an_answer_that_hangs_on_a_small_code_is_not_a_matter_of_size():
    found, atom = planted(-1)
    nodes = found.table("nodes").query("atom >= 0")
    assert nodes["atom"].tolist() == [atom] and nodes["pos"].tolist() == [0]
    assert min(found.beyond_size) > 0.5
    assert "better than size what is enough and what is needed" in found.finding()
    assert "largest activations" not in found.warning()


def by_hand(case, kept, others=False):
    """Returns the target if the codes (layer, pos, atom) stay, or all others; one forward."""

    def edit(code, hook):
        layer = int(hook.name.split(".")[1])
        new = code.clone() if others else torch.zeros_like(code)
        for at, pos, atom in kept:
            if at == layer:
                new[:, pos, atom] = 0 if others else code[:, pos, atom]
        return new

    hooks = [(full_name(CODE, layer), edit) for layer in range(len(case.codes))]
    logits = case.model.run_with_hooks(case.sample, fwd_hooks=hooks).detach()
    return float(case.question.of(logits)[0])


def as_places(case, nodes):
    width = case.codes[0].shape[1]
    return [(n, *divmod(int(one), width)) for n, own in enumerate(nodes) for one in own]


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_the_largest_and_random_codes_beside_a_graph(name):
    case, rng = explained(name), np.random.default_rng(0)
    inside = [(code != 0) & torch.tensor(rng.random(code.shape) < 0.1) for code in case.codes]
    inside[0][1] = False  # a token without a node
    table = alone_and_gone(case, inside, DRAWS, seed=3)
    assert table["edit"].tolist() == ["keep", "remove"] and (table["draws"] == DRAWS).all()
    assert DRAWS >= 100 and (table["nodes"] == sum(int(own.sum()) for own in inside)).all()
    largest = []
    for layer, (code, own) in enumerate(zip(case.codes, inside, strict=True)):
        for pos, row in enumerate(code.tolist()):
            order = sorted(range(len(row)), key=lambda atom, row=row: -abs(row[atom]))
            largest += [(layer, pos, atom) for atom in order[: int(own[pos].sum())]]
    generator = torch.Generator().manual_seed(3)
    drawn = [
        random_nodes(code, own.sum(dim=1), DRAWS, generator)
        for code, own in zip(case.codes, inside, strict=True)
    ]
    chosen = as_places(case, [own.flatten().nonzero()[:, 0] for own in inside])
    draws = [as_places(case, [layer[n] for layer in drawn]) for n in range(DRAWS)]
    assert len(set(map(tuple, draws))) == DRAWS
    for row, others in zip(table.itertuples(), (False, True), strict=True):
        assert row.logit == pytest.approx(by_hand(case, chosen, others), abs=1e-9)
        assert row.largest == pytest.approx(by_hand(case, largest, others), abs=1e-9)
        targets = sorted(by_hand(case, one, others) for one in draws)
        assert row.random_mean == pytest.approx(sum(targets) / DRAWS, abs=1e-9)
        for at, share in ((row.random_q025, 0.025), (row.random_q975, 0.975)):
            below = int(share * (DRAWS - 1))
            part = share * (DRAWS - 1) - below
            end = (1 - part) * targets[below] + part * targets[below + 1]
            assert at == pytest.approx(end, abs=1e-9)
    other = alone_and_gone(case, inside, 0, seed=3)["largest"].tolist()
    assert other == pytest.approx(table["largest"].tolist(), abs=1e-9)


def test_k_codes_at_any_token_by_attribution_and_by_size():
    case = explained("crate-lm")
    row = sufficiency(case, seed=0).set_index("k").loc[3]
    sizes = {
        "logit": [case.attribution(n) for n in range(len(case.codes))],
        "largest": case.codes,
    }
    for column, values in sizes.items():
        best = [np.argsort(-own.abs().flatten().numpy())[:3] for own in values]
        assert row[column] == pytest.approx(by_hand(case, as_places(case, best)), abs=1e-9)
