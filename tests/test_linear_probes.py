"""Linear probes, and what the input alone gives them and ci.segment: by hand and slowly."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression

import crate_interp as ci
from conftest import make
from crate_interp.measures import input_maps, mass_mask, top_mask
from crate_interp.measures.maps import MAPS
from crate_interp.sweeps.linear_probes import input_features
from segments import PATCH, dataset, model
from test_segment import slow_scores

N = 120


@pytest.fixture(scope="module")
def images():
    return torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(1))


def levels(result, name):
    table = result.layers()
    return table[table["statistic"] == name].sort_values("layer")["mean"].to_numpy()


def test_a_planted_label_is_found_and_a_permuted_one_is_not(images):
    model = make()
    _, cache = model.run_with_cache(images)
    planted = (
        (cache["resid_post", 2][:, 0, 0] > 1.0 * cache["resid_post", 2][:, 0, 0].median())
        .long()
        .tolist()
    )
    result = ci.linear_probe(model, images, labels=planted, progress=False)
    assert list(result.layers()["n"].unique()) == [30] and len(levels(result, "accuracy")) == 4
    assert levels(result, "accuracy")[3] > 0.9  # Z^3 is what it was made of
    rows = result.layers().query("statistic == 'accuracy' and layer == 1")
    (low,), (high,) = result.mean_ends(rows)
    exact = binomtest(round(30 * rows["mean"].iloc[0]), 30).proportion_ci()
    assert (low, high) == pytest.approx((exact.low, exact.high))
    assert abs(levels(result, "permuted") - 0.5).max() < 0.3  # 30 coins: three standard deviations
    assert levels(result, "chance") == pytest.approx(0.5, abs=0.02)
    # CLS has seen nothing yet
    assert levels(result, "accuracy")[0] == pytest.approx(levels(result, "chance")[0])
    again = ci.linear_probe(model, images, labels=planted, progress=False)
    assert again.samples().equals(result.samples())


def test_by_hand(images):
    """Held-out samples, features and scaling: mean 0 and variance 1 of the training part."""
    model = make("crate-alpha")
    labels = ["a", "b", "c"] * (N // 3)
    result = ci.linear_probe(model, images, labels=labels, pool="mean", test=0.5, progress=False)
    table = result.samples()
    rows = table[table["layer"] == 1]
    held = rows["linear.accuracy"].notna().to_numpy()
    assert held.sum() == 60
    _, cache = model.run_with_cache(images)
    x, y = cache["resid_pre", 1].mean(dim=1).double().numpy(), np.array(labels)
    mean, std = x[~held].mean(axis=0), x[~held].std(axis=0)
    probe = LogisticRegression(max_iter=1000).fit((x[~held] - mean) / std, y[~held])
    right = probe.predict((x[held] - mean) / std) == y[held]
    assert (
        right == (rows["linear.accuracy"].to_numpy()[held] == 1)
    ).mean() > 0.95  # float32 features


def test_equal_samples_are_on_one_side(images):
    doubled = torch.cat([images[:40], images[:40]])
    labels = [0, 1] * 40
    table = ci.linear_probe(make(), doubled, labels=labels, progress=False).samples()
    held = table[table["layer"] == 0]["linear.accuracy"].notna().to_numpy()
    assert (held[:40] == held[40:]).all() and 0 < held.sum() < 80


LARGE = (5, 7)  # a grid with an inside
NAMES = list(MAPS)


def pictures(n=3, channels=3, grid=LARGE, seed=0):
    """Random colours, different from patch to patch, as [n, channels, height, width]."""
    generator = torch.Generator().manual_seed(seed)
    size = (grid[0] * PATCH[0], grid[1] * PATCH[1])
    colours = torch.randn(n, channels, *grid, generator=generator)
    noise = torch.randn(n, channels, *size, generator=generator)
    return colours.repeat_interleave(PATCH[0], 2).repeat_interleave(PATCH[1], 3) + 0.5 * noise


def slow_maps(picture):
    """The maps that look at a picture [channels, height, width], by loops over pixels."""
    channels, height, width = picture.shape
    rows, columns = height // PATCH[0], width // PATCH[1]
    places = [(r, c) for r in range(height) for c in range(width)]
    colour = {place: picture[:, place[0], place[1]] for place in places}
    edge = [p for p in places if p[0] in (0, height - 1) or p[1] in (0, width - 1)]
    border = np.mean([colour[place] for place in edge], axis=0)
    patches = [
        [p for p in places if (p[0] // PATCH[0], p[1] // PATCH[1]) == (r, c)]
        for r in range(rows)
        for c in range(columns)
    ]
    own = [np.mean([colour[place] for place in patch], axis=0) for patch in patches]

    def away(reference):
        return [
            np.mean([((colour[place] - to) ** 2).sum() for place in patch])
            for patch, to in zip(patches, reference, strict=True)
        ]

    centres = [border, max(own, key=lambda mean: ((mean - border) ** 2).sum())]
    groups = [[], []]
    for _ in range(50):
        groups = [[], []]
        for number, mean in enumerate(own):
            near = [((mean - centre) ** 2).sum() for centre in centres]
            groups[int(near[1] < near[0])].append(number)
        centres = [
            np.mean([own[number] for number in group], axis=0) if group else centre
            for group, centre in zip(groups, centres, strict=True)
        ]
    outside = {
        number
        for number in range(rows * columns)
        if number // columns in (0, rows - 1) or number % columns in (0, columns - 1)
    }
    shares = [len(outside & set(group)) / max(len(group), 1) for group in groups]
    background = centres[int(shares[1] > shares[0])]
    count = len(patches)
    everywhere = np.mean(list(colour.values()), axis=0)
    return {
        "border_colour": away([border] * count),
        "mean_colour": away([everywhere] * count),
        "local_variance": away(own),
        "colour_clusters": away([background] * count),
    }, int(shares[1] > shares[0])


def test_maps_agree_with_loops_over_pixels():
    kept = Counter()
    for channels in (1, 3):
        images = pictures(4, channels)
        found = ci.maps.input_maps(images.double(), PATCH).numpy()
        for maps, picture in zip(found, images.double().numpy(), strict=True):
            wanted, background = slow_maps(picture)
            kept[background] += 1
            for name, values in wanted.items():
                np.testing.assert_allclose(maps[NAMES.index(name)], values, rtol=1e-9)
    assert len(kept) == 2  # the background is the first cluster in some pictures only


@pytest.fixture(scope="module")
def of_classes():
    """Pictures, of which one has no object, with masks of several classes; and their scores."""
    data = dataset(6, 3, empty=(3,), binary=False)
    return data, ci.segment(model(), data, untrained=0, mass=0.5, fraction=0.4, progress=False)


def test_scores_in_the_table_agree_with_loops_over_pixels(of_classes):
    data, result = of_classes
    kept = [0, 1, 2, 4, 5]
    images = model().preprocess(data["image"]).double().numpy()
    maps = [slow_maps(images[place])[0] for place in kept]
    masks = [np.asarray(data[place]["mask"]) for place in kept]
    rows = {(row["rule"], row["resolution"]): row for row in result.table().to_dict("records")}
    scores = result.table("constants").set_index("sample")
    for name in NAMES[1:]:
        pattern = np.array([each[name] for each in maps])[:, None]
        for rule, function, share in (("mass", mass_mask, 0.5), ("top", top_mask, 0.4)):
            cut = lambda map, f=function, s=share: f(map, s)  # noqa: E731
            for resolution in ("token", "pixel"):
                wanted = slow_scores(pattern, masks, cut, resolution)[1]
                column = scores[f"{name}_{rule}_{resolution}"]
                np.testing.assert_allclose(column.loc[kept], wanted, rtol=1e-6)
                assert rows[rule, resolution][name] == pytest.approx(np.mean(wanted), rel=1e-6)
                assert np.isnan(column.loc[3])
    table = result.table()
    levels = table[["all_foreground", *NAMES]]
    assert (levels.idxmax(axis=1) == table["strongest"]).all() and table["strongest"].nunique() > 1
    strongest = [row[row["strongest"]] for row in table.to_dict("records")]
    np.testing.assert_allclose(table["excess"], table["value"] - strongest, atol=1e-12)
    assert table["excess"].between(table["excess_low"], table["excess_high"]).all()


@pytest.mark.parametrize("channels", [3, 1])
def test_one_bright_square_on_a_flat_ground_is_found(channels):
    """Closed form: the square has 6 of 35 patches, and lies beside the ground by 1 a channel."""
    images = torch.full((1, channels, 20, 35), 0.25)
    images[:, :, 4:12, 10:25] += 1.0
    on = torch.zeros(LARGE, dtype=torch.bool)
    on[1:3, 2:5] = True
    on = on.flatten()
    maps = dict(zip(NAMES, input_maps(images, PATCH)[0], strict=True))
    for name in ("border_colour", "colour_clusters"):
        assert maps[name].tolist() == pytest.approx((channels * on.double()).tolist())
        assert torch.equal(mass_mask(maps[name], 1.0), on)
    share = 6 / 35
    wanted = channels * torch.where(on, (1 - share) ** 2, share**2).double()
    assert maps["mean_colour"].tolist() == pytest.approx(wanted.tolist())
    assert maps["local_variance"].abs().max() == pytest.approx(0, abs=1e-12)
    flat = input_maps(torch.full((2, channels, 20, 35), 0.3), PATCH)[:, 1:]
    assert flat.abs().max() < 1e-12  # nothing to see


@given(st.integers(0, 10_000), st.floats(-3, 3), st.sampled_from([(2,), (3,), (2, 3)]))
def test_brightness_does_not_matter_and_a_mirrored_picture_has_mirrored_maps(seed, shift, axes):
    images = pictures(1, seed=seed).double()
    maps = input_maps(images, PATCH)
    torch.testing.assert_close(input_maps(images + shift, PATCH), maps, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(input_maps(3 * images, PATCH)[:, 1:], 9 * maps[:, 1:])
    mirrored = maps.unflatten(2, LARGE).flip(axes).flatten(2)
    torch.testing.assert_close(input_maps(images.flip(axes), PATCH), mirrored)


def test_features_of_the_input_by_hand():
    """31 numbers hold 3 channels of 3 x 3 means; of 6 rows each cell has 2, of 21 columns 7."""
    images = torch.randn(2, 3, 6, 21, generator=torch.Generator().manual_seed(0))
    found = input_features(images, "cls", 31)
    wanted = [
        [
            float(picture[channel, 2 * row : 2 * row + 2, 7 * column : 7 * column + 7].mean())
            for channel in range(3)
            for row in range(3)
            for column in range(3)
        ]
        for picture in images
    ]
    torch.testing.assert_close(found, torch.tensor(wanted))
    assert torch.equal(
        input_features(images[:, :1, :2, :2], "mean", 31), images[:, 0, :2, :2].flatten(1)
    )
    tokens = torch.tensor([[4, 0, 4, 2], [6, 6, 6, 1]])  # with 5 features, 6 is as 1
    assert input_features(tokens, "last", 5).tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    shares = [[0.25, 0, 0.25, 0, 0.5], [0, 1, 0, 0, 0]]
    assert input_features(tokens, "mean", 5).tolist() == shares
