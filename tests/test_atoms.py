"""Dictionary statistics and names of atoms: against a cache, counts and planted candidates."""

import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import rankdata

import crate_interp as ci
from conftest import make
from crate_hooks import full_name
from crate_interp.circuits.excerpts import (
    concepts_of_patches,
    concepts_of_samples,
    concepts_of_tokens,
)
from crate_interp.circuits.graphs.atom_names import auc
from crate_interp.sweeps.atom_statistics import (
    OCTAVES,
    histograms,
    layer_sums,
    merged_sums,
    tables_of_sums,
)

N = 7


@pytest.fixture(scope="module")
def images():
    return torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["crate", "crate-alpha"])
def model(request):
    model = make(request.param)
    with torch.no_grad():  # an atom that never fires, and one that always does
        model.blocks[1].ln2.bias.zero_()
        model.blocks[1].mlp.D[:, 3] = 0
        if request.param == "crate":
            model.blocks[1].ln2.weight[3], model.blocks[1].ln2.bias[3] = 0.0, -40.0
    return model


@pytest.fixture(scope="module")
def result(model, images):
    return ci.atoms(model, images, top=5, coactivation=True, batch_size=3, progress=False)


def test_against_a_cache(model, images, result):
    _, cache = model.run_with_cache(images)
    for layer in range(3):
        code = cache["post", layer].double().numpy()  # [sample, pos, atom]
        flat = code.reshape(-1, code.shape[-1])
        table = result.table()
        table = table[table["layer"] == layer]
        assert_allclose(table["firing_rate"], (flat > 0).mean(axis=0))
        assert_allclose(table["mean"], flat.mean(axis=0), rtol=1e-5)
        assert_allclose(table["max"], flat.max(axis=0), rtol=1e-5)
        assert_allclose(table["energy_share"], (flat**2).sum(axis=0) / (flat**2).sum(), rtol=1e-5)
        on = (flat > 0).astype(float)
        assert_allclose(result.coactivation(layer), on.T @ on / len(on))
        for atom in (0, 7, 30):
            top = result.top(layer, atom)
            wanted = np.sort(flat[:, atom])[::-1][:5]
            assert_allclose(top["value"], wanted[wanted > 0], rtol=1e-5)
            assert_allclose(code[top["sample"], top["token"], atom], top["value"], rtol=1e-5)


def test_octaves_count_the_values_by_powers_of_two():
    """Values on, below and beyond the ends; a dead atom has none."""
    values = [0.0, -1.0, 2.0**-9, 2.0**-7, 0.25, 0.49, 0.5, 1.0, 1.99, 2.0, 31.0, 400.0]
    code = torch.tensor([values, [0.0] * len(values)]).T[None]  # [1, token, 2]
    found = layer_sums(code, 0, 3, False)["octaves"]
    wanted = [sum(v > 0 and min(max(math.floor(math.log2(v)), -7), 4) == k for v in values)
              for k in OCTAVES]  # fmt: skip
    assert found[:, 0].tolist() == wanted and sum(wanted) == 10 and found[:, 1].sum() == 0
    table = tables_of_sums({5: layer_sums(code, 0, 3, False)})["sums"]
    assert histograms(table) == {(5, 0): wanted, (5, 1): [0] * 12}
    twice = merged_sums(table, table, {})
    assert histograms(twice)[5, 0] == [2 * count for count in wanted]


