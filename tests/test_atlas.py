"""ci.atlas and its pages: each column against a slow form, excerpts of the data, and refusals."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import crate_interp as ci
from atlases import LOOK, MODELS, ready
from conftest import LAYERS, make_lm
from crate_interp.circuits.excerpts import TILE, _tile
from crate_interp.data import open_data, part
from crate_interp.sweeps.atom_statistics import layer_sums


@pytest.mark.parametrize("name", MODELS)
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


def test_pages_of_images(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, data, top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path / "out")
    names = {"index.html", "atoms.csv", "patches", *(f"layer-{n}.html" for n in range(LAYERS))}
    names |= {"meta.json", *(f"{name}.parquet" for name in found.tables)}
    assert {path.name for path in index.parent.iterdir()} == names
    pages = {path.name: path.read_text() for path in index.parent.glob("*.html")}
    for name, content in pages.items():
        assert "<script" not in content and "http" not in content and "<kind" not in content, name
        for target, anchor in re.findall(r'href="([^"#]+)#?([^"]*)"', content):
            assert target in pages and (not anchor or f'id="{anchor}"' in pages[target])
        for source in re.findall(r'src="([^"]+)"', content):
            assert (index.parent / source).is_file()
    first = pages["layer-0.html"]
    assert (
        first.count("<article") == model.cfg.d_mlp
        and 'loading="lazy"' in first
        and "&lt;kind" in first
    )
    with Image.open(index.parent / "patches" / "L1A4.webp") as strip:
        assert strip.size == (TILE * len(found.top(1, 4)), TILE)
    found = ci.atlas(model, data, top=3, progress=False)
    before = {path: path.read_bytes() for path in index.parent.rglob("*.*")}
    ci.viz.atlas_pages(found, tmp_path / "out")
    assert before == {
        path: path.read_bytes() for path in index.parent.rglob("*.*")
    }  # a second time the same


def test_pages_of_texts_mark_the_token(tmp_path):
    lm = ci.load("crate-tiny-lm")
    texts = ["In the beginning was the Word, and the Word was with God.\n" * 20]
    found = ci.atlas(lm, texts, top=2, ablate=0, progress=False)
    page = (ci.viz.atlas_pages(found, tmp_path).parent / "layer-2.html").read_text()
    assert page.count("<article") == 512 and not (tmp_path / "patches").exists()
    tokens = lm.windows(texts)
    for atom in (0, 77):
        article = page.split(f'<article id="a{atom}">')[1].split("</article>")[0]
        marks = re.findall(r"<mark>(.*?)</mark>", article)
        top = found.top(2, atom)
        said = [
            lm.to_single_str_token(int(tokens[row.sample, row.token])) for row in top.itertuples()
        ]
        wanted = [
            word.replace("\n", "\u21b5").replace("<", "&lt;").replace(">", "&gt;") for word in said
        ]
        assert marks == wanted


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
    assert len(found.table()) == 12 * 384 and sum(pages.values()) < 30e6


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
