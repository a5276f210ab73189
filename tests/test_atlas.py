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
from crate_interp.circuits.atlases.excerpts import TILE, _tile, _webp
from crate_interp.data import open_data, part
from crate_interp.sweeps.atom_statistics import layer_sums
from crate_interp.viz.pages.atlas_page import BLOCK, write_sheets
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
def test_in_batches_and_merged(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, data, ablate=2, progress=False)
    again = ci.atlas(model, data, ablate=2, batch_size=2, progress=False)
    np.testing.assert_allclose(found.table()["max"], again.table()["max"], rtol=1e-6)
    np.testing.assert_allclose(
        found.table()["first_order"], again.table()["first_order"], rtol=1e-4, atol=1e-7
    )
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
        parts = [half.row(row["layer"], row["atom"])["ablation"] for half in halves]
        assert row["ablation"] == pytest.approx(np.mean(parts), rel=1e-9)
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
    assert layer_sums(
        torch.full((1, 2, 3), 300.0, dtype=dtype), 0, 1, False
    ).squares == pytest.approx(2 * 300.0**2, rel=1e-2)


def test_tiles_are_the_patch_its_neighbours_and_a_box():
    picture = np.random.default_rng(0).integers(0, 256, (6, 20, 3), dtype=np.uint8)
    assert np.array_equal(
        np.asarray(_tile(picture, 0, (2, 5))),
        np.asarray(Image.fromarray(picture).resize((TILE, TILE), Image.Resampling.BILINEAR)),
    )
    # row 1, column 2: rows 2 and 3, columns 10 to 14
    tile = np.asarray(_tile(picture, 1 + 1 * 4 + 2, (2, 5)))
    around = np.asarray(
        Image.fromarray(picture[0:6, 5:20]).resize((TILE, TILE), Image.Resampling.NEAREST)
    )
    inside = np.s_[TILE // 3 + 1 : TILE - TILE // 3 - 1, TILE // 3 + 1 : TILE - TILE // 3 - 1]
    assert np.array_equal(tile[inside], around[inside]) and np.array_equal(
        tile[: TILE // 4], around[: TILE // 4]
    )
    assert tuple(tile[TILE // 3 - 1, TILE // 2]) == (255, 120, 0)
    corner = np.asarray(_tile(picture, 1, (2, 5)))
    assert (corner[0] == 128).all()  # beyond the edge


def carried(page, name):
    """The JSON that a page carries in a script of this id."""
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def test_pages_of_images(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, data, top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path / "out")
    names = {"index.html", "atoms.csv", "patches", "images"}
    names |= {f"layer-{n}.html" for n in range(LAYERS)}
    names |= {"meta.json", *(f"{name}.parquet" for name in found.tables)}
    assert {path.name for path in index.parent.iterdir()} == names
    pages = {path.name: path.read_text() for path in index.parent.glob("*.html")}
    for name, content in pages.items():
        assert "http" not in content and "<kind" not in content, name
        for target, anchor in re.findall(r'href="([^"#]*)#?([^"]*)"', content):
            page = pages[target or name]
            assert not anchor or f'id="{anchor}"' in page, (name, target, anchor)
        for source in re.findall(r"url\((patches/[^)]+)\)", content):
            assert (index.parent / source).is_file()
        for sample in re.findall(r"data-s=(\d+)", content):
            assert (index.parent / "images" / f"{sample}.webp").is_file()
    first = pages["layer-0.html"]
    assert first.count("<article") == model.cfg.d_mlp and "&lt;kind" in first
    with Image.open(index.parent / "patches" / "L1-0.webp") as sheet:
        assert sheet.size == (3 * TILE, min(model.cfg.d_mlp, BLOCK) * TILE)
    again = ci.atlas(model, data, top=3, progress=False)
    again.meta["seconds"] = found.meta["seconds"]
    before = {path: path.read_bytes() for path in index.parent.rglob("*.*")}
    ci.viz.atlas_pages(again, tmp_path / "out")
    assert before == {
        path: path.read_bytes() for path in index.parent.rglob("*.*")
    }  # a second time the same


def test_a_sheet_holds_each_atoms_patches_in_its_row(tmp_path):
    random = np.random.default_rng(0)
    colours = {atom: random.integers(0, 256, (2, 3), dtype=np.uint8) for atom in (0, 5, 63, 64, 70)}
    pictures = {}
    for atom, own in colours.items():
        tiles = [Image.fromarray(np.full((TILE, TILE, 3), colour, np.uint8)) for colour in own]
        pictures[atom] = [_webp(tile) for tile in tiles]
    write_sheets(pictures, 3, tmp_path, 2)
    for atom, own in colours.items():
        with Image.open(tmp_path / "patches" / f"L2-{atom // BLOCK}.webp") as sheet:
            drawn = np.asarray(sheet.convert("RGB")).astype(int)
        for rank, colour in enumerate(own):
            middle = drawn[atom % BLOCK * TILE + TILE // 2, rank * TILE + TILE // 2]
            assert np.abs(middle - colour).max() <= 12, (atom, rank)
    assert drawn.shape == (7 * TILE, 3 * TILE, 3)


def test_atoms_come_in_the_order_of_their_measured_effects_and_cls_is_said(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, torch.cat([data, data.flip(-1)]), top=3, progress=False)
    folder = ci.viz.atlas_pages(found, tmp_path).parent
    rows = carried((folder / "index.html").read_text(), "atoms")["atoms"]
    table = found.table().set_index(["layer", "atom"])
    assert len(rows) == len(table)
    exact = [row for row in rows if row[6]]
    assert rows[: len(exact)] == exact and len(exact) == (table["ablated"] > 0).sum()
    for group, column in ((exact, "ablation"), (rows[len(exact) :], "first_order")):
        sizes = [abs(table.loc[(row[0], row[1]), column]) for row in group]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) > 10
        for row in group[:9]:
            wanted = table.loc[(row[0], row[1]), [column, f"{column}_low", f"{column}_high"]]
            wanted = [end if np.isfinite(end) else None for end in wanted.to_numpy(float)]
            assert row[3:6] == pytest.approx(wanted, rel=6e-3)
    for row in rows[:20]:
        top = found.top(row[0], row[1])
        assert row[10] == [int(token == 0) for token in top["token"]]
    layer = (folder / "layer-1.html").read_text()
    for atom in range(model.cfg.d_mlp):
        article = layer.split(f'<article id="a{atom}">')[1].split("</article>")[0]
        on_cls = int((found.top(1, atom)["token"] == 0).sum())
        assert article.count("class=cls") == on_cls
        assert ("top tokens" in article) == (on_cls > 0)


@pytest.mark.slow
def test_atoms_are_sorted_filtered_and_reached_by_keys(driven, tmp_path):  # noqa: F811
    model, data = ready("crate")
    found = ci.atlas(model, torch.cat([data, data.flip(-1)]), top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path)
    table = found.table()
    with opened(driven, index) as shown:
        page, names = shown.page, shown.page.locator(".card .name")
        rows = carried(index.read_text(), "atoms")["atoms"]
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
        assert not shown.asked and not shown.wrong


@pytest.mark.slow
def test_the_pages_of_an_atlas_fit_both_widths_and_schemes(driven, tmp_path):  # noqa: F811
    model, data = ready("crate")
    index = ci.viz.atlas_pages(ci.atlas(model, data, top=3, ablate=0, progress=False), tmp_path)
    for page in (index, index.parent / "layer-1.html"):
        assert looked_over(driven, page) == []
    with opened(driven, index.parent / "layer-1.html") as shown:  # nothing waits to be scrolled to
        last = shown.page.locator("main > article .strip-of i").last
        blank = last.screenshot()
        assert len(np.unique(np.asarray(Image.open(io.BytesIO(blank)).convert("L")))) > 8
        assert "content-visibility: auto" not in shown.page.content()


@pytest.mark.slow
def test_pages_of_texts_box_and_shade_the_token(tmp_path):
    lm = ci.load("crate-tiny-lm")
    texts = ["In the beginning was the Word, and the Word was with God.\n" * 20]
    found = ci.atlas(lm, texts, top=2, ablate=0, progress=False)
    folder = ci.viz.atlas_pages(found, tmp_path).parent
    page = (folder / "layer-2.html").read_text()
    assert page.count("<article") == lm.cfg.d_mlp and not (tmp_path / "patches").exists()
    tokens = lm.windows(texts)
    for atom in (0, 77):
        article = page.split(f'<article id="a{atom}">')[1].split("</article>")[0]
        marks = re.findall(r'<mark style="--share: ([\d.]+)">(.*?)</mark>', article)
        top = found.top(2, atom)
        said = [
            lm.to_single_str_token(int(tokens[row.sample, row.token])) for row in top.itertuples()
        ]
        wanted = [
            word.replace("\n", "\u21b5").replace("<", "&lt;").replace(">", "&gt;") for word in said
        ]
        assert [word for _, word in marks] == wanted
        shares = (top["value"] / top["value"].max()).tolist()
        assert [float(share) for share, _ in marks] == pytest.approx(shares, abs=0.006)
    line = carried((folder / "index.html").read_text(), "atoms")["atoms"][0][11][0]
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
    # 0.48 bytes a pixel of noise: a tile has 48 x 48 of them
    tiles = 12 * 384 * 9
    assert len(found.table()) == 12 * 384 and sum(pages.values()) < 0.48 * 48 * 48 * tiles


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
        "HookedCrateMAE has no logits": lambda: ci.atlas(autoencoder(), data),
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
