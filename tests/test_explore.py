"""What the explorer's page carries, refuses and leaves out; its answers without a part."""

import base64
import json
import re
import zlib
from html import unescape

import numpy as np
import pytest
import torch

import crate_interp as ci
from browser import drawn, driven, opened
from conftest import BATCH, HEADS, LAYERS, make, make_lm
from crate_hooks import edit
from crate_interp.viz.packing import LIMIT

FAMILIES = ("crate-lm", "nanochat-crate", "gpt-baseline")


@pytest.fixture
def cache(model, images):
    return model.run_with_cache(images)[1]


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.html(), re.DOTALL)[1])


def blob(page, name):
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)<', page.html())
    return zlib.decompress(base64.b64decode(found[1])) if found else None


def parts_of(page):
    """The names of what the page carries of each layer's attention."""
    names = re.findall(r'id="(codes|contract|keys|largest|rows)-(\d+)"', page.html())
    layers = range(data_of(page)["layers"])
    return [sorted(name for name, layer in names if int(layer) == each) for each in layers]


def halves(data, *shape):
    """float16 from two planes, in the plainest way."""
    count = len(data) // 2
    pairs = b"".join(bytes([data[i], data[count + i]]) for i in range(count))
    return np.frombuffer(pairs, "<f2").astype(np.float64).reshape(shape)


