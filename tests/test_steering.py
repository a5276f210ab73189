"""A graph answers about its own model and sample, and refuses others."""

import copy

import pytest
import torch

import crate_interp as ci
from conftest import make_lm, refuses
from test_graph_results import IMAGE, TOKENS, network


def edited(model):
    model = copy.deepcopy(model)
    weight = model.blocks[1].mlp.W_out.data
    weight[[2, 3]] = weight[[3, 2]].clone()
    return model


OTHER_MODELS = {
    "another seed": lambda model: make_lm("crate-lm", seed=1).double(),
    "another depth": lambda model: make_lm("crate-lm", n_layers=2).double(),
    "another vocabulary": lambda model: make_lm("crate-lm", d_vocab=7).double(),
    "another dtype": lambda model: copy.deepcopy(model).float(),
    "edited weights": edited,
    "no model": lambda model: torch.nn.Linear(2, 3),
}
OTHER_INPUTS = {
    "other tokens": torch.tensor([[3, 1, 4, 1, 5, 2, 2]]),
    "a shorter text": TOKENS[:, :3],
    "a longer text before it": torch.cat([TOKENS[:, :2], TOKENS], dim=1),
    "tokens beyond the vocabulary": TOKENS + 97,
    "two samples": TOKENS.repeat(2, 1),
    "an image": IMAGE,
}


@pytest.fixture(scope="module")
def text_graph(tmp_path_factory):
    model, sample = network("crate-lm")
    graph = ci.graph(model, sample, most=40)
    folder = tmp_path_factory.mktemp("text")
    graph.save(folder)
    return model, graph, ci.AttributionGraph.load(folder)


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_graph_refuses_other_models(text_graph, case, unchecked):
    model, graph, loaded = text_graph
    other = OTHER_MODELS[case](model)
    for one in (graph, loaded):
        with pytest.raises(ValueError, match="model"):
            one.steer({"L1A2": 0}, model=other, inputs=TOKENS)
    refuses("model", lambda: graph.steer({"L1A2": 0}, model=other))


@pytest.mark.parametrize("case", OTHER_INPUTS)
def test_a_graph_refuses_other_inputs(text_graph, case):
    model, graph, loaded = text_graph
    with pytest.raises(ValueError):
        graph.steer({"L1A2": 0}, inputs=OTHER_INPUTS[case])
    for one in (graph, loaded):
        with pytest.raises(ValueError):
            one.steer({"L1A2": 0}, model=model, inputs=OTHER_INPUTS[case])


def test_a_graph_takes_its_model_and_inputs_in_every_way(text_graph):
    model, graph, loaded = text_graph
    wanted, longer = graph.steer({"L1A2": 0}), torch.cat([TOKENS, TOKENS[:, :2]], dim=1)
    for inputs in (TOKENS, TOKENS[0], TOKENS.int(), longer):
        for found in (
            graph.steer({"L1A2": 0}, inputs=inputs),
            loaded.steer({"L1A2": 0}, model=copy.deepcopy(model), inputs=inputs),
        ):
            assert found.table.equals(wanted.table)
    assert graph.steer({"L1A2": 0}, model=copy.deepcopy(model)).table.equals(wanted.table)


def test_a_graph_notices_that_its_model_was_edited():
    model, sample = network("crate-lm")
    graph = ci.graph(model, sample, most=20)
    weight = model.blocks[1].mlp.W_out.data
    weight[[2, 3]] = weight[[3, 2]].clone()
    refuses("its weights are not those", lambda: graph.steer({"L1A2": 0}))
    weight[[2, 3]] = weight[[3, 2]].clone()
    graph.steer({"L1A2": 0})
