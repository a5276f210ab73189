"""Unrolled layers: steps by hand, the baseline's length, own steps, and what is refused."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import make_lm
from crate_interp import measures
from crate_interp.surgeries import unrolling
from crate_interp.surgeries.unrolling import Unroll
from test_surgery import MODELS, QUIET, inputs_of, labels_of, loss_at

from crate_interp.surgeries.steps import any_step  # isort: skip


@pytest.fixture(scope="module", params=list(MODELS))
def network(request):
    return MODELS[request.param]().double()


def unrolled(network, **options):
    return ci.unroll(network, inputs_of(network), labels=labels_of(network), **options, **QUIET)


def by_hand(network, layer, count, eta, lambd):
    """The code of a layer after proximal steps, as a hook that replaces it, and what it cost."""
    block, kept = network.blocks[layer], {}
    lasso = block.mlp.lasso()
    d, step = lasso.d, lasso.eta if eta is None else eta
    threshold = lasso.lambd if lambd is None else lambd

    def read(y, hook):
        kept["y"] = y

    def put(code, hook):
        y = kept["y"]
        z = y if lasso.warm else torch.zeros_like(code)
        for _ in range(count):
            z = (z - step * ((z @ d.T - y) @ d) - step * threshold).clamp(min=0)
        rest = (y - z @ d.T).square().sum(-1) / 2 + (lasso.lambd * z.abs()).sum(-1)
        kept.update(objective=rest.mean(1), zeros=(z == 0).double().mean((1, 2)))
        return z

    names = [f"blocks.{layer}.{point}" for point in ("ln2.hook_normalized", "mlp.hook_post")]
    return [(names[0], read), (names[1], put)], kept


@pytest.mark.parametrize(("eta", "lambd"), [(None, None), (0.2, 0.3)])
def test_sparse_steps_by_hand(network, eta, lambd):
    result = unrolled(network, steps=(3, 1), eta=eta, lambd=lambd)
    hands = [by_hand(network, layer, 3, eta, lambd) for layer in range(3)]
    inputs = inputs_of(network)
    with torch.no_grad(), network.hooks([hook for hooks, _ in hands for hook in hooks]):
        wanted = loss_at(network, any_step("plus"), [], 0.0, inputs, labels_of(network))
        layers = result.table("layers").query("steps == 3").set_index(["layer", "sample"])
        for layer, (_, kept) in enumerate(hands):
            for name in ("objective", "zeros"):
                np.testing.assert_allclose(layers.loc[layer][name], kept[name], rtol=1e-9)
    answers = result.table("answers").query("kind == 'unrolled' and steps == 3")
    np.testing.assert_allclose(answers["loss"], wanted, rtol=1e-9)
    row = result.table().query("kind == 'unrolled' and steps == 3").iloc[0]
    assert row["loss"] == pytest.approx(wanted.mean().item())
    base = result.table("unchanged")
    assert row["loss_change"] == pytest.approx(wanted.mean().item() - base["loss"].mean())
    assert row["loss_low"] <= row["loss_change"] <= row["loss_high"] and row["n"] == 5
    assert np.isnan(row["eta"]) if eta is None else row["eta"] == eta


def test_steps_of_attention_by_hand(network):
    result = unrolled(network, of="attention", steps=(2,), eta=0.4, eps=0.7)
    kept = {}

    def put(out, hook):
        layer = hook.layer()
        block, z = network.blocks[layer], kept["z"]
        context = None
        if network.cfg.causal:
            from crate_interp.models.layers.context import contexts

            context = contexts(network.cfg, z.shape[1], None, z.device)[layer]
        end = z
        for _ in range(2):
            end = end + 0.4 * block.attn(block.ln1(end), context=context)
        rate = measures.subspace_coding_rate(end, block.attn.U, 0.7).sum(-1)
        kept[layer] = rate
        return end - z

    hooks = [(lambda name: name.endswith("hook_attn_out"), put)]
    hooks += [(lambda name: name.endswith("hook_resid_pre"), lambda z, hook: kept.update(z=z))]
    inputs = inputs_of(network)
    with torch.no_grad(), network.hooks(hooks):
        wanted = loss_at(network, any_step("plus"), [], 0.0, inputs, labels_of(network))
    answers = result.table("answers").query("kind == 'unrolled'")
    np.testing.assert_allclose(answers["loss"], wanted, rtol=1e-9)
    layers = result.table("layers").set_index(["layer", "sample"])
    for layer in range(3):
        np.testing.assert_allclose(layers.loc[layer]["objective"], kept[layer], rtol=1e-9)
    assert layers["zeros"].isna().all()


def first_change(network, count, kind):
    """How the code of the first layer changes."""
    question = Unroll([count], "sparse", None, None, 0.1, 0)
    hooks, _ = unrolling._hooks(network, question, question.cases()[0], kind)
    point = "blocks.0.mlp.hook_post"
    with torch.no_grad():
        _, clean = network.run_with_cache(inputs_of(network))
        with network.hooks(hooks):
            _, cache = network.run_with_cache(inputs_of(network))
    return cache[point] - clean[point]


def test_own_steps_change_nothing_and_random_ones_are_as_long(network):
    count, changes = network.blocks[0].mlp.lasso().count, []
    result = unrolled(network, steps=(count, count + 2))
    base, answers = result.table("unchanged"), result.table("answers")
    for kind in ("unrolled", "random"):
        own = answers.query(f"kind == '{kind}' and steps == {count}")
        np.testing.assert_allclose(own["loss"], base["loss"], rtol=1e-9)
    other = answers.query(f"steps == {count + 2}")
    losses = (other.query(f"kind == '{kind}'")["loss"] for kind in ("unrolled", "random"))
    assert not np.allclose(*losses)
    layers = result.table("layers").groupby("steps")["layer_change"].mean()
    assert layers[count] < 1e-12 < layers[count + 2]
    objective = result.table("layers").groupby("steps")["objective"].mean()
    if network.cfg.family != "nanochat-crate":  # its step of 1 is too long for a random dictionary
        assert objective[count + 2] < objective[count]
    for kind in ("unrolled", "random"):  # the first layer reads the same in both
        changes.append(first_change(network, count + 2, kind))
    torch.testing.assert_close(*(change.norm(dim=(1, 2)) for change in changes))
    assert not torch.allclose(*changes)
    again = unrolled(network, steps=(count, count + 2), seed=1)
    assert not again.table("answers")["loss"].equals(answers["loss"])


def test_what_is_refused():
    network = MODELS["crate"]().double()
    for options, words in (
        ({"steps": ()}, r"steps=\(\)"), ({"eta": []}, r"eta=\[\]"), ({"steps": (-1,)}, "steps=-1"),
        ({"eta": 0.0}, "eta=0.0"), ({"lambd": -1.0}, "lambd=-1.0"), ({"of": "both"}, "of='both'"),
        ({"of": "attention", "lambd": 0.1}, "no threshold"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            unrolled(network, **options)
    with pytest.raises(ValueError, match="not finite"):
        unrolled(network, steps=(400,), eta=1e9)
    gpt = make_lm("gpt-baseline").double()
    for of, words in (("sparse", "no dictionary"), ("attention", "no subspaces")):
        with pytest.raises(ValueError, match=words):
            unrolled(gpt, of=of)
