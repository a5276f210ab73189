"""ci.atlas and its pages: each column against a slow form, excerpts of the data, and refusals."""

import io
import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import crate_interp as ci
from atlases import LOOK, MODELS, ready
from browser import driven, looked_over, opened  # noqa: F401
from conftest import LAYERS, make_lm
from crate_interp.data import open_data, part
from crate_interp.models.preprocess import displayable
from crate_interp.sweeps.atom_sums import layer_sums
from crate_interp.viz.pages.atom_pages import SHOWN
from selection import few


@pytest.mark.parametrize("name", few(MODELS, 2))
def test_statistics_and_neighbours_against_a_slow_form(name):
    model, data = ready(name)
    found = ci.atlas(model, data, top=3, ablate=0, batch_size=2, progress=False)
    width = model.cfg.d_mlp
    assert len(found.table()) == LAYERS * width
    _, cache = model.run_with_cache(data)
    for layer, atom in [(layer, atom) for layer in range(LAYERS) for atom in (0, 4, width - 1)]:
        row, code = found.row(layer, atom), cache["post", layer][..., atom]
        assert row["firing_rate"] == pytest.approx((code > 0).float().mean().item())
        cosines = {
            (other, place): torch.cosine_similarity(
                model.blocks[layer].mlp.D[:, atom], model.blocks[other].mlp.D[:, place], dim=0
            ).item()
            for other in range(LAYERS)
            if other != layer
            for place in range(width)
        }
        best = max(cosines, key=cosines.get)
        assert row["nearest"].startswith(f"L{best[0]}A{best[1]} ")
        assert row["nearest_cosine"] == pytest.approx(cosines[best], abs=1e-5)
        top = found.top(layer, atom)
        largest = code.flatten().sort(descending=True).values[: len(top)].tolist()
        assert top["value"].tolist() == pytest.approx(largest, rel=1e-6)
    assert "atoms" in repr(found) and "<table" in found._repr_html_()


@pytest.mark.slow
def test_effects_of_halves_merge(tmp_path):
    model, data = ready("crate")
    data = torch.cat([data, data.flip(-1)])
    samples = open_data(data, model.preprocess)
    halves = [
        ci.atlas(model, part(samples, *ends), ablate=2, progress=False)
        for ends in ((0, 5), (5, 10))
    ]
    merged = halves[0].merge(halves[1])
    both = merged.table("ablations")
    assert set(both["sample"]) == {0, 2, 5, 7} and set(merged.table()["ablated"]) <= {0, 2, 4}
    for _, row in merged.table().query("ablated == 4").head(5).iterrows():
        parts = [half.row(row["layer"], row["atom"]) for half in halves]
        if all(one["ablated"] == 2 for one in parts):
            wanted = np.mean([one["ablation"] for one in parts])
            assert row["ablation"] == pytest.approx(wanted, rel=1e-9)
    total = sum(half.table("logits")["total"] for half in halves)
    np.testing.assert_allclose(merged.table("logits")["total"], total, rtol=1e-9)
    assert merged.table("logits")["n"].unique().tolist() == [4]
    loaded = ci.circuits.Atlas.load(merged.save(tmp_path))
    pd.testing.assert_frame_equal(loaded.table(), merged.table())
    assert loaded.headline() == merged.headline()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_overflows_nowhere(dtype):
    found = ci.atoms(make_lm("crate-lm").to(dtype), torch.randint(47, (2, 11)), progress=False)
    assert np.isfinite(found.table()["energy_share"]).all()
    sums = layer_sums(torch.full((1, 2, 3), 300.0, dtype=dtype), 0, 1, False)
    assert sums["squares"] == pytest.approx(2 * 300.0**2, rel=1e-2)


def carried(page, name):
    """The JSON that a page carries in a script of this id."""
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def atoms_of(folder, layer):
    """All atoms of a layer: those in its page, and those in the file beside it."""
    names = ["atom", "fires", "effect", "low", "high", "first_order", "ablated", "state"]
    names += ["raises", "lowers", "near", "tokens", "heights"]
    data = carried((folder / f"layer-{layer}.html").read_text(), "data")
    script = (folder / "layers" / f"layer-{layer}.js").read_text()
    rest = json.loads(script.removeprefix("more(").removesuffix(");"))
    assert len(data["atoms"]) == min(SHOWN, data["count"])
    assert len(data["atoms"]) + len(rest) == data["count"]
    return [dict(zip(names, row, strict=True)) for row in data["atoms"] + rest]


