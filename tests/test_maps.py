"""Maps read from a cache, and pictures of them."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

import crate_interp as ci
from conftest import BATCH, HEADS, LAYERS, refuses

GRID = (3, 4)


@pytest.fixture
def cache(model, images):
    return model.run_with_cache(images)[1]


def test_attention_is_the_models_own_pattern(cache):
    pattern = cache["pattern", 1]
    maps = ci.maps.attention(cache, 1)
    assert maps.shape == (BATCH, HEADS, *GRID)
    assert torch.equal(maps.flatten(2), pattern[:, :, 0, 1:])
    assert torch.equal(
        ci.maps.attention(cache, 1, query=(2, 1)).flatten(2), pattern[:, :, 1 + 2 * 4 + 1, 1:]
    )
    assert torch.equal(
        ci.maps.attention(cache, -2, query=3), ci.maps.attention(cache, 1, query=(0, 2))
    )
    without = ci.maps.attention(cache, 1, cls_key=False).flatten(2)
    assert torch.allclose(
        without, pattern[:, :, 0, 1:] / pattern[:, :, 0, 1:].sum(-1, keepdim=True), atol=1e-6
    )
    unscaled = ci.maps.attention(cache, 1, scaled=False, cls_key=False).flatten(2)
    assert (
        torch.equal(unscaled.argsort(dim=-1), without.argsort(dim=-1))
        and (unscaled.amax(-1) >= without.amax(-1)).all()
    )


def test_codes_components_and_rollout(cache):
    post = cache["post", 2]
    maps = ci.maps.codes(cache, 2, [5, 0])
    assert torch.equal(maps[1, 0].flatten(), post[1, 1:, 5]) and torch.equal(
        maps[0, 1].flatten(), post[0, 1:, 0]
    )
    parts = ci.maps.components(cache, 0, 2)
    keys = cache["blocks.0.attn.hook_k"].flatten(2)[:, 1:]
    assert torch.equal(parts, ci.measures.pca_map(keys, GRID, 2))
    patterns = torch.stack([cache["pattern", layer] for layer in range(LAYERS)], dim=1)
    assert torch.equal(
        ci.maps.rollout(cache).flatten(1), ci.measures.attention_rollout(patterns)[:, 0, 1:]
    )


def test_windows_average_where_they_overlap(model, images):
    read = lambda cache: ci.maps.attention(cache, 1)  # noqa: E731
    whole = ci.maps.windowed(model, images, read, progress=False)
    assert torch.equal(whole, read(model.run_with_cache(images)[1]))  # one window
    wide = torch.cat([images, images[..., :10]], dim=-1)  # 6 x 30: 3 x 6 patches of 2 x 5
    found = ci.maps.windowed(model, wide, read, stride=(2, 10), progress=False)
    left, right = (
        read(model.run_with_cache(wide[..., start : start + 20])[1]) for start in (0, 10)
    )
    assert found.shape == (BATCH, HEADS, 3, 6)
    torch.testing.assert_close(found[..., :2], left[..., :2])
    torch.testing.assert_close(found[..., 2:4], (left[..., 2:] + right[..., :2]) / 2)
    torch.testing.assert_close(found[..., 4:], right[..., 2:])


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_said(model, images, cache):
    _, few = model.run_with_cache(images, names_filter="hook_embed")
    _, sliced = model.run_with_cache(images, pos_slice=slice(0, 2))
    _, flat = model.run_with_cache(images[:1], remove_batch_dim=True)
    _, codes = model.run_with_cache(
        images, names_filter=lambda name: name.endswith(("hook_q", "hook_k"))
    )
    attention, rollout, windowed = ci.maps.attention, ci.maps.rollout, ci.maps.windowed
    grid_of_heads, unscaled = ci.viz.head_grid, dict(layers=[0], scaled=False)
    for words, call in (
        ("layer=3: the model has layers 0 to 2", lambda: attention(cache, 3)),
        ("12 patches do not fit the grid 3 x 5", lambda: attention(cache, 0, grid=(3, 5))),
        ("column. of 3 x 4", lambda: attention(cache, 0, query=(3, 0))),
        ("query=13: .* of the 13 tokens", lambda: attention(cache, 0, query=13)),
        ("query='cls': give 0 for CLS", lambda: attention(cache, 0, query="cls")),
        ("grid='a'", lambda: attention(cache, 0, grid="a")),
        ("cache lacks tokens", lambda: attention(sliced, 0)),
        ("cache lacks tokens", lambda: rollout(sliced)),
        ("no batch axis", lambda: attention(flat, 0)),
        ("give the cache of", lambda: attention([1], 0)),
        ("give whole numbers from 0 to", lambda: ci.maps.codes(cache, 0, 10**6)),
        ("atoms=1.5: give whole numbers", lambda: ci.maps.codes(cache, 0, 1.5)),
        (r"at least \(6, 20\)", lambda: windowed(model, images[..., :15], rollout)),
        (r"at least \(6, 20\)", lambda: windowed(model, images[0], rollout)),
        ("give a multiple of the patch", lambda: windowed(model, images, rollout, stride=25)),
        ("stride=4.0", lambda: windowed(model, images, rollout, stride=4.0)),
        (r"return .batch, map, h, w.", lambda: windowed(model, images, rollout)),
        ("does not belong to images", lambda: grid_of_heads(cache, images[:1])),
        ("hook_k .* does not belong", lambda: grid_of_heads(codes, images[:1], **unscaled)),
        ("layers=.*give numbers", lambda: grid_of_heads(cache, images, layers=[])),
        ("layers=.*give numbers", lambda: grid_of_heads(cache, images, layers=[-9])),
    ):
        refuses(words, call)
    refuses(r"the cache lacks 'blocks.1.attn.hook_pattern'", lambda: attention(few, 1), KeyError)


def tiles(html):
    """The palette index of every tile over a picture, in order."""
    return [
        Image.open(io.BytesIO(base64.b64decode(data)))
        for data in re.findall(r'<img alt="" src="data:image/png;base64,([^"]+)"', html)
    ]


def test_the_page_of_heads(cache, images, tmp_path):
    page = ci.viz.head_grid(cache, images, layers=[0, -1])
    html = page.save(tmp_path / "new" / "heads.html").read_text()
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert (
        html.count('type="radio"') == 2
        and html.count("checked>") == 1
        and html.count('tabindex="0"') == 2 * BATCH * (HEADS + 1)
    )
    drawn = tiles(html)
    assert len(drawn) == 2 * BATCH * HEADS
    maps = ci.maps.attention(cache, LAYERS - 1)
    for tile, map in zip(drawn[BATCH * HEADS :], maps.flatten(0, 1).numpy(), strict=True):
        assert tile.mode == "P" and tile.size == (4, 3)
        np.testing.assert_array_equal(np.asarray(tile), (map / map.max() * 31).round().astype(int))
    assert f"head 1, {maps[0, 1].max():.2g}" in html
    assert page._repr_html_().startswith("<iframe srcdoc=") and "kB" in repr(page)


def test_the_page_of_twelve_heads_of_197_tokens_is_small():
    torch.manual_seed(0)
    size = dict(d_model=24, n_layers=12, n_heads=12, image_size=224, patch_size=16, n_classes=3)
    model = ci.HookedCrate(
        ci.CrateConfig(family="crate", mean=[0.5] * 3, std=[0.5] * 3, **size)
    ).eval()
    images = torch.randn(1, 3, 224, 224)  # noise: the largest picture a PNG can have
    with torch.no_grad():
        _, cache = model.run_with_cache(
            images, names_filter=ci.hooks.every_layer(model, ci.hooks.PATTERN)
        )
    assert len(ci.viz.head_grid(cache, images).html()) < 1_000_000