IMAGES = torch.randn(34, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@given(st.integers(0, 2**16))
def test_auc_counts_pairs(seed):
    """Of a present and an absent row, how often the present one is larger; ties count half."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, (29, 3), generator=generator).double()
    present = torch.randint(0, 2, (2, 29), generator=generator).bool()
    found = auc(torch.from_numpy(rankdata(values.numpy(), axis=0)), present)
    for concept in range(2):
        ones, zeros = values[present[concept]], values[~present[concept]]
        if min(len(ones), len(zeros)) < 4:
            assert (found[concept] == 0.5).all()
            continue
        above = (ones[:, None] > zeros).double() + 0.5 * (ones[:, None] == zeros).double()
        torch.testing.assert_close(found[concept], above.mean(dim=(0, 1)))


def planted(value, hook):
    """Atom 3 of each image tells the class: samples come as 0, 1, 0, 1, ... or as they are."""
    value = value.clone()
    rows = torch.arange(len(value)) // 2 % 2
    value[..., 3] = rows[:, None].to(value) + 0.01 * torch.rand(value.shape[:2])
    value[:, :, 4] = 0
    value[:, 0, 4] = 1  # and atom 4 tells CLS
    return value


def test_planted_candidates_are_found_and_noise_has_no_name():
    model = make("crate")
    labels = [n // 2 % 2 for n in range(32)]
    with model.hooks(fwd_hooks=[(full_name("mlp.hook_post", 1), planted)]):
        found = ci.circuits.atom_names(model, (IMAGES[:32], labels), batch_size=32, progress=False)
    table = found.table().set_index(["layer", "atom"])
    assert table.loc[(1, 3), "name"] == "class 1" and table.loc[(1, 3), "auc"] == 1
    assert table.loc[(1, 4), "name"] == "CLS" and table.loc[(1, 4), "auc"] == 1
    assert found.name_of(1, 3) == "class 1 (AUC 1.00)" and "atoms of" in found.headline()
    unnamed = table[table["name"] == ""]
    assert (unnamed["auc"] <= unnamed["null"]).all()
    examples = found.examples(1, 4)
    assert all("CLS of sample" in one["words"] and one["webp"] is None for one in examples)


def codes_of(table):
    """The tables of a layer whose codes `[sample, pos, atom]` are given, with ten classes."""
    module = importlib.import_module("crate_interp.circuits.graphs.atom_names")
    samples, pos = table.shape[:2]
    classes = concepts_of_samples([n * 7 % 10 for n in range(samples)], None)
    concepts = concepts_of_patches(make("crate"), samples, pos, None)
    generator = torch.Generator().manual_seed(0)
    found = module._of_layer(0, table.mean(dim=1), classes, table, concepts, generator)
    return found.set_index("atom")


def test_a_class_at_one_position_is_a_class_and_a_position_a_position():
    """Atoms 0 to 2: a class at one position; 3 to 5: positions alone, with noise; 6: both."""
    generator = torch.Generator().manual_seed(2)
    samples, pos = 128, 13
    label = torch.arange(samples) * 7 % 10
    table = torch.zeros(samples, pos, 7)
    for atom, place in ((0, 0), (1, 3), (2, 9)):
        table[:, place, atom] = (label == atom).float() + 0.01 * torch.rand(
            samples, generator=generator
        )
    for atom, places in ((3, [0]), (4, [1, 2, 6]), (5, [12])):
        table[..., atom] = 0.3 * torch.rand(samples, pos, generator=generator)
        table[:, places, atom] += 1
    table[:, :, 6] = 5.0 * (torch.arange(pos) == 0) + 0.5 * (label == 4)[:, None]
    table[..., 6] += torch.rand(samples, pos, generator=generator)
    found = codes_of(table)
    assert found["name"][[0, 1, 2, 6]].tolist() == [f"class {n}" for n in (0, 1, 2, 4)]
    assert found["kind"][[3, 4, 5]].tolist() == ["position"] * 3 and found["name"][3] == "CLS"


def test_random_labels_name_few_atoms():
    model = make("crate")
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(34, 13, model.cfg.d_mlp, generator=generator)

    def unrelated(value, hook):
        return noise[: len(value), : value.shape[1]].to(value)

    hooks = [(full_name("mlp.hook_post", n), unrelated) for n in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        found = ci.circuits.atom_names(model, IMAGES, batch_size=34, progress=False)
    share = (found.table()["name"] != "").mean()
    assert share < 0.25


def test_candidates_of_patches_and_tokens():
    model = make("crate")
    rows, columns = model.cfg.grid
    masks = torch.zeros(2, 6, 20, dtype=torch.uint8)
    masks[1, :3, :10] = 1
    found = concepts_of_patches(model, 2, 1 + rows * columns, masks)
    assert found[0][0] == "CLS" and found[0][2].sum() == 2
    places = sum(on.int() for _, _, on in found[1:10])
    assert (places[:, 1:] == 1).all() and (places[:, 0] == 0).all()
    on = {name: on for name, _, on in found}["patches on the object"]
    assert not on[0].any() and on[1].any() and not on[1, 0]
    words = ["'", " the", "3", "X"]
    tokens = torch.tensor([[0, 1, 2, 3, 0]])
    texts = concepts_of_tokens(tokens, words)
    at = {name: on[0] for name, _, on in texts}
    assert at["a quotation mark"].tolist() == [True, False, False, False, True]
    assert at["after a digit"].tolist() == [False, False, False, True, False]
    assert at["the first token"].tolist() == [True, False, False, False, False]
    assert at["after ' the'"].tolist() == [False, False, True, False, False]
    assert "token set" not in {one[1] for one in concepts_of_tokens(tokens, ["0", "1", "2", "3"])}
