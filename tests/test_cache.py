"""Reading a cache: what is at a point of a layer, and what a cache says of points that it lacks."""

import pytest
import torch

import crate_interp as ci
from conftest import make_lm, refuses

SIZE = dict(image_size=(6, 20), patch_size=(2, 5))


def test_at_reads_points_of_layers_and_of_the_model(model, images):
    _, cache = model.run_with_cache(images)
    assert cache.at("attn.hook_pattern", 1) is cache["blocks.1.attn.hook_pattern"]
    assert cache.at("mlp.hook_post", -1) is cache["blocks.2.mlp.hook_post"]
    assert cache.at("ln_final.hook_scale") is cache["ln_final.hook_scale"]


def test_at_refuses_what_was_not_cached(model, images):
    _, few = model.run_with_cache(images, names_filter="hook_embed")
    with pytest.raises(
        KeyError, match=r"the cache lacks 'blocks.2.mlp.hook_post': .* names_filter=\['blocks.2.mlp"
    ):
        few.at("mlp.hook_post", -1)
    with pytest.raises(KeyError, match="the cache lacks 'ln_final.hook_scale'"):
        few.at("ln_final.hook_scale")
    with pytest.raises(KeyError, match=r"fires only after model.set_use_attn_result\(True\)"):
        few.at("attn.hook_result", 0)
    _, flat = model.run_with_cache(images[:1], remove_batch_dim=True)
    refuses("no batch axis: cache without remove_batch_dim", lambda: flat.at("mlp.hook_post", 0))


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
    cache.model = None  # as TransformerLens advises, to free its memory
    refuses("the cache lacks", lambda: cache["hook_embeds"], KeyError)


def test_at_reads_the_parts_of_larger_models(images):
    size = dict(d_model=30, n_layers=2, n_heads=5, **SIZE)
    mae = ci.HookedCrateMAE(
        ci.CrateConfig(family="crate-mae", decoder_n_heads=5, decoder_n_layers=3, **size)
    ).eval()
    _, cache = mae.run_with_cache(images)
    held = cache["decoder_blocks.2.attn.hook_pattern"]
    assert cache.decoder.at("attn.hook_pattern", -1) is held
    with pytest.raises(KeyError, match="there is no hook point 'decoder_blocks.0.mlp.hook_post'"):
        cache.decoder.at("mlp.hook_post", 0)
    text = dict(d_embed=8, text_d_model=12, text_n_layers=1, text_n_heads=2, n_ctx=5, d_vocab=11)
    clip = ci.HookedCrateCLIP(ci.CrateConfig(family="clipa", **size, **text)).eval()
    _, cache = clip.run_with_cache(images, torch.randint(11, (2, 5)))
    assert cache.text.at("hook_embed") is cache["text.hook_embed"]
    assert cache.at("visual.hook_embed") is cache.visual.at("hook_embed")
    refuses("read cache.visual or cache.text", lambda: cache.at("mlp.hook_post", 0))


def test_a_layer_that_there_is_not_is_told(model, images):
    _, cache = model.run_with_cache(images)
    for key in (("pattern", -9), ("pattern", 9), "blocks.3.attn.hook_pattern"):
        with pytest.raises(KeyError, match="Did you mean blocks.2.attn.hook_pattern"):
            cache[key]
    refuses("Did you mean blocks.1.attn.hook_pattern", lambda: cache["patern", 1], KeyError)
    assert dir(ci.maps) == ci.maps.__all__


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
