"""Maps read from a cache, their pictures and figures, and pages of attention and activations."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

import crate_interp as ci
from browser import driven, looked_over  # noqa: F401
from browser import opened as shown_in
from conftest import BATCH, HEADS, LAYERS, make, refuses

GRID = (3, 4)


@pytest.fixture
def cache(model, images):
    return model.run_with_cache(images)[1]


def test_maps_of_what_patches_cost(cache, model):
    z = cache["resid_mid", 1]
    maps = ci.maps.token_rates(cache, 1, eps=0.4)
    torch.testing.assert_close(maps.flatten(1), ci.measures.token_rates(z, 0.4)[:, 1:])
    maps = ci.maps.token_rates(cache, 1, subspaces=True)
    codes = torch.einsum("bpd,hdk->bhpk", z, model.blocks[1].attn.U)
    wanted = ci.measures.token_rates(codes, 0.1)[..., 1:]
    assert maps.shape == (BATCH, HEADS, *GRID)
    torch.testing.assert_close(maps.flatten(2), wanted, rtol=1e-4, atol=1e-6)


def test_attention_is_the_models_own_pattern(cache):
    pattern = cache["pattern", 1]
    maps = ci.maps.attention(cache, 1)
    assert maps.shape == (BATCH, HEADS, *GRID)
    of_cls = pattern[:, :, 0, 1:]
    assert torch.equal(maps.flatten(2), of_cls)
    found, other = (ci.maps.attention(cache, 1, query=query) for query in ((2, 1), (0, 2)))
    assert torch.equal(found.flatten(2), pattern[:, :, 1 + 2 * 4 + 1, 1:])
    assert torch.equal(ci.maps.attention(cache, -2, query=3), other)
    without = ci.maps.attention(cache, 1, cls_key=False).flatten(2)
    assert torch.allclose(without, of_cls / of_cls.sum(-1, keepdim=True), atol=1e-6)
    unscaled = ci.maps.attention(cache, 1, scaled=False, cls_key=False).flatten(2)
    assert torch.equal(unscaled.argsort(dim=-1), without.argsort(dim=-1))
    assert (unscaled.amax(-1) >= without.amax(-1)).all()


def test_codes_components_and_rollout(cache):
    post = cache["post", 2]
    maps = ci.maps.codes(cache, 2, [5, 0])
    assert torch.equal(maps[1, 0].flatten(), post[1, 1:, 5])
    assert torch.equal(maps[0, 1].flatten(), post[0, 1:, 0])
    parts = ci.maps.components(cache, 0, 2)
    keys = cache["blocks.0.attn.hook_k"].flatten(2)[:, 1:]
    assert torch.equal(parts, ci.measures.pca_map(keys, GRID, 2))
    patterns = torch.stack([cache["pattern", layer] for layer in range(LAYERS)], dim=1)
    wanted = ci.measures.attention_rollout(patterns)[:, 0, 1:]
    assert torch.equal(ci.maps.rollout(cache).flatten(1), wanted)


def test_windows_average_where_they_overlap(model, images):
    read = lambda cache: ci.maps.attention(cache, 1)  # noqa: E731
    whole = ci.maps.windowed(model, images, read, progress=False)
    assert torch.equal(whole, read(model.run_with_cache(images)[1]))  # one window
    wide = torch.cat([images, images[..., :10]], dim=-1)  # 6 x 30: 3 x 6 patches of 2 x 5
    found = ci.maps.windowed(model, wide, read, stride=(2, 10), progress=False)
    parts = (wide[..., start : start + 20] for start in (0, 10))
    left, right = (read(model.run_with_cache(part)[1]) for part in parts)
    assert found.shape == (BATCH, HEADS, 3, 6)
    torch.testing.assert_close(found[..., :2], left[..., :2])
    torch.testing.assert_close(found[..., 2:4], (left[..., 2:] + right[..., :2]) / 2)
    torch.testing.assert_close(found[..., 4:], right[..., 2:])


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
    assert html.count('type="radio"') == 2
    assert html.count("checked>") == 1
    assert html.count('tabindex="0"') == 2 * BATCH * (HEADS + 1)
    drawn = tiles(html)
    assert len(drawn) == 2 * BATCH * HEADS
    maps = ci.maps.attention(cache, LAYERS - 1)
    for tile, map in zip(drawn[BATCH * HEADS :], maps.flatten(0, 1).numpy(), strict=True):
        assert tile.mode == "P" and tile.size == (4, 3)
        np.testing.assert_array_equal(np.asarray(tile), (map / map.max() * 31).round().astype(int))
    assert f"head 1, {100 * maps[0, 1].max():.2g}\xa0%" in html
    marked = np.array([mark != "" for mark in re.findall(r'class="tile( most)?"', html)])
    marked = marked.reshape(2, BATCH, HEADS + 1)[..., 1:]  # the first tile is the image
    largest = torch.stack([ci.maps.attention(cache, at).amax(dim=(2, 3)) for at in (0, -1)])
    assert (marked.argmax(-1) == largest.numpy().argmax(-1)).all() and (marked.sum(-1) == 1).all()
    layer, image, head = np.unravel_index(int(largest.argmax()), largest.shape)
    named = f"L{[0, LAYERS - 1][layer]}H{head} gives one patch of image {image} "
    assert named in re.sub("<[^>]*>", "", html) and html.count("means over") == 0
    assert "<iframe srcdoc=" in page._repr_html_() and "kB" in repr(page)


def test_the_pages_of_twelve_heads_of_197_tokens_are_small():
    torch.manual_seed(0)
    size = dict(d_model=24, n_layers=12, n_heads=12, image_size=224, patch_size=16, n_classes=3)
    cfg = ci.CrateConfig(family="crate", mean=[0.5] * 3, std=[0.5] * 3, **size)
    model = ci.HookedCrate(cfg).eval()
    images = torch.randn(1, 3, 224, 224)  # noise: the largest picture a PNG can have
    patterns = ci.hooks.every_layer(model, ci.hooks.PATTERN)
    with torch.no_grad():
        _, cache = model.run_with_cache(images, names_filter=patterns)
    for page in (ci.viz.head_grid(cache, images), ci.viz.attention(cache, 0)):
        assert len(page.html()) < 1_000_000


TEXT = "In the beginning was the Word"


def properties(page):
    """What a page of atoms carries for its script."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.html())[1])


