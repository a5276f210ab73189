"""JoMA's latent tree and network, and NCorr with its baselines."""

import joma_tree
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from joma_tree import LENGTH, PAD, Network, best_correlation, train, tree


@given(st.sampled_from(joma_tree.CELLS), st.integers(0, 99))
def test_a_class_is_the_union_of_its_latents(cell, seed):
    (n_0, n_1), classes, children = cell
    data = tree(classes, children, (n_0, n_1), seed)
    layer_0, layer_1 = data.latents
    assert layer_0.shape == (classes, n_0) and layer_1.shape == (classes, n_1)
    assert (layer_1.sum(dim=1) == children).all() and layer_0.sum(dim=1).max() <= children**2
    assert len({tuple(row) for row in layer_1.tolist()}) == classes  # no two classes are equal
    assert data.fills + data.tokens.shape[1] - 1 == LENGTH and (data.tokens[:, 0] == PAD).all()
    # two classes with the same layer-0 latents have the same tokens
    for row, latents in zip(data.tokens, layer_0, strict=True):
        present = row[row != PAD]
        assert len(set(present.tolist())) == len(present) and latents.sum() <= len(present)
        assert present.tolist() == sorted(present.tolist())


def test_one_filling_token_stands_for_all():
    data = tree(7, 2, (10, 20), 0)
    model = Network(17, 11, 7, 0)
    whole = torch.cat([torch.full((7, data.fills - 1), PAD), data.tokens], dim=1)
    assert whole.shape == (7, LENGTH)
    logits, units = model(data.tokens, data.fills)
    plain, every = model(whole, 1)
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    for few, many in zip(units, every, strict=True):
        torch.testing.assert_close(few.amax(dim=1), many.amax(dim=1), rtol=1e-4, atol=1e-5)


def test_training_learns_the_classes():
    data = tree(5, 2, (10, 20), 0)
    model = Network(31, 37, 5, 0)
    assert train(model, data, 0, 1e-2, 0) < 0.7 and train(model, data, 60, 1e-2, 0) == 1


def samples(rng):
    return torch.tensor(rng.integers(0, 2, (509, 5)).astype(float))


def test_best_correlation_is_one_of_a_copy_and_does_not_see_scale():
    rng = np.random.default_rng(1)
    latents, units = samples(rng), torch.tensor(rng.normal(size=(509, 31)))
    weights = torch.full((509,), 1 / 509, dtype=torch.float64)
    units[:, 7:12], units[:, 12] = 3 * latents + 2, 4.0
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(best_correlation(latents, units, weights), ones)
    units[:, 7:12] = torch.tensor(rng.normal(size=(509, 5)))
    found = best_correlation(latents, units, weights)
    scaled = units * torch.tensor(rng.uniform(0.1, 10, 31)) + torch.tensor(rng.normal(size=31))
    torch.testing.assert_close(best_correlation(latents, scaled, weights), found)
    every = np.corrcoef(latents.numpy().T, np.delete(units.numpy(), 12, axis=1).T)[:5, 5:]
    np.testing.assert_allclose(found.numpy(), every.max(axis=1), rtol=1e-9)


def test_weights_are_counts():
    rng = np.random.default_rng(2)
    latents, units = samples(rng)[:11], torch.tensor(rng.normal(size=(11, 7)))
    counts = torch.tensor(rng.integers(1, 5, 11))
    repeated = [x.repeat_interleave(counts, dim=0) for x in (latents, units)]
    total = int(counts.sum())
    equal = torch.full((total,), 1 / total, dtype=torch.float64)
    torch.testing.assert_close(
        best_correlation(latents, units, counts / total), best_correlation(*repeated, equal),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip
