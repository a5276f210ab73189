"""Caches: points, signs, towers, kept weights, and caches that another model may not read."""

import copy
import dataclasses
import re

import pytest
import torch

import crate_interp as ci
from conftest import FIXTURES, make, make_lm, refuses
from crate_interp.circuits import patching
from crate_interp.models.cache import CrateCache
from crate_interp.models.weights import model_digest
from neighbours import ids, make_clip, make_mae


def tiny(dtype=torch.float32):
    torch.manual_seed(0)
    cfg = ci.CrateConfig(
        family="crate", d_model=15, n_layers=2, n_heads=3, image_size=14, patch_size=7, channels=1
    )
    return ci.HookedCrate(cfg).eval().to(dtype)


def replaced(own):
    own.blocks[1].attn.u_proj.weight = torch.nn.Parameter(2 * own.blocks[1].attn.u_proj.weight.data)


def swapped(own):
    """Two rows change places: every sum over all of the weight stays."""
    weight = own.blocks[0].attn.u_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]].clone()


def through_a_view(own):
    own.blocks[0].attn.u_proj.weight.detach().numpy()[3, 2] += 1


EDITS = {
    "in place": torch.no_grad()(lambda own: own.blocks[0].attn.u_proj.weight.mul_(1.5)),
    "through .data": lambda own: own.blocks[0].attn.u_proj.weight.data.mul_(1.5),
    "through a view": through_a_view,
    "swapped rows": swapped,
    "another tensor": replaced,
    "load_state_dict": lambda own: own.load_state_dict(
        {name: value + 0.125 for name, value in own.state_dict().items()}
    ),
    "to another dtype": lambda own: own.to(torch.float64),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_gives_new_numbers(edit):
    own = tiny()
    images = torch.randn(2, 1, 14, 14, generator=torch.Generator().manual_seed(1))
    before = ci.probe(own.run_with_cache(images)[1])
    edit(own)
    after = ci.probe(own.run_with_cache(images.to(own.cfg.dtype))[1])
    fresh = copy.deepcopy(own)  # of which nothing is kept
    wanted = ci.probe(fresh.run_with_cache(images.to(own.cfg.dtype))[1])
    assert after.meta["model_digest"] == model_digest(own) != before.meta["model_digest"]
    assert after.table("weights").equals(wanted.table("weights"))
    assert not after.table("weights")["value"].equals(before.table("weights")["value"])


SENTENCE = r"weights have changed since this cache was made.*another model: call model\."
SMALL = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def kept():
    model = make("crate-alpha")
    return model, model.run_with_cache(SMALL)[1]


def metric(logits):
    return logits[..., 3].mean()


IMAGES = {
    "probe": lambda cache: ci.probe(cache, "sparsity"),
    "lens table": lambda cache: ci.circuits.logit_lens(cache),
    "attribution": lambda cache: ci.circuits.logit_attribution(cache, 3),
    "head results": lambda cache: cache.stack_head_results(),
    "neurons": lambda cache: cache.stack_neuron_results(-1),
    "decomposition": lambda cache: cache.get_full_resid_decomposition(),
    "last norm": lambda cache: cache.accumulated_resid(apply_ln=True),
    "maps": lambda cache: ci.maps.attention(cache, 1),
    "rollout": lambda cache: ci.maps.rollout(cache),
    "page of attention": lambda cache: ci.viz.attention(cache, 1),
    "explorer": lambda cache: ci.viz.explore(cache, SMALL),
    "patching": lambda cache: patching.get_act_patch_resid_mid(cache.model, SMALL, cache, metric),
}


def edited(model):
    own = copy.deepcopy(model)
    own.blocks[1].attn.W_O.data[0, 1, 2] += 0.5
    own.blocks[1].mlp.W_out.data[3, 4] += 0.5
    return own


def reconfigured(model):
    own = copy.deepcopy(model)
    own.cfg = dataclasses.replace(own.cfg, ln_eps=1e-2)
    return own


OTHERS = {
    "an edited copy": edited,
    "another config": reconfigured,
    "an untrained twin": lambda model: model.fresh(),
    "half precision": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "no model of ours": lambda model: torch.nn.Linear(2, 3),
}


def given_to(cache, other):
    own = copy.copy(cache)
    own.model = other
    return own


@pytest.mark.parametrize("reader", IMAGES.values(), ids=IMAGES)
def test_readers_of_images(kept, reader):
    model, cache = kept
    twin = copy.deepcopy(model)
    reader(given_to(cache, twin))  # equal weights
    for other in (edited(model), model.fresh()):
        with pytest.raises(ValueError, match=SENTENCE):
            reader(given_to(cache, other))
    with torch.no_grad():
        twin.blocks[0].attn.W_O.data.mul_(1.01)
    refuses(SENTENCE, lambda: reader(given_to(cache, twin)))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_every_other_model(kept, other):
    model, cache = kept
    makes = (
        given_to, lambda cache, other: CrateCache(cache.cache_dict, other),
        lambda cache, other: given_to(cache.apply_slice_to_batch_dim([1]), other),
        lambda cache, other: given_to(cache.alone(0), other),
    )  # fmt: skip
    for make_cache in makes:
        make_cache(cache, model).check_weights()
        with pytest.raises(ValueError, match=SENTENCE):
            make_cache(cache, other(model)).check_weights()


def test_a_plain_dict_is_taken_as_it_is(kept):
    """It is the way to patch from another model on purpose."""
    model, cache = kept
    other = model.fresh().eval()
    sweep = patching.get_act_patch_attn_head_out_all_pos
    assert sweep(other, SMALL, dict(cache), metric).shape == (3, 5)
    refuses(SENTENCE, lambda: sweep(other, SMALL, cache, metric))


def test_at_reads_points_of_layers_and_of_the_model(model, images):
    _, cache = model.run_with_cache(images)
    assert cache.at("attn.hook_pattern", 1) is cache["blocks.1.attn.hook_pattern"]
    assert cache.at("mlp.hook_post", -1) is cache["blocks.2.mlp.hook_post"]
    assert cache.at("ln_final.hook_scale") is cache["ln_final.hook_scale"]


def test_misspelt_points_get_a_hint(model, images):
    _, cache = model.run_with_cache(images)
    for call in (
        lambda: cache.at("attn.hook_patern", 1),
        lambda: cache["attn.hook_patern", 1],
        lambda: cache["blocks.1.attn.hook_patern"],
        lambda: cache["patern", -2],
    ):
        refuses("Did you mean blocks.1.attn.hook_pattern", call, KeyError)
    refuses("Did you mean ln_final.hook_scale", lambda: cache.at("ln_final.hook_scales"), KeyError)
    for key in (("pattern", -9), ("pattern", 9), "blocks.3.attn.hook_pattern"):  # no such layer
        refuses("The model has layers 0 to 2", lambda key=key: cache[key], KeyError)
    refuses("A layer has .*attn.z", lambda: cache["code", 1], KeyError)
    refuses("names no point: give", lambda: cache["pattern", "1"], KeyError)
    assert cache["u", 1] is cache["blocks.1.attn.hook_u"]
    cache.model = None  # as TransformerLens advises, to free its memory
    refuses("the cache lacks", lambda: cache["hook_embeds"], KeyError)


def test_at_reads_the_parts_of_larger_models(images):
    _, cache = make_mae().run_with_cache(images)
    held = cache["decoder_blocks.0.attn.hook_pattern"]
    assert cache.decoder.at("attn.hook_pattern", -1) is held
    with pytest.raises(KeyError, match="there is no hook point 'decoder_blocks.0.mlp.hook_post'"):
        cache.decoder.at("mlp.hook_post", 0)
    _, cache = make_clip().run_with_cache(images, ids(2, 7))
    assert cache.text.at("hook_embed") is cache["text.hook_embed"]
    assert cache.at("visual.hook_embed") is cache.visual.at("hook_embed")
    refuses("read cache.visual or cache.text", lambda: cache.at("mlp.hook_post", 0))


def test_a_notebook_shows_every_point_and_is_searched(images):
    whole = [make_mae().run_with_cache(images)[1], make_clip().run_with_cache(images, ids(2, 7))[1]]
    for cache in (*whole, make().run_with_cache(images[:1], remove_batch_dim=True)[1]):
        view = cache._repr_html_()
        first = {re.sub(r"blocks\.\d+", "blocks.0", name) for name in cache}
        assert all(f"<code>{name}</code>" in view for name in first)
        assert len(repr(cache)) < 80 and f"{len(cache)} points" in repr(cache)
        assert view.count("<td") == 4 * len(first) and "the same in layer" in view


def test_a_cache_shares_no_memory_with_its_inputs(model, images):
    lm, tokens = make_lm(), torch.arange(14).view(2, 7)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    _, words = lm.run_with_cache(tokens, attention_mask=mask)
    stream = model(images, stop_at_layer=1).detach()
    before = stream.clone()
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda z, hook: z.mul_(2))]):
        model(stream, start_at_layer=1)
    assert stream.equal(before)
    _, later = model.run_with_cache(stream, start_at_layer=1)
    mask.fill_(True)
    stream.zero_()
    assert words.mask.sum(dim=1).tolist() == [7, 5]
    assert later["resid_pre", 1].equal(before)


