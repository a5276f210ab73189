"""ci.segment: scores against a slow form, what chance has, its page."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over, opened  # noqa: F401
from crate_interp.measures import mass_mask, top_mask
from crate_interp.measures.maps import centred_map
from crate_interp.probes.segmentation_probe import random_order, segmentation
from crate_interp.stats.intervals import halves
from segments import GRID, PATCH, SIZE, dataset, model
from selection import few


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
@pytest.mark.parametrize("scaled", few([True, False]))
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
    """Returns queries and keys [n, pos, 1, 2] of a head whose CLS attends to a mask alone."""
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


def slow_rows(sweep, name, kept, chance=""):
    """Returns (way, layer) -> (values, the commonest (layer, head)) from the tables of a sweep.

    Heads are chosen by `name`; the values are those of `name + chance`.
    """
    judged, each = (
        sweep.head_samples()
        .pivot(index="sample", columns=["layer", "head"], values=f"segmentation.{name}{end}")
        .loc[kept]
        for end in ("", chance)
    )
    best = (
        sweep.samples()
        .pivot(index="sample", columns="layer", values=f"segmentation.{name}{chance}_best")
        .loc[kept]
    )
    rows = {}
    for layer in (0, 1, None):
        columns = [pair for pair in each.columns if layer in (None, pair[0])]
        scores, chosen = [], Counter()
        for first in halves(len(kept)):
            pair = {
                side: max(columns, key=lambda one: judged[one][first != side].mean())
                for side in (True, False)
            }
            scores.append([each[pair[side]].iloc[place] for place, side in enumerate(first)])
            chosen.update(pair[side] for side in first)
        best_first = sorted(chosen, key=lambda one: (-chosen[one], one))
        rows["fixed head", layer] = (np.mean(scores, axis=0), best_first[0])
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
    images = result.table("images")
    assert result.meta["n_samples"] - len(images) == 1 and result.meta["untrained"] == 2
    own, *twins = (
        ci.sweep(other, data, probes=probe, controls=0, progress=False)
        for other in (net, model(0), model(1))
    )
    masks = [np.where(np.asarray(data[place]["mask"]) == 255, 1, 0) for place in kept]
    flat = centred_map(GRID)[None].numpy()
    for rule, function, share in (("mass", mass_mask, 0.5), ("top", top_mask, 0.4)):
        for resolution in ("token", "pixel"):
            name, found = f"{rule}_{resolution}", result.layers(rule, resolution)
            wanted, random = slow_rows(own, name, kept), slow_rows(own, name, kept, "_random")
            other_image = slow_rows(own, name, kept, "_other")
            others = [slow_rows(twin, name, kept) for twin in twins]
            cut = lambda map, f=function, s=share: f(map, s)  # noqa: E731
            centre = slow_scores([flat] * 8, masks, cut, resolution)[1].mean()
            all_on = lambda map: torch.ones(6, dtype=torch.bool)  # noqa: E731
            every = slow_scores([flat] * 8, masks, all_on, resolution)[1].mean()
            assert len(found) == len(wanted) == 7
            for row in found.to_dict("records"):
                key = (row["way"], None if row["layer"] is pd.NA else row["layer"])
                assert row["value"] == pytest.approx(np.mean(wanted[key][0]), rel=1e-6)
                place = (row["head_layer"], row["head"])
                assert (None if pd.isna(place[0]) else place) == wanted[key][1]
                judged = np.nanmean(other_image[key][0])
                assert row["other_image"] == pytest.approx(judged, rel=1e-6)
                assert row["random"] == pytest.approx(np.mean(random[key][0]), rel=1e-6)
                untrained = np.mean([np.mean(other[key][0]) for other in others])
                assert row["untrained"] == pytest.approx(untrained, rel=1e-6)
                assert row["centre"] == pytest.approx(centre, rel=1e-6) and row["n"] == 8
                assert row["all_foreground"] == pytest.approx(every, rel=1e-6)
                assert row["low"] <= row["value"] <= row["high"] and row["low"] < row["high"]
            heads = result.table("heads").query("rule == @rule and resolution == @resolution")
            heads = heads.set_index(["layer", "head"])
            for column, sweeps, suffix in (
                ("value", [own], ""),
                ("random", [own], "_random"),
                ("other_image", [own], "_other"),
                ("untrained", twins, ""),
            ):
                tables = [sweep.heads().set_index("statistic") for sweep in sweeps]
                tables = [table.loc[name + suffix, "mean"].to_numpy() for table in tables]
                np.testing.assert_allclose(heads[column], np.mean(tables, axis=0), rtol=1e-6)
    overall = slow_rows(own, "mass_token", kept)["fixed head", None][0]
    np.testing.assert_allclose(images["score"], overall, rtol=1e-6)
    assert list(images["sample"]) == kept
    assert list(images["label"]) == [f"kind {place % 3}" for place in kept]
    assert "mask of another image" in repr(result)
    assert result.cells()[1][1][3].count(",") == 2
    assert "nan" not in str(ci.segment(net, data, untrained=0, progress=False).cells())


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
    assert result.layers()["mean"].notna().all()
    assert ci.sweep(model(), dataset(3), progress=False).head_samples().empty


QUIET: dict = {"progress": False}


def test_a_network_whose_attention_is_nan_is_no_score():
    with model().hooks([("blocks.1.attn.hook_q", lambda q, hook: q * torch.nan)]) as net:
        with pytest.raises(ValueError, match="segmentation in layer 1, samples 0 to 6: the map"):
            ci.segment(net, dataset(), untrained=0, progress=False)
