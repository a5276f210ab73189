"""ci.segment: its result, its page, and what is refused."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from datasets import ClassLabel
from PIL import Image as Pillow

import crate_interp as ci
from crate_interp.measures import mass_mask
from segments import GRID, dataset, model


def test_batches_do_not_matter_and_a_second_run_is_the_same(tmp_path):
    net, data = model(), dataset(6, binary=False)
    folders = []
    for name, batch_size in (("one", 2), ("two", 2), ("three", 5)):
        result = ci.segment(net, data, batch_size=batch_size, progress=False)
        ci.viz.segment_page(result, tmp_path / name)
        folders.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert folders[0] == folders[1]
    tables = {f"{table}.parquet" for table in result.tables}
    assert set(folders[0]) == {"segment.html", "meta.json", *tables}
    meta = json.loads(folders[0]["meta.json"])
    assert meta["probes"]["segmentation"]["settings"]["mass"] == 0.6
    table = ci.segment(net, data, batch_size=2, progress=False).table()
    np.testing.assert_allclose(table["value"], result.table()["value"], rtol=1e-6)


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


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_judged_is_refused_before_work_starts():
    """Even one forward would stop the test."""
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
        "3 of 4 images have an object": lambda: ci.segment(net, dataset(4, empty=(1,))),
        "3 of 3 images have an object": lambda: ci.segment(net, data, limit=3),
        "0 of 5 images have an object": lambda: ci.segment(net, dataset(5, empty=range(5))),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_a_query_that_is_not_there_and_a_cache_without_masks_are_refused():
    net, data = model(), dataset()
    with pytest.raises(ValueError, match="query=7: there are 7 tokens"):
        ci.segment(net, data, query=7, progress=False)
    with pytest.raises(ValueError, match="has none: use ci.sweep on data with masks"):
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


def test_the_page_escapes_what_images_are_called(tmp_path):
    net, data = model(), dataset(6)
    bad = "<script>alert(1)</script>" * 9
    data = data.remove_columns("label").add_column("label", [[bad], None, [bad], [bad], [], [bad]])
    result = ci.segment(net, data, untrained=0, progress=False)
    page = ci.viz.segment_page(result, tmp_path).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


def overlays(page, sample):
    """The tiles over an image of a page: the mask of the data, the map, the mask made of it."""
    found = re.findall(
        rf'<div class="sample-{sample}"[^>]*><img alt="" src="data:image/png;base64,([^"]+)"', page
    )
    return [np.asarray(Pillow.open(io.BytesIO(base64.b64decode(text)))) for text in found]


def test_the_page_shows_the_images_masks_and_maps_of_the_result(tmp_path):
    net, data = model(), dataset(7, binary=False)
    result = ci.segment(net, data, untrained=0, mass=0.5, progress=False)
    page = ci.viz.segment_page(result, tmp_path / "page").read_text()
    loaded = ci.SegmentResult.load(tmp_path / "page")
    assert ci.viz.segment_page(loaded, tmp_path / "again").read_text() == page
    examples = result.table("examples")
    assert len(examples) == 7
    for row in examples.to_dict("records"):
        assert f"image {row['sample']}, label kind" in page
        assert base64.b64encode(row["picture"]).decode() in page
        true, map, found = overlays(page, row["sample"])
        wanted = np.asarray(data[row["sample"]]["mask"])
        assert np.array_equal(true > 0, (wanted != 0) & (wanted != 255))
        values = np.array(row["map"]).reshape(GRID)
        assert map.max() == map.flat[values.argmax()] and map.shape == GRID
        mask = mass_mask(torch.tensor(row["map"]), 0.5).numpy().reshape(GRID)
        assert np.array_equal(found > 0, mask)


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
        with pytest.raises(
            ValueError, match="segmentation in layer 1, samples 0 to 6: the map holds NaN"
        ):
            ci.segment(net, dataset(), untrained=0, progress=False)