TOKENS = torch.randint(47, (2, 11), generator=torch.Generator().manual_seed(3))


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
    slope = (ends[0] - ends[1]) / (2 * step)
    assert (frozen * direction).sum().item() == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_towers_share_points_and_keep_their_names():
    path = FIXTURES / "crate_alpha_clipa" / "crate_alpha_CLIPA_L14.pth"
    clip = ci.load(path, n_heads=4, text_n_heads=3)
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))
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
        assert torch.equal(whole.visual["pattern", 1], cache["pattern", 1])
        assert whole.text["resid_post", 0].shape == (2, 8, 24)
        last = whole.visual.logit_lens().values[-1]
        torch.testing.assert_close(last, clip.encode_image(pictures), atol=1e-4, rtol=1e-4)
        clip.visual.set_use_attn_result(True)
        assert "visual.blocks.0.attn.hook_result" in clip.run_with_cache(pictures, tokens)[1]
        clip.visual.set_use_split_qkv_input(True)
    with pytest.raises(ValueError, match="does not fire with split inputs"), torch.no_grad():
        clip.run_with_hooks(pictures, tokens, fwd_hooks=[("visual.blocks.0.attn.hook_u", zero)])
    assert torch.equal(clip.visual.b_U, torch.zeros(24)) and not hasattr(clip.text, "generate")