def matrix(page):
    """What the page of attention carries, its bytes unpacked as its script does."""
    props = json.loads(re.search(r'id="pattern">(.*?)</script>', page.html(), re.DOTALL)[1])
    names = ("largest", "second", "top")
    largest, second, top = (np.array(props[name])[..., None] for name in names)
    count = len(props["tokens"])
    steps = np.frombuffer(base64.b64decode(props["bytes"]), np.uint8).reshape(-1, count, count)
    return props | {"attention": np.where(np.arange(count) == top, largest, steps / 255 * second)}


def test_attention_of_images(cache):
    page = ci.viz.attention(cache, -1, sample=1, heads=[0, 4])
    props, pattern = matrix(page), cache["pattern", LAYERS - 1][1, [0, 4]].numpy()
    assert props["tokens"][:3] == ["CLS", "0,0", "0,1"] and len(props["tokens"]) == 13
    assert props["causal"] is False and props["grid"] == [3, 4]
    assert props["heads"] == [f"L{LAYERS - 1}H0", f"L{LAYERS - 1}H4"]
    # to half a step of the second of each row, and the four digits of that
    second = np.sort(pattern, axis=2)[..., -2:-1]
    off = np.abs(props["attention"] - pattern) - 5e-4 * pattern
    assert (off / second).max() <= 0.5 / 255 + 5e-4 and "sample 1" in page.title
    html, seen = page.html(), 1 / (pattern[:, 0] ** 2).sum(-1)  # tokens that CLS sees in effect
    assert "http" not in html and html.count("<script") == 2 and props["first"] == seen.argmin()
    found = float(re.search(r"effectively ([\d.]+) of 13 <", html)[1])
    assert found == pytest.approx(seen.min(), abs=0.5)


def test_attention_of_texts_names_its_tokens_without_being_asked():
    lm = ci.load("crate-tiny-lm")
    _, cache = lm.run_with_cache(TEXT)
    ids = lm.to_tokens(TEXT)
    for tokens in (None, TEXT, ids, ids[0].tolist(), lm.to_str_tokens(TEXT)):
        props = matrix(ci.viz.attention(cache, 2, tokens=tokens))
        assert props["tokens"] == lm.to_str_tokens(TEXT) and props["causal"] is True
    looks = cache["pattern", 2][0, props["first"]].argmax(-1).tolist()
    others = [key for query, key in enumerate(looks) if key != query]
    key, count = max(others, key=others.count), len(looks)
    words = re.sub("<[^>]*>", "", ci.viz.attention(cache, 2).html())
    assert f"{others.count(key)} of {count} tokens look most at" in words and props["named"] == key
    assert f"({key}), and {count - len(others)} at themselves" in words
    assert properties(ci.viz.activations(cache, 0))["tokens"] == lm.to_str_tokens(TEXT)
    top = properties(ci.viz.top_tokens(cache, range(3)))
    assert top["tokens"] == [lm.to_str_tokens(TEXT)]
    _, few = lm.run_with_cache(TEXT, names_filter="blocks.2.attn.hook_pattern")
    assert matrix(ci.viz.attention(few, 2))["tokens"][:2] == ["0", "1"]
    with lm.hooks([("hook_embed", lambda x, hook: x + 1)]):  # no token embeds to that
        _, moved = lm.run_with_cache(TEXT)
    assert matrix(ci.viz.attention(moved, 2))["tokens"][:2] == ["0", "1"]