def test_the_images_of_an_atlas_are_those_of_the_data():
    model, data = ready("crate")
    images = ci.atlas(model, data, top=3, progress=False).table("images")
    assert images["sample"].tolist() == list(range(5))
    assert (images[["rows", "columns"]] == [3, 4]).all(axis=None)
    for sample, picture in zip(images["sample"], images["picture"], strict=True):
        stored = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
        wanted = (displayable(data[sample], model.cfg) * 255).round()
        assert np.array_equal(stored, wanted.astype(np.uint8))


def test_pages_of_images(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, data, top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path / "out")
    names = {"index.html", "atoms.csv", "images", "layers"}
    names |= {f"layer-{n}.html" for n in range(LAYERS)}
    names |= {"meta.json", *(f"{name}.parquet" for name in found.tables)}
    assert {path.name for path in index.parent.iterdir()} == names
    for page in index.parent.glob("*.html"):
        content = page.read_text()
        assert "http" not in content and "<kind" not in content, page.name
        assert "content-visibility: auto" not in content  # nothing waits to be scrolled to
        for target in re.findall(r'href="([^"#]+)[^"]*"', content):
            assert (index.parent / target).is_file(), (page.name, target)
    for layer in range(LAYERS):
        atoms = atoms_of(index.parent, layer)
        assert sorted(atom["atom"] for atom in atoms) == list(range(model.cfg.d_mlp))
        for atom in atoms:
            top = found.top(layer, atom["atom"])
            places = top[["sample", "token"]].to_numpy().tolist()
            assert [token[:2] for token in atom["tokens"]] == places
            values = [token[2] for token in atom["tokens"]]
            assert values == pytest.approx(top["value"].tolist(), rel=6e-3)
            for sample, _ in places:
                assert (index.parent / "images" / f"{sample}.webp").is_file()
        assert any("<kind" in atom["raises"] for atom in atoms)
    again = ci.atlas(model, data, top=3, progress=False)
    again.meta["seconds"] = found.meta["seconds"]
    before = {path: path.read_bytes() for path in index.parent.rglob("*.*")}
    ci.viz.atlas_pages(again, tmp_path / "out")
    assert before == {
        path: path.read_bytes() for path in index.parent.rglob("*.*")
    }  # a second time the same
    other = ci.atlas(model, data[:3], top=2, ablate=0, progress=False)
    ci.viz.atlas_pages(other, tmp_path / "out")  # takes the place of the earlier pages
    assert len(atoms_of(index.parent, 1)[0]["tokens"]) <= 2
    assert {path.name for path in (index.parent / "images").iterdir()} <= {
        f"{n}.webp" for n in range(3)
    }


