"""ToST, CBT and attention-only models: hooks, weights, text, round trips and bad input."""

import copy
import pickle

import pytest
import torch

import crate_interp as ci
from conftest import make, refuses
from crate_interp.probes.segmentation_probe import head_maps

SQUARE = dict(image_size=(6, 15))  # 3 x 3 patches of (2, 5)
CONV = dict(image_size=(12, 12), patch_size=4, d_model=30, d_head=7)
MEMBERS = {
    "tost": dict(stem="linear"),
    "tost conv": CONV,
    "cbt": dict(stem="linear", **SQUARE),
    "cbt conv": CONV,
    "tost-ista": dict(stem="linear"),
    "aot": {},
    "crate conv": dict(stem="conv", **CONV),
}


def member(name, **over):
    model = make(name.split()[0], **{**MEMBERS.get(name, {}), **over})
    size = model.cfg.image_size
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
    return model, images


@pytest.fixture(params=MEMBERS)
def one(request):
    return member(request.param)


def test_hooked_contributions_add_up_to_the_stream(one):
    model, images = one
    model.set_use_attn_result(True)
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    for layer, block in enumerate(model.blocks):
        at = lambda name, layer=layer: cache[f"blocks.{layer}.{name}"]  # noqa: E731
        heads = at("attn.hook_result").sum(dim=2) + block.attn.b_O
        torch.testing.assert_close(heads, at("hook_attn_out"), atol=1e-5, rtol=1e-4)
        whole = at("hook_resid_pre") + at("hook_attn_out")
        if not model.cfg.attn_only:
            whole = whole + at("hook_mlp_out")
        torch.testing.assert_close(whole, at("hook_resid_post"), atol=1e-5, rtol=1e-4)
        if model.cfg.has_mlp:  # LayerScale is in the weights that TransformerLens reads
            out = at("mlp.hook_post") @ block.mlp.W_out + block.mlp.b_out
            torch.testing.assert_close(out, at("hook_mlp_out"), atol=1e-5, rtol=1e-4)


def test_what_the_heads_of_tssa_write_is_the_moments_formula():
    model, images = member("tost")
    _, cache = model.run_with_cache(images)
    at = lambda name: cache[f"blocks.2.attn.{name}"].detach()  # noqa: E731
    codes, pi = at("hook_u").transpose(1, 2), at("hook_pi")
    assert torch.allclose(pi.sum(dim=1), torch.ones(()))
    moment = (pi[..., None] * codes**2).sum(dim=2, keepdim=True) / pi.sum(-1)[..., None, None]
    torch.testing.assert_close(at("hook_moment"), moment, atol=1e-6, rtol=1e-4)
    heads = -codes * pi[..., None] / (1 + moment)
    torch.testing.assert_close(at("hook_z").transpose(1, 2), heads, atol=1e-6, rtol=1e-4)
    # a step against the gradient of the variational rate at eps = sqrt(d), by construction
    eps = (model.cfg.n_heads * model.cfg.d_head) ** 0.5
    slope = ci.measures.variational_rate_gradient(codes.double(), pi.double(), eps)
    step = -codes.shape[2] * slope
    torch.testing.assert_close(heads.double(), step, atol=1e-5, rtol=1e-4)


def test_the_square_of_representatives_is_shifted():
    """CLS is pooled and the last patch is not: the published weights were trained so."""
    model, _ = member("cbt")
    attn, u = model.blocks[0].attn, torch.randn(2, 10, 5, 7)
    pooled = attn.pooled(u)
    changed = u.clone()
    changed[:, -1] += 1
    assert torch.equal(attn.pooled(changed), pooled)
    changed = u.clone()
    changed[:, 0] += 1
    assert not torch.allclose(attn.pooled(changed), pooled)
    pooling = attn.reading(torch.zeros(1, 5, 64, 10))[0]  # the same in every head
    shares = torch.einsum("hrn,bnhp->brhp", pooling, u)
    torch.testing.assert_close(shares, pooled, atol=1e-6, rtol=1e-5)


def test_round_trips(one, tmp_path):
    model, images = one
    with torch.no_grad():
        out = model(images)
        model.save_pretrained(tmp_path / "saved")
        for again in (
            ci.load(tmp_path / "saved"),
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
        ):
            assert again.cfg == model.cfg
            assert torch.equal(again(images), out)


def test_batch_norm_stays_frozen_in_train_mode():
    model, images = member("crate conv")
    for norm in model.embed.norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        out = model(images)
        model.train()
        assert torch.equal(model(images), out)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_resized_copy_is_the_model_with_interpolated_positions(one):
    model, images = one
    height, width = model.cfg.image_size
    wide = torch.randn(2, 3, 2 * height, 2 * width, generator=torch.Generator().manual_seed(2))
    finer = model.resized((2 * height, 2 * width))
    loose = ci.CrateConfig.from_dict(model.cfg.to_dict() | {"interpolate_pos": True})
    with torch.no_grad(), torch.random.fork_rng():
        other = ci.HookedCrate(loose).eval()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(finer(wide), other(wide))
        assert torch.equal(model.resized(model.cfg.image_size)(images), model(images))
    assert finer.cfg.grid == (2 * model.cfg.grid[0], 2 * model.cfg.grid[1])
    refuses("multiples of", lambda: model.resized((height + 1, width)))


@pytest.mark.parametrize("family", ["tost", "cbt"])
def test_maps_of_heads_without_a_pattern(family):
    model, images = member(family)
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    (point,) = ci.probes.segmentation(kind=model.cfg.facts["attention"]).points
    acts = {point: cache.at(point, 1)}
    maps = head_maps(acts, model.cfg.n_special, 0, True, True)
    assert maps.shape == (2, 5, model.cfg.grid[0] * model.cfg.grid[1])
    if family == "tost":
        assert torch.equal(ci.maps.memberships(cache, 1).flatten(2), maps)
    else:
        whole = ci.maps.contracted(cache, 1)[:, :, 0]
        torch.testing.assert_close(maps, (whole / whole.sum(-1, keepdim=True))[..., 1:])
        refuses("query=99", lambda: head_maps(acts, 1, 99, True, True))
    with pytest.raises(ValueError, match="has none"):
        ci.probes.segmentation(kind=model.cfg.facts["attention"], scaled=False)
