"""Linear probes: planted labels are found, permuted ones are not, and nothing leaks."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression

import crate_interp as ci
from conftest import make, make_lm
from crate_interp.sweeps.linear_probes import _split

N = 120


@pytest.fixture(scope="module")
def images():
    return torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))


def levels(result, name):
    table = result.layers()
    return table[table["statistic"] == name].sort_values("layer")["mean"].to_numpy()


def test_a_planted_label_is_found_and_a_permuted_one_is_not(images):
    model = make()
    _, cache = model.run_with_cache(images)
    planted = (
        (cache["resid_post", 2][:, 0, 0] > 1.0 * cache["resid_post", 2][:, 0, 0].median())
        .long()
        .tolist()
    )
    result = ci.linear_probe(model, images, labels=planted, progress=False)
    assert list(result.layers()["n"].unique()) == [30] and len(levels(result, "accuracy")) == 4
    assert levels(result, "accuracy")[3] > 0.9  # Z^3 is what it was made of
    rows = result.layers().query("statistic == 'accuracy' and layer == 1")
    (low,), (high,) = result.mean_ends(rows)
    exact = binomtest(round(30 * rows["mean"].iloc[0]), 30).proportion_ci()
    assert (low, high) == pytest.approx((exact.low, exact.high))
    assert abs(levels(result, "permuted") - 0.5).max() < 0.3  # 30 coins: three standard deviations
    assert levels(result, "chance") == pytest.approx(0.5, abs=0.02)
    assert levels(result, "accuracy")[0] == pytest.approx(
        levels(result, "chance")[0]
    )  # CLS has seen nothing yet
    again = ci.linear_probe(model, images, labels=planted, progress=False)
    assert again.samples().equals(result.samples())


def test_by_hand(images):
    """Held-out samples, features and scaling: mean 0 and variance 1 of the training part."""
    model = make("crate-alpha")
    labels = ["a", "b", "c"] * (N // 3)
    result = ci.linear_probe(model, images, labels=labels, pool="mean", test=0.5, progress=False)
    table = result.samples()
    rows = table[table["layer"] == 1]
    held = rows["linear.accuracy"].notna().to_numpy()
    assert held.sum() == 60
    _, cache = model.run_with_cache(images)
    x, y = cache["resid_pre", 1].mean(dim=1).double().numpy(), np.array(labels)
    mean, std = x[~held].mean(axis=0), x[~held].std(axis=0)
    probe = LogisticRegression(max_iter=1000).fit((x[~held] - mean) / std, y[~held])
    right = probe.predict((x[held] - mean) / std) == y[held]
    assert (
        right == (rows["linear.accuracy"].to_numpy()[held] == 1)
    ).mean() > 0.95  # float32 features


def test_equal_samples_are_on_one_side(images):
    doubled = torch.cat([images[:40], images[:40]])
    labels = [0, 1] * 40
    table = ci.linear_probe(make(), doubled, labels=labels, progress=False).samples()
    held = table[table["layer"] == 0]["linear.accuracy"].notna().to_numpy()
    assert (held[:40] == held[40:]).all() and 0 < held.sum() < 80


@hypothesis.given(st.integers(0, 2**16))
def test_a_split_keeps_groups_together_or_is_refused(seed):
    generator = np.random.default_rng(seed)
    n = int(generator.integers(4, 29))
    classes, groups = generator.integers(0, 3, n), generator.integers(0, n, n)
    try:
        train = _split(classes, groups, float(generator.choice([0.5, 0.25])), 0)
    except ValueError as error:
        assert "the smallest class has" in str(error)
        return
    assert not train.all()
    assert not set(groups[train]) & set(groups[~train])


def test_refusals(images, monkeypatch):
    model = make()
    for match, given in (
        ("a linear probe needs labels", {}),
        ("there are 3 labels for 120 samples", dict(labels=[1, 2, 3])),
        ("all 120 samples have the label '1'", dict(labels=[1] * N)),
        ("the smallest class has 1 different samples", dict(labels=[0] * (N - 1) + [1])),
        ("test=0.9", dict(labels=[0, 1] * 60, test=0.9)),
        ("pool='max': give one of cls, mean, last", dict(labels=[0, 1] * 60, pool="max")),
    ):
        with pytest.raises(ValueError, match=match):
            ci.linear_probe(model, images, progress=False, **given)
    with monkeypatch.context() as patch:  # a class too small is refused before the model runs
        patch.setattr(type(model), "forward", None)
        with pytest.raises(ValueError, match="the smallest class has 3 different samples"):
            ci.linear_probe(model, images, labels=[0] * (N - 3) + [1] * 3, progress=False)
    with pytest.raises(ValueError, match="'cls' needs a model with a CLS token"):
        ci.linear_probe(make_lm(), torch.zeros(2, 13, dtype=torch.long), labels=[0, 1], pool="cls")
