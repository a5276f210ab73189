"""ci.segment: scores against a slow form, what chance has, and what is refused."""

import base64
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pillow

import crate_interp as ci
from crate_interp.measures import mass_mask, random_jaccard, top_mask
from crate_interp.probes.masks import Targets, random_order, segmentation
from crate_interp.segmentation.run import centred_map
from crate_interp.segmentation.scores import fixed

PATCH, GRID = (4, 5), (3, 2)
SIZE = (12, 10)


def model(seed=0, **changes):
    torch.manual_seed(seed)
    size = dict(d_model=12, n_layers=2, n_heads=3, image_size=SIZE, patch_size=PATCH, n_classes=5)
    look = dict(mean=[0.5] * 3, std=[0.25] * 3)
    return ci.HookedCrate(ci.CrateConfig(family="crate", **size | look | changes)).eval()


def class_map(random):
    """Classes 1 to 3 and 255 patch by patch, some noise, a patch that is half unjudged, and a class in an unjudged patch alone."""
    mask = random.choice([0, 1, 2, 255], GRID).repeat(PATCH[0], 0).repeat(PATCH[1], 1)
    noise = random.random(SIZE) < 0.1
    mask[noise] = random.choice([0, 1, 2, 255], noise.sum())
    mask[4:6, :5], mask[6:8, :5] = 255, 1
    mask[8:12, 5:10], mask[9, 6:9] = 255, 3
    return mask