def test_activations_are_a_grid_of_patches_or_tokens(cache):
    page = ci.viz.activations(cache, [3, 1], layers=[2, 0])
    data = properties(page)
    code = torch.stack([cache["post", layer][0][:, [3, 1]].T for layer in (2, 0)]).numpy()
    np.testing.assert_allclose(np.array(data["values"]), code, rtol=6e-3)
    assert (data["layers"], data["atoms"], data["grid"]) == ([2, 0], [3, 1], [3, 4])
    on = code[..., 1:]
    above = (on.max(-1) - on.mean(-1)) / np.sqrt((on**2).mean((1, 2)))[:, None]
    assert data["first"] == [*np.unravel_index(above.argmax(), above.shape)]
    layer, atom = [2, 0][data["first"][0]], [3, 1][data["first"][1]]
    assert f"(L{layer}A{atom}) stands out most" in page.html()


@pytest.fixture(scope="module")
def views():
    """The page of attention of an image and of a text, and the pattern that it shows."""
    model, lm = make(), ci.load("crate-tiny-lm")
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(images)
    _, texts = lm.run_with_cache(TEXT)
    return {
        "image": (ci.viz.attention(cache, 1), cache["pattern", 1][0]),
        "text": (ci.viz.attention(texts, 2), texts["pattern", 2][0]),
    }


@pytest.mark.slow
def test_a_matrix_is_seen_whole_in_a_notebook(driven, views, tmp_path):  # noqa: F811
    """Pointing says the share of the pair; the whole matrix stands in the frame of a cell."""
    for name in ("image", "text"):
        page, pattern = views[name]
        with shown_in(driven, f"<!doctype html><body>{page._repr_html_()}", 1000) as shown:
            frame = shown.page.frames[1]
            frame.wait_for_selector("#matrix")
            fits = "document.documentElement.offsetHeight <= innerHeight"
            frame.wait_for_function(fits)
            assert frame.evaluate("innerHeight - document.documentElement.offsetHeight") < 8
            seen = frame.evaluate(
                "() => { const b = document.querySelector('#matrix').getBoundingClientRect();"
                " return [b.top, b.bottom, innerHeight, b.width, b.height]; }"
            )
            assert seen[0] >= 0 and seen[1] <= seen[2] != 44 * 16, seen
            assert seen[3] == pytest.approx(seen[4]) and seen[3] > 200
            count, box = len(pattern[0]), frame.locator("#matrix").bounding_box()
            query, key = count - 2, 1
            side = box["width"] / count  # of a cell
            at = {"x": side * (key + 0.5), "y": side * (query + 0.5)}
            frame.locator("#matrix").hover(position=at)  # scrolls to it
            first = matrix(page)["first"]  # the head that is open
            before = frame.inner_text("#live")
            told = re.search(r" gives .*? ([\d.e-]+)\s%, ([\d.e-]+) times", before)
            share = pattern[first, query, key].item()
            most = pattern[first, query].max().item()
            assert float(told[1]) / 100 == pytest.approx(share, abs=most / 255 + 0.05 * share)
            keys = query + 1 if name == "text" else count
            assert float(told[2]) == pytest.approx(share * keys, abs=most * keys / 200 + 0.05)
            colours = (
                "c => new Set(new Uint32Array(c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data.buffer)).size"
            )
            assert frame.locator("#matrix").evaluate(colours) > 8
            frame.locator("#matrix").focus()
            shown.page.keyboard.press("ArrowRight")  # the next key of the same query
            after = frame.inner_text("#live")
            assert before != after and before.split(" gives")[0] == after.split(" gives")[0]
            frame.locator("#heads button").nth(first - 1).click()
            assert frame.inner_text("#live").split(":")[0] != after.split(":")[0]
            pressed = "[aria-pressed=true]"
            assert frame.locator(pressed).count() == 1
            assert frame.locator("#heads button").count() == len(pattern)
            assert not shown.asked and not shown.wrong, name


