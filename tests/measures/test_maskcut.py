"""MaskCut against closed forms, a dense eigensolver, and its invariances."""

import importlib

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import eigh

from crate_interp.measures.cuts import maskcut, normalised_cut
from maskcut_reference import NOISES, affinity_of, has_two_farthest, iou, planted, reference_masks
from tensors import draw

module = importlib.import_module("crate_interp.measures.cuts")
solver = importlib.import_module("crate_interp.measures.spectra")
seeds = st.integers(0, 2**31)


def blocks(labels, cross):
    """Weight 1 between tokens of one label and with themselves, `cross` between others."""
    labels = torch.as_tensor(labels)
    same = labels[:, None] == labels
    return torch.full(same.shape, cross, dtype=torch.float64).masked_fill(same, 1)


def one_hot(labels):
    return torch.eye(max(labels) + 1, dtype=torch.float64)[labels]


def show(mask):
    """A mask as rows of text."""
    return ["".join(".#"[int(cell)] for cell in row) for row in mask]


def random_weights(seed, n):
    weights = draw(seed, n, n).abs()
    return weights + weights.T


# the cut


@pytest.mark.parametrize("cross", [0.3, 1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize("n1, n2", [(11, 17), (2, 61), (101, 103)])
def test_two_blocks_have_the_eigenpair_of_the_closed_form(n1, n2, cross):
    labels = torch.tensor([0] * n1 + [1] * n2)[
        torch.randperm(n1 + n2, generator=torch.Generator().manual_seed(0))
    ]
    vector, value = normalised_cut(blocks(labels, cross))
    wanted = cross * n2 / (n1 + cross * n2) + cross * n1 / (n2 + cross * n1)
    assert abs(value.item() - wanted) < min(1e-8, 1e-6 * wanted)
    inside, outside = vector[labels == 0], vector[labels == 1]
    assert inside.std() < 1e-9 * inside.mean() and outside.std() < -1e-9 * outside.mean()
    larger = vector > vector.mean()
    assert torch.equal(larger, labels == 0)  # the smaller block has the larger entries


@given(seed=seeds, n=st.integers(2, 40))
def test_the_pair_is_the_one_of_a_dense_solver(seed, n):
    weights = random_weights(seed, n)
    vector, value = normalised_cut(weights)
    degrees = torch.diag(weights.sum(dim=1))
    values, vectors = eigh((degrees - weights).numpy(), degrees.numpy(), subset_by_index=[1, 1])
    assert abs(value - values[0]) < 1e-12
    assert abs(abs(vector @ degrees @ torch.from_numpy(vectors[:, 0])) - 1) < 1e-9
    assert abs(vector @ degrees @ vector - 1) < 1e-12 and vector[vector.abs().argmax()] > 0
    scaled, same = normalised_cut(weights * 2.0**400)
    assert torch.equal(scaled * 2.0**200, vector) and torch.equal(same, value)


@pytest.mark.parametrize("seed", range(4))
def test_all_solvers_find_the_same_pair(seed, monkeypatch):
    weights = affinity_of(planted(seed, (12, 13), NOISES[2 * seed + 1]), 0.15)
    root = np.sqrt(weights.sum(axis=1))
    pairs = [solver._inverse_krylov(weights, root, dtype) for dtype in (np.float32, np.float64)]
    pairs.append(solver._dense(weights, root))
    for value, vector in pairs:
        assert abs(value - pairs[0][0]) < 1e-13 and abs(abs(vector @ pairs[0][1]) - 1) < 1e-12
    monkeypatch.setattr(solver, "_STEPS", 2)
    unconverged = solver._inverse_krylov(weights, root, np.float64)
    assert unconverged is None


@pytest.mark.parametrize("cross", [1e-9, 1e-14, 1e-18, 1e-30, 1e-300])
def test_blocks_that_hardly_hold_together(cross):
    labels = torch.tensor([0] * 31 + [1] * 37)
    vector, value = normalised_cut(blocks(labels, cross))
    rounding = len(labels) * torch.finfo(torch.float64).eps  # of an eigenvalue of so many rows
    assert torch.equal(vector > 0, labels == 0) and 0 <= abs(value) <= 2.1 * cross + rounding


def test_of_equal_eigenvalues_the_vector_is_the_projection_of_the_start():
    weights = blocks([0] * 7 + [1] * 7 + [2] * 7 + [3] * 5, 1e-3)
    vector, value = normalised_cut(weights)
    degrees = weights.sum(dim=1)
    values, vectors = eigh((torch.diag(degrees) - weights).numpy(), torch.diag(degrees).numpy())
    space = torch.from_numpy(vectors[:, abs(values - values[1]) < 1e-9])
    assert space.shape[1] == 2 and abs(value - values[1]) < 1e-12
    start = torch.arange(26).double().square().cos()
    wanted = space @ (space.T @ (degrees * start))
    cosine = (degrees * vector) @ wanted / ((degrees * wanted) @ wanted).sqrt()
    assert abs(abs(cosine) - 1) < 1e-9


def test_a_graph_in_pieces_parts_the_second_largest():
    labels = [2] * 3 + [0] * 11 + [1] * 7 + [3] * 7
    vector, value = normalised_cut(blocks(labels, 0.0))
    assert value == 0 and torch.equal(vector > 0, torch.tensor(labels) == 1)


# the masks


def test_orthogonal_features_are_two_blocks():
    labels = [0] * 13 + [1] * 17
    masks = maskcut(one_hot(labels), (5, 6))
    smaller = ["######", "######", "#.....", "......", "......"]  # of the blocks, with 2 corners
    assert show(masks[0]) == smaller
    assert masks.shape == (3, 5, 6) and masks.dtype == torch.bool


def test_a_side_with_three_corners_is_background():
    frame = torch.ones(7, 7, dtype=torch.long)
    frame[1:-1, 1:-1] = 0  # 25 tokens against 24: the frame is the smaller block
    assert torch.equal(maskcut(one_hot(frame.flatten().tolist()), (7, 7), 1)[0], frame == 0)


def test_three_objects_come_one_after_another():
    picture = torch.zeros(9, 11, dtype=torch.long)
    picture[1:3, 1:3], picture[1:5, 5:8], picture[6:8, 2:10] = 1, 2, 3
    masks = maskcut(one_hot(picture.flatten().tolist()), (9, 11), 5)
    found = [mask for mask in masks if mask.any()]
    assert {tuple(show(mask)) for mask in found} == {
        tuple(show(picture == label)) for label in (1, 2, 3)
    }


def test_a_part_of_the_foreground_that_is_apart_is_left_out():
    picture = torch.zeros(5, 9, dtype=torch.long)
    picture[1:4, 1:3], picture[1:4, 5:8] = 1, 1
    picture[4, 3] = 1  # touches the first at a corner alone
    # all entries are equal: the first is the seed
    mask = maskcut(one_hot(picture.flatten().tolist()), (5, 9), 1)[0]
    assert show(mask) == [".........", ".##......", ".##......", ".##......", "........."]


@pytest.mark.parametrize("seed", range(12))
def test_masks_do_not_overlap_and_nothing_follows_one_not_found(seed):
    masks = maskcut(torch.from_numpy(planted(seed, (12, 10), NOISES[seed % 10])), (12, 10), 6)
    assert masks.sum(dim=0).max() <= 1 and masks[0].any()
    found = masks.flatten(1).any(dim=1).tolist()
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("affinity", ["cosine", "inner"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, 1e-30, 1e200])
def test_tokens_all_alike_hold_no_object(affinity, value):
    direction = draw(3, 13)
    assert not maskcut((value * direction).expand(2, 35, 13), (5, 7), affinity=affinity).any()


def test_tokens_that_have_nothing_in_common_are_parted_one_way_every_time():
    tokens = torch.eye(210, dtype=torch.float64)[
        :, torch.randperm(210, generator=torch.Generator().manual_seed(3))
    ]
    masks = maskcut(tokens, (14, 15))  # 208 eigenvalues are equal
    start = torch.arange(210).double().square().cos()
    seed = (start - start.mean()).abs().argmax()
    assert masks[0].flatten()[seed] and torch.equal(maskcut(tokens, (14, 15)), masks)


def test_the_smallest_grids():
    alike, apart = torch.ones(2, 3), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for grid in ((1, 2), (2, 1)):
        assert not maskcut(alike, grid).any()
        # of equal entries the first is largest
        assert maskcut(apart, grid, 1).flatten().tolist() == [True, False]
    assert not maskcut(torch.ones(4, 0), (2, 2)).any()
    assert maskcut(torch.ones(0, 4, 3), (2, 2)).shape == (0, 3, 2, 2)


# inner products


def test_inner_products_cut_blocks_that_are_joined():
    tokens = torch.tensor([[1.0, 0.2]] * 12 + [[0.2, 1.0]] * 9, dtype=torch.float64)
    assert show(maskcut(tokens, (7, 3), 1, affinity="inner")[0]) == ["..."] * 4 + ["###"] * 3
    # nothing is left of the graph
    assert not maskcut(tokens, (7, 3), 1, tau=2.0, affinity="inner").any()


def test_tokens_without_weight_are_background_and_left_out():
    codes = draw(7, 5, 9, 13).abs()
    codes[:, :4, :6] = 0
    codes[1:3, 2:4], codes[:, 6:] = 0, codes[:, 6:] + 2
    codes[0, 0] = 0
    codes[2:4, :3, 6:] = 3 * codes[2:4, :3, 6:] + 4
    codes[3, 7] = 0
    masks = maskcut(codes.flatten(0, 1), (5, 9), affinity="inner")
    silent = (codes == 0).all(dim=-1)
    assert silent.any() and masks[0].any() and not (masks & silent).any()
    kept = codes.flatten(0, 1)[~silent.flatten()]
    inner = kept @ kept.T
    inner = (inner + inner.mT) / 2  # some processors round the two halves apart
    vector, _ = normalised_cut(inner.where(inner >= 0.15, 0.0))
    above = torch.zeros(45, dtype=torch.bool)
    above[~silent.flatten()] = vector > vector.mean()
    below = ~above & ~silent.flatten()
    assert (masks[0].flatten() <= above).all() or (masks[0].flatten() <= below).all()


def test_the_threshold_of_inner_products_is_inclusive_and_scales():
    tokens = torch.tensor(
        [[2.0, 0.0]] * 4 + [[0.0, 1.0]] * 3 + [[0.5, 1.0]] * 2, dtype=torch.float64
    )
    # <f_0, f_7> = <f_4, f_7> = 1 join the graph
    whole = maskcut(tokens, (3, 3), tau=1.0, affinity="inner")
    assert show(whole[0]) == ["...", ".##", "###"]
    apart = maskcut(tokens, (3, 3), tau=1.01, affinity="inner")
    # pieces of 4 and of 2, three tokens are left out
    assert show(apart[0]) == ["...", "...", ".##"]
    for scale in (1e-150, 1e-3, 1e120):
        assert torch.equal(
            maskcut(scale * tokens, (3, 3), tau=scale * scale, affinity="inner"), whole
        )


# against the dense solver


@pytest.mark.parametrize(
    "side, grids, n_masks",
    [
        (14, 20, 3),
        (28, 2, 3),
        pytest.param(14, 100, 3, marks=pytest.mark.slow),
        pytest.param(28, 10, 3, marks=pytest.mark.slow),
        pytest.param(60, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_masks_are_those_of_a_dense_solver(side, grids, n_masks):
    agree = 0
    for seed in range(grids):
        features = planted(seed, (side, side), NOISES[seed % 10] if grids > 1 else 2.0)
        wanted, _ = reference_masks(features, (side, side), n_masks)
        got = maskcut(torch.from_numpy(features), (side, side), n_masks).numpy()
        agree += min(map(iou, got, wanted)) >= 0.99
    assert agree >= 0.99 * grids


def test_thresholds_of_either_sign():
    for tau in (-0.3, -0.05, 0.0, 0.05, 0.4):
        features = planted(0, (9, 8), 1.0)
        got = maskcut(torch.from_numpy(features), (9, 8), tau=tau).numpy()
        assert min(map(iou, got, reference_masks(features, (9, 8), tau=tau)[0])) == 1, tau


def test_cosines_near_the_threshold_are_those_of_float64():
    angles = torch.linspace(0, 1.5, 61, dtype=torch.float64)
    features = torch.cat([torch.stack([angles.cos(), angles.sin()], dim=1), draw(1, 9, 2)])
    for tau in (0.15, float((angles[40] - angles[3]).cos())):
        for shift in (-1e-13, 0.01, 1e-13):
            got = module._cosine_affinity(features.numpy(), tau + shift)
            unit = features / features.norm(dim=1, keepdim=True)
            assert np.array_equal(got, np.where((unit @ unit.T).numpy() > tau + shift, 1, 1e-5))


# invariances


@given(seed=seeds, scale=st.floats(1e-100, 1e100))
def test_the_length_of_features_does_not_matter(seed, scale):
    features = torch.from_numpy(planted(seed, (11, 9), 1.5))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.rand(99, 1, generator=generator, dtype=torch.float64) + 0.1
    assert torch.equal(maskcut(features * scale, (11, 9)), maskcut(features, (11, 9)))
    assert torch.equal(maskcut(features * lengths, (11, 9)), maskcut(features, (11, 9)))


@pytest.mark.slow
@given(seed=seeds, affinity=st.sampled_from(["cosine", "inner"]))
def test_rotating_the_space_and_mirroring_the_grid(seed, affinity):
    features = draw(seed, 7, 9, 6) + 0.5
    cut = lambda x, grid=(7, 9): maskcut(x.reshape(63, 6), grid, affinity=affinity)  # noqa: E731
    masks = cut(features)
    # rounding decides ties: two patches equally far out, or a cut that a change of 1e-9 moves
    hypothesis.assume(not has_two_farthest(features.reshape(63, 6).numpy()))
    hypothesis.assume(torch.equal(cut(features + 1e-9 * draw(seed + 2, 7, 9, 6)), masks))
    assert torch.equal(cut(features @ torch.linalg.qr(draw(seed + 1, 6, 6))[0]), masks)
    assert torch.equal(cut(features.flip(1)), masks.flip(2))
    assert torch.equal(cut(features.flip(0)), masks.flip(1))
    assert torch.equal(cut(features.transpose(0, 1), (9, 7)), masks.transpose(1, 2))


@pytest.mark.parametrize("affinity", ["cosine", "inner"])
def test_a_batch_is_its_images_one_by_one_and_the_same_bits_again(affinity):
    features = torch.from_numpy(
        np.stack([planted(seed, (8, 9), 1.0) for seed in (0, 3, 6, 9, 12, 15)])
    )
    batch = maskcut(features.unflatten(0, (2, 3)), (8, 9), 2, affinity=affinity)
    assert batch.shape == (2, 3, 2, 8, 9)
    single = torch.stack([maskcut(image, (8, 9), 2, affinity=affinity) for image in features])
    assert torch.equal(batch.flatten(0, 1), single)
    assert torch.equal(maskcut(features.unflatten(0, (2, 3)), (8, 9), 2, affinity=affinity), batch)
    weights = torch.from_numpy(affinity_of(features[0].numpy(), 0.15))
    first, second = normalised_cut(weights), normalised_cut(weights)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_is_computed_in_float64(dtype):
    features = torch.from_numpy(planted(4, (9, 9), 1.0)).to(dtype).requires_grad_()
    before = features.detach().clone()
    masks = maskcut(features, (9, 9))
    assert torch.equal(masks, maskcut(features.double(), (9, 9))) and not masks.requires_grad
    assert torch.equal(features, before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(maskcut(features, (9, 9)), masks)
