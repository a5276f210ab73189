"""Surgery and replaced steps: slopes against differences, tables and steps by hand."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import stats

import crate_interp as ci
from conftest import BATCH, make, make_lm
from crate_interp.stats.intervals import mean_interval, paired_shares
from crate_interp.surgeries.steps import any_step, replacement_hooks
from selection import few

N = 5
MODELS = {
    "crate": lambda: make("crate"),
    "crate-alpha": lambda: make("crate-alpha"),
    "crate-lm": make_lm,
    "windowed": lambda: _positive(make_lm("nanochat-crate", window_pattern="LS")),
}


def _positive(lm):
    for block in lm.blocks:
        block.mlp.threshold.data.abs_()
    return lm


def inputs_of(model, n=N):
    generator = torch.Generator().manual_seed(1)
    if model.unit == "windows":
        return torch.randint(0, 47, (n, 13), generator=generator)
    return torch.randn(n, 3, 6, 20, generator=generator, dtype=torch.float64)


def labels_of(model, n=N):
    return None if model.unit == "windows" else [(3 * place) % 11 for place in range(n)]


QUIET = dict(batch_size=3, progress=False)
LAYER, EPS = 1, 0.7
STEPS = ["gradient", "neumann", "plus", "minus", 3]


@pytest.fixture(scope="module", params=few(MODELS, 2))
def model(request):
    return MODELS[request.param]().double()


def loss_at(model, step, layers, mix, inputs, labels):
    with torch.no_grad():
        logits = model.run_with_hooks(
            inputs, fwd_hooks=replacement_hooks(model, [step], layers, mix, EPS)
        )
    if labels is None:
        log = logits[:, :-1].log_softmax(-1)
        return -log.gather(-1, inputs[:, 1:, None])[..., 0].mean(dim=1)
    return -logits.log_softmax(-1)[range(len(inputs)), labels]


@pytest.fixture(scope="module")
def measured(model):
    inputs, labels = inputs_of(model), labels_of(model)
    options = dict(mixes=(1.0,), directions=3, eps=EPS, labels=labels, replacements=STEPS)
    return model, inputs, labels, ci.surgery(model, inputs, **options, **QUIET)


def test_slopes_are_those_of_finite_differences(measured):
    model, inputs, labels, result = measured
    table, h = result.table("samples"), 1e-6
    for what in STEPS:
        step = any_step(what)
        for layer, layers in ((LAYER, [LAYER]), (-1, range(3))):
            losses = [loss_at(model, step, layers, t, inputs, labels) for t in (-h, h)]
            wanted = ((losses[1] - losses[0]) / (2 * h)).numpy()
            mine = table[(table["replacement"] == step.name) & (table["layer"] == layer)]
            assert_allclose(mine["slope"], wanted, rtol=1e-6, atol=1e-6 * abs(wanted).max())


def test_the_slope_towards_the_solution(images):
    model, labels, h = make().double(), [3, 7], 1e-6
    options = dict(labels=labels, replacements=["solution"], mixes=(), **QUIET)
    table = ci.surgery(model, images.double(), **options).table("samples")
    step = any_step("solution")
    low, high = (loss_at(model, step, [1], t, images.double(), labels) for t in (-h, h))
    assert_allclose(table.query("layer == 1")["slope"], (high - low) / (2 * h), 1e-6)


def test_answers_at_each_mix(measured):
    model, inputs, labels, result = measured
    answers, own = result.table("answers"), result.table("unchanged")
    base = loss_at(model, any_step("plus"), [], 0.0, inputs, labels).numpy()
    assert_allclose(own["loss"], base, rtol=1e-12)
    for what, layer, layers, mix in (("gradient", 2, [2], 1.0), (3, -1, range(3), 1.0)):
        name = any_step(what).name
        rows = answers[
            (answers["replacement"] == name) & (answers["layer"] == layer) & (answers["mix"] == mix)
        ]
        wanted = loss_at(model, any_step(what), layers, mix, inputs, labels).numpy()
        assert_allclose(rows["loss"], wanted, rtol=1e-9)
        table = result.table("mixes").set_index(["replacement", "layer", "mix"])
        row = table.loc[name, layer, mix]
        assert row["loss"] == pytest.approx(wanted.mean(), rel=1e-9)
        assert row["loss_change"] == pytest.approx((wanted - base).mean(), rel=1e-9)
        assert row["loss_low"] <= row["loss_change"] <= row["loss_high"]
        assert row["accuracy"] == pytest.approx(rows["right"].mean())
        flips = (rows["right"].to_numpy() - own["right"].to_numpy())[:, None]
        images = result.meta["unit"] == "images"  # which have one answer, and a text has many
        (low,), (high,) = paired_shares(flips).ends if images else mean_interval(flips)
        assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx(
            (low, high), nan_ok=True
        )
        assert row["change"] == pytest.approx(rows["change"].mean()) and row["change"] > 0


def test_the_table_by_hand(measured):
    result = measured[3]
    row = result.table().set_index(["replacement", "layer"]).loc["minus", 2]
    values = result.table("samples").query("replacement == 'minus' and layer == 2")["slope"]
    assert row["slope"] == pytest.approx(values.mean()) and row["n"] == N
    low, high = mean_interval(values.to_numpy()[:, None])
    assert (row["slope_low"], row["slope_high"]) == pytest.approx((low[0], high[0]))
    assert row["slope_low"] <= row["slope"] <= row["slope_high"]
    random = result.table("random").query("replacement == 'minus' and layer == 2")
    means = (random["slope"] / random["n"]).to_numpy()
    low, high = stats.t.interval(0.95, 2, means.mean(), means.std(ddof=1) * np.sqrt(4 / 3))
    assert (row["random_low"], row["random_high"]) == pytest.approx((low, high))
    assert len(means) == 3 and row["falls"] == (row["slope_high"] < 0)
    assert row["better"] == (row["falls"] and row["slope"] < low)
    order = result.table()[["replacement", "layer"]].iloc[:8].to_numpy().tolist()
    assert order == [[name, k] for name in ("gradient", "neumann") for k in (0, 1, 2, -1)]
    together = result.table("samples").query("replacement == 'minus' and layer == -1")["slope"]
    each = result.table("samples").query("replacement == 'minus' and layer >= 0")
    assert_allclose(together, each.groupby("sample")["slope"].sum(), rtol=1e-12)


@pytest.fixture(scope="module", params=list(MODELS))
def network(request):
    return MODELS[request.param]().double()


def sees(network, token):
    """The tokens that a token sees in layer 1; the S of the pattern LS is a window of 6."""
    if network.unit == "images":
        return slice(None)
    return slice(max(0, token - 6), token + 1) if network.cfg.window else slice(0, token + 1)


def attention_by_hand(network, name, acts):
    """One sample: z [pos, d_model], codes [pos, head, d_head], own [pos, d_model]."""
    z, heads, own = acts
    u = network.blocks[LAYER].attn.U.detach().numpy()
    if name in ("plus", "minus"):
        update = sum(heads[:, k] @ u[k].T for k in range(len(u))) * (1 if name == "plus" else -1)
    else:
        update = np.zeros_like(z)
        for token, row in enumerate(z):
            seen = z[sees(network, token)]
            a = u.shape[2] / (len(seen) * EPS**2)
            for uk in u:
                gram, code = a * (seen @ uk).T @ (seen @ uk), a * row @ uk
                exact = code @ np.linalg.inv(np.eye(len(gram)) + gram)
                update[token] -= uk @ (exact if name == "gradient" else code - code @ gram)
    return update * np.linalg.norm(own) / np.linalg.norm(update)


@pytest.mark.parametrize("name", ["gradient", "neumann", "plus", "minus"])
def test_attention_steps_by_hand(network, name):
    inputs = inputs_of(network, BATCH)
    with torch.no_grad():
        _, own = network.run_with_cache(inputs)
        with ci.surgeries.replaced(network, attention=name, layers=[LAYER], mix=0.3, eps=EPS):
            _, cache = network.run_with_cache(inputs)
    points = [f"blocks.{LAYER}.{p}" for p in ("hook_resid_pre", "attn.hook_z", "hook_attn_out")]
    for index in range(BATCH):
        acts = [own[point][index].numpy() for point in points]
        wanted = 0.7 * acts[2] + 0.3 * attention_by_hand(network, name, acts)
        got = cache["attn_out", LAYER][index].numpy()
        assert abs(got - wanted).max() < 1e-9 * abs(wanted).max()
    assert torch.equal(cache["attn_out", 0], own["attn_out", 0])
    assert not torch.allclose(cache["attn_out", 2], own["attn_out", 2])


@pytest.mark.parametrize("what", [1, 3, "solution"])
def test_sparse_steps_by_hand(network, what):
    inputs = inputs_of(network, BATCH)
    with torch.no_grad():
        _, own = network.run_with_cache(inputs)
        with ci.surgeries.replaced(network, sparse=what, layers=[LAYER], mix=0.25):
            _, cache = network.run_with_cache(inputs)
    cfg, step = network.cfg, network.blocks[LAYER].mlp
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
    network = make(family, variant=variant)
    count = network.blocks[0].mlp.lasso().count
    with torch.no_grad():
        logits = network(images)
        with ci.surgeries.replaced(network, attention=own, sparse=count):
            torch.testing.assert_close(network(images), logits, rtol=1e-4, atol=1e-5)
    table = ci.surgery(
        network, images, labels=[3, 7], replacements=[own], mixes=(), progress=False
    ).table()
    assert abs(table["slope"]).max() < 1e-5 and abs(table["random"]).max() < 1e-5


def test_nothing_changes_at_mix_0_and_nothing_stays_behind(images):
    network = make("crate-alpha")
    with torch.no_grad():
        logits = network(images)
        with ci.surgeries.replaced(network, attention="neumann", sparse=3, mix=0.0) as same:
            assert same is network and torch.equal(network(images), logits)
        with pytest.raises(KeyError), ci.surgeries.replaced(network, attention="plus"):
            raise KeyError
        assert torch.equal(network(images), logits)
    assert not any(point.fwd_hooks for point in network.hook_dict.values())
