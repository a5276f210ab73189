"""Sparse rate reduction as a term of a loss: where its gradient goes, and what it leaves alone."""

import pytest
import torch
import torch.nn.functional as F

import crate_interp as ci
from conftest import make, refuses
from crate_interp.measures import l1_norm, layer_objectives


@pytest.fixture
def images():
    return torch.randn(7, 3, 6, 20, generator=torch.Generator().manual_seed(1))


LABELS = torch.arange(7)


def trained(images, weight, steps=3, **more):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ci.SRRRegularizer(model, weight, **more) as penalty:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), LABELS) + penalty()
            loss.backward()
            optimizer.step()
    return model


def gradients(model):
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("layers, chosen", [("last", [2]), ([0, 2], [0, 2])])
def test_it_is_the_objective_of_the_layers_with_their_inputs_detached(images, layers, chosen):
    model = make()
    z = [model.run_with_cache(images)[1]["resid_pre", layer].detach() for layer in range(3)]
    with ci.SRRRegularizer(model, 0.5, layers=layers, eps=0.3, lambd=0.2) as penalty:
        model(images)
        value = penalty()
    terms = {
        layer: layer_objectives(
            [model.blocks[layer]], [model.blocks[layer].attn.U], z[layer], 0.3, 0.2
        )
        .mean()
        .detach()
        for layer in chosen
    }
    torch.testing.assert_close(value, 0.5 * sum(terms.values()))
    assert penalty.last == pytest.approx({layer: float(term) for layer, term in terms.items()})


def test_the_gradient_stays_in_the_layer(images):
    model = make()
    with ci.SRRRegularizer(model, layers=[1]) as penalty:
        model(images)
        penalty().backward()
    reached = {name for name, grad in gradients(model).items() if grad is not None and grad.any()}
    assert reached and all(name.startswith("blocks.1.") for name in reached)


def test_a_count_has_no_gradient_and_its_surrogate_has(images):
    def grads(**more):
        model = make()
        with ci.SRRRegularizer(model, 1.0, **more) as penalty:
            model(images)
            value = penalty()
            value.backward()
        return value, model.blocks[2].mlp.D.grad

    (value, with_count), (less, without) = grads(lambd=0.1), grads(lambd=0.0)
    assert value > less and torch.equal(with_count, without)
    surrogate = grads(lambd=0.1, penalty="l1")[1]
    assert not torch.equal(surrogate, without)
    share = grads(lambd=0.1, penalty="l1", normalise=True)[1] - without
    torch.testing.assert_close(share * 13 * 31, surrogate - without, rtol=1e-3, atol=1e-3)


def test_the_gradient_is_that_of_finite_differences(images):
    model = make().double()
    x, block = images.double()[:2], model.blocks[1]
    z = model.run_with_cache(x)[1]["resid_pre", 1].detach()
    weight = next(value for name, value in block.named_parameters() if "ln" not in name)

    def term(values):
        with torch.no_grad():
            weight.copy_(values)
            (own,) = layer_objectives([block], [block.attn.U], z, 0.5, 0.1, l1_norm)
        return own.mean()

    with ci.SRRRegularizer(model, 1.0, layers=[1], eps=0.5, penalty="l1") as penalty:
        model(x)
        penalty().backward()
    start, along = weight.detach().clone(), torch.randn_like(weight)
    step = 1e-6
    slope = (term(start + step * along) - term(start - step * along)) / (2 * step)
    assert float(slope) == pytest.approx(float((weight.grad * along).sum()), rel=1e-4)


def test_weight_zero_trains_the_same_bits(images):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images), LABELS).backward()
        optimizer.step()
    for name, value in trained(images, 0.0).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    other = trained(images, 0.1).state_dict()
    assert not torch.equal(other["blocks.2.mlp.D"], model.state_dict()["blocks.2.mlp.D"])


def test_a_random_layer_leaves_torchs_generator_alone(images):
    model = make()

    def drawn(seed):
        with ci.SRRRegularizer(model, layers="random", seed=seed) as penalty:
            for _ in range(11):
                model(images)
                penalty()
                yield from penalty.last

    state = torch.random.get_rng_state()
    first = list(drawn(0))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first == list(drawn(0)) != list(drawn(1)) and set(first) == {0, 1, 2}


def test_hooks_come_off_and_a_caller_is_told(images):
    model = make()
    penalty = ci.SRRRegularizer(model)
    refuses("use `with", penalty, RuntimeError)
    with pytest.raises(KeyError), penalty:
        refuses("no forward with gradients", penalty, RuntimeError)
        with torch.no_grad():
            model(images)
        refuses("no forward with gradients", penalty, RuntimeError)
        with pytest.raises(RuntimeError, match="open already"), penalty:
            pass
        raise KeyError
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert "layers=[2], eps=0.1, lambd=0.1, penalty='l0'" in repr(penalty)
