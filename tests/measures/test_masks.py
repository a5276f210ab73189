"""Masks and maps against closed forms, slow second forms, and their invariances."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import crate_interp.measures as m


def draw(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_mass(values, mass):
    """Largest first, lower index first, until the share is reached, with exact sums."""
    kept, held, total = [], [], math.fsum(values)
    for index in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        if math.fsum(held) >= mass * total * (1 - 1e-12):
            break
        kept.append(index)
        held.append(values[index])
    return [index in kept for index in range(len(values))]


def test_uniform_and_peaky_maps_tell_the_two_rules_apart():
    uniform = torch.full((100,), 0.01)
    assert m.mass_mask(uniform).sum() == 60 and m.top_mask(uniform).sum() == 60
    peaky = torch.cat([torch.full((10,), 0.08), torch.full((90,), 0.2 / 90)])
    assert m.mass_mask(peaky).sum() == 8  # 8 x 0.08 = 0.64 >= 0.6 > 7 x 0.08
    assert m.top_mask(peaky).sum() == 60


def test_of_equal_values_the_lower_index_wins():
    even = torch.tensor([1.0, 2, 1, 1, 1, 2, 1])
    # 2 + 2 + 1 + 1 of 9 >= 5.4
    assert m.mass_mask(even, 0.6).tolist() == [True, True, True, False, False, True, False]
    assert m.top_mask(even, 0.43).tolist() == [True, True, False, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_even_maps_of_every_size_keep_the_first_tokens_and_no_more(dtype):
    for n in range(2, 300):
        kept = math.ceil(round(0.6 * n, 9))
        found = m.mass_mask(torch.full((n,), 1 / n, dtype=dtype)).nonzero().flatten()
        assert found.tolist() == [*range(kept)], n
        kept = math.floor(round(0.6 * n + 0.5, 9))
        found = m.top_mask(torch.full((n,), 0.3, dtype=dtype)).nonzero().flatten()
        assert found.tolist() == [*range(kept)], n


@pytest.mark.parametrize(
    "n, fraction, kept",
    [(5, 0.5, 3), (5, 0.6, 3), (7, 0.05, 1), (100, 0.145, 15), (7, 0.08, 1), (11, 1.0, 11)],
)
def test_the_top_rule_rounds_halves_up(n, fraction, kept):
    assert m.top_mask(draw(n, 3, n), fraction).sum(dim=-1).tolist() == [kept] * 3


def test_a_map_of_zeros_has_no_mass():
    assert not m.mass_mask(torch.zeros(2, 5)).any()
    assert m.mass_mask(torch.tensor([0.0, 3.0, 0.0]), 1.0).tolist() == [False, True, False]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=23), st.sampled_from([0.1, 0.5, 0.6, 0.9, 1.0])
)
def test_mass_agrees_with_a_slow_form_and_does_not_see_scale(values, mass):
    map = torch.tensor(values, dtype=torch.float64)
    wanted = (
        slow_mass([float(value) for value in values], mass)
        if any(values)
        else [False] * len(values)
    )
    assert m.mass_mask(map, mass).tolist() == wanted
    assert m.mass_mask(map / 1024, mass).tolist() == wanted
    assert torch.equal(m.mass_mask(map.float(), mass), m.mass_mask(map, mass))


@given(st.integers(0, 10**6))
def test_jaccard_agrees_with_sets(seed):
    a, b = draw(seed, 3, 13) > 0.5, draw(seed + 1, 3, 13) > 0.7
    for mask, target, found in zip(a.tolist(), b.tolist(), m.jaccard(a, b).tolist(), strict=True):
        one, two = ({i for i, on in enumerate(row) if on} for row in (mask, target))
        assert found == (len(one & two) / len(one | two) if one | two else 1.0)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(m.jaccard(a[:, order], b[:, order]), m.jaccard(a, b))
    assert torch.equal(m.jaccard(b, a), m.jaccard(a, b))


def test_jaccard_of_the_same_none_and_nothing():
    a = torch.tensor([True, True, False])
    assert m.jaccard(a, a) == 1 and m.jaccard(a, ~a) == 0 and m.jaccard(a & False, a & False) == 1
    heads = torch.stack([a, ~a])[None].expand(5, 2, 3)
    assert m.jaccard(heads, a).shape == (5, 2)  # leading axes broadcast


def test_random_masks_score_what_the_formula_says():
    n, fraction, target_fraction = 20_000, 0.6, 0.2
    target = torch.arange(n) < target_fraction * n
    found = m.jaccard(m.top_mask(draw(0, 11, n), fraction), target).mean()
    assert m.random_jaccard(fraction, target_fraction) == pytest.approx(0.12 / 0.68)  # 0.176
    assert found == pytest.approx(0.12 / 0.68, abs=3e-3)
    assert m.random_jaccard(1.0, 0.2) == 0.2 and m.random_jaccard(0.3, 0.0) == 0


def test_more_heads_never_lower_the_best():
    target = draw(1, 1, 1, 29) > 0.6
    scores = m.jaccard(m.mass_mask(draw(2, 7, 13, 29)), target)
    best = scores.cummax(dim=-1).values
    assert (best.diff(dim=-1) >= 0).all() and (best[:, -1] > scores.mean(dim=-1)).all()


def test_patches_follow_the_majority_of_their_pixels_and_pixels_their_patch():
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[:2, :3] = True  # all of the first patch of 2 x 3
    mask[2:4, 3:5] = True  # 4 of 6
    mask[4, :3] = True  # 3 of 6: no majority
    tokens = m.token_mask(mask, (2, 3))
    assert tokens.tolist() == [True, False, False, True, False, False]
    wide = m.pixel_mask(tokens, (3, 2), (2, 3))
    assert wide.shape == (6, 6) and wide.sum() == 12
    assert torch.equal(m.token_mask(wide, (2, 3)), tokens)


def slow_map(queries, keys, query, scaled, cls_key):
    batch, heads, count, p = keys.shape
    out = torch.zeros(batch, heads, count - 1, dtype=keys.dtype)
    for b in range(batch):
        for k in range(heads):
            logits = [
                float(queries[b, k, query] @ keys[b, k, j]) / (p**0.5 if scaled else 1)
                for j in range(count)
            ]
            weights = [math.exp(x - max(logits)) for x in logits]
            total = sum(weights) if cls_key else sum(weights[1:])
            out[b, k] = torch.tensor([weight / total for weight in weights[1:]], dtype=keys.dtype)
    return out


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("cls_key", [True, False])
@pytest.mark.parametrize("query", [0, 4, -1])
def test_maps_agree_with_a_slow_form(scaled, cls_key, query):
    q, k = draw(3, 2, 3, 7, 5), draw(4, 2, 3, 7, 5)
    found = m.attention_map(q, k, query, scaled, cls_key)
    assert_close(found, slow_map(q, k, query, scaled, cls_key), rtol=1e-12, atol=1e-14)


def test_without_cls_the_order_and_the_masks_stay_but_not_without_the_scale():
    codes = 3 * draw(5, 2, 3, 41, 7)
    with_cls, without = m.attention_map(codes, codes), m.attention_map(codes, codes, cls_key=False)
    assert torch.equal(m.mass_mask(with_cls), m.mass_mask(without))
    assert torch.allclose(with_cls / with_cls.sum(-1, keepdim=True), without)
    unscaled = m.attention_map(codes, codes, scaled=False, cls_key=False)
    assert torch.equal(unscaled.argsort(dim=-1), without.argsort(dim=-1))
    # sharper: the scale matters to the mass rule
    assert (m.mass_mask(unscaled).sum(-1) < m.mass_mask(without).sum(-1)).all()


def test_rollout_of_known_patterns():
    eye = torch.eye(5, dtype=torch.float64).expand(3, 2, 5, 5)
    assert torch.equal(m.attention_rollout(eye), torch.eye(5, dtype=torch.float64))
    uniform = torch.full((3, 2, 5, 5), 0.2, dtype=torch.float64)
    wanted = torch.eye(5) / 8 + (1 - 1 / 8) / 5  # (I/2 + J/2)^3 for the idempotent J
    assert_close(m.attention_rollout(uniform), wanted.double())
    patterns = draw(6, 7, 3, 2, 5, 5).softmax(dim=-1)
    rolled = m.attention_rollout(patterns)
    assert rolled.shape == (7, 5, 5)
    assert torch.allclose(rolled.sum(dim=-1), torch.ones(7, 5, dtype=torch.float64))
    one = torch.eye(5, dtype=torch.float64)
    for layer in range(3):
        one = (patterns[2, layer].mean(dim=0) + torch.eye(5)) / 2 @ one
    assert_close(rolled[2], one)


def planted(seed=0, sign=1.0):
    """Three images of 5 x 7 tokens in 11 dimensions.

    A rectangle inside has another mean than the border.
    """
    inside = torch.zeros(3, 5, 7, dtype=torch.bool)
    inside[0, 1:4, 2:5] = inside[1, 2:4, 1:3] = inside[2, 1:2, 4:6] = True
    way = draw(seed, 11) - 0.5
    features = 0.01 * draw(seed + 1, 3, 35, 11) + sign * inside.flatten(1)[..., None] * way
    return features, inside.flatten(1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_first_component_finds_the_object_whatever_the_sign(sign):
    features, inside = planted(sign=sign)
    assert torch.equal(m.pca_mask(features, (5, 7)), inside)
    first = m.pca_map(features, (5, 7), 1)[:, 0].flatten(1)
    assert first[inside].min() > 0 > first[~inside].max()


def test_components_are_those_of_an_svd_and_turn_with_the_space():
    features, _ = planted(3)
    maps = m.pca_map(features, (5, 7), 3)
    centred = (features - features.mean(dim=(0, 1))).flatten(0, 1)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    other = (u * s)[:, :3].T.unflatten(-1, (3, 5, 7)).transpose(0, 1)
    assert_close(maps.abs(), other.abs(), rtol=1e-7, atol=1e-9)
    turn, _ = torch.linalg.qr(draw(9, 11, 11))
    assert_close(m.pca_map(features @ turn, (5, 7), 3), maps, rtol=1e-7, atol=1e-9)


def test_tokens_all_alike_have_no_foreground():
    for value in (1.0, 0.1, 1 / 3):  # the mean of many is another by rounding
        for dtype in (torch.float32, torch.float64):
            assert not m.pca_mask(torch.full((3, 35, 11), value, dtype=dtype), (5, 7)).any()


def test_the_border_is_all_four_sides():
    inside = torch.zeros(1, 5, 7, dtype=torch.bool)
    inside[0, 0, 1:6] = inside[0, 1:4, 2:5] = (
        True  # it reaches the upper side, most of which is object
    )
    way = draw(0, 11) - 0.5
    for sign in (1.0, -1.0):
        features = 0.001 * draw(1, 1, 35, 11) + sign * inside.flatten(1)[..., None] * way
        assert torch.equal(m.pca_mask(features, (5, 7)), inside.flatten(1))


def test_the_sign_has_a_rule_where_there_is_no_inside():
    # every token of a grid of one row is on the border, whose mean is 0 then
    features = draw(4, 1, 7, 11)
    tokens = features[0] - features[0].mean(dim=0)
    first = torch.linalg.svd(tokens).Vh[0]
    first = first * first[first.abs().argmax()].sign()
    assert_close(m.pca_map(features, (1, 7), 1)[0, 0, 0], tokens @ first)
    assert_close(m.pca_map(-features, (1, 7), 1), -m.pca_map(features, (1, 7), 1))


MASK, MAP = torch.ones(5, dtype=torch.bool), torch.rand(5)


def test_masks_are_bool():
    with pytest.raises((ValueError, TypeError)):
        m.jaccard(MAP, MASK)
