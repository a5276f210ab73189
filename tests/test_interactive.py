"""Views of circuitsvis as pages of one file, and the logit lens: content, size, in a browser."""

import base64
import json
import re

import numpy as np
import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over  # noqa: F401
from browser import opened as shown_in
from conftest import BATCH, HEADS, LAYERS, make, make_lm, refuses

TEXT = "In the beginning was the Word"


@pytest.fixture
def cache(model, images):
    return model.run_with_cache(images)[1]


def properties(page):
    """What a page hands to its component of circuitsvis."""
    return json.JSONDecoder().raw_decode(
        page.html().split("CircuitsVis.render(")[1].split(", ", 2)[2]
    )[0]


def matrix(page):
    """What the page of attention carries, its bytes unpacked as its script does."""
    props = json.loads(re.search(r'id="pattern">(.*?)</script>', page.html(), re.DOTALL)[1])
    largest = np.array(props["largest"])[..., None]
    count = len(props["tokens"])
    steps = np.frombuffer(base64.b64decode(props["bytes"]), np.uint8)
    return props | {"attention": steps.reshape(-1, count, count) / 255 * largest}


def test_attention_of_images(cache):
    page = ci.viz.attention(cache, -1, sample=1, heads=[0, 4])
    props, pattern = matrix(page), cache["pattern", LAYERS - 1][1, [0, 4]].numpy()
    assert props["tokens"][:3] == ["CLS", "0,0", "0,1"] and len(props["tokens"]) == 13
    assert props["causal"] is False and props["grid"] == [3, 4]
    assert props["heads"] == [f"L{LAYERS - 1}H0", f"L{LAYERS - 1}H4"]
    # to half a step of the largest of each row, and the four digits of that
    off = np.abs(props["attention"] - pattern) / pattern.max(axis=2, keepdims=True)
    assert off.max() <= 0.5 / 255 + 1e-3 and "sample 1" in page.title
    html = page.html()
    assert "http" not in html and html.count("<script") == 2


def test_attention_of_texts_names_its_tokens_without_being_asked():
    lm = ci.load("crate-tiny-lm")
    _, cache = lm.run_with_cache(TEXT)
    for tokens in (
        None,
        TEXT,
        lm.to_tokens(TEXT),
        lm.to_tokens(TEXT)[0].tolist(),
        lm.to_str_tokens(TEXT),
    ):
        props = matrix(ci.viz.attention(cache, 2, tokens=tokens))
        assert props["tokens"] == lm.to_str_tokens(TEXT) and props["causal"] is True
    assert properties(ci.viz.activations(cache, 0))["tokens"] == lm.to_str_tokens(TEXT)
    top = properties(ci.viz.top_tokens(cache, range(3)))
    assert top["tokens"] == [lm.to_str_tokens(TEXT)] * 2
    _, few = lm.run_with_cache(TEXT, names_filter="blocks.2.attn.hook_pattern")
    assert matrix(ci.viz.attention(few, 2))["tokens"][:2] == ["0", "1"]
    with lm.hooks([("hook_embed", lambda x, hook: x + 1)]):  # no token embeds to that
        _, moved = lm.run_with_cache(TEXT)
    assert matrix(ci.viz.attention(moved, 2))["tokens"][:2] == ["0", "1"]


def test_activations_are_a_grid_of_patches_or_tokens(cache):
    page = ci.viz.activations(cache, [3, 1], layers=[2, 0])
    told = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html())[1]
    data = json.loads(told)
    code = torch.stack([cache["post", layer][0][:, [3, 1]].T for layer in (2, 0)]).numpy()
    np.testing.assert_allclose(np.array(data["values"]), code, rtol=6e-3)
    assert (data["layers"], data["atoms"], data["grid"]) == ([2, 0], [3, 1], [3, 4])
    assert data["first"] == [int(at) for at in np.unravel_index(code.argmax(), code.shape)[:2]]
    assert (
        f"Atom {[3, 1][data['first'][1]]} of layer {[2, 0][data['first'][0]]} is on" in page.html()
    )
    lm = make_lm("crate-lm")
    _, texts = lm.run_with_cache(torch.randint(47, (2, 5)))
    props = properties(ci.viz.activations(texts, [3, 5], tokens=list("abcde")))
    assert props["tokens"] == list("abcde")
    code = torch.stack([texts["post", layer][0][:, [3, 5]] for layer in range(LAYERS)])
    layer, _, atom = np.unravel_index(int(code.argmax()), code.shape)
    first = props["firstDimensionLabels"][0], props["secondDimensionLabels"][0]
    assert first == (str(layer), str([3, 5][atom]))  # circuitsvis opens on these


def test_top_tokens():
    lm = make_lm("crate-lm")
    _, cache = lm.run_with_cache(
        torch.randint(47, (2, 7), generator=torch.Generator().manual_seed(0))
    )
    props = properties(
        ci.viz.top_tokens(
            cache, [5, 2], layers=[1], tokens=[list("abcdefg"), list("hijklmn")], count=3
        )
    )
    code = cache["post", 1][1]
    assert props["topkIdxs"][1][0] == code[:, [5, 2]].topk(3, dim=0).indices.tolist()
    assert (
        props["bottomkIdxs"][1][0][-1] == code[:, [5, 2]].argmin(dim=0).tolist()
        or (code[:, [5, 2]] == 0).any()
    )
    assert props["tokens"] == [list("abcdefg"), list("hijklmn")]


