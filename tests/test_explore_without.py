"""The explorer's answers without a head, an atom or a patch. Skips a test without a browser."""

import json
import re

import pytest
import torch

import crate_interp as ci
from browser import drawn, driven, opened
from conftest import make

assert driven  # the fixture

STEPS = 10_000  # of a probability in the page


def without(page):
    found = re.search(r'id="data">(.*?)</script>', page.html(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])["without"]


def explored(model, cache, inputs, sample=0):
    off = ci.circuits.switched_off(model, inputs[sample])
    return ci.viz.explore(cache, inputs, sample=sample, without=off)


def row(logits, own):
    """The page's row for one answer, from the logits of its own run."""
    shares = (logits[-1] if logits.ndim == 2 else logits).float().softmax(dim=-1)
    return [
        round(STEPS * shares[own].item()),
        int(shares.argmax()),
        round(STEPS * max(shares).item()),
    ]


def close(found, wanted):
    """Batches of copies and single runs differ in their last bits."""
    assert found[1] == wanted[1] and all(
        abs(a - b) <= 1 for a, b in zip(found[::2], wanted[::2], strict=True)
    )


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

                def no_head(z, hook, head=head):
                    z[:, :, head] = 0
                    return z

                wanted = row(edited(f"blocks.{layer}.attn.hook_z", no_head), own)
                close(found["heads"][layer][head], wanted)
        for layer, atoms in found["atoms"].items():
            for atom, one in atoms.items():

                def no_atom(code, hook, atom=int(atom)):
                    code[..., atom] = 0
                    return code

                close(one, row(edited(f"blocks.{layer}.mlp.hook_post", no_atom), own))
        height, width = model.cfg.patch_size
        for number, one in enumerate(found["patches"]):
            y, x = divmod(number, 20 // width)
            picture = images[1:].clone()
            picture[:, :, y * height : (y + 1) * height, x * width : (x + 1) * width] = (
                picture.mean(dim=(2, 3), keepdim=True)
            )
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
        assert words().startswith("The answer is “Ankle boot”")
        shown.page.click("label:has(input[name=off][value=head])")
        drawn(shown.page)
        state = shown.page.evaluate("({...explorer.state})")
        left = found["heads"][state["layer"]][state["head"]][0] / STEPS
        assert f"{left:.0%}".replace("%", " %") in words() and "Without head" in words()
        shown.page.click("label:has(input[name=off][value=atom])")
        drawn(shown.page)
        assert "Without atom" in words()  # the page opens on an atom that was switched off
        shown.page.click("label:has(input[name=off][value=patch])")
        drawn(shown.page)
        assert words() == "Point at a patch to cover it with the mean colour."
        shown.page.hover("#surface")
        shown.page.wait_for_function(
            "byId('without-words').textContent.startsWith('Without patch')"
        )
        shown.page.select_option("#over", "patches")
        drawn(shown.page)
        assert "off=patch&over=patches" in shown.page.evaluate("location.hash")
