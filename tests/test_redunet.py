"""ReduNet: its operators in a slow form, its step as a gradient, invariances, audit and folders."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import fails, leftover_hooks, refuses
from crate_interp.measures import coding_rate, mcr2_coding_rate

CLASSES, D, EACH, LAYERS, EPS = 3, 11, (13, 17, 19), 7, 0.5**0.5


def mixture(seed=0, width=2, noise=0.3):
    """Features `[49, 11]` near subspaces of a width, one a class, in a random order; labels."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for count in EACH:
        basis = torch.linalg.qr(torch.randn(D, width, generator=rng, dtype=torch.float64))[0]
        code = torch.randn(count, width, generator=rng, dtype=torch.float64)
        parts.append(code @ basis.T + noise * torch.randn(count, D, generator=rng).double())
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(EACH))
    order = torch.randperm(len(labels), generator=rng)
    return torch.cat(parts)[order], labels[order]


def reduction(z, labels):
    return coding_rate(z, EPS) - mcr2_coding_rate(z, labels, EPS)


@pytest.fixture(scope="module")
def built():
    z, labels = mixture()
    return ci.redunet(z, labels, layers=LAYERS), z, labels


def test_operators_and_layers_in_a_slow_form(built):
    net, features, labels = built
    z = features.numpy() / np.sqrt((features.numpy() ** 2).sum(axis=1, keepdims=True))
    count = len(z)
    _, cache = net.run_with_cache(features, labels)
    for layer, block in enumerate(net.blocks):
        a = D / (count * EPS**2)
        expand = a * np.linalg.inv(np.eye(D) + a * sum(np.outer(row, row) for row in z))
        np.testing.assert_allclose(block.E, expand, atol=1e-12)
        moved = []
        for row, label in zip(z, labels.tolist(), strict=True):
            own = [other for other, at in zip(z, labels.tolist(), strict=True) if at == label]
            of_class = D / (len(own) * EPS**2)
            gram = sum(np.outer(other, other) for other in own)
            compress = of_class * np.linalg.inv(np.eye(D) + of_class * gram)
            np.testing.assert_allclose(block.C[label], compress, atol=1e-12)
            update = expand @ row - len(own) / count * compress @ row
            moved.append((row + 0.5 * update) / np.linalg.norm(row + 0.5 * update))
        z = np.array(moved)
        np.testing.assert_allclose(cache[f"blocks.{layer}.hook_resid_post"], z, atol=1e-12)


def test_a_step_is_the_gradient_and_every_layer_raises_the_rate_reduction(built):
    net, features, labels = built
    _, cache = net.run_with_cache(features, labels)
    rates = []
    for layer in range(LAYERS):
        z = cache[f"blocks.{layer}.hook_resid_pre"].clone().requires_grad_()
        value = reduction(z, labels)
        (slope,) = torch.autograd.grad(value, z)
        torch.testing.assert_close(cache[f"blocks.{layer}.hook_step"], slope)
        rates.append(value.item())
    assert rates == sorted(set(rates))


