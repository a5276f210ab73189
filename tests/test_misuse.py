"""Uses that would give a wrong number in silence, and what is said instead."""

import copy
import re

import pytest
import torch

import crate_interp as ci
from conftest import BATCH, LAYERS, make, make_lm, refuses
from test_graph_results import IMAGE, TOKENS, network


@pytest.fixture
def data():
    return torch.randn(11, 3, 6, 20, generator=torch.Generator().manual_seed(3))


def one_number(measure, points=("hook_resid_mid",), **over):
    fields = (
        dict(name="own", points=points, measure=measure, statistics={"a": ("", None, None, "x")})
        | over
    )
    return ci.Probe(**fields)


@pytest.mark.usefixtures("unchecked")
def test_a_cut_cache(model, data):
    for pool, where in (("cls", (1, 4)), ("cls", 0), ("mean", (1, 4)), ("mean", 2)):
        other = make(model.cfg.family, pool=pool)
        cache = other.run_with_cache(data, pos_slice=where)[1]
        refuses("some of the tokens only", lambda cache=cache: ci.probe(cache))
        assert cache["ln_final.hook_normalized"].numel() > 0
    refuses("takes a cache, not ", lambda: ci.probe(other.run_with_cache(data)))


# What a user sees, who has no type checks.
MISTAKES = {
    "probe(statistics=['a'])": "has no statistics",
    "probe(points=('blocks.0.hook_resid_mid',))": "names inside a block",
    "ci.probes.resolve([ci.probes.compression])": "function is not a probe: call it, compression()",
    "ci.CrateConfig(**base, mean=0.5, std=0.5)": "give a number for each of 3 channels",
    "ci.CrateConfig(**base, crop=-3)": "crop=-3: give a whole number",
    "ci.measures.coding_rate(torch.ones(3, 5).long(), 0.1)": "takes floats, got torch.int64",
    "ci.measures.coding_rate(torch.ones(5), 0.1)": "takes [..., pos width], got shape [5]",
    "ci.measures.coding_rate([[1.0]], 0.1)": "takes a tensor [..., pos width], got list",
    "ci.measures.coding_rate(torch.ones(0, 5), 0.1)": "there are no tokens to measure",
    "ci.measures.coding_rate(torch.ones(3, 5), 0)": "give a number above 0",
    "ci.measures.projection_energy(torch.ones(3, 5), torch.ones(5, 2))": "got shape [5, 2]",
    "ci.measures.maskcut(torch.ones(6, 5), (2, 4))": "grid=(2, 4) does not fit 6 tokens",
    "ci.load(None)": "cannot load None: give a file",
    "ci.sweep('crate-tiny-fashion', 'embedded:fashion')": "cannot measure str",
    "ci.viz.layers(result, 'sparsity.l2')": "no statistic 'sparsity.l2'. Did you mean sparsity.l1",
    "tiny('a.png')": "images are str: make floats",
    "tiny(torch.zeros(1, 1, 28, 28, dtype=torch.uint8))": "make floats of them, model.preprocess",
    "tiny(torch.zeros(1, 3, 28, 28))": "shape (1, 3, 28, 28): give [batch, 1, height, width]",
    "tiny(torch.zeros(1, 1, 20, 28))": "images are (20, 28), but the model was built for (28, 28)",
    "tiny(torch.full((1, 1, 28, 28), 255.0))": "floats up to 255, and so not preprocessed",
    "tiny.to_tokens('hi')": "there is no class 'hi'",
    "ci.ablate_heads(lm, 'embedded:fashion', limit=4)": "but this model reads text",
    "ci.sweep(tiny, ['a text'])": "sample 0 is 'a text', but this model reads images",
    "ci.segment(tiny, 'embedded:fashion', limit=4)": "the data has none: ",
    "ci.compare(tiny, lm, 'embedded:fashion', limit=4)": "but this model reads text",
}


@pytest.fixture(scope="module")
def names():
    """What the wrong calls name."""
    base = dict(family="crate", d_model=32, n_layers=2, n_heads=4)
    tiny, lm = ci.load("crate-tiny-fashion"), ci.load("crate-tiny-lm")
    result = ci.sweep(tiny, "embedded:fashion", probes="sparsity", limit=2, progress=False)
    probe = lambda **over: one_number(print, **over)  # noqa: E731
    return dict(ci=ci, torch=torch, base=base, tiny=tiny, lm=lm, result=result, probe=probe)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", MISTAKES)
def test_everyday_mistakes_are_answered_in_one_line(wrong, names):
    with pytest.raises(ValueError) as caught:
        eval(wrong, dict(names))
    assert MISTAKES[wrong] in str(caught.value) and "\n" not in str(caught.value)


def test_points_are_chosen_by_names_functions_and_regular_expressions(model, images):
    wanted = [f"blocks.{layer}.attn.hook_z" for layer in range(LAYERS)]
    alias = re.compile(r"attn\.o\.hook_in$")  # TransformerLens' name of hook_z
    for given in (set(wanted), tuple(wanted), re.compile(r"\d\.attn\.hook_z"), alias):
        _, cache = model.run_with_cache(images, names_filter=given)
        assert list(cache.cache_dict) == wanted
    zero = lambda tensor, hook: torch.zeros_like(tensor)  # noqa: E731
    by_hand = model.run_with_hooks(images, fwd_hooks=[(name, zero) for name in wanted])
    found = model.run_with_hooks(images, fwd_hooks=[(re.compile("hook_z$"), zero)])
    assert torch.equal(found, by_hand) and not torch.equal(found, model(images))
    with pytest.raises(KeyError, match="matches none of"):
        model.run_with_cache(images, names_filter=re.compile("hook_y"))
    for names, words in ([], "names_filter is empty"), ("hook_embeds", "Did you mean hook_embed"):
        with pytest.raises(KeyError, match=words):
            model.run_with_cache(images, names_filter=names)


def test_check_finds_nan_and_inf_and_the_default_does_not_look(model, images):
    wanted, bad = model(images), images.clone()
    bad[1, 2, 0, 5] = torch.nan
    assert model(bad)[1].isnan().all()
    assert torch.equal(model(images, check=True), wanted)
    assert torch.equal(model.run_with_cache(images, check=True)[0], wanted)
    stream = model(images, stop_at_layer=2)
    stream[0, 4, 3] = -torch.inf
    for run, first in (
        (lambda: model(bad, check=True), 1),
        (lambda: model.run_with_cache(bad, check=True), 1),
        (lambda: model(stream, start_at_layer=2, check=True), 0),
    ):
        refuses(f"in 1 of {BATCH} samples, first in sample {first}", run)
    assert model.to("meta")(images.to("meta"), check=True).shape == wanted.shape  # holds no values


def with_swapped_atoms(model):
    model = copy.deepcopy(model)
    weight = model.blocks[1].mlp.W_out.data
    weight[[2, 3]] = weight[[3, 2]].clone()
    return model


OTHER_MODELS = {
    "another seed": lambda model: make_lm("crate-lm", seed=1).double(),
    "another depth": lambda model: make_lm("crate-lm", n_layers=2).double(),
    "another vocabulary": lambda model: make_lm("crate-lm", d_vocab=7).double(),
    "another dtype": lambda model: copy.deepcopy(model).float(),
    "edited weights": with_swapped_atoms,
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
