"""Views of circuitsvis as pages of one file, and the logit lens: content, size, in a browser."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import crate_interp as ci
from chromium import found, opened
from conftest import BATCH, HEADS, LAYERS, make, make_lm

TEXT = "In the beginning was the Word"


@pytest.fixture
def cache(model, images):
    return model.run_with_cache(images)[1]


def properties(page):
    """What the page hands to its component, the packed attention unpacked as its script does."""
    html = page.html()
    props = json.JSONDecoder().raw_decode(
        html.split("CircuitsVis.render(")[1].split(", {...", 1)[1]
    )[0]
    packed = re.search(r"unpack\(\.\.\.(\[.*?\])\)\}", html)
    if packed:
        text, count, largest = json.loads(packed[1])
        steps = np.frombuffer(base64.b64decode(text), np.uint8).reshape(len(largest), count, count)
        props["attention"] = steps * np.array(largest)[:, None, None] / 255
    return props


def test_attention_of_images(cache):
    page = ci.viz.attention(cache, -1, sample=1, heads=[0, 4])
    props, pattern = properties(page), cache["pattern", LAYERS - 1][1, [0, 4]].numpy()
    assert (
        props["tokens"][:3] == ["CLS", "0,0", "0,1"]
        and len(props["tokens"]) == 13
        and props["maskUpperTri"] is False
    )
    assert props["attentionHeadNames"] == [f"L{LAYERS - 1}H0", f"L{LAYERS - 1}H4"]
    assert np.abs(props["attention"] - pattern).max() <= pattern.max() / 500
    assert props["maxValue"] == pytest.approx(pattern.max()) and "sample 1" in page.title
    assert (
        page.html().split("</head>")[0].count("Content-Security-Policy") == 1
        and "unpkg.com" not in page.html().split("</script>")[-2]
    )


def test_attention_of_texts():
    lm = ci.load("crate-tiny-lm")
    _, cache = lm.run_with_cache(TEXT)
    for tokens in (
        TEXT,
        lm.to_tokens(TEXT),
        lm.to_tokens(TEXT)[0].tolist(),
        lm.to_str_tokens(TEXT),
    ):
        props = properties(ci.viz.attention(cache, 2, tokens=tokens))
        assert props["tokens"] == lm.to_str_tokens(TEXT) and props["maskUpperTri"] is True
    assert properties(ci.viz.attention(cache, 2))["tokens"][:2] == ["0", "1"]
    assert "".join(props["tokens"]).endswith("Word")


def test_activations_are_a_grid_of_patches_or_tokens(cache):
    props = properties(ci.viz.activations(cache, [3, 1], layers=[2]))
    assert [token.endswith("\n") for token in props["tokens"]] == [True] + [
        False,
        False,
        False,
        True,
    ] * 3
    code = cache["post", 2][0][:, [3, 1]].numpy()
    np.testing.assert_allclose(np.array(props["activations"])[:, 0], code, rtol=6e-3)
    assert props["secondDimensionLabels"] == ["3", "1"] and props["firstDimensionLabels"] == ["2"]
    lm = make_lm("crate-lm")
    _, told = lm.run_with_cache(torch.randint(47, (2, 5)))
    assert properties(ci.viz.activations(told, 3, tokens=list("abcde")))["tokens"] == list("abcde")


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


def test_words_of_the_data_cannot_end_the_script(cache):
    bad = ["</script><b>"] * 13
    html = ci.viz.activations(cache, 0, tokens=bad).html()
    assert "</script><b>" not in html and "\\u003c/script\\u003e" in html


def test_twelve_heads_of_197_tokens_are_under_three_megabytes():
    torch.manual_seed(0)
    size = dict(d_model=24, n_layers=1, n_heads=12, image_size=224, patch_size=16, n_classes=3)
    model = ci.HookedCrate(ci.CrateConfig(family="crate", **size)).eval()
    with torch.no_grad():
        _, cache = model.run_with_cache(
            torch.randn(1, 3, 224, 224), names_filter="blocks.0.attn.hook_pattern"
        )
    assert len(ci.viz.attention(cache, 0).html()) < 3_000_000


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
    assert html.count("<tr>") == LAYERS + 1 and "<kind" not in html


def test_results_show_themselves_in_a_notebook():
    model = ci.load("crate-tiny-cutouts")
    data = "embedded:cutouts"
    for result, words in (
        (ci.sweep(model, data, limit=8, controls=0, progress=False), "zero_fraction"),
        (ci.segment(model, data, limit=8, untrained=0, progress=False), "mask of another image"),
        (ci.atoms(model, data, limit=8, progress=False), "coherence"),
        (ci.audit(model, data, limit=4, untrained=0, progress=False), "R^c falls"),
    ):
        html = result._repr_html_()
        assert words in html and html.startswith("<") and "nan, nan" not in html


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_said(cache, model, images):
    _, few = model.run_with_cache(images, names_filter="hook_embed")
    view = ci.viz
    for words, kind, call in (
        ("layer=9: the model has layers", ValueError, lambda: view.attention(cache, 9)),
        ("the cache lacks", KeyError, lambda: view.attention(few, 0)),
        (
            f"sample=7: the cache has samples 0 to {BATCH - 1}",
            ValueError,
            lambda: view.attention(cache, 0, sample=7),
        ),
        (
            f"heads=9: give numbers from 0 to {HEADS - 1}",
            ValueError,
            lambda: view.attention(cache, 0, heads=9),
        ),
        ("13 tokens and 2 names", ValueError, lambda: view.attention(cache, 0, tokens=["a", "b"])),
        ("13 tokens and 16 names", ValueError, lambda: view.attention(cache, 0, grid=(3, 5))),
        ("give numbers from 0 to", ValueError, lambda: view.activations(cache, 10**6)),
        ("give the cache of", ValueError, lambda: view.activations({}, 0)),
        ("tokens are of 1 samples", ValueError, lambda: view.top_tokens(cache, 0, tokens=[["a"]])),
        ("count=0", ValueError, lambda: ci.circuits.logit_lens(cache, count=0)),
        ("count=0", ValueError, lambda: view.top_tokens(cache, 0, count=0)),
        ("position=99", ValueError, lambda: ci.circuits.logit_lens(cache, position=99)),
        ("position=None", ValueError, lambda: ci.circuits.logit_lens(cache, position=None)),
        (
            "no batch axis",
            ValueError,
            lambda: ci.circuits.logit_lens(
                model.run_with_cache(images[:1], remove_batch_dim=True)[1]
            ),
        ),
        (
            "holds NaN",
            ValueError,
            lambda: view.attention(model.run_with_cache(images * torch.nan)[1], 0),
        ),
        (
            "tokens of an image are patches",
            ValueError,
            lambda: view.attention(cache, 0, tokens="abc"),
        ),
        ("sample=-1", ValueError, lambda: ci.circuits.logit_lens(cache, sample=-1)),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_a_browser_draws_the_views_and_asks_for_nothing(tmp_path):
    if found() is None:
        pytest.skip("there is no Chromium")
    model = ci.load("crate-tiny-cutouts")
    with torch.no_grad():
        _, cache = model.run_with_cache(model.preprocess(ci.data.embedded("cutouts")[:1]["image"]))
    page = ci.viz.attention(cache, 3).save(tmp_path / "page.html")
    document, asked = opened(page)
    assert (
        all(f"L3H{head}" in document for head in range(6))
        and document.count("<canvas") == 7
        and not asked
    )
    opened(page, picture=tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as shot:
        assert len(np.unique(np.asarray(shot.convert("RGB"))[150:].reshape(-1, 3), axis=0)) > 20
    (tmp_path / "leak.html").write_text('<img src="http://127.0.0.1:9/x.png">')
    assert opened(tmp_path / "leak.html")[1] == [
        "http://127.0.0.1:9/x.png"
    ]  # the check sees what a page asks for
