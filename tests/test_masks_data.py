"""Data with masks: class maps that lie on their images, and errors of masks that do not."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from conftest import PLAIN, make, refuses
from crate_interp.data import open_data

SIZES = [(11, 37), (13, 29), (7, 20), (17, 19), (23, 41)]  # height, width
SMALL = dict(resize=7, crop=(6, 7), image_size=(6, 7), patch_size=(2, 7), **PLAIN)


@pytest.fixture
def model():
    return make(**SMALL)


def mask_of(size, values, mode="L", seed=0):
    """Blocks of a few pixels with these values."""
    small = np.random.default_rng(seed).choice(np.array(values, np.uint8), (3, 5))
    mask = Image.fromarray(small).resize(size[::-1], Image.Resampling.NEAREST)
    if mode == "1":
        return mask.point(lambda value: 255 * (value > 0)).convert("1")
    if mode == "P":  # grey levels of colours are not the classes
        mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [9] * 759)
    return mask


def masks_of(values, mode="L"):
    return [mask_of(size, values, mode, seed) for seed, size in enumerate(SIZES)]


def pictures(masks):
    """Images that show their masks: red is 10 times the class, so that a shifted mask is seen."""
    arrays = [np.array(mask).astype(np.uint8) * np.uint8(10) for mask in masks]
    return [Image.merge("RGB", [Image.fromarray(array)] * 3) for array in arrays]


def table(masks, name="mask", images=None, **columns):
    images = pictures(masks) if images is None else images
    data = datasets.Dataset.from_dict({name: masks, "picture": images, **columns})
    return data.cast_column("picture", datasets.Image()).cast_column(name, datasets.Image())


def opened(model, data, **kwargs):
    return open_data(data, model.preprocess, preprocess_masks=model.preprocess_masks, **kwargs)


def classes(maps):
    return set(maps.unique().tolist())


@pytest.mark.parametrize("mode", ["L", "P"])
def test_masks_lie_on_their_images(mode):
    model, masks = make(interpolation="nearest", **SMALL), masks_of([0, 1, 2], mode)
    samples = opened(model, table(masks, label=list("abcde")), limit=4)
    assert samples.n == 4 and samples.labels == list("abcd")
    maps = torch.cat([samples.masks(0, 3), samples.masks(3, 5)])
    assert maps.dtype is torch.uint8 and maps.shape == (5, 6, 7) and classes(maps) == {0, 1, 2}
    assert torch.equal(maps * 10, (samples.read(0, 5)[:, 0] * 255).round().to(torch.uint8))
    assert open_data(table(masks), model.preprocess).masks is None


def test_preprocess_masks(model, tmp_path):
    by_hand = mask_of((11, 37), [0, 3, 255])
    small = by_hand.resize((23, 7), Image.Resampling.NEAREST)  # shorter side 7: 7 * 37 / 11 = 23
    wanted = torch.from_numpy(np.array(small.crop((8, 0, 15, 6))))[None]
    by_hand.save(tmp_path / "mask.png")
    array = np.array(by_hand)[None]
    for given in (by_hand, [by_hand], tmp_path / "mask.png", array, torch.from_numpy(array)):
        assert torch.equal(model.preprocess_masks(given), wanted)
    black_and_white = mask_of((11, 37), [0, 1], "1")
    maps = model.preprocess_masks(black_and_white)
    assert classes(maps) == {0, 1}
    assert torch.equal(model.preprocess_masks(np.array(black_and_white)[None]), maps)


def test_binary_is_decided_for_the_whole_data_set(model):
    pure, white = masks_of([0, 255]), masks_of([0, 255], "1")
    maps = opened(model, table(pure)).masks(0, 5)
    assert classes(maps) == {0, 1}
    for same in (white, pure[:2] + white[2:]):
        assert torch.equal(opened(model, table(same)).masks(0, 5), maps)
    # the last image has a class 2: the others' 255 is "ignore", though they hold nothing else
    with_classes = table([*pure[:4], mask_of(SIZES[4], [0, 2])])
    assert torch.equal(opened(model, with_classes).masks(0, 4), maps[:4] * 255)
    assert classes(opened(model, with_classes).masks(4, 5)) == {0, 2}
    assert torch.equal(opened(model, with_classes, limit=2).masks(0, 2), maps[:2] * 255)


@pytest.mark.parametrize(
    "match, last",
    [
        ("the mask of sample 4 is .23, 41. .* image is .41, 23.", mask_of((41, 23), [0, 255])),
        ("the mask of sample 4 is .* of mode 'RGB'.* one number", Image.new("RGB", (41, 23))),
        ("the mask of sample 4 is missing: the column holds None", None),
    ],
)
def test_masks_that_do_not_fit(model, match, last):
    masks = masks_of([0, 255])
    samples = opened(model, table([*masks[:4], last], images=pictures(masks)))
    assert samples.read(0, 5).shape == (5, 3, 6, 7)  # a use without masks is not held up
    refuses(match, lambda: samples.masks(2, 5))


def refused(model, match, data):
    refuses(match, lambda: opened(model, data))


@pytest.fixture
def voc(tmp_path):
    folder = tmp_path / "voc: 2012"  # a colon of its own
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for index, mask in enumerate(masks_of([0, 7, 255], "P")):
        mask.save(folder / "SegmentationClass" / f"{index}.png")
        image = Image.new("RGB", mask.size, (50 * index, 0, 0))
        image.save(folder / "JPEGImages" / f"{index}.jpg", quality=100)
    Image.new("RGB", (20, 7)).save(folder / "JPEGImages" / "without.jpg")
    (folder / "ImageSets" / "Segmentation" / "val.txt").write_text("3\n1\n\n4\n")
    (folder / "ImageSets" / "Segmentation" / "train.txt").write_text("0\n../../../etc/passwd\n")
    return folder


def test_voc(model, voc):
    wanted = model.preprocess_masks(masks_of([0, 7, 255], "P"))
    samples = opened(model, f"voc:{voc}")
    assert samples.n == 5 and samples.labels is None and torch.equal(samples.masks(0, 5), wanted)
    assert classes(samples.masks(0, 5)) == {0, 7, 255}
    val = opened(model, f"voc:{voc}:val", limit=2)
    assert val.n == 2 and torch.equal(val.masks(0, 2), wanted[[3, 1]])
    red = val.read(0, 2)[:, 0].mean((1, 2)) * 255
    assert torch.allclose(red, torch.tensor([150.0, 50.0]), atol=5)
    assert val.fingerprint.startswith("voc:names-and-sizes:sha256:")
    assert val.fingerprint != samples.fingerprint
    assert open_data(f"voc:{voc}", model.preprocess).masks is None
    # 255 is ignored even where nothing else is there
    for index, mask in enumerate(masks_of([0, 255], "P")):
        mask.save(voc / "SegmentationClass" / f"{index}.png")
    assert classes(opened(model, f"voc:{voc}").masks(0, 5)) == {0, 255}


# first words of the refusal -> the list of the split "val", or nothing
BAD_LISTS = {
    "'../../../etc/passwd' lacks its image or its mask": "../../../etc/passwd",
    "'without' lacks its image or its mask": "1 1\nwithout -1\n",
    "every image lacks": "\n",
}


def test_bad_voc(model, voc, tmp_path):
    for match, names in BAD_LISTS.items():
        (voc / "ImageSets" / "Segmentation" / "val.txt").write_text(names)
        refused(model, match, f"voc:{voc}:val")


@pytest.fixture
def stamps(tmp_path):
    folder = tmp_path / "stamps"
    for index, name in enumerate(["town/hall.png", "town/old/gate.webp", "food/apple.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((23, 31, 4), np.uint8)
        pixels[3:19, 5 : 13 + 5 * index] = (200, 90, 10, 255)
        Image.fromarray(pixels).save(folder / name, lossless=True)
    palette = Image.open(folder / "food/apple.png").quantize(16)
    palette.save(folder / "food/pear.png", transparency=palette.getpixel((0, 0)))
    return folder


def test_cutouts(model, stamps):
    samples = opened(model, f"cutouts:{stamps}")
    assert samples.n == 4 and samples.labels == ["food", "food", "town", "town"]
    images, maps = samples.read(0, 4), samples.masks(0, 4)
    assert images.shape == (4, 3, 6, 7) and maps.shape == (4, 6, 7) and classes(maps) == {0, 1}
    assert torch.equal(samples.read(2, 4), images[2:])
    assert torch.equal(samples.masks(2, 9), maps[2:])
    large = make(image_size=224, patch_size=32, **PLAIN)
    again, other = opened(large, f"cutouts:{stamps}:0"), opened(large, f"cutouts:{stamps}:3")
    assert again.fingerprint == samples.fingerprint != other.fingerprint
    assert "seed=3" in other.fingerprint
    assert not torch.equal(again.masks(0, 4), other.masks(0, 4))
    colour = torch.tensor([200, 90, 10]).view(3, 1, 1) / 255
    shown = (again.read(3, 4) - colour).abs().amax((0, 1)) < 0.01  # the object's own pixels
    mask = again.masks(3, 4)[0] == 1
    assert 0.03 < mask.float().mean() < 0.65 and (shown & mask).sum() > 0.95 * mask.sum()
    assert (shown & ~mask).sum() < 0.05 * mask.sum()
    (stamps / "backgrounds").mkdir()
    Image.new("LA", (37, 41), (128, 255)).save(stamps / "backgrounds" / "wall.png")
    on_walls = opened(large, f"cutouts:{stamps}")
    outside = on_walls.read(0, 1)[0][:, on_walls.masks(0, 1)[0] == 0]
    assert on_walls.n == 4 and ((outside * 255).round() == 128).float().mean() > 0.9
    (stamps / "town" / "hall.png").rename(stamps / "hall.png")
    assert opened(model, f"cutouts:{stamps}").labels is None
