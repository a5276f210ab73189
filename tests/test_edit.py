"""crate_hooks.edit: against direct computation, composed, under autograd, and refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import HEADS, leftover_hooks
from crate_hooks import edit
from neighbours import EVERY, ready


def edited(model, inputs, point, function):
    with torch.no_grad(), model.hooks([(point, function)]):
        out = model(inputs)
    assert not leftover_hooks(model)
    return out


@pytest.mark.parametrize("name", EVERY)
def test_zeroing_a_head_is_zeroing_its_rows_of_the_output_map(name):
    model, inputs = ready(name)
    found = edited(model, inputs, "blocks.1.attn.hook_z", edit.zero(heads=[2, -1]))
    attn = model.blocks[1].attn
    maps = [
        module
        for key, module in attn.named_modules()
        if key in ("out_proj", "W_O_proj", "o_proj", "c_proj")
    ]
    width = model.cfg.d_head
    with torch.no_grad():
        for head in (2, HEADS - 1):
            maps[0].weight[:, head * width : (head + 1) * width] = 0
        wanted = model(inputs)
    torch.testing.assert_close(found, wanted)
    assert (
        found - edited(model, inputs, "blocks.1.attn.hook_z", lambda z, hook: z)
    ).abs().max() == 0


@pytest.mark.parametrize("name", EVERY)
def test_zeroing_an_atom_is_zeroing_what_it_writes(name):
    model, inputs = ready(name)
    found = edited(model, inputs, "blocks.2.mlp.hook_post", edit.zero(atoms=3))
    if name in ("crate", "crate-lm vanilla"):  # the code is the stream
        wanted = edited(model, inputs, "blocks.2.hook_resid_post", edit.zero(atoms=3))
    else:
        mlp = model.blocks[2].mlp
        cache = model.run_with_cache(inputs)[1]
        lost = cache["post", 2][..., 3:4] * mlp.W_out[3]
        wanted = edited(model, inputs, "blocks.2.hook_mlp_out", lambda out, hook: out - lost)
    torch.testing.assert_close(found, wanted)


def test_projections_of_bases_of_any_kind():
    generator = torch.Generator().manual_seed(0)
    x, u = (torch.randn(size, generator=generator) for size in ((2, 3, 11), (11, 5)))
    q = torch.linalg.qr(u)[0]
    for basis in (
        u,
        1e-3 * u,
        u @ torch.randn(5, 5, generator=generator),
        torch.cat([u, u[:, :2] + u[:, 2:4]], dim=1),
    ):
        out, onto = edit.project_out(basis), edit.project_onto(basis)
        torch.testing.assert_close(out(x, None), x - x @ q @ q.T, atol=2e-5, rtol=0)
        torch.testing.assert_close(onto(x, None) + out(x, None), x)
        torch.testing.assert_close(out(out(x, None), None), out(x, None), atol=2e-6, rtol=0)
    two = torch.stack([u[:, :2], u[:, 2:4]])
    torch.testing.assert_close(
        edit.project_onto(two)(x, None), edit.project_onto(u[:, :4])(x, None), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(edit.project_out(u, orthonormal=False)(x, None), x - x @ u @ u.T)
    assert edit.project_onto(q, positions=[1])(x, None)[:, [0, 2]].equal(x[:, [0, 2]])


def test_values():
    x = torch.arange(-30.0, 30.0).view(3, 4, 5)
    assert edit.scale(3.0, atoms=1)(x, None)[..., 1].equal(3 * x[..., 1])
    assert edit.clamp(low=0.0)(x, None).equal(x.relu())
    assert edit.clamp(2.0, 2.0, positions=1)(x, None)[:, 1].eq(2).all()
    assert edit.threshold(4.0)(x, None).equal((x - 4).relu())
    assert edit.zero(positions=range(2))(x, None)[:, :2].eq(0).all()
    both = edit.zero(atoms=torch.tensor([1]), positions=[0, 2])(x, None)
    assert both[:, [0, 2], 1].eq(0).all() and (both != x).sum() == (x[:, [0, 2], 1] != 0).sum()
    source = x + 100
    assert edit.patch(source, positions=3)(x, None)[:, 3].equal(source[:, 3])
    assert edit.patch(source[:1])(x, None).equal(source[:1].expand(3, 4, 5))
    assert edit.mean(source)(x, None).equal(source.mean(dim=0, keepdim=True).expand(3, 4, 5))
    drawn = edit.resample(source, seed=5)(x, None)
    order = [int((source == row).flatten(1).all(dim=1).nonzero()) for row in drawn]
    assert sorted(order) == [0, 1, 2] and all(place != mine for place, mine in enumerate(order))
    assert drawn.equal(edit.resample(source, seed=5)(x, None))
    many = edit.resample(torch.arange(7.0).view(7, 1, 1).expand(7, 4, 5))(x, None)
    assert set(many.flatten(1).std(dim=1).tolist()) == {0.0}
    direction = torch.tensor([3.0, 0, 0, 4.0, 0])
    assert (edit.steer(direction, 10.0)(x, None) - x).equal(
        torch.tensor([6.0, 0, 0, 8, 0]).expand(3, 4, 5)
    )
    assert (edit.steer(direction, 10.0, unit=False, positions=2)(x, None) - x)[:, 2].equal(
        (10 * direction).expand(3, 5)
    )
    step = edit.noise(0.5, seed=1)(x, None) - x
    assert step.equal(edit.noise(0.5, seed=1)(x, None) - x) and 0.35 < step.std() < 0.65
    assert edit.patch_positions([(0, 0), (1, 2)], grid=(2, 3)) == [1, 6]


def test_a_hook_that_comes_after_may_write_into_what_an_edit_made():
    model, inputs = ready("crate")
    _, cache = model.run_with_cache(inputs)
    point, before = "blocks.1.attn.hook_z", cache["z", 1].clone()

    def write(z, hook):
        z[:, :, 1] = 0
        return z

    for function in (
        edit.patch(cache["z", 1]),
        edit.mean(cache["z", 1]),
        edit.resample(cache["z", 1]),
    ):
        with torch.no_grad():
            model.run_with_hooks(inputs, fwd_hooks=[(point, function), (point, write)])
        assert cache["z", 1].equal(before)


@pytest.mark.parametrize("name", EVERY)
def test_edits_compose_leave_no_hook_and_carry_gradients(name):
    model, inputs = ready(name)
    _, cache = model.run_with_cache(inputs)
    z = "blocks.1.attn.hook_z"
    stream = "blocks.2.hook_resid_pre"
    edits = [
        (
            z,
            edit.compose(
                edit.zero(heads=0), edit.scale(2.0, heads=1), edit.mean(cache[z], heads=2)
            ),
        ),
        (stream, edit.steer(model.blocks[2].attn.W_Q[0][:, 0].detach(), 0.7, positions=[1])),
        (stream, edit.project_out(model.blocks[2].attn.W_Q[3])),
        (
            "blocks.2.mlp.hook_post",
            edit.compose(edit.threshold(0.01), edit.clamp(high=1.0), edit.noise(0.01)),
        ),
        ("blocks.0.attn.hook_pattern", edit.resample(cache["pattern", 0], heads=3)),
    ]
    kept = {key: value.clone() for key, value in cache.items()}
    with model.hooks(edits):
        out = model(inputs)
        out.square().mean().backward()
    assert not leftover_hooks(model) and out.isfinite().all()
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)
    assert all(value.equal(kept[key]) for key, value in cache.items())  # nothing was written into
    torch.testing.assert_close(model.run_with_hooks(inputs, fwd_hooks=edits), out)


def test_the_gradient_of_an_edit_is_that_of_its_formula():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    q = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64))[0]
    for function in (
        edit.zero(atoms=1), edit.scale(2.5, positions=0), edit.threshold(0.1),
        edit.clamp(-0.5, 0.5), edit.noise(0.1),
        edit.project_out(q), edit.project_onto(q), edit.steer(q[:, 0], 2.0),
        edit.patch(torch.ones(2, 3, 5), atoms=2),
    ):  # fmt: skip
        assert torch.autograd.gradcheck(lambda value, f=function: f(value, None), x, atol=1e-6)


@pytest.mark.parametrize("name", ["crate", "crate-alpha", "crate-lm"])
def test_another_lambd_or_eta_is_gone_with_its_context(name):
    model, inputs = ready(name)
    before = model(inputs)
    with edit.sparse_step(model.blocks[1], lambd=2.0, eta=0.05) as block, torch.no_grad():
        assert (block.mlp.lambd, block.mlp.eta) == (2.0, 0.05)
        post, found = model.run_with_cache(inputs)[1]["post", 1], model(inputs)
    model.blocks[1].mlp.lambd, model.blocks[1].mlp.eta = 2.0, 0.05
    assert found.equal(model(inputs)) and not torch.equal(found, before)
    model.blocks[1].mlp.lambd, model.blocks[1].mlp.eta = model.cfg.lambd, model.cfg.eta
    with pytest.raises(RuntimeError, match="inside"), edit.sparse_step(model.blocks[1], lambd=9.0):
        raise RuntimeError("inside")
    assert model(inputs).equal(before) and (post == 0).float().mean() > 0


@given(
    st.integers(0, 2**16),
    st.sets(st.integers(0, 4), min_size=1),
    st.sets(st.integers(0, 2), min_size=1),
)
def test_what_was_not_chosen_stays_bit_for_bit(seed, atoms, positions):
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    for position in positions:
        mask[position, sorted(atoms)] = True
    for function in (
        edit.zero,
        lambda **which: edit.scale(3.0, **which),
        lambda **which: edit.patch(-x, **which),
    ):
        found = function(atoms=atoms, positions=sorted(positions))(x, None)
        assert found[:, ~mask].equal(x[:, ~mask]) and (found[:, mask] != x[:, mask]).all()
        reversed_order = function(positions=sorted(positions))(x, None)
        assert reversed_order[:, mask].equal(found[:, mask])