def attention_in(page, layer, heads, count, causal=False):
    """A layer's attention from the bytes of the page, entry by entry of the formula."""
    rows = blob(page, f"rows-{layer}")
    if rows:
        steps = np.frombuffer(rows, np.uint8).reshape(heads, count, count)
        return steps / 255 * halves(blob(page, f"largest-{layer}"), heads, count, 1)
    q = halves(blob(page, f"codes-{layer}"), heads, count, -1)
    keys = blob(page, f"keys-{layer}")
    k = halves(keys, heads, count, -1) if keys else q
    scores = np.einsum("hqp,hkp->hqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
    weights = np.exp(scores)
    return weights / weights.sum(-1, keepdims=True)


def worst(found, wanted):
    return (np.abs(found - wanted) / wanted.max(-1, keepdims=True)).max()


@pytest.mark.parametrize("sample", range(BATCH))
def test_codes_give_the_attention_of_images(cache, images, sample):
    page = ci.viz.explore(cache, images, sample=sample)
    assert parts_of(page) == [["codes"]] * LAYERS
    for layer in range(LAYERS):
        wanted = cache["pattern", layer][sample].numpy()
        assert worst(attention_in(page, layer, HEADS, 13), wanted) < LIMIT
    assert "sample" in page.title and data_of(page)["grid"] == [3, 4]


@pytest.mark.parametrize("name", FAMILIES)
def test_codes_give_the_attention_of_texts(name):
    lm = make_lm(name, window=False) if name == "nanochat-crate" else make_lm(name)
    tokens = torch.randint(47, (2, 11), generator=torch.Generator().manual_seed(3))
    _, cache = lm.run_with_cache(tokens)
    page = ci.viz.explore(cache, tokens, sample=1)
    two = [["codes", "keys"]] if name == "gpt-baseline" else [["codes"]]
    assert parts_of(page) == two * LAYERS
    for layer in range(LAYERS):
        found = attention_in(page, layer, HEADS, 11, causal=True)
        assert worst(found, cache["pattern", layer][1].numpy()) < LIMIT
    assert data_of(page)["alike"] == ("queries" if name == "gpt-baseline" else "codes")
    assert data_of(page)["names"] == [str(token) for token in tokens[1].tolist()]


def test_attention_that_is_not_of_the_codes_is_stored():
    """A window hides keys, and an edit changes shares: the rows themselves are carried."""
    lm = make_lm("nanochat-crate")
    tokens = torch.randint(47, (1, 13), generator=torch.Generator().manual_seed(4))
    _, cache = lm.run_with_cache(tokens)
    page = ci.viz.explore(cache, tokens)
    assert parts_of(page) == [["codes", "largest", "rows"], ["codes"], ["codes"]]
    assert worst(attention_in(page, 0, HEADS, 13), cache["pattern", 0][0].numpy()) < LIMIT / 2
    assert "Attention (layers: 0) is stored" in page.html()
    sees = [(cache["pattern", layer][0] > 0).sum(-1).max().item() for layer in range(LAYERS)]
    assert data_of(page)["sees"] == sees == [7, 13, 13]
    assert "(layers: 0) a token sees only itself and the 6 tokens before it." in page.html()


def test_the_answer_atoms_masks_and_components_are_those_of_the_library(cache, images):
    page, model = ci.viz.explore(cache, images, sample=1), cache.model
    html, share = page.html(), 100 * model(images)[1].softmax(-1).max().item()
    assert f"class {model(images)[1].argmax()}\u201d, with probability {share:.1f}\xa0%" in html
    layer = LAYERS - 1
    found = np.frombuffer(blob(page, f"atoms-{layer}"), "<u4").reshape(-1)
    code = cache["post", layer][1]
    assert found[: 13 * 16].reshape(13, 16)[:, 0].tolist() == code.argmax(-1).tolist()
    shown = data_of(page)["overlays"][layer]
    one = cache["k", layer][1, 1:].flatten(1)
    masks = ci.measures.maskcut(one, (3, 4), n_masks=3).flatten(1)
    assert all(masks[number - 1, patch] for patch, number in enumerate(shown["masks"]) if number)
    assert (np.array(shown["masks"]) > 0).tolist() == masks.any(0).tolist()
    wanted = ci.measures.pca_map(one[None], (3, 4))[0].flatten(1)
    scaled = (wanted / wanted.abs().amax(1, keepdim=True) * 100).round()
    assert shown["components"] == scaled.long().tolist()


def test_maps_of_heads_without_a_pattern():
    """Pi once for all queries; A, from which the page makes the rows of A^T A."""
    for family, over, count in (
        ("tost", {}, 12), ("tost-ista", {}, 13), ("cbt", dict(image_size=(6, 15)), 10),
    ):  # fmt: skip
        model = make(family, stem="linear", **over)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(2, 3, *model.cfg.image_size, generator=generator)
        cache = model.run_with_cache(images)[1]
        page = ci.viz.explore(cache, images, sample=1)
        data = data_of(page)
        assert (data["count"], data["special"]) == (count, model.cfg.n_special)
        assert (data["start"]["query"] == 0) == (family == "cbt") and "alike" in data["verbs"]
        assert len(data["overlays"][0]["masks"]) == count - model.cfg.n_special
        codes = cache["u", 2, "attn"][1].transpose(0, 1).numpy()
        assert np.abs(halves(blob(page, "codes-2"), *codes.shape) - codes).max() < 1e-2
        if family == "cbt":
            assert parts_of(page) == [["codes", "contract"]] * LAYERS
            contract = halves(blob(page, "contract-2"), HEADS, 64, count)
            found = contract.swapaxes(1, 2) @ contract / contract.sum(1)[..., None]
            wanted = ci.maps.contracted(cache, 2)[1].numpy()
            wanted /= wanted.sum(-1, keepdims=True)
            assert worst(found, wanted) < LIMIT
            assert "tokens</abbr> that share representatives" in page.html()
            assert data["most"][2] == pytest.approx(wanted.max((1, 2)), rel=1e-3)
        else:
            assert parts_of(page) == [["codes", "largest", "rows"]] * LAYERS
            steps = np.frombuffer(blob(page, "rows-2"), np.uint8).reshape(HEADS, 1, count)
            found = steps / 255 * halves(blob(page, "largest-2"), HEADS, 1, 1)
            assert worst(found[:, 0], cache["pi", 2, "attn"][1].numpy()) < LIMIT
            assert "the membership of each patch in the head" in page.html()
        few = model.run_with_cache(images, names_filter="hook_embed")[1]
        with pytest.raises(KeyError, match=r"hook_(pi|contract) of a .*names_filter.*attn\.hook_u"):
            ci.viz.explore(few, images)


def test_the_logit_lens_is_the_librarys(tmp_path, monkeypatch):
    lm = ci.load("crate-tiny-lm")
    text = "In the beginning was the Word"
    logits, cache = lm.run_with_cache(text)
    page, count = ci.viz.explore(cache, text), logits.shape[1]
    data = data_of(page)
    assert data["start"]["query"] == count - 1  # where the answer is
    for layer in (0, len(lm.blocks) - 1):
        raw = blob(page, f"lens-{layer}")
        ids = np.frombuffer(raw, "<u4")[: 5 * count].reshape(count, 5)
        shares = np.frombuffer(raw, "<f4")[5 * count : 10 * count].reshape(count, 5)
        table = ci.circuits.logit_lens(cache, position=4).table()
        table = table[table["layer"] == layer + 1]
        assert [data["answers"][str(token)] for token in ids[4]] == table["answer"].tolist()
        assert shares[4] == pytest.approx(table["probability"].to_numpy(), rel=1e-4)
    assert logits[0, 3].argmax().item() == ids[3, 0]  # the last layer is the model itself
    assert "".join(data["names"]).endswith("Word")
    assert ci.viz.explore(cache, lm.to_tokens(text)[0]).html() == page.html()
    monkeypatch.chdir(tmp_path)  # the code that the page prints makes the page
    exec(unescape(re.search(r"<pre><code>(.*?)</code>", page.html(), re.DOTALL)[1]), {})
    assert (tmp_path / "explore.html").read_text(encoding="utf-8") == page.html()


assert driven  # the fixture

STEPS = 10_000  # of a probability in the page


@pytest.mark.parametrize("name", ["crate", "crate-alpha", "crate-lm", "nanochat-crate", "tost"])
def test_what_codes_add_to_a_score_is_what_why_attends_says(name):
    if name in ("crate-lm", "nanochat-crate"):
        model, inputs = make_lm(name), torch.randint(47, (1, 11))
    else:
        model = make(name, stem="linear" if name == "tost" else None)
        inputs = torch.randn(1, 3, *model.cfg.image_size)
    _, cache = model.run_with_cache(inputs)
    page, (layer, head, query, key) = ci.viz.explore(cache, inputs), (1, 1, 7, 3)
    assert blob(page, "match-0") is None
    assert (blob(page, "match-1") is None) == (name in ("nanochat-crate", "tost"))
    if blob(page, "match-1") is None:
        return
    codes = cache["blocks.0.mlp.hook_post"][0].numpy()
    stored = np.unique(np.argsort(-codes, axis=1, kind="stable")[:, :16])
    q = halves(blob(page, "codes-1"), HEADS, len(codes), -1)[head]
    match = halves(blob(page, "match-1"), HEADS, len(stored), -1)[head]
    scale = halves(blob(page, "scale-1"), len(codes))
    pieces = ci.circuits.why_attends(model, inputs, layer, head, query, key).table("pieces")
    for side, token, other in (("query", query, key), ("key", key, query)):
        parts = pieces[(pieces["side"] == side) & (pieces["layer"] == 0)].set_index("atom")["part"]
        found = codes[token, stored] * (match @ q[other]) / scale[token]
        assert np.abs(found).max() > 1e-3
        wanted = parts.reindex(stored, fill_value=0.0).to_numpy()
        np.testing.assert_allclose(found, wanted, atol=5e-3 * np.abs(wanted).max())


def test_what_tokens_cost_is_what_is_lost_without_them(cache, images):
    """A token that is 0 costs nothing, and R falls by its cost without it."""
    found = data_of(ci.viz.explore(cache, images, sample=1))["costs"]
    for layer, own in enumerate(found):
        z = cache["resid_mid", layer][1].double()
        codes = torch.einsum("pd,kdc->kpc", z, cache.model.blocks[layer].attn.U.detach().double())
        for name, tokens in (("R", z[None]), ("Rc", codes)):
            whole = ci.measures.coding_rate(tokens, 0.1).sum()
            left = []
            for pos in range(len(z)):
                fewer = tokens.clone()
                fewer[:, pos] = 0
                left.append(float(whole - ci.measures.coding_rate(fewer, 0.1).sum()))
            np.testing.assert_allclose(own[name], left, rtol=6e-3)


def without(page):
    return data_of(page)["without"]


def explored(model, cache, inputs, sample=0):
    off = ci.circuits.switched_off(model, inputs[sample])
    return ci.viz.explore(cache, inputs, sample=sample, without=off)


def row(logits, own):
    """The page's row for one answer, from the logits of its own run."""
    shares = (logits[-1] if logits.ndim == 2 else logits).float().softmax(dim=-1)
    left, most = (round(STEPS * share.item()) for share in (shares[own], max(shares)))
    return [left, int(shares.argmax()), most]


def close(found, wanted):
    """Batches of copies and single runs differ in their last bits."""
    assert found[1] == wanted[1]
    assert all(abs(a - b) <= 1 for a, b in zip(found[::2], wanted[::2], strict=True))


@pytest.mark.parametrize("family", ["crate", "crate-alpha", "tost", "aot"])
def test_each_part_is_off_in_a_run_of_its_own(family, monkeypatch):
    monkeypatch.setattr("crate_interp.circuits.head_ablation._BATCH", 5)
    model = make(family, stem="linear") if family == "tost" else make(family)
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits, cache = model.run_with_cache(images)
        found = without(explored(model, cache, images, 1))
        own = int(logits[1].argmax())
        assert found["own"] == row(logits[1], own)[:2]

        def edited(point, change):
            return model.run_with_hooks(images[1:], fwd_hooks=[(point, change)])[0]

        for layer in range(model.cfg.n_layers):
            for head in range(model.cfg.n_heads):
                off = edit.zero(heads=head)
                wanted = row(edited(f"blocks.{layer}.attn.hook_z", off), own)
                close(found["heads"][layer][head], wanted)
        for layer, atoms in found["atoms"].items():
            for atom, one in atoms.items():
                off = edit.zero(atoms=int(atom))
                close(one, row(edited(f"blocks.{layer}.mlp.hook_post", off), own))
        height, width = model.cfg.patch_size
        for number, one in enumerate(found["patches"]):
            y, x = divmod(number, 20 // width)
            picture = images[1:].clone()
            mean = picture.mean(dim=(2, 3), keepdim=True)
            picture[:, :, y * height : (y + 1) * height, x * width : (x + 1) * width] = mean
            close(one, row(model(picture)[0], own))
    assert len(found["patches"]) == (6 // height) * (20 // width)
    least, most = {"aot": (0, 0), "tost": (40, 40)}.get(family, (41, 40 + 8 * model.cfg.n_layers))
    assert least <= sum(map(len, found["atoms"].values())) <= most
    used = {found["own"][1], *(one[1] for layer in found["heads"] for one in layer)}
    assert {str(number) for number in used} <= set(found["names"])


def test_a_click_shows_the_new_answer(driven, tmp_path):  # noqa: F811
    model = ci.load("crate-tiny-fashion")
    images = model.preprocess(ci.data.embedded("fashion")[:1]["image"])
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    page = explored(model, cache, images)
    found = without(page)
    with opened(driven, page.save(tmp_path / "explore.html")) as shown:
        words = lambda: shown.page.inner_text("#without-words")  # noqa: E731
        drawn(shown.page)
        state = shown.page.evaluate("({...explorer.state})")
        shares = np.array([[one[0] for one in layer] for layer in found["heads"]])
        place = state["layer"], state["head"]
        changes = abs(shares - found["own"][0])
        assert changes[place] == changes.max()  # the page opens on the head that matters most
        assert f"{shares[place] / STEPS:.1%}".replace("%", "\xa0%") in words()
        assert words().startswith("Without head")
        shown.page.click("label:has(input[name=off][value=none])")
        drawn(shown.page)
        assert words().startswith("The answer is “Ankle boot”")
        shown.page.click("label:has(input[name=off][value=atom])")
        drawn(shown.page)
        assert "Without atom" in words()  # the page opens on an atom that was switched off
        shown.page.evaluate("choose({atom: 10 ** 6})")
        drawn(shown.page)
        assert words() == f"L{state['layer']}A1000000 was not tested."
        shown.page.click("label:has(input[name=off][value=patch])")
        drawn(shown.page)
        assert words() == "Point at a patch to cover it with the mean colour."
        shown.page.hover("#surface")
        words_of = "byId('without-words').textContent"
        shown.page.wait_for_function(f"{words_of}.startsWith('Without patch')")
        shown.page.select_option("#over", "patches")
        drawn(shown.page)
        assert "off=patch&over=patches" in shown.page.evaluate("location.hash")