def dataset(n=7, seed=0, empty=(), binary=True):
    """Pictures with masks; binary ones are 0 and 255, the others have classes 1 to 3 and 255 for what is not judged."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(n):
        values = (random.random(SIZE) > 0.6) * 255 if binary else class_map(random)
        mask = np.zeros(SIZE, np.uint8) if index in empty else values.astype(np.uint8)
        picture = Pillow.fromarray(random.integers(0, 256, (*SIZE, 3), dtype=np.uint8))
        rows.append(
            {"image": picture, "mask": Pillow.fromarray(mask), "label": f"kind {index % 3}"}
        )
    return Dataset.from_list(
        rows, features=Features({"image": Image(), "mask": Image(), "label": Value("string")})
    )


def slow_scores(pattern, masks, rule, resolution):
    """Scores [n, head] and of the best head [n] by sets of pixels and patches."""
    each, best = [], []
    for heads, mask in zip(pattern, masks, strict=True):
        patch_of = {
            (r, c): (r // PATCH[0]) * GRID[1] + c // PATCH[1]
            for r in range(SIZE[0])
            for c in range(SIZE[1])
        }
        judged = {place for place in patch_of if mask[place] != 255}
        scores = []
        for kind in sorted({int(value) for value in mask.flatten()} - {0, 255}):
            pixels = {place for place in patch_of if mask[place] == kind}
            count = {patch: sum(patch_of[place] == patch for place in pixels) for patch in range(6)}
            tokens = {patch for patch in count if count[patch] > 10} or {
                max(count, key=lambda patch: (count[patch], -patch))
            }
            unjudged = {
                p
                for p in range(6)
                if sum(patch_of[place] == p and place not in judged for place in patch_of) > 10
            }
            row = []
            for map in heads:
                chosen = {p for p, on in enumerate(rule(torch.as_tensor(map)).tolist()) if on}
                if resolution == "token":
                    mine, true = chosen - (unjudged - tokens), tokens
                else:
                    mine, true = {place for place in judged if patch_of[place] in chosen}, pixels
                row.append(len(mine & true) / len(mine | true))
            scores.append(row)
        each.append(np.mean(scores, axis=0))
        best.append(np.mean(np.max(scores, axis=1)))
    return np.array(each), np.array(best)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("chance", ["", "_random", "_other"])
@pytest.mark.parametrize("scaled", [True, False])
def test_scores_agree_with_sets_of_pixels(binary, chance, scaled):
    net, data = model(), dataset(binary=binary)
    probe = segmentation(mass=0.7, fraction=0.4, scaled=scaled, cls_key=scaled)
    result = ci.sweep(net, data, probes=probe, batch_size=3, progress=False)
    images = net.preprocess(data["image"])
    masks = [np.asarray(mask) for mask in data["mask"]]
    masks = [np.where(mask == 255, 1, mask) for mask in masks] if binary else masks
    with torch.no_grad():
        _, cache = net.run_with_cache(images)
    for layer in range(2):
        pattern = cache["pattern", layer][:, :, 0, 1:]
        if not scaled:
            q, k = cache["q", layer][:, 0], cache["k", layer][:, 1:]
            pattern = torch.einsum("nhd,nphd->nhp", q, k).softmax(dim=-1)
        if chance == "_random":
            pattern = torch.stack(
                [maps[:, random_order(6, sample)] for sample, maps in enumerate(pattern)]
            )
        judges = masks[1:] + masks[:1] if chance == "_other" else masks
        for name, rule, share in (("mass", mass_mask, 0.7), ("top", top_mask, 0.4)):
            for resolution in ("token", "pixel"):
                column = f"{name}_{resolution}{chance}"
                each, best = slow_scores(
                    pattern.numpy(), judges, lambda map, f=rule, s=share: f(map, s), resolution
                )
                rows = (
                    result.head_samples()
                    .query("layer == @layer")[f"segmentation.{column}"]
                    .to_numpy()
                    .reshape(7, 3)
                )
                np.testing.assert_allclose(rows, each, rtol=1e-6)
                found = result.samples().query("layer == @layer")[f"segmentation.{column}_best"]
                np.testing.assert_allclose(found, best, rtol=1e-6)
                means = result.heads().query("layer == @layer and statistic == @column")["mean"]
                np.testing.assert_allclose(means, each.mean(axis=0), rtol=1e-6)


def acts_for(targets, sharpness=50.0):
    """Queries and keys [n, pos, 1, 2] of one head whose CLS attends to the patches of a mask alone."""
    keys = torch.zeros(len(targets), 7, 1, 2)
    keys[:, 1:, 0, 0] = sharpness * targets.float()
    queries = torch.zeros_like(keys)
    queries[:, 0, 0, 0] = 1
    scores = torch.einsum("nqhd,nkhd->nhqk", queries, keys)
    return {
        "attn.hook_q": queries,
        "attn.hook_k": keys,
        "attn.hook_pattern": scores.softmax(dim=-1),
        "sample": torch.arange(len(targets)),
    }


@pytest.mark.parametrize("scaled", [True, False])
def test_attention_on_the_object_alone_scores_one_and_beside_it_zero(scaled):
    tokens = torch.tensor(
        [[1, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]], dtype=torch.bool
    )
    masks = ci.measures.pixel_mask(tokens, GRID, PATCH).to(torch.uint8)
    probe, block = segmentation(mass=1.0 - 1e-6, scaled=scaled), model().blocks[0]
    both = {"masks": masks, "other_masks": masks.roll(-1, 0)}
    found = probe.measure(block, acts_for(tokens) | both)
    others = [
        len(a & b) / len(a | b)
        for a, b in (({0, 1, 5}, {3}), ({3}, {0, 1, 2, 3, 4}), ({0, 1, 2, 3, 4}, {0, 1, 5}))
    ]
    assert found["mass_token_other"].flatten().tolist() == pytest.approx(others)
    for name in ("mass_token", "mass_pixel", "mass_token_best", "mass_pixel_best"):
        assert found[name].flatten().tolist() == [1.0] * 3, name
    away = probe.measure(block, acts_for(~tokens) | both)
    assert away["mass_token"].abs().max() == 0 and away["mass_pixel_best"].abs().max() == 0


def test_random_order_scores_what_random_masks_do():
    """Every map is the same, on an object that is always there: 5 of its 8 patches, and only the order is random."""
    tokens = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.bool).expand(4000, 8)
    masks = ci.measures.pixel_mask(tokens, (2, 4), (3, 5)).to(torch.uint8)
    pattern = torch.cat([torch.zeros(1), torch.arange(8, 0, -1) / 36]).expand(4000, 1, 9, 9)
    acts = {
        "attn.hook_pattern": pattern,
        "sample": torch.arange(4000),
        "masks": masks,
        "other_masks": masks,
    }
    block = model(image_size=(6, 20), patch_size=(3, 5)).blocks[0]
    found = segmentation().measure(block, acts)["top_token_random"].mean().item()
    exact = sum(
        share * hits / (7 - hits) for hits, share in ((1, 2 * 5 * 3 / 56), (2, 5 * 4 / 56))
    )  # hypergeometric
    assert found == pytest.approx(exact, abs=0.01)
    assert random_jaccard(5 / 8, 2 / 8) == pytest.approx(
        exact, abs=0.02
    )  # the formula is for many patches


def test_a_class_too_small_for_any_patch_has_the_one_with_most_of_it():
    mask = torch.zeros(1, *SIZE, dtype=torch.uint8)
    mask[0, 5, 2:4], mask[0, 0, 0], mask[0, 8:12, 5:10] = 7, 7, 9
    targets = Targets(mask, PATCH)
    assert targets.tokens().tolist() == [
        [False, False, True, False, False, False],
        [False] * 5 + [True],
    ]


def test_the_head_is_chosen_on_the_other_half():
    heads = np.array(
        [[[0.1, 0.9]], [[0.8, 0.2]], [[0.2, 0.7]], [[0.6, 0.1]], [[0.3, 0.8]]]
    )  # [n, layer, head]
    score, place = fixed(heads)
    # on even samples head 1 is best, on odd ones head 0: each half is scored with what the other half chose
    assert score.tolist() == [0.1, 0.2, 0.2, 0.1, 0.3] and place.tolist() == [
        [0, 0],
        [0, 1],
        [0, 0],
        [0, 1],
        [0, 0],
    ]
    score, place = fixed(np.full((5, 2, 3), 0.5))
    assert (place == 0).all() and (score == 0.5).all()  # of equal heads the first


def slow_rows(sweep, name, kept):
    """(way, layer) -> (values, (layer, head) or None) from the tables of a sweep, sample by sample."""
    each = (
        sweep.head_samples()
        .pivot(index="sample", columns=["layer", "head"], values=f"segmentation.{name}")
        .loc[kept]
    )
    best = (
        sweep.samples()
        .pivot(index="sample", columns="layer", values=f"segmentation.{name}_best")
        .loc[kept]
    )
    rows = {}
    for layer in (0, 1, None):
        columns = [pair for pair in each.columns if layer in (None, pair[0])]
        chosen = [
            max(columns, key=lambda pair: each[pair].iloc[1 - half :: 2].mean()) for half in (0, 1)
        ]
        values = [each[chosen[place % 2]].iloc[place] for place in range(len(kept))]
        rows["fixed head", layer] = (values, chosen[0] if chosen[0] == chosen[1] else None)
        if layer is not None:
            rows["best head for each image", layer] = (best[layer].tolist(), None)
            rows["mean over heads", layer] = (each[layer].mean(axis=1).tolist(), None)
    return rows


def test_the_table_agrees_with_a_slow_one():
    net, data = model(5), dataset(9, empty=(4,))
    result = ci.segment(
        net, data, untrained=2, batch_size=4, mass=0.5, fraction=0.4, progress=False
    )
    probe, kept = segmentation(mass=0.5, fraction=0.4), [0, 1, 2, 3, 5, 6, 7, 8]
    followed = [0, 1, 2, 5, 6, 7, 8]  # by an image with an object
    images = result.table("images")
    assert result.meta["n_samples"] - len(images) == 1 and result.meta["untrained"] == 2
    own, *twins = (
        ci.sweep(other, data, probes=probe, controls=False, progress=False)
        for other in (net, model(0), model(1))
    )
    masks = [np.where(np.asarray(data[place]["mask"]) == 255, 1, 0) for place in kept]
    flat = centred_map(GRID)[None].numpy()
    named = 0
    for rule, function, share in (("mass", mass_mask, 0.5), ("top", top_mask, 0.4)):
        for resolution in ("token", "pixel"):
            name, found = f"{rule}_{resolution}", result.layers(rule, resolution)
            wanted, random = slow_rows(own, name, kept), slow_rows(own, f"{name}_random", kept)
            other_image = slow_rows(own, f"{name}_other", followed)
            others = [slow_rows(twin, name, kept) for twin in twins]
            centre = slow_scores(
                [flat] * 8, masks, lambda map, f=function, s=share: f(map, s), resolution
            )[1].mean()
            every = slow_scores(
                [flat] * 8, masks, lambda map: torch.ones(6, dtype=torch.bool), resolution
            )[1].mean()
            assert len(found) == len(wanted) == 7
            for row in found.to_dict("records"):
                key = (row["way"], None if row["layer"] is pd.NA else row["layer"])
                assert row["value"] == pytest.approx(np.mean(wanted[key][0]), rel=1e-6)
                place = (row["head_layer"], row["head"])
                assert (None if pd.isna(place[0]) else place) == wanted[key][1]
                assert row["other_image"] == pytest.approx(np.mean(other_image[key][0]), rel=1e-6)
                assert row["random"] == pytest.approx(np.mean(random[key][0]), rel=1e-6)
                assert row["untrained"] == pytest.approx(
                    np.mean([np.mean(other[key][0]) for other in others]), rel=1e-6
                )
                assert row["centre"] == pytest.approx(centre, rel=1e-6) and row["n"] == 8
                assert row["all_foreground"] == pytest.approx(every, rel=1e-6)
                assert row["low"] <= row["value"] <= row["high"] and row["low"] < row["high"]
                named += wanted[key][1] is not None
            heads = result.table("heads").query("rule == @rule and resolution == @resolution")
            heads = heads.set_index(["layer", "head"])
            for column, sweeps, suffix in (
                ("value", [own], ""),
                ("random", [own], "_random"),
                ("other_image", [own], "_other"),
                ("untrained", twins, ""),
            ):
                tables = [sweep.heads() for sweep in sweeps]
                tables = [
                    table[table["statistic"] == name + suffix]["mean"].to_numpy()
                    for table in tables
                ]
                np.testing.assert_allclose(heads[column], np.mean(tables, axis=0), rtol=1e-6)
    assert 0 < named < 12  # halves agree on a head sometimes
    overall = slow_rows(own, "mass_token", kept)["fixed head", None][0]
    np.testing.assert_allclose(images["score"], overall, rtol=1e-6)
    assert list(images["sample"]) == kept
    assert list(images["label"]) == [f"kind {place % 3}" for place in kept]
    assert "mask of another image" in repr(result)
    assert result.cells()[1][1][3].count(",") == 2 and "nan" not in str(
        ci.segment(net, data, untrained=0, progress=False).cells()
    )
    with pytest.raises(ValueError, match="give 'mass' or 'top'"):
        result.layers("half")


def test_random_orders_differ_between_samples_and_leave_no_place_alone():
    orders = torch.stack([random_order(7, sample) for sample in range(7000)])
    assert torch.equal(orders.sort(dim=1).values, torch.arange(7).expand(7000, 7))
    counts = torch.stack([torch.bincount(orders[:, place], minlength=7) for place in range(7)])
    assert ((counts - 1000).abs() < 150).all()  # five standard deviations of 29
    assert torch.equal(random_order(7, 3), orders[3])


def test_the_centred_map_is_a_mirror_of_itself_and_highest_in_the_middle():
    map = centred_map((5, 7)).view(5, 7)
    assert (
        torch.equal(map, map.flip(0))
        and torch.equal(map, map.flip(1))
        and map.argmax() == 2 * 7 + 3
    )


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
