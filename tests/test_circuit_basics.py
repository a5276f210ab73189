"""What circuits read: weights by role, signs, frozen norms, hooks of towers, slices of caches."""

import pytest
import torch

import crate_interp as ci
from conftest import FIXTURES, HEADS, LAYERS, make, make_lm, refuses

TOKENS = torch.randint(47, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def clip():
    return ci.load(
        FIXTURES / "crate_alpha_clipa" / "crate_alpha_CLIPA_L14.pth", n_heads=4, text_n_heads=3
    )


@pytest.fixture
def pictures():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", ["crate-lm", "gpt-baseline"])
def test_weights_by_role(name):
    lm = make_lm(name)
    with torch.no_grad():
        _, cache = lm.run_with_cache(TOKENS)
        for layer in range(LAYERS):
            x = cache["normalized", layer, "ln1"]
            for role in "qkv":
                bias = 0
                if name == "gpt-baseline":
                    bias = lm.blocks[layer].attn.qkv_proj.bias.view(3, HEADS, 6)["qkv".index(role)]
                direct = (
                    torch.einsum("bnd,hdp->bnhp", x, getattr(lm, f"W_{role.upper()}")[layer]) + bias
                )
                torch.testing.assert_close(cache[role, layer], direct, atol=1e-5, rtol=1e-4)
    assert torch.equal(lm.W_K, lm.W_Q) == (name == "crate-lm")
    torch.testing.assert_close(lm.QK.AB[1, 2], lm.W_Q[1, 2] @ lm.W_K[1, 2].T)
    torch.testing.assert_close(lm.OV.AB[1, 2], lm.W_V[1, 2] @ lm.W_O[1, 2])
    assert lm.W_in.shape == lm.W_out.transpose(1, 2).shape and lm.all_head_labels[:2] == [
        "L0H0",
        "L0H1",
    ]


def frozen_by_hand(x, weight, bias, scale):
    return (x - x.mean(-1, keepdim=True)) / scale * weight + bias


@pytest.mark.parametrize("name", ["crate-lm", "gpt-baseline", "nanochat-crate"])
def test_a_detached_scale_is_a_constant_to_gradients(name):
    """Freezing norms gives the gradient of the model whose scales are numbers.

    By finite differences along one direction.
    """
    lm = make_lm(name).double()
    points = [point for point in lm.hook_dict if point.endswith("hook_scale")]
    freeze = [(point, lambda scale, hook: scale.detach()) for point in points]
    with lm.hooks(fwd_hooks=freeze):
        loss = lm(TOKENS, "loss")
    (frozen,) = torch.autograd.grad(loss, lm.embed.weight)
    (free,) = torch.autograd.grad(lm(TOKENS, "loss"), lm.embed.weight)
    assert (frozen - free).norm() > 0.01 * free.norm()
    with torch.no_grad():
        _, cache = lm.run_with_cache(TOKENS)
        fixed = [(point, lambda scale, hook: cache[hook.name]) for point in points]
        along = torch.Generator().manual_seed(0)  # not across a threshold of ISTA, where it bends
        direction = torch.randn(lm.embed.weight.shape, generator=along, dtype=torch.float64)
        step = 1e-6
        ends = []
        for sign in (1, -1):
            lm.embed.weight.data += sign * step * direction
            with lm.hooks(fwd_hooks=fixed):
                ends.append(lm(TOKENS, "loss").item())
            lm.embed.weight.data -= sign * step * direction
    assert (frozen * direction).sum().item() == pytest.approx(
        (ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-6
    )


def test_gradients_of_every_point():
    lm = make_lm()
    _, cache = lm.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    assert {f"{name}_grad" for name in lm.matching_points(None)} <= set(cache)
    vision = make("crate")
    for name in ("blocks.0.ln1.hook_scale", "ln_final.hook_scale"):
        seen = {}
        with vision.hooks(
            bwd_hooks=[
                (name, lambda grad, hook, seen=seen: seen.update(size=grad.abs().sum().item()))
            ]
        ):
            vision(torch.randn(2, 3, 6, 20)).sum().backward()
        assert seen["size"] > 0


@pytest.mark.usefixtures("unchecked")
def test_a_ratio_is_not_a_noise():
    mae = ci.load(FIXTURES / "crate_mae" / "checkpoint-799.pth", n_heads=4)
    refuses("noise=0.75", lambda: mae(torch.randn(2, 3, 32, 32), 0.75))


def test_the_decoder_adds_up_signed():
    mae = ci.load(FIXTURES / "crate_mae" / "checkpoint-799.pth", n_heads=4)
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    with torch.no_grad():
        plain = mae.run_with_cache(images, noise)[1].decoder
        mae.set_use_attn_result(True)
        gated = mae.run_with_cache(images, noise)[1].decoder
    for cache in (plain, gated):
        cache.compute_head_results()
        for layer in range(2):
            bias = mae.decoder_blocks[layer].attn.b_O
            torch.testing.assert_close(
                cache["result", layer].sum(-2) - bias,
                cache["attn_out", layer],
                atol=1e-4,
                rtol=1e-4,
            )
    refuses("no attribute 'visual'", lambda: plain.visual, AttributeError)
    refuses("no classifier head", lambda: mae.run_with_cache(images, noise)[1].logit_lens())
    refuses("mask_ratio=1: give a number", lambda: mae(images, noise, 1))
    cut = mae.run_with_cache(images, noise, pos_slice=0)[1]
    assert cut["hook_pred"].shape == (2, 16, 192) and cut["hook_mask"].shape == (2, 16)


def test_towers_share_points_and_keep_their_names(clip, pictures):
    tokens = torch.randint(50, (2, 8))
    zero = lambda value, hook: value * 0  # noqa: E731
    with torch.no_grad():
        plain = clip(pictures, tokens)
        with clip.hooks(fwd_hooks=[("visual.blocks.0.hook_resid_post", zero)]):
            bent = clip(pictures, tokens)
            clip.visual.run_with_cache(pictures)  # opens and closes a context of its own
            assert torch.equal(clip(pictures, tokens), bent) and not torch.equal(bent, plain)
        with clip.visual.hooks(fwd_hooks=[("blocks.0.hook_resid_post", zero)]):
            clip.run_with_cache(pictures, tokens)
            assert torch.equal(clip(pictures, tokens), bent)
        assert torch.equal(clip(pictures, tokens), plain)
        _, cache = clip.visual.run_with_cache(pictures)
        back = lambda value, hook: cache[hook.name]  # noqa: E731
        clip.visual.run_with_hooks(pictures, fwd_hooks=[("blocks.1.hook_resid_post", back)])
        _, whole = clip.run_with_cache(pictures, tokens)
        assert torch.equal(whole.visual["pattern", 1], cache["pattern", 1]) and whole.text[
            "resid_post", 0
        ].shape == (2, 8, 24)
        torch.testing.assert_close(
            whole.visual.logit_lens().values[-1], clip.encode_image(pictures), atol=1e-4, rtol=1e-4
        )
        clip.visual.set_use_attn_result(True)
        assert "visual.blocks.0.attn.hook_result" in clip.run_with_cache(pictures, tokens)[1]
        clip.visual.set_use_split_qkv_input(True)
    with pytest.raises(ValueError, match="does not fire with split inputs"), torch.no_grad():
        clip.run_with_hooks(pictures, tokens, fwd_hooks=[("visual.blocks.0.attn.hook_u", zero)])
    assert torch.equal(clip.visual.b_U, torch.zeros(24)) and not hasattr(clip.text, "generate")


def test_a_text_tower_is_kept(clip, tmp_path):
    tokens = torch.randint(50, (2, 8))
    for tower, data in ((clip.text, tokens), (clip.visual, torch.randn(1, 3, 32, 32))):
        back = ci.load(tower.save_pretrained(tmp_path / type(tower).__name__))
        assert type(back) is type(tower) and torch.equal(back(data), tower(data))


def test_a_function_that_selects_silent_points_warns():
    lm = make_lm()
    silent = [(lambda name: name.endswith("hook_result"), lambda value, hook: value * 0)]
    with pytest.warns(UserWarning, match="no hook was added: .* is gated-off"):
        lm.run_with_hooks(TOKENS, fwd_hooks=silent)
    with pytest.warns(UserWarning, match="is gated-off"):
        lm.add_hook(*silent[0])


def test_hooks_in_place_on_untied_roles():
    lm = make_lm("gpt-baseline")

    def zero(value, hook):
        value[:, -1] = 0
        return value

    with torch.no_grad():
        other = lm.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.0.attn.hook_q", lambda v, hook: zero(v.clone(), hook))]
        )
    torch.testing.assert_close(
        lm.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_q", zero)]), other
    )


def test_slices_of_a_cache_keep_reading_where_the_model_reads(images):
    model = make("crate")
    with torch.no_grad():
        logits, cache = model.run_with_cache(images)
        half = cache.apply_slice_to_batch_dim(slice(0, 1))
        torch.testing.assert_close(half.logit_lens().values[-1], logits[:1], atol=1e-5, rtol=1e-5)


def test_configs_of_another_kind():
    vision, text = make("crate").cfg, make_lm().cfg
    refuses("HookedCrateLM takes a CrateConfig of family", lambda: ci.HookedCrateLM(vision))
    refuses("HookedCrate takes a CrateConfig of family 'crate' or", lambda: ci.HookedCrate(text))
    refuses("HookedCrateMAE takes .* 'crate-mae', got family", lambda: ci.HookedCrateMAE(vision))
    refuses("HookedCrateCLIP takes .* 'clipa', got family", lambda: ci.HookedCrateCLIP(vision))
    chat = ci.CrateConfig(
        family="nanochat-crate", d_model=8, n_layers=1, n_heads=2, n_ctx=5, d_vocab=7
    )
    assert chat.softcap == 15.0