@pytest.mark.slow
def test_a_point_of_a_cache_is_found_by_its_name(driven, cache):  # noqa: F811
    with shown_in(driven, f"<!doctype html><body>{cache._repr_html_() * 2}") as shown:
        page, found = shown.page, "tr:visible td:first-child"
        assert page.locator("input").count() == 2 and page.locator(found).count() == 0
        page.locator("input").last.fill("hook_pat")
        assert page.locator(found).all_inner_texts() == ["blocks.0.attn.hook_pattern"]
        page.locator("input").last.fill("")
        assert page.locator(found).count() == 0 and not shown.asked and not shown.wrong


@pytest.fixture(scope="module", params=["crate", "crate-alpha"])
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def data():
    return torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def result(model, data):
    return ci.sweep(model, data, progress=False)


@pytest.fixture(scope="module")
def twins(data):
    return [ci.sweep(make(seed=seed), data, progress=False) for seed in (5, 6)]


def lines(figure):
    """The lines of a figure but for the dotted one of chance."""
    every = figure.axes[0].get_lines()
    return [line for line in every if len(line.get_xdata()) and line.get_linestyle() != ":"]


def test_a_statistic_per_sample(result, twins):
    figure = ci.viz.layers(result, "compression.rate_pre", twins)
    mean, dashed = lines(figure)
    rows = result.layers().query("statistic == 'rate_pre'")
    np.testing.assert_allclose(mean.get_ydata(), rows["mean"])
    assert list(mean.get_xdata()) == list(range(LAYERS + 1))
    expected = np.mean([t.layers().query("statistic == 'rate_pre'")["mean"] for t in twins], axis=0)
    np.testing.assert_allclose(dashed.get_ydata(), expected)
    assert dashed.get_linestyle() == "--"


def bands(axes):
    """Lower and upper ends of each band that is drawn, from its outline."""
    found = []
    for band in axes.collections:
        if len(band.get_paths()) and len(points := band.get_paths()[0].vertices) > 2:
            places = sorted(set(points[:, 0]))
            ends = [[points[points[:, 0] == x, 1].min() for x in places]]
            found.append([*ends, [points[points[:, 0] == x, 1].max() for x in places]])
    return found


def test_the_band_of_every_line_is_the_interval_of_its_mean(model, data):
    """Against SciPy's own interval, sample by sample."""
    results = [ci.sweep(model, part, progress=False) for part in (data, data[:3], data[1:])]
    figure = ci.viz.layers(results, "sparsity.zero_fraction", labels=["a", "b", "c"])
    drawn = bands(figure.axes[0])
    assert len(drawn) == 3
    for result, (low, high) in zip(results, drawn, strict=True):
        table = result.samples().dropna()
        for layer, own in table.groupby("layer")["sparsity.zero_fraction"]:
            wanted = stats.t.interval(0.95, len(own) - 1, own.mean(), stats.sem(own))
            assert (low[layer], high[layer]) == pytest.approx(wanted, rel=1e-6)
    alone = bands(ci.viz.layers(results[0], "sparsity.zero_fraction").axes[0])
    np.testing.assert_allclose(alone, drawn[:1])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    drawn = ["a", "b", "c", "95 % interval of the mean, n = 3 to 5 images", "a ReLU of noise"]
    assert words == drawn


def test_attention_on_image(model, images):
    _, cache = model.run_with_cache(images)
    figure = ci.viz.attention_on_image(cache, -1, images)
    assert len(figure.axes) == BATCH * (HEADS + 1)
    panel = figure.axes[(HEADS + 1) + 1 + 3]  # second image, fourth head
    (shown,) = panel.get_images()  # the map alone: a bright picture below it would look attended
    (picture,) = figure.axes[HEADS + 1].get_images()
    expected = cache["pattern", LAYERS - 1][1, 3, 0, 1:].reshape(3, 4)
    np.testing.assert_allclose(shown.get_array(), expected)
    assert shown.get_extent() == [0, 20, 6, 0] and shown.get_alpha() is None
    assert np.asarray(picture.get_array()).shape == (6, 20, 3)
    itself = cache["pattern", LAYERS - 1][1, 3, 0, 0]
    assert f"max {expected.max():.2g}\nCLS {itself:.2g}" == panel.get_xlabel()
    refuses("does not belong to images", lambda: ci.viz.attention_on_image(cache, 0, images[:1]))
    _, cache = model.run_with_cache(images, names_filter="hook_embed")
    with pytest.raises(KeyError, match="the cache lacks 'blocks.0.attn.hook_pattern'"):
        ci.viz.attention_on_image(cache, 0, images)
