"""Dictionary statistics: against a full cache, in parts that are merged, and what is refused."""

import math

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.data import open_data, part
from crate_interp.sweeps import atom_sums

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
        np.testing.assert_allclose(table["firing_rate"], (flat > 0).mean(axis=0))
        np.testing.assert_allclose(table["mean"], flat.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(table["max"], flat.max(axis=0), rtol=1e-5)
        np.testing.assert_allclose(
            table["energy_share"], (flat**2).sum(axis=0) / (flat**2).sum(), rtol=1e-5
        )
        on = (flat > 0).astype(float)
        np.testing.assert_allclose(result.coactivation(layer), on.T @ on / len(on))
        for atom in (0, 7, 30):
            top = result.top(layer, atom)
            wanted = np.sort(flat[:, atom])[::-1][:5]
            np.testing.assert_allclose(top["value"], wanted[wanted > 0], rtol=1e-5)
            np.testing.assert_allclose(
                code[top["sample"], top["token"], atom], top["value"], rtol=1e-5
            )


def test_dead_and_dense(model, images, result):
    table = result.table().set_index(["layer", "atom"])
    assert (
        table.loc[(1, 3), "state"] == "dead"
        and table.loc[(1, 3), "mean_on"] == 0
        and not len(result.top(1, 3))
    )
    rates = table.loc[1]["firing_rate"]
    assert set(table.loc[1][rates > 0.5]["state"]) == {"dense"}
    layers = result.layers().set_index("layer")
    assert layers.loc[1, "dead"] == (rates == 0).sum() >= 1
    assert layers.loc[1, "dense"] == (rates > 0.5).sum()
    named = {name for name in result.layers() if f"{name}: " in result.legend()}
    assert named == set(result.layers()) - {"layer", "atoms", "n_tokens"}
    stricter = ci.atoms(model, images, layers=[1], dense=0.9, progress=False)
    assert "dense: atoms that are on at more than 90% of the tokens" in stricter.legend()
    assert stricter.layers()["dense"].tolist() == [(rates > 0.9).sum()]
    d = model.blocks[2].mlp.D.detach()
    assert layers.loc[2, "coherence"] == pytest.approx(float(ci.measures.mutual_coherence(d)))
    assert layers.loc[2, "n_tokens"] == N * 13 and layers.loc[2, "atoms"] == d.shape[1]


def test_equal_values_keep_the_earlier_token():
    model = make()
    images = torch.randn(1, 3, 6, 20, generator=torch.Generator().manual_seed(1)).repeat(4, 1, 1, 1)
    data = open_data(images, model.preprocess)
    each = [ci.atoms(model, part(data, n, n + 1), top=3, progress=False) for n in range(4)]
    merged = each[2].merge(each[0]).merge(each[3]).merge(each[1])
    top = merged.top(0, 0)
    assert list(top["sample"]) == [0, 1, 2] and top["value"].nunique() == 1


def test_refusals(model, images, result):
    for match, call in (
        ("top=0", lambda: ci.atoms(model, images, top=0)),
        (r"layers=\[3\]: give layers from 0 to 2", lambda: ci.atoms(model, images, layers=[3])),
        ("layer=9: the result has the layers 0, 1, 2", lambda: result.top(9, 0)),
        ("layer 0 has the atoms 0 to", lambda: result.top(0, 999)),
        ("was not counted", lambda: ci.atoms(model, images[:1], progress=False).coactivation(0)),
        ("the data is empty", lambda: ci.atoms(model, images[:0])),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_octaves_count_the_values_by_powers_of_two():
    """Values on, below and beyond the ends; a dead atom has none."""
    values = [0.0, -1.0, 2.0**-9, 2.0**-7, 0.25, 0.49, 0.5, 1.0, 1.99, 2.0, 31.0, 400.0]
    code = torch.tensor([values, [0.0] * len(values)]).T[None]  # [1, token, 2]
    found = atom_sums.layer_sums(code, 0, 3, False)["octaves"]
    wanted = [sum(v > 0 and min(max(math.floor(math.log2(v)), -7), 4) == k for v in values)
              for k in atom_sums.OCTAVES]  # fmt: skip
    assert found[:, 0].tolist() == wanted and sum(wanted) == 10 and found[:, 1].sum() == 0
    table = atom_sums.tables_of_sums({5: atom_sums.layer_sums(code, 0, 3, False)})["sums"]
    assert atom_sums.histograms(table) == {(5, 0): wanted, (5, 1): [0] * 12}
    twice = atom_sums.merged_sums(table, table, {})
    assert atom_sums.histograms(twice)[5, 0] == [2 * count for count in wanted]
    older = table.drop(columns=[name for name in table if name.startswith("octave")])
    assert atom_sums.histograms(atom_sums.merged_sums(table, older, {})) == {}