def test_twelve_heads_of_197_tokens_are_under_a_megabyte():
    torch.manual_seed(0)
    size = dict(d_model=24, n_layers=1, n_heads=12, image_size=224, patch_size=16, n_classes=3)
    model = ci.HookedCrate(ci.CrateConfig(family="crate", **size)).eval()
    with torch.no_grad():
        _, cache = model.run_with_cache(
            torch.randn(1, 3, 224, 224), names_filter="blocks.0.attn.hook_pattern"
        )
    assert len(ci.viz.attention(cache, 0).html()) < 1_000_000


@pytest.mark.parametrize("name", ["crate", "crate-alpha", "crate-lm", "nanochat-crate"])
def test_the_last_row_of_the_lens_is_the_models_answer(name):
    vision = name in ("crate", "crate-alpha")
    model = (
        make(name, labels=[f"<kind {number}>" for number in range(11)]) if vision else make_lm(name)
    )
    inputs = torch.randn(2, 3, 6, 20) if vision else torch.randint(47, (2, 7))
    logits, cache = model.run_with_cache(inputs)
    found = ci.circuits.logit_lens(cache, sample=1, count=3)
    best = (logits[1] if vision else logits[1, -1]).softmax(dim=-1).topk(3)
    last = found.table().query("layer == @LAYERS")
    assert last["probability"].tolist() == pytest.approx(best.values.tolist(), rel=1e-3)
    wanted = [f"<kind {place}>" if vision else str(place) for place in best.indices.tolist()]
    assert last["answer"].tolist() == wanted and len(found.table()) == 3 * (LAYERS + 1)
    html = found._repr_html_()
    assert html.count("<tr>") >= LAYERS + 1 and "<kind" not in html


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_said(cache, model, images):
    _, few = model.run_with_cache(images, names_filter="hook_embed")
    view, lens = ci.viz, ci.circuits.logit_lens
    single = model.run_with_cache(images[:1], remove_batch_dim=True)[1]
    nothing = model.run_with_cache(images * torch.nan)[1]
    refuses("the cache lacks", lambda: view.attention(few, 0), KeyError)
    for words, call in (
        ("layer=9: the model has layers", lambda: view.attention(cache, 9)),
        (f"sample=7: .* 0 to {BATCH - 1}", lambda: view.attention(cache, 0, sample=7)),
        (f"heads=9: .* 0 to {HEADS - 1}", lambda: view.attention(cache, 0, heads=9)),
        ("13 tokens, but 2 names", lambda: view.attention(cache, 0, tokens=["a", "b"])),
        ("13 tokens, but 16 names", lambda: view.attention(cache, 0, grid=(3, 5))),
        ("holds NaN", lambda: view.attention(nothing, 0)),
        ("atoms=.* give numbers from 0 to", lambda: view.activations(cache, 10**6)),
        ("give the cache of", lambda: view.activations({}, 0)),
        ("got tokens of 1 samples", lambda: view.top_tokens(cache, 0, tokens=[["a"]])),
        ("count=0", lambda: view.top_tokens(cache, 0, count=0)),
        ("count=0", lambda: lens(cache, count=0)),
        ("position=99", lambda: lens(cache, position=99)),
        ("position=None", lambda: lens(cache, position=None)),
        ("no batch axis", lambda: lens(single)),
        ("sample=-1", lambda: lens(cache, sample=-1)),
    ):
        refuses(words, call)


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
            seen = frame.evaluate(
                "() => { const b = document.querySelector('#matrix').getBoundingClientRect();"
                " return [b.top, b.bottom, innerHeight, b.width, b.height]; }"
            )
            assert seen[0] >= 0 and seen[1] <= seen[2] == 44 * 16, seen
            assert seen[3] == pytest.approx(seen[4]) and seen[3] > 200
            count, box = len(pattern[0]), frame.locator("#matrix").bounding_box()
            query, key = count - 2, 1
            shown.page.mouse.move(
                box["x"] + box["width"] * (key + 0.5) / count,
                box["y"] + box["height"] * (query + 0.5) / count,
            )
            first = matrix(page)["first"]  # the head that is open
            told = re.search(r"\) gives .*? ([\d.e-]+), ([\d.e-]+) x", frame.inner_text("#live"))
            share = pattern[first, query, key].item()
            most = pattern[first, query].max().item()
            assert float(told[1]) == pytest.approx(share, abs=most / 255 + 0.05 * share)
            keys = query + 1 if name == "text" else count
            assert float(told[2]) == pytest.approx(share * keys, abs=most * keys / 200 + 0.05)
            colours = (
                "c => new Set(new Uint32Array(c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data.buffer)).size"
            )
            assert frame.locator("#matrix").evaluate(colours) > 8
            before = frame.inner_text("#live")
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
