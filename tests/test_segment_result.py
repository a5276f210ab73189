"""ci.segment: its result, its page, and what is refused."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import crate_interp as ci
from browser import driven, looked_over, opened  # noqa: F401
from crate_interp.measures import mass_mask
from segments import GRID, dataset, model


def test_scores_of_every_head_are_kept_and_saved(tmp_path):
    result = ci.sweep(model(), dataset(5, empty=(2,)), probes="segmentation", progress=False)
    table = ci.SweepResult.load(result.save(tmp_path)).head_samples()
    assert table.equals(result.head_samples()) and len(table) == 5 * 2 * 3
    assert table[table["sample"] == 2].filter(like="segmentation").isna().all(axis=None)
    for means in (
        result.heads(),
        result.layers(),
    ):  # sample 1 is followed by the one without an object
        assert (means["n"] == 4 - means["statistic"].str.contains("_other")).all()
    assert (
        result.layers()["mean"].notna().all()
        and ci.sweep(model(), dataset(3), progress=False).head_samples().empty
    )


QUIET: dict = {"progress": False}


def test_hooks_on_the_pattern_are_seen():
    """Attention moved to the first patch alone."""
    net, data = model(), dataset()

    def first_patch(pattern, hook):
        return torch.zeros_like(pattern).index_fill(-1, torch.tensor([1]), 1.0)

    with net.hooks([("blocks.1.attn.hook_pattern", first_patch)]):
        found = ci.sweep(net, data, probes="segmentation", progress=False).head_samples()
    masks = [np.asarray(mask) > 0 for mask in data["mask"]]
    wanted = [mask[:4, :5].sum() / (mask.sum() + (~mask[:4, :5]).sum()) for mask in masks]
    rows = found.query("layer == 1")["segmentation.mass_pixel"].to_numpy().reshape(7, 3)
    np.testing.assert_allclose(rows, np.array(wanted)[:, None].repeat(3, 1), rtol=1e-6)


def inside(path, size):
    """The mask whose border an SVG path is, by crossing vertical edges from the left."""
    flips = np.zeros((size[1], size[0] + 1), dtype=int)
    for x, y, length in re.findall(r"M(\d+) (\d+)v(\d+)", path):
        flips[int(y) : int(y) + int(length), int(x)] += 1
    return flips.cumsum(axis=1)[:, :-1] % 2 == 1


def overlays(page, sample):
    """What lies over an image of a page: the mask of the data, the map, both masks."""
    tiles = re.findall(rf'<div class="sample-{sample}"[^>]*>(.*?)</div>', page, re.DOTALL)
    found = []
    for tile in tiles[1:]:
        picture = re.search(r'src="data:image/png;base64,([^"]+)"', tile)
        if picture:
            found.append(np.asarray(Pillow.open(io.BytesIO(base64.b64decode(picture[1])))))
        for width, height, path in re.findall(r'viewBox="0 0 (\d+) (\d+)".*?d="([^"]*)"', tile):
            found.append(inside(path, (int(width), int(height))))
    return found


@pytest.mark.slow
def test_the_page_shows_the_images_masks_and_maps_of_the_result(tmp_path):
    net, data = model(), dataset(9, binary=False)
    result = ci.segment(net, data, untrained=0, mass=0.5, progress=False)
    page = ci.viz.segment_page(result, tmp_path / "page").read_text()
    loaded = ci.SegmentResult.load(tmp_path / "page")
    assert ci.viz.segment_page(loaded, tmp_path / "again").read_text() == page
    examples = result.table("examples")
    ranked = result.table("images").sort_values("score", ascending=False, kind="stable")["score"]
    assert [len(examples[examples["group"] == name]) for name in ("best", "median", "worst")] == [
        3, 2, 3
    ]  # fmt: skip
    assert examples["score"].tolist() == ranked.iloc[[0, 1, 2, 3, 4, 8, 7, 6]].tolist()
    for row in examples.to_dict("records"):
        assert f"image {row['sample']}, label kind" in page
        assert base64.b64encode(row["picture"]).decode() in page
        true, map, again, found = overlays(page, row["sample"])
        wanted = np.asarray(data[row["sample"]]["mask"])
        assert np.array_equal(true, (wanted != 0) & (wanted != 255))
        assert np.array_equal(again, true)
        values = np.array(row["map"]).reshape(GRID)
        assert map.max() == map.flat[values.argmax()] and map.shape == GRID
        mask = mass_mask(torch.tensor(row["map"]), 0.5).numpy().reshape(GRID)
        assert np.array_equal(found, mask)


@pytest.mark.slow
def test_the_page_of_scores_fits_both_widths_and_schemes(driven, tmp_path):  # noqa: F811
    result = ci.segment(model(), dataset(9), untrained=1, progress=False)
    page = ci.viz.segment_page(result, tmp_path)
    assert looked_over(driven, page) == []
    with opened(driven, page, 1200) as shown:  # beside the map of heads; the others are folded
        assert shown.page.locator("table:not(.heat):visible").count() == 1
        heads = result.table("heads").query("rule == 'mass' and resolution == 'token'")
        values = [float(text) for text in shown.page.locator(".heat td").all_inner_texts()]
        np.testing.assert_allclose(values, heads["value"], atol=0.0051)


def test_probes_of_different_shapes_share_the_table_of_heads():
    def some(block, acts):
        return {
            "one": torch.ones(len(acts["hook_resid_mid"]), 2),
            "two": torch.full((len(acts["hook_resid_mid"]), 5), 2.0),
        }

    facts = {name: ("", 0.0, 2.0, "A number.") for name in ("one", "two")}
    probe = ci.Probe(
        name="own",
        points=("hook_resid_mid",),
        measure=some,
        statistics=facts,
        per_head=("one", "two"),
    )
    table = ci.sweep(
        model(), dataset(3), probes=[probe, "segmentation"], progress=False
    ).head_samples()
    assert len(table) == 3 * 2 * 5 and not table.duplicated(["sample", "layer", "head"]).any()
    assert (table["own.one"].notna() == (table["head"] < 2)).all() and (table["own.two"] == 2).all()
    assert (table["segmentation.mass_token"].notna() == (table["head"] < 3)).all()


def test_a_network_whose_attention_is_nan_is_no_score():
    with model().hooks([("blocks.1.attn.hook_q", lambda q, hook: q * torch.nan)]) as net:
        with pytest.raises(ValueError, match="segmentation in layer 1, samples 0 to 6: the map"):
            ci.segment(net, dataset(), untrained=0, progress=False)