@given(st.integers(0, 99))
def test_features_may_be_turned_and_samples_reordered(seed):
    rng = torch.Generator().manual_seed(seed)
    z, labels = mixture(seed)
    turn = torch.linalg.qr(torch.randn(D, D, generator=rng, dtype=torch.float64))[0]
    order = torch.randperm(len(z), generator=rng)
    net, turned = (ci.redunet(x, labels, layers=2) for x in (z, 3 * z @ turn))
    moved = ci.redunet(z[order], labels[order], layers=2)
    torch.testing.assert_close(turned(z @ turn), net(z) @ turn, atol=1e-9, rtol=0)
    for one, other in zip(net.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_points_memberships_and_hooks(built):
    net, features, labels = built
    out, cache = net.run_with_cache(features)
    shapes = {"pi": (49, CLASSES), "compress": (49, CLASSES, D), "expand": (49, D), "step": (49, D)}
    for name, shape in shapes.items():
        assert cache[f"blocks.3.hook_{name}"].shape == shape
    block, pi = net.blocks[3], cache["blocks.3.hook_pi"]
    z = cache["blocks.3.hook_resid_pre"]
    lengths = torch.stack([(z @ c).norm(dim=1) for c in block.C], dim=1)
    torch.testing.assert_close(pi, (-500 * lengths).softmax(dim=1))
    assert bool((pi.argmax(dim=1) == labels).double().mean() > 0.9)
    fixed = torch.nn.functional.one_hot(labels).double()
    points = [(f"blocks.{layer}.hook_pi", lambda x, hook: fixed) for layer in range(LAYERS)]
    told = net.run_with_hooks(features, fwd_hooks=points)
    torch.testing.assert_close(told, net(features, labels))
    assert out.norm(dim=1).allclose(torch.ones(49, dtype=torch.float64))
    assert not leftover_hooks(net)


def test_the_audit_says_yes_to_what_was_built_and_no_to_other_weights(built):
    net, features, labels = built
    table = net.audit(features, labels, seed=3)
    assert table["raises"].tolist() == table["along"].tolist() == ["yes"] * LAYERS
    assert bool((table["rate_after"] > table["shuffled"]).all()) and table["cosine"].min() > 0.999
    first = torch.nn.functional.normalize(features)
    assert table["rate_before"][0] == pytest.approx(float(reduction(first, labels)))
    assert table["rate_before"][1:].tolist() == pytest.approx(table["rate_after"][:-1].tolist())
    rng, other = torch.Generator().manual_seed(0), ci.redunet(features, labels, layers=LAYERS)
    for weight in other.parameters():
        order = torch.randperm(weight.numel(), generator=rng)
        weight.data = weight.flatten()[order].view_as(weight)
    shuffled = other.audit(features, labels)
    assert set(shuffled["along"]) == {"no"} and "no" in set(shuffled["raises"])


def test_it_is_saved_and_loaded(built, tmp_path, unchecked):
    net, features, labels = built
    for dtype in (torch.float64, torch.float32):
        own = ci.redunet(features.to(dtype), labels, layers=2)
        assert own(features).dtype == dtype
        again = ci.load(own.save_pretrained(tmp_path / str(dtype)), dtype=dtype)
        assert again.cfg == own.cfg and torch.equal(again(features), own(features))
    (tmp_path / "torch.float32" / "model.safetensors").unlink()
    fails("model.safetensors", tmp_path / "torch.float32")
    with pytest.raises(ValueError, match="cannot measure ReduNet"):
        ci.sweep(net, features)


def test_what_it_refuses(built, unchecked):
    net, z, labels = built
    bad = z.clone()
    bad[3] = 0
    for features in (labels, z[0]):
        refuses("features=.*floats", lambda features=features: ci.redunet(features, labels))
    for features in (bad, z / 0):
        refuses("NaN, Inf or a row of zeros", lambda given=features: ci.redunet(given, labels))
    for other in (labels[1:], labels.double(), labels - 1):
        refuses("49 whole numbers", lambda other=other: ci.redunet(z, other))
    for other in (2 * labels, 0 * labels):
        refuses("classes have", lambda other=other: ci.redunet(z, other))
    refuses("layers=0", lambda: ci.redunet(z, labels, layers=0))
    for name in ("eta", "eps", "lambd"):
        refuses(f"{name}=-1", lambda name=name: ci.redunet(z, labels, **{name: -1}))
    refuses("lowers the rate reduction .* eta below 50", lambda: ci.redunet(z, labels, eta=50))
    refuses("floats .sample, 11", lambda: net(z[:, 1:]))
    refuses("from 0 to 2", lambda: net(z, labels + 1))
    refuses("from 0 to 2", lambda: net.audit(z, labels + 1))
    refuses("each of 3 classes", lambda: net.audit(z, labels * 0))


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_features_of_any_length_are_scaled_to_one(scale):
    features = torch.randn(21, 7, generator=torch.Generator().manual_seed(3))
    net = ci.redunet(features, torch.arange(21) % 3, layers=3)
    torch.testing.assert_close(net(scale * features), net(features))
