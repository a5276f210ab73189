"""Steps in place of a layer's own: each by a slow second form, and what is refused."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import BATCH, make
from operated import MODELS, inputs_of

LAYER, EPS = 1, 0.7


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]().double()


def sees(model, token):
    """The tokens that a token sees in layer 1; the S of the pattern LS is a window of 6."""
    if model.unit == "images":
        return slice(None)
    return slice(max(0, token - 6), token + 1) if model.cfg.window else slice(0, token + 1)


def attention_by_hand(model, name, acts):
    """One sample: z [pos, d_model], codes [pos, head, d_head], own [pos, d_model]."""
    z, heads, own = acts
    u = model.blocks[LAYER].attn.U.detach().numpy()
    if name in ("plus", "minus"):
        update = sum(heads[:, k] @ u[k].T for k in range(len(u))) * (1 if name == "plus" else -1)
    else:
        update = np.zeros_like(z)
        for token, row in enumerate(z):
            seen = z[sees(model, token)]
            a = u.shape[2] / (len(seen) * EPS**2)
            for uk in u:
                gram, code = a * (seen @ uk).T @ (seen @ uk), a * row @ uk
                exact = code @ np.linalg.inv(np.eye(len(gram)) + gram)
                update[token] -= uk @ (exact if name == "gradient" else code - code @ gram)
    return update * np.linalg.norm(own) / np.linalg.norm(update)


@pytest.mark.parametrize("name", ["gradient", "neumann", "plus", "minus"])
def test_attention_steps_by_hand(model, name):
    inputs = inputs_of(model, BATCH)
    with torch.no_grad():
        _, own = model.run_with_cache(inputs)
        with ci.surgeries.replaced(model, attention=name, layers=[LAYER], mix=0.3, eps=EPS):
            _, cache = model.run_with_cache(inputs)
    points = [f"blocks.{LAYER}.{p}" for p in ("hook_resid_pre", "attn.hook_z", "hook_attn_out")]
    for index in range(BATCH):
        acts = [own[point][index].numpy() for point in points]
        wanted = 0.7 * acts[2] + 0.3 * attention_by_hand(model, name, acts)
        got = cache["attn_out", LAYER][index].numpy()
        assert abs(got - wanted).max() < 1e-9 * abs(wanted).max()
    assert torch.equal(cache["attn_out", 0], own["attn_out", 0])
    assert not torch.allclose(cache["attn_out", 2], own["attn_out", 2])


@pytest.mark.parametrize("what", [1, 3, "solution"])
def test_sparse_steps_by_hand(model, what):
    inputs = inputs_of(model, BATCH)
    with torch.no_grad():
        _, own = model.run_with_cache(inputs)
        with ci.surgeries.replaced(model, sparse=what, layers=[LAYER], mix=0.25):
            _, cache = model.run_with_cache(inputs)
    cfg, step = model.cfg, model.blocks[LAYER].mlp
    d = step.D.detach().numpy()
    learned = hasattr(step, "threshold")  # a step of size 1, a penalty for each atom
    eta, lambd = (1.0, step.threshold.detach().numpy()) if learned else (cfg.eta, cfg.lambd)
    for index in range(BATCH):
        y = own[f"blocks.{LAYER}.ln2.hook_normalized"][index].numpy()
        if what == "solution":
            wanted = _coordinates(d, y, lambd)
        else:
            wanted = y if cfg.family == "crate" else np.zeros((len(y), d.shape[1]))
            for _ in range(what):
                wanted = np.maximum(wanted - eta * ((wanted @ d.T - y) @ d) - eta * lambd, 0)
        wanted = 0.75 * own["post", LAYER][index].numpy() + 0.25 * wanted
        got = cache["post", LAYER][index].numpy()
        if what != "solution":
            assert abs(got - wanted).max() < 1e-9 * abs(wanted).max()
        elif d.shape[0] == d.shape[1]:  # of a wide dictionary the solution is not unique
            assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(wanted)
        else:
            z = (got - 0.75 * own["post", LAYER][index].numpy()) / 0.25
            best = (wanted - 0.75 * own["post", LAYER][index].numpy()) / 0.25
            assert _objective(z, y, d, lambd) < _objective(best, y, d, lambd) * (1 + 1e-3)
            assert z.min() > -1e-12


def _coordinates(d, y, lambd, rounds=100):
    """Lassos solved one coordinate at a time."""
    z, rest, squares = np.zeros((len(y), d.shape[1])), y.copy(), (d**2).sum(axis=0)
    lambd = np.broadcast_to(lambd, d.shape[1])
    for _ in range(rounds):
        for j in range(d.shape[1]):
            new = np.maximum(z[:, j] + (rest @ d[:, j] - lambd[j]) / squares[j], 0)
            rest += np.outer(z[:, j] - new, d[:, j])
            z[:, j] = new
    return z


def _objective(z, y, d, lambd):
    return 0.5 * ((y - z @ d.T) ** 2).sum() + (lambd * abs(z)).sum()


def test_no_token_learns_what_follows():
    lm = MODELS["windowed"]().double()
    inputs = inputs_of(lm, BATCH)
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % 47
    for name in ("gradient", "neumann", "plus"):
        with torch.no_grad(), ci.surgeries.replaced(lm, attention=name, layers=[0]):
            here, there = (lm.run_with_cache(x)[1]["attn_out", 0] for x in (inputs, other))
        # a sample's length is that of the whole window: the direction of a token cannot change
        here, there = (x[:, :-1] / x[:, :1].norm(dim=-1, keepdim=True) for x in (here, there))
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family, variant, own", [("crate", "c", "plus"), ("crate", "n", "minus")])
def test_a_layer_that_takes_the_step_already_does_not_change(family, variant, own, images):
    model = make(family, variant=variant)
    count = model.blocks[0].mlp.lasso().count
    with torch.no_grad():
        logits = model(images)
        with ci.surgeries.replaced(model, attention=own, sparse=count):
            torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-5)
    table = ci.surgery(
        model, images, labels=[3, 7], replacements=[own], mixes=(), progress=False
    ).table()
    assert abs(table["slope"]).max() < 1e-5 and abs(table["random"]).max() < 1e-5


def test_nothing_changes_at_mix_0_and_nothing_stays_behind(images):
    model = make("crate-alpha")
    with torch.no_grad():
        logits = model(images)
        with ci.surgeries.replaced(model, attention="neumann", sparse=3, mix=0.0) as same:
            assert same is model and torch.equal(model(images), logits)
        with pytest.raises(KeyError), ci.surgeries.replaced(model, attention="plus"):
            raise KeyError
        assert torch.equal(model(images), logits)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