def test_atoms_come_in_the_order_of_their_measured_effects_and_cls_is_said(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, torch.cat([data, data.flip(-1)]), top=3, progress=False)
    folder = ci.viz.atlas_pages(found, tmp_path).parent
    rows = carried((folder / "index.html").read_text(), "data")["atoms"]
    table = found.table().set_index(["layer", "atom"])
    assert len(rows) == len(table)
    assert tuple(rows[0][:2]) == found.lead()
    # lead, card and table have one number, of the samples that did not choose the atom
    for layer in (None, *range(LAYERS)):
        place = found.lead(layer)
        tried = found.table("ablations").set_index(["layer", "atom"]).loc[place]
        judges = tried.sort_values("sample")["ablation"].iloc[1::2]
        row = table.loc[place]
        assert row["ablation"] == pytest.approx(judges.mean()) and row["ablated"] == len(judges)
        assert f"the loss most: by {row['ablation']:+.2g} nats" in found.largest(layer)
        card = next(one for one in rows if tuple(one[:2]) == place)
        assert card[3] == pytest.approx(row["ablation"], rel=6e-3)
    whole = found.table("ablations").groupby(["layer", "atom"])["ablation"].agg(["mean", "size"])
    others = whole.index.difference([found.lead(layer) for layer in range(LAYERS)])
    for name, column in (("ablation", "mean"), ("ablated", "size")):
        wanted = whole.loc[others, column].to_numpy(float)
        assert table.loc[others, name].to_numpy(float) == pytest.approx(wanted)
    kinds = [(row[7] == "dense", not row[6]) for row in rows[1:]]
    assert kinds == sorted(kinds) and len(set(kinds)) == 4
    for dense, exact in sorted(set(kinds)):
        group = [row for row in rows[1:] if (row[7] == "dense", not row[6]) == (dense, exact)]
        column = "first_order" if exact else "ablation"
        sizes = [abs(table.loc[(row[0], row[1]), column]) for row in group]
        assert sizes == sorted(sizes, reverse=True)
        for row in group[:9]:
            wanted = table.loc[(row[0], row[1]), [column, f"{column}_low", f"{column}_high"]]
            wanted = [end if np.isfinite(end) else np.nan for end in wanted.to_numpy(float)]
            shown = np.array(row[3:6], dtype=float)  # None becomes NaN
            assert shown == pytest.approx(wanted, rel=6e-3, nan_ok=True)
    for row in rows[:20]:
        top = found.top(row[0], row[1])
        assert row[10] == top[["sample", "token"]].to_numpy().tolist()


