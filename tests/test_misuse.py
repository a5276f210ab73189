"""Uses that would give a wrong number in silence, and what is said instead."""

import copy
import re

import pytest
import torch

import crate_interp as ci
from conftest import BATCH, LAYERS, make, make_lm, refuses
from crate_interp.measures.cuts import normalised_cut
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
    "ci.CrateConfig(**base, mean=0.5, std=0.5)": "give one for each of 3 channels",
    "ci.measures.coding_rate(torch.ones(5), 0.1)": "takes [..., pos width], got shape [5]",
    "ci.measures.coding_rate(torch.ones(0, 5), 0.1)": "there are no tokens to measure",
    "ci.measures.coding_rate(torch.ones(3, 5), 0)": "give a number above 0",
    "ci.measures.projection_energy(torch.ones(3, 5), torch.ones(5, 2))": "got shape [5, 2]",
    "ci.measures.maskcut(torch.ones(6, 5), (2, 4))": "grid=(2, 4) does not fit 6 tokens",
    "ci.measures.hoyer(torch.ones(3, 1))": "at least 2 entries, got 1",
    "ci.measures.top_mass(torch.full((3, 5), 0.2), 6)": "k=6: give a number from 1 to 5",
    "ci.measures.output_map_cosine(torch.ones(3, 9, 5), torch.ones(3, 9, 5))": "does not fit u",
    "ci.measures.maskcut(torch.ones(6, 5) * torch.nan, (2, 3))": "features hold NaN or Inf",
    "normalised_cut(torch.ones(3, 4))": "is [pos, pos] with pos > 1, got [3, 4]",
    "normalised_cut(torch.diag(torch.tensor([1.0, 0.0])))": "token 1 has weight 0",
    "ci.load(None)": "cannot load None: give a file",
    "ci.sweep('crate-tiny-fashion', 'embedded:fashion')": "cannot measure str",
    "ci.viz.layers(result, 'sparsity.l2')": "no statistic 'sparsity.l2'. Did you mean sparsity.l1",
    "tiny('a.png')": "images are str: make floats",
    "tiny(torch.zeros(1, 3, 28, 28))": "shape (1, 3, 28, 28): give [batch, 1, height, width]",
    "tiny(torch.zeros(1, 1, 20, 28))": "images are (20, 28), but the model was built for (28, 28)",
    "tiny(torch.full((1, 1, 28, 28), 255.0))": "floats up to 255, and so not preprocessed",
    "tiny.to_tokens('hi')": "there is no class 'hi'",
    "ci.sweep(tiny, ['a text'])": "sample 0 is 'a text', but this model reads images",
    "ci.segment(tiny, 'embedded:fashion', limit=4)": "the data has none: ",
    "ci.CrateConfig(**base | {'n_heads': 3})": "n_heads=3 must divide d_model=32: change it, or",
    "ci.CrateConfig(**base, image_size=30)": "image_size=(30, 30), patch_size=(16, 16): ",
    "ci.CrateConfig(**base, d_mlp=64)": "d_mlp=64: the dictionary is square",
    "ci.CrateConfig(**base, mean=[51.0] * 3, std=[9.0] * 3)": "divide both by 255",
    "ci.CrateConfig(**base, labels=('a',))": "labels: 1 names for 1000 classes",
    "ci.sweep(tiny, images, probes='compresion')": "'compresion'. Did you mean compression",
    "ci.sweep(tiny, images, probes=[])": "probes=[]: give names",
    "ci.sweep(tiny, images, probes=['sparsity', ci.probes.sparsity()])": "two probes share a name",
    "ci.sweep(tiny, images, shard='0/2')": "needs a folder that all shards share: give out=DIR",
    "ci.sweep(lm, '3 4 5')": "write a list: data=[text]",
    "ci.sweep(lm, [])": "the data is empty: there is no text",
    "ci.sweep(lm, torch.full((1, 13), 10**6))": "beyond the vocabulary of",
    "ci.linear_probe(tiny, images)": "a linear probe needs labels",
    "ci.linear_probe(tiny, images, labels=[1])": "there are 1 labels for 2 samples",
    "ci.linear_probe(tiny, images, labels=[0, 1], pool='max')": "pool='max': give one of cls, mean",
    "ci.linear_probe(lm, tokens, labels=[0, 1], pool='cls')": "'cls' needs a model with a CLS",
    "ci.ablate_heads(tiny, images)": "need the true class of each image: labels are missing",
    "ci.ablate_heads(tiny, (images, [0, 99]))": "the label 99 of sample 1 is",
    "tiny(images, labels=torch.tensor([0, 11]))": "labels are classes from 0 to 9",
    "tiny.preprocess([])": "the sequence is empty",
    "tiny.preprocess('missing.png')": "cannot read the image 'missing.png'",
    "ci.maps.attention(cache, 9)": "layer=9: the model has layers 0 to 5",
    "ci.maps.attention(cache, 0, grid=(3, 5))": "patches do not fit the grid 3 x 5",
    "ci.viz.head_grid(cache, images[:1])": "does not belong to images",
    "ci.graph(tiny, images)": "give one sample",
    "ci.graph(tiny, images[:1], target='shoe')": "no class 'shoe'",
    "ci.circuits.Circuit((ci.circuits.Edge('head 1', 'logits', 1.0),))": "is not a node",
    "ci.circuits.composition(tiny, through='data')": "give data with through='data'",
    "ci.circuits.path_patch(tiny, images, images, torch.sum, receivers=[(9, 0)])": "[(9, 0)]",
    "lm(tokens + 10**6)": "tokens range from 10000",
    "lm(tokens[:, :0])": "there are no tokens",
    "lm(tokens.repeat(1, 400))": "the model takes at most n_ctx",
    "lm(3)": "the input is int",
    "lm(tokens[:, :1], 'loss')": "the loss needs at least two tokens",
}


@pytest.fixture(scope="module")
def names():
    """What the wrong calls name."""
    base = dict(family="crate", d_model=32, n_layers=2, n_heads=4)
    tiny, lm = ci.load("crate-tiny-fashion"), ci.load("crate-tiny-lm")
    result = ci.sweep(tiny, "embedded:fashion", probes="sparsity", limit=2, progress=False)
    images = tiny.preprocess(ci.data.embedded("fashion")[:2]["image"])
    return dict(
        ci=ci, torch=torch, normalised_cut=normalised_cut, base=base, tiny=tiny, lm=lm,
        result=result, images=images,
        cache=tiny.run_with_cache(images)[1], tokens=torch.arange(14).view(2, 7),
        probe=lambda **over: one_number(print, **over),
    )  # fmt: skip


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
