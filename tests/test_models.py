"""The hooked models against plain forwards, their steps, and what hooking may change."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from conftest import BATCH, CLASSES, D_HEAD, D_MODEL, HEADS, LMS, leftover_hooks, make, make_lm
from crate_interp.models.layers.embed import interpolate_positions
from reference import forward, published_layout
from test_family_fixtures import MEMBERS, member


def plain(model, images):
    cfg = model.cfg
    return forward(
        published_layout(model),
        images,
        cfg.family,
        cfg.n_heads,
        cfg.patch_size,
        variant=cfg.variant,
        pool=cfg.pool,
        eta=cfg.eta,
        lambd=cfg.lambd,
    )


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("family", ["crate", "crate-alpha"])
def test_equals_a_plain_forward(family, pool, images):
    model = make(family, pool=pool, eta=0.2, lambd=0.3)
    assert_close(model(images), plain(model, images), atol=1e-5, rtol=1e-5)
    double = model.double()
    assert_close(double(images.double()), plain(double, images.double()), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("variant", ["c", "n", "t", "fix", "identity"])
def test_variants_equal_a_plain_forward(variant, images):
    model = make(variant=variant, d_model=HEADS * D_HEAD)
    assert_close(model(images), plain(model, images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["crate", "crate-alpha"])
def test_one_head_over_the_whole_stream_has_no_output_matrix(family, images):
    model = make(family, n_heads=1, d_head=D_MODEL)
    assert not any("out_proj" in name for name, _ in model.named_parameters())
    assert_close(model(images), plain(model, images), atol=1e-5, rtol=1e-5)
    _, cache = model.run_with_cache(images)
    assert_close(cache["attn_out", 1], cache["z", 1][:, :, 0], atol=0, rtol=0)
    assert "out_proj" in str(
        [n for n, _ in make(family, n_heads=1, d_head=D_HEAD).named_parameters()]
    )


@pytest.mark.parametrize("name", ["crate", "crate-alpha", *LMS, "crate-bert", *MEMBERS])
def test_hooks_that_only_look_change_no_bit(name):
    if name in (*LMS, "crate-bert"):
        model = make_lm(name)
        inputs = torch.randint(47, (2, 7), generator=torch.Generator().manual_seed(3))
    else:
        model, inputs = member(name)
        half = model(inputs, stop_at_layer=1)
        assert torch.equal(model(half, start_at_layer=1), model(inputs))
    out = model(inputs)
    cached, cache = model.run_with_cache(inputs)
    assert torch.equal(cached, out) and set(cache.cache_dict) == set(model.matching_points(None))
    gated = [f"hook_{name}" for name in ("result", "q_input", "k_input", "v_input", "attn_in")]
    assert not any(name.endswith((*gated, "hook_mlp_in")) for name in cache.cache_dict)
    for idle in (
        lambda tensor, hook: None,
        lambda tensor, hook: tensor,
        # in the same layout: BLAS may round otherwise in another one
        lambda tensor, hook: torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype
        ).copy_(tensor),
    ):
        every = [(name, idle) for name in model.matching_points(None)]
        assert torch.equal(model.run_with_hooks(inputs, fwd_hooks=every), out)
        every = [(lambda name: True, idle)]
        assert torch.equal(model.run_with_hooks(inputs, fwd_hooks=every), out)
    assert leftover_hooks(model) == []


def test_a_hook_that_is_never_called_is_said(model, images):
    def nothing(tensor, hook):
        return None

    for hang in (
        lambda name: model.run_with_hooks(images, fwd_hooks=[(name, nothing)]),
        lambda name: model.add_hook(name, nothing),
    ):
        with pytest.raises(ValueError, match="gated-off: it fires only after model.set_use_attn"):
            hang("blocks.0.attn.hook_result")
        with pytest.raises(KeyError, match="Did you mean blocks.0.hook_resid_mid"):
            hang("blocks.0.hook_resid_mdi")
    model.reset_hooks()
    model.set_use_split_qkv_input(True)
    with pytest.raises(ValueError, match="does not fire with split inputs"):
        model.run_with_hooks(images, fwd_hooks=[("blocks.1.attn.hook_u", nothing)])
    with pytest.raises(KeyError, match="does not fire with split inputs"):
        model.run_with_cache(images, names_filter="blocks.1.attn.hook_u")
    assert leftover_hooks(model) == []


def test_no_hook_is_left_after_an_exception(model, images):
    def broken(tensor, hook):
        raise RuntimeError("in a hook")

    for call in (
        lambda: model.run_with_hooks(images, fwd_hooks=[("hook_embed", broken)]),
        lambda: model.run_with_cache(images[:, :1]),
        lambda: model.run_with_cache(images, names_filter="blocks.0.hook_resid_prex"),
    ):
        with pytest.raises((RuntimeError, ValueError, KeyError)):
            call()
        assert leftover_hooks(model) == []
    with (
        pytest.raises(RuntimeError, match="in a hook"),
        model.hooks(fwd_hooks=[("hook_embed", broken)]),
    ):
        model.run_with_cache(images)
    assert leftover_hooks(model) == []


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_editing_one_role_in_place_changes_that_role_alone(model, images, role):
    def in_place(tensor, hook):
        tensor[:, :, 1] = 0
        return tensor

    names = {r: f"blocks.0.attn.hook_{r}" for r in "qkv"}
    _, before = model.run_with_cache(images)
    with model.hooks(fwd_hooks=[(names[role], in_place)]):
        _, after = model.run_with_cache(images)
    assert after[names[role]][:, :, 1].abs().max() == 0
    for other in set("qkv") - {role}:
        assert torch.equal(after[names[other]], before[names[other]])
    assert torch.equal(after["blocks.0.attn.hook_u"], before["blocks.0.attn.hook_u"])
    u = before["blocks.0.attn.hook_u"]
    parts = {r: after[names[r]] if r == role else u for r in "qkv"}
    scores = torch.einsum("bqhp,bkhp->bhqk", parts["q"], parts["k"]) * D_HEAD**-0.5
    heads = torch.einsum("bhqk,bkhp->bqhp", scores.softmax(-1), parts["v"])
    assert_close(after["blocks.0.attn.hook_z"], heads, atol=1e-5, rtol=1e-5)


def test_an_edit_of_the_position_embedding_stays_in_its_image(model, images):
    def one_image(tensor, hook):
        tensor[0] = 0
        return tensor

    weights = model.pos_embed.clone()
    out = model.run_with_hooks(images, fwd_hooks=[("hook_pos_embed", one_image)])
    assert torch.equal(out[1], model(images)[1]) and not torch.equal(out[0], model(images)[0])
    assert torch.equal(model.pos_embed, weights)


@pytest.mark.parametrize("family", ["crate", "crate-alpha"])
def test_other_image_sizes(family, images):
    model = make(family, interpolate_pos=True)
    same = make(family)
    assert torch.equal(model(images), same(images))  # its own grid is untouched
    larger = torch.randn(BATCH, 3, 10, 35)
    out, cache = model.run_with_cache(larger)
    assert out.shape == (BATCH, CLASSES) and cache["resid_pre", 0].shape == (
        BATCH,
        1 + 5 * 7,
        D_MODEL,
    )
    with pytest.raises(ValueError, match=r"both sides must be multiples of the patch \(2, 5\)"):
        model(torch.randn(BATCH, 3, 7, 20))


def test_interpolated_positions_follow_dino_not_a_plain_resize():
    table = torch.randn(1, 1 + 3 * 4, D_MODEL, dtype=torch.float64)
    got = interpolate_positions(table, (3, 4), (5, 7))
    assert torch.equal(got[:, 0], table[:, 0]) and got.shape == (1, 36, D_MODEL)
    image = table[:, 1:].reshape(1, 3, 4, D_MODEL).permute(0, 3, 1, 2)
    resized = (
        F.interpolate(image, size=(5, 7), mode="bicubic")
        .permute(0, 2, 3, 1)
        .reshape(1, 35, D_MODEL)
    )
    assert not torch.allclose(got[:, 1:], resized)
    assert_close(got[:, 1:], _dino(image, (5, 7)), atol=1e-12, rtol=1e-12)


def _dino(image, size):
    """Cubic convolution (a = -0.75) at (i + 0.5) / scale - 0.5, scale = (size + 0.1) / grid.

    Edges are repeated.
    """

    def weights(length, out):
        matrix = torch.zeros(out, length, dtype=torch.float64)
        for i in range(out):
            x = (i + 0.5) * length / (out + 0.1) - 0.5
            base = int(torch.floor(torch.tensor(x)))
            for j in range(base - 1, base + 3):
                t = abs(x - j)
                a = -0.75
                w = (
                    (a + 2) * t**3 - (a + 3) * t**2 + 1
                    if t <= 1
                    else a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
                )
                matrix[i, min(max(j, 0), length - 1)] += w
        return matrix

    rows, columns = weights(image.shape[2], size[0]), weights(image.shape[3], size[1])
    return torch.einsum("ih,bdhw,jw->bijd", rows, image, columns).flatten(1, 2)


STEPS = {
    "ista": lambda: make("crate"),
    "odl": lambda: make("crate-alpha"),
    "tied-odl": lambda: make_lm("crate-lm"),
    "threshold": lambda: make_lm("nanochat-crate"),
    "mlp-relu": lambda: make_lm("gpt-baseline"),
}


@pytest.fixture(params=STEPS)
def step(request):
    model = STEPS[request.param]().double()
    assert model.cfg.sparse_step == request.param
    return model.blocks[1].mlp


@pytest.fixture
def y(rng):
    return torch.randn(BATCH, 7, D_MODEL, generator=rng, dtype=torch.float64)


def captured(step, y, point):
    kept = []
    with torch.no_grad():
        step.get_submodule(point).add_hook(lambda tensor, hook: kept.append(tensor))
        step(y)
        step.get_submodule(point).remove_hooks()
    return kept[0]


def test_the_lasso_is_what_the_layer_solves(step, y):
    if hasattr(step, "threshold"):
        assert step.lasso() == "some learned thresholds are negative, but no penalty is negative"
        step.threshold.data.abs_()
    lasso = step.lasso()
    if isinstance(lasso, str):
        assert lasso == "the layer has an MLP, no dictionary"
        return
    assert_close(lasso.run(y, lasso.lambd)[0], captured(step, y, "hook_post"))
    assert not lasso.d.requires_grad and (lasso.start(y) >= 0).all()


def test_the_linear_form_is_the_forward_with_every_atom_on(step, y, monkeypatch):
    monkeypatch.setattr(F, "relu", lambda x: x)  # the forward is affine then
    with torch.no_grad():
        assert_close(step.linear(y), step(y) - step(torch.zeros_like(y)))


def test_an_atom_writes_its_direction(step, y):
    code = captured(step, y, "hook_post")
    constant = getattr(step, "b_out", 0)
    with torch.no_grad():
        assert_close(code @ step.written() + constant, step(y))
