"""The pages of head ablations and of atoms hold the numbers of their results."""

import re

import pytest
import torch

import crate_interp as ci
from conftest import HEADS, LAYERS, make, make_lm
from crate_interp.circuits.atlases.excerpts import excerpts
from crate_interp.questions.batches import samples_of
from crate_interp.viz.pages.atom_pages import CARDS

QUIET = {"progress": False}


@pytest.fixture(scope="module")
def model():
    return make(labels=[f"c{number}" for number in range(11)], n_classes=11)


@pytest.fixture(scope="module")
def images():
    return torch.randn(7, 3, 6, 20, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def ablated(model, images):
    return ci.ablate_heads(model, (images, torch.arange(7)), **QUIET)


def test_the_map_of_heads_has_their_drops_and_opens_them(ablated, tmp_path):
    table = ablated.heads().set_index(["layer", "head"])
    page = ci.viz.ablation_page(ablated, tmp_path / "a", explorer="explore.html")
    text = page.read_text()
    found = re.findall(r'href="explore.html#layer=(\d)&amp;head=(\d)">([-+.\de]+)</a>', text)
    assert [(int(layer), int(head)) for layer, head, _ in found] == list(table.index)
    for layer, head, drop in found:
        assert drop == f"{table.loc[(int(layer), int(head)), 'drop']:+.2g}"
    assert text.count("class=faint") == (~(table["p"] <= 0.05)).sum()
    assert ("Crossed out: no effect" in text) == ("class=faint" in text)
    assert ci.HeadAblation.load(tmp_path / "a").heads().equals(ablated.heads())
    assert (tmp_path / "a" / "heads.png").exists()
    plain = ci.viz.ablation_page(ablated, tmp_path / "b").read_text()
    assert "explore.html" not in plain and plain.count("<td style=") == LAYERS * HEADS
    for wrong in ("../explore.html", "javascript:alert(1)", "explore"):
        with pytest.raises(ValueError, match="give the name of a page beside this one"):
            ci.viz.ablation_page(ablated, tmp_path / "c", explorer=wrong)
    assert not (tmp_path / "c").exists()


def test_the_cards_are_of_the_atoms_with_most_energy(model, images, tmp_path):
    result = ci.atoms(model, images, top=5, **QUIET)
    places = result.table("top").query("rank < 4")
    shown = excerpts(places, model, samples_of(model, images), False)
    text = ci.viz.atoms_page(result, tmp_path, excerpts=shown).read_text()
    table = result.table()
    cards = re.findall(r'<b class="name">L(\d)A(\d+)</b><span class="quiet">on at ([\d.]+)%', text)
    for layer in range(LAYERS):
        rows = table[(table["layer"] == layer) & (table["state"] == "")]
        best = rows.sort_values("energy_share", ascending=False, kind="stable").head(CARDS)
        own = [(int(atom), rate) for at, atom, rate in cards if int(at) == layer]
        rates = [f"{100 * rate:.1f}" for rate in best["firing_rate"]]
        assert own == list(zip(best["atom"], rates, strict=True))
    assert text.count('<img src="data:image/png;base64,') > len(cards)
    assert text.count('class="octaves"') == len(cards)
    assert ci.AtomResult.load(tmp_path).table().equals(table)


def test_texts_have_contexts_and_without_excerpts_tokens_are_named(tmp_path):
    lm, tokens = make_lm("crate-lm"), torch.randint(47, (5, 13))
    result = ci.atoms(lm, tokens, top=4, **QUIET)
    named = ci.viz.atoms_page(result, tmp_path / "a").read_text()
    row = result.top(0, int(re.search(r"L0A(\d+)</b>", named)[1])).to_dict("records")[0]
    assert f"sample {row['sample']}, token {row['token']}: {row['value']:.3g}" in named
    shown = excerpts(result.table("top"), lm, samples_of(lm, tokens), False)
    text = ci.viz.atoms_page(result, tmp_path / "b", excerpts=shown).read_text()
    assert "<mark>" in text and "sample 0, token" not in text