@pytest.mark.slow
def test_a_patch_is_cut_from_its_image_and_cls_is_said(driven, tmp_path):  # noqa: F811
    model, data = ready("crate")
    # a colour for each patch, so that a drawn patch tells where it was cut
    colours = torch.linspace(0, 1, 12).view(1, 3, 4).repeat(3, 1, 1) * 0.8 + 0.1
    image = colours.repeat_interleave(2, dim=1).repeat_interleave(5, dim=2)
    found = ci.atlas(model, torch.stack([(image - 0.5) / 0.25] * 2), top=3, progress=False)
    folder = ci.viz.atlas_pages(found, tmp_path).parent
    with opened(driven, folder / "layer-1.html") as shown:
        page, seen = shown.page, set()
        page.locator("#more").click() if page.locator("#more").is_visible() else None
        page.wait_for_function(f"document.querySelectorAll('article').length == {model.cfg.d_mlp}")
        for atom in range(0, model.cfg.d_mlp, 5):
            article, top = page.locator(f"#a{atom}"), found.top(1, atom)
            on_cls = int((top["token"] == 0).sum())
            assert article.locator(".cls").count() == on_cls
            assert ("top tokens" in article.inner_text()) == (on_cls > 0)
            patches = article.locator(".strip-of i").all()
            for patch, token in zip(patches, top["token"], strict=True):
                if token == 0 or token in seen:
                    continue
                seen.add(token)
                pixels = np.asarray(Image.open(io.BytesIO(patch.screenshot())).convert("RGB"))
                middle = pixels[len(pixels) // 2, pixels.shape[1] // 2].astype(float)
                wanted = 255 * float(colours[0].flatten()[token - 1])
                assert np.abs(middle - wanted).max() < 3, (atom, token)
                at_edge = pixels[2, pixels.shape[1] // 2]  # the patch above, or beyond the edge
                above = 128 if token <= 4 else 255 * float(colours[0].flatten()[token - 5])
                assert np.abs(at_edge - above).max() < 3, (atom, token)
        assert len(seen) >= 3


@pytest.mark.slow
def test_atoms_are_sorted_filtered_and_reached_by_keys(driven, tmp_path):  # noqa: F811
    model, data = ready("crate")
    found = ci.atlas(model, torch.cat([data, data.flip(-1)]), top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path)
    table = found.table()
    with opened(driven, index) as shown:
        page, names = shown.page, shown.page.locator(".card .name")
        rows = carried(index.read_text(), "data")["atoms"]
        assert names.all_inner_texts() == [f"L{row[0]}A{row[1]}" for row in rows[:60]]
        page.select_option("#order", "often")
        rates = table.sort_values("firing_rate", ascending=False, kind="stable")["firing_rate"]
        best = names.first.inner_text()[1:].split("A")
        assert found.row(int(best[0]), int(best[1]))["firing_rate"] == rates.iloc[0]
        page.select_option("#layer", "1")
        assert all(name.startswith("L1A") for name in names.all_inner_texts())
        assert f"of {model.cfg.d_mlp} atoms" in page.locator("#count").inner_text()
        page.keyboard.press("/")
        page.keyboard.type("L1A7")
        assert names.first.inner_text() == "L1A7"
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/layer-1.html#a7")
        page.keyboard.press("j")
        page.wait_for_function("location.hash !== '#a7'")
        assert page.locator("#whole img").get_attribute("src").startswith("images/")
        page.keyboard.press("/")  # an atom that is in the other file
        last = atoms_of(index.parent, 1)[-1]["atom"]
        page.keyboard.type(f"L1A{last}")
        page.keyboard.press("Enter")
        page.wait_for_function(f"location.hash === '#a{last}'")
        assert page.locator("article").count() == model.cfg.d_mlp
        assert not shown.asked and not shown.wrong


@pytest.mark.slow
def test_pages_of_texts_box_and_shade_the_token(tmp_path):
    lm = ci.load("crate-tiny-lm")
    texts = ["In the beginning was the Word, and the Word was with God.\n" * 20]
    found = ci.atlas(lm, texts, top=2, ablate=0, progress=False)
    folder = ci.viz.atlas_pages(found, tmp_path).parent
    atoms = {atom["atom"]: atom for atom in atoms_of(folder, 2)}
    assert len(atoms) == lm.cfg.d_mlp and not (tmp_path / "images").exists()
    tokens = lm.windows(texts)
    for atom in (0, 77):
        top = found.top(2, atom)
        said = [
            lm.to_single_str_token(int(tokens[row.sample, row.token])) for row in top.itertuples()
        ]
        marks = [token[4] for token in atoms[atom]["tokens"]]
        assert marks == [word.replace("\n", "\u21b5") for word in said]
    line = carried((folder / "index.html").read_text(), "data")["atoms"][0][11][0]
    assert len(line) == 3 and "\n" not in "".join(line)


@pytest.mark.slow
def test_a_large_atlas_of_noise_is_small(tmp_path):
    """12 layers of 384 atoms; noise is what a picture format likes least."""
    torch.manual_seed(0)
    size = dict(d_model=384, n_layers=12, n_heads=6, image_size=64, patch_size=16, n_classes=7)
    model = ci.HookedCrate(
        ci.CrateConfig(family="crate", **size | {key: LOOK[key] for key in ("mean", "std")})
    ).eval()
    data = torch.randn(24, 3, 64, 64)
    found = ci.atlas(model, data, ablate=0, progress=False)
    ci.viz.atlas_pages(found, tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    pages = {name: size for name, size in sizes.items() if not name.endswith((".parquet", "json"))}
    # 300 bytes an atom in a file of its layer, 100 in the index, and the row of atoms.csv
    assert len(found.table()) == 12 * 384 and sum(pages.values()) < 12 * 384 * 900
    assert max(size for name, size in pages.items() if name.startswith("layer-")) < 400_000


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_shown_is_refused(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, data, ablate=0, progress=False)
    (tmp_path / "file").write_text("")
    for words, call in {
        "ablate=-1": lambda: ci.atlas(model, data, ablate=-1),
        "top=0": lambda: ci.atlas(model, data, top=0),
        "cannot write into": lambda: ci.viz.atlas_pages(found, tmp_path / "file" / "o"),
        "has the atoms 0 to": lambda: found.row(0, 999),
        "has the layers": lambda: found.row(9, 0),
        "has no logits": lambda: ci.atlas(autoencoder(), data),
        "windows have one token": lambda: ci.atlas(make_lm(), torch.zeros(3, 1, dtype=torch.long)),
        "effect='x'": lambda: found.clear("x"),
        "cannot measure Linear": lambda: ci.atlas(torch.nn.Linear(2, 2), data),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def autoencoder():
    size = dict(
        d_model=12,
        n_layers=1,
        n_heads=2,
        image_size=8,
        patch_size=4,
        decoder_n_layers=1,
        decoder_n_heads=2,
    )
    return ci.HookedCrateMAE(ci.CrateConfig(family="crate-mae", **size)).eval()
