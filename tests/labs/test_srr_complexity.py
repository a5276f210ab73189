"""Measures of complexity, and Kendall's tau: closed forms, slow loops, invariances."""

import copy
import itertools
import math

import complexity
import lab
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import srr_complexity
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from crate_interp import CrateConfig, HookedCrate


def small(variant="crate", layers=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        size = dict(d_model=6, n_heads=2, n_layers=layers, n_classes=3)
        look = dict(image_size=(4, 6), patch_size=2, channels=1)
        return HookedCrate(CrateConfig(family="crate", variant=variant, **size, **look)).eval()


def trained(model=None, start=None, sigma=0.5):
    """A network with the labels that it gives itself, so that its margins are above 0."""
    model = model or small()
    images = torch.randn(11, 1, 4, 6, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        labels = model(images).argmax(dim=-1)
    moved = start or small()
    if start is None:
        with torch.no_grad():
            for weight in moved.parameters():
                weight.mul_(0.7)
    return complexity.Trained(model, moved, images, labels, sigma)


def scaled(model, factor):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.ndim == 2:
                weight.mul_(factor)
    return other


def test_the_table_has_the_published_rows():
    printed = pd.read_csv(srr_complexity.PUBLISHED)
    assert list(complexity.MEASURES) == printed[printed["table"] == 1]["measure"].tolist()
    assert len(complexity.MEASURES) == 23


@pytest.mark.parametrize("variant", ["crate", "c", "n", "t", "identity"])
def test_path_norm_is_that_of_slow_loops(variant):
    model = small(variant)
    assert complexity.path_norm(model) == pytest.approx(slow_path_norm(model), rel=1e-6)


@torch.no_grad()
def slow_path_norm(model):
    """The same number by loops over tokens and entries."""
    d, heads, p = range(6), range(2), range(3)
    embed, tokens = model.embed.proj, range(model.cfg.n_tokens)
    z = [[float(model.cls_token[0, 0, i]) ** 2 for i in d]]
    for _ in tokens[1:]:
        z.append([
            sum(float(w) ** 2 for w in embed.weight[i]) + float(embed.bias[i]) ** 2 for i in d
        ])  # fmt: skip
    z = [[z[t][i] + float(model.pos_embed[0, t, i]) ** 2 for i in d] for t in tokens]
    for block in model.blocks:
        attn, dictionary = block.attn, block.mlp.D.detach()
        out = [[float(attn.b_O[i]) ** 2 for i in d] for _ in tokens]
        for k in heads:
            codes = [
                [sum(z[t][i] * float(attn.U[k, i, a]) ** 2 for i in d) for a in p] for t in tokens
            ]
            for t in tokens:
                scores = [
                    math.exp(sum(codes[t][a] * codes[s][a] for a in p) / 3**0.5) for s in tokens
                ]
                for a, i in itertools.product(p, d):
                    mean = sum(scores[s] * codes[s][a] for s in tokens) / sum(scores)
                    out[t][i] += mean * float(attn.W_O[k, a, i]) ** 2
        step = torch.eye(6) + 0.1 * (dictionary - dictionary.T @ dictionary)
        mid = [[z[t][i] + out[t][i] for i in d] for t in tokens]
        z = [[sum(mid[t][i] * float(step[i, j]) ** 2 for i in d) for j in d] for t in tokens]
    head = model.unembed
    return sum(
        sum(z[0][i] * float(head.weight[c, i]) ** 2 for i in d) + float(head.bias[c]) ** 2
        for c in range(3)
    )


def test_norms_of_known_matrices():
    model = small("c", layers=1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.eye(*weight.shape))
    t = trained(model, start=scaled(model, 0.0))
    shapes = [weight.shape for weight in t.weights]
    assert shapes == [(6, 4), (6, 6), (6, 6), (3, 6)]  # embedding, U, D, classes
    ones, m = 4 + 6 + 6 + 3, 11
    found = complexity.measured(t)
    assert found["params"] == pytest.approx(math.sqrt((24 + 36 + 36 + 18) / m))
    for name in ("l2-norm", "l2-norm-init", "fro-distance", "param-norm", "fro/spec"):
        assert found[name] == pytest.approx(math.sqrt(ones / m))
    assert found["spec-distance"] == pytest.approx(math.sqrt(4 / m))
    assert found["prod-of-spec"] == pytest.approx(-math.log(m) / 2)
    assert found["sum-of-spec"] == pytest.approx(math.log(4 / m) / 2)
    fro = math.log(4 * 6 * 6 * 3)
    assert found["prod-of-fro"] == pytest.approx((fro - math.log(m)) / 2)
    assert found["sum-of-fro"] == pytest.approx((math.log(4) + fro / 4 - math.log(m)) / 2)
    bound = ones / (4 * 0.25) + math.log(m / 0.5) + 10
    assert found["pac-bayes-orig"] == pytest.approx(math.sqrt(bound / m))
    assert found["pac-bayes-init"] == found["pac-bayes-orig"]
    assert found["1/pac-bayes-flatness"] == pytest.approx(math.sqrt(4 / m))
    main = math.log(ones) - 2 * math.log(t.margin) - math.log(m)
    assert found["spec-orig-main"] == pytest.approx(main / 2)


@settings(max_examples=5, deadline=None)
@given(st.sampled_from([-2, -1, 1, 3]))
def test_scaling_all_weights(power):
    factor = 2.0**power  # exact in float32: the distances are small beside the weights
    model = small()
    t, other = trained(model), trained(scaled(model, factor), start=scaled(trained().start, factor))
    for name in ("params", "fro/spec"):
        measure = complexity.MEASURES[name]
        assert measure(other) == pytest.approx(measure(t))
    for name in ("l2-norm", "l2-norm-init", "fro-distance", "spec-distance", "param-norm"):
        measure = complexity.MEASURES[name]
        assert measure(other) == pytest.approx(factor * measure(t))
    shift = math.log(factor)
    for name, times in {"prod-of-spec": len(t.weights), "sum-of-fro": 1}.items():
        measure = complexity.MEASURES[name]
        assert measure(other) - measure(t) == pytest.approx(times * shift)


def test_the_margin_is_that_of_slow_loops_and_must_be_above_0():
    t = trained()
    with torch.no_grad():
        rows = t.model(t.images).double().tolist()
    each = sorted(
        row[y] - max(value for j, value in enumerate(row) if j != y)
        for row, y in zip(rows, t.labels.tolist(), strict=True)
    )
    assert t.margin == pytest.approx(each[1])  # of 11 values the tenth percentile is the second
    with pytest.raises(ValueError, match="give a network that classifies"):
        complexity.margin(t.model, t.images, (t.labels + 1) % 3)


@pytest.mark.slow
def test_the_quick_lab(tmp_path):
    found = srr_complexity.run("quick", lab.Steps(None))
    assert len(found.table()) == 4
    assert lab.written(found, srr_complexity.draw, tmp_path).exists()
    kept = pd.read_csv(zoo.TRAININGS).set_index("name")["sigma"]
    for recipe in zoo.grid()[: srr_complexity.REPEATED]:
        again = found.numbers("sigma", setting=recipe.name)["value"][0]
        assert again == pytest.approx(kept[recipe.name], rel=1e-3)


TABLES = srr_complexity.PUBLISHED
lists = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=13)


@settings(max_examples=30, deadline=None)
@given(lists)
def test_tau_is_scipys_where_that_is_defined(pairs):
    x, y = zip(*pairs, strict=True)
    ours, signed = srr_complexity.tau_b(x, y), srr_complexity.tau_b([-value for value in x], y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert ours == 0
    else:
        assert ours == pytest.approx(scipy.stats.kendalltau(x, y).statistic)
    assert signed == pytest.approx(-ours)
    assert srr_complexity.tau_b(np.exp(x) + 3, np.power(y, 3)) == pytest.approx(ours)


def test_standard_error_is_that_of_permutations():
    assert srr_complexity.standard_error(31) == pytest.approx(0.127, abs=5e-4)
    random = np.random.default_rng(0)
    draws = [srr_complexity.tau_b(range(7), random.permutation(7)) for _ in range(2000)]
    assert np.std(draws) == pytest.approx(srr_complexity.standard_error(7), rel=0.05)


def test_granulated_compares_along_one_axis_only():
    rows = [
        {"width": width, "rate": rate, "gap": 10 * width + rate, "m": width - 10 * rate, "n": rate}
        for width in (1, 2, 3)
        for rate in (1, 2)
    ]
    psi, draws = srr_complexity.granulated(pd.DataFrame(rows), ("width", "rate"), "m")
    assert psi == {"width": 1, "rate": -1}
    assert (draws == 0).all()
    assert srr_complexity.granulated(pd.DataFrame(rows), ("width", "rate"), "n")[0]["width"] == 0


@pytest.fixture(scope="module")
def published():
    return pd.read_csv(TABLES)


def test_published_psi_is_the_mean_of_four_but_for_misprints(published):
    means = published[["batch", "lr", "drop", "type"]].mean(axis=1)
    wrong = (means - published["psi"]).abs() > 6e-4
    assert (wrong == (published["misprint"] == "yes")).all()
    assert published[wrong]["measure"].tolist() == [
        "l2-norm-init", "pac-bayes-init", "fro/spec", "param-norm",
    ]  # fmt: skip
