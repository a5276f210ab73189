"""ci.segment: its result, its page, and what is refused."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from datasets import ClassLabel
from PIL import Image as Pillow

import crate_interp as ci
from browser import driven, looked_over, opened  # noqa: F401
from conftest import refuses
from crate_interp.measures import mass_mask
from crate_interp.segmentation.result import merged_examples
from crate_interp.viz.pages.page import outline
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


def test_unscaled_maps_are_the_papers():
    net, data = model(), dataset()
    options = dict(untrained=0, progress=False)
    paper, own = (
        ci.segment(net, data, scaled=False, cls_key=False, **options),
        ci.segment(net, data, **options),
    )
    top = [result.layers("top")["value"].to_numpy() for result in (paper, own)]
    np.testing.assert_array_equal(*top)  # neither scale nor CLS changes an order
    sizes = [result.layers("mass")["value"].to_numpy() for result in (paper, own)]
    assert (sizes[0] != sizes[1]).any()


QUIET: dict = {"progress": False}


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_judged_is_refused_before_work_starts():
    """Even one forward would stop the test, so nothing is forecast either."""
    net, data = model(), dataset()

    def forward(tensor, hook):
        raise AssertionError("work has started")

    net.add_hook("hook_embed", forward)
    lm = ci.HookedCrateLM(
        ci.CrateConfig(family="crate-lm", d_model=12, n_layers=1, n_heads=2, n_ctx=5, d_vocab=7)
    )
    for words, call in {
        "the data has none": lambda: ci.segment(net, data.remove_columns("mask"), progress=False),
        "model of images": lambda: ci.segment(lm, torch.zeros(3, 5, dtype=torch.long)),
        "cannot measure Linear": lambda: ci.segment(torch.nn.Linear(2, 2), data),
        "untrained=-1": lambda: ci.segment(net, data, untrained=-1),
        "mass=0": lambda: ci.segment(net, data, mass=0.0),
        "fraction=2": lambda: ci.segment(net, data, fraction=2.0),
        "untrained=True": lambda: ci.segment(net, data, untrained=True),
        "mass='a'": lambda: ci.segment(net, data, mass="a"),
        "fraction=None": lambda: ci.segment(net, data, fraction=None),
        r"query=\(1, 1\)": lambda: ci.segment(net, data, query=(1, 1)),
        "batch_size=0": lambda: ci.segment(net, data, batch_size=0),
        "3 of 4 images have an object": lambda: ci.segment(net, dataset(4, empty=(1,)), **QUIET),
        "3 of 3 images have an object": lambda: ci.segment(net, data, limit=3, **QUIET),
        "0 of 5 images have an object": lambda: ci.segment(
            net, dataset(5, empty=range(5)), **QUIET
        ),
    }.items():
        refuses(words, call)


def test_a_query_that_is_not_there_and_a_cache_without_masks_are_refused():
    net, data = model(), dataset()
    refuses("query=7: there are 7 tokens", lambda: ci.segment(net, data, query=7, progress=False))
    with pytest.raises(ValueError, match="has none: ci.sweep takes"):
        ci.probe(net.run_with_cache(net.preprocess(data["image"]))[1], "segmentation")


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


def test_the_border_of_a_mask_is_all_edges_between_on_and_off():
    mask = np.random.default_rng(0).random((7, 9)) < 0.5
    path = outline(mask)
    assert np.array_equal(inside(path, (9, 7)), mask)
    turned = path.replace("h", "!").replace("v", "h").replace("!", "v")
    turned = re.sub(r"M(\d+) (\d+)", r"M\2 \1", turned)  # the horizontal edges, as vertical ones
    assert np.array_equal(inside(turned, (7, 9)), mask.T)
    assert outline(np.zeros((2, 3), dtype=bool)) == ""
    assert outline(np.ones((2, 3), dtype=bool)) == "M0 0h3M0 2h3M0 0v2M3 0v2"


def test_merged_examples_are_the_extremes_and_the_middle_of_both():
    net, data = model(), dataset(18)
    halves = [
        ci.segment(net, data.select(rows), untrained=0, progress=False).table("examples")
        for rows in (range(9), range(9, 18))
    ]
    merged = merged_examples(halves[0], halves[1].assign(sample=halves[1]["sample"] + 9), {})
    scores = np.sort(np.concatenate([half["score"] for half in halves]))[::-1]
    groups = {name: merged[merged["group"] == name]["score"] for name in set(merged["group"])}
    assert groups["best"].tolist() == scores[:3].tolist()
    assert groups["worst"].tolist() == scores[:-4:-1].tolist()
    middles = np.sort(np.concatenate([half[half["group"] == "median"]["score"] for half in halves]))
    assert sorted(groups["median"]) == middles[1:3].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "low, high, excess, verdict",
    [
        (0.9, 0.95, 0.1, "finds objects: Jaccard index"),
        (0.9, 0.95, -0.1, "finds objects, no better than a map of local variance (0.300): Jacc"),
        (0.9, 0.95, -0.9, "finds objects, worse than a map of local variance (0.300): Jaccard"),
        (0.01, 0.95, 0.1, "may find objects (this data does not decide)"),
        (0.01, 0.02, 0.1, "does not find objects"),
    ],
)
def test_the_page_begins_with_what_was_found(tmp_path, monkeypatch, low, high, excess, verdict):
    result = ci.segment(model(), dataset(8), untrained=1, progress=False)
    result.stored["examples"] = result.stored["examples"].iloc[:0]
    images = result.table("images").assign(layer=1, head=2)
    row = result.overall() | {"low": low, "high": high, "centre": 0.4, "head_layer": 1, "head": 2}
    row |= {"excess_low": excess, "excess_high": excess + 0.4, "strongest": "local_variance"}
    row["local_variance"] = 0.3
    monkeypatch.setattr(type(result), "overall", lambda *_: row)
    result._computed["images"] = images
    page = ci.viz.segment_page(result, tmp_path).read_text()
    finding = page.split('<div class="finding">')[1].split("</div>")[0]
    finding = re.sub("<[^>]*>", "", finding)  # words with meanings
    assert f"One head (L1H2) {verdict}" in finding and "best blind guess" in finding
    blind = [row[name] for name in ("centre", "all_foreground", "other_image", "random")]
    assert f"{max(blind):.3f}, untrained {row['untrained']:.3f}" in finding
    assert page.index("finding") < page.index("<table")  # numbers come after what they say


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


def test_labels_are_called_what_the_data_calls_them():
    data = dataset(6).remove_columns("label").add_column("label", [0, 1, 0, 1, 0, 1])
    data = data.cast_column("label", ClassLabel(names=["cat", "dog"]))
    net = model(labels=["one", "two", "three", "four", "five"])
    found = ci.segment(net, data, untrained=0, progress=False).table("images")
    assert list(found["label"]) == ["cat", "dog"] * 3


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
