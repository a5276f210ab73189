"""model.preprocess: pictures, paths, bytes and odd files to what the model was trained on."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import crate_interp as ci
from conftest import PLAIN, make, refuses
from crate_interp.checkpoints.hub import MODELS
from crate_interp.models.preprocess import preprocess
from reference import published_layout

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


@pytest.fixture
def model():
    return make(mean=MEAN, std=STD)


def picture(height=6, width=20, mode="RGB", seed=0):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8), mode=None)


def by_hand(image):
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255
    return (
        (x - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(STD).double()[:, None, None]
    ).float()


def test_pictures_paths_and_bytes_agree(model, tmp_path):
    images = [picture(seed=seed) for seed in range(3)]
    wanted = torch.stack([by_hand(image) for image in images])
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    array = np.stack([np.array(image) for image in images]).transpose(0, 3, 1, 2)
    for given in (
        images,
        tuple(images),
        paths,
        [str(path) for path in paths],
        array,
        torch.from_numpy(array.copy()),
    ):
        torch.testing.assert_close(model.preprocess(given), wanted, atol=1e-6, rtol=1e-6)
    for form in (images[0], str(paths[0])):
        assert model.preprocess(form).shape == (1, 3, 6, 20)
    assert model.double().preprocess(images[0]).dtype is torch.float64


def test_resize_and_crop():
    model = make(resize=6, crop=(6, 20), **PLAIN)
    wide = picture(30, 103)
    # shorter side 6: width int(6 * 103 / 30) = 20
    small = wide.resize((20, 6), Image.Resampling.BILINEAR)
    torch.testing.assert_close(
        model.preprocess(wide)[0], torch.from_numpy(np.array(small)).permute(2, 0, 1) / 255
    )
    larger = picture(30, 150)  # 6 x 30, the middle 20 columns
    middle = larger.resize((30, 6), Image.Resampling.BILINEAR).crop((5, 0, 25, 6))
    torch.testing.assert_close(
        model.preprocess(larger)[0], torch.from_numpy(np.array(middle)).permute(2, 0, 1) / 255
    )
    array = torch.from_numpy(np.array(larger)).permute(2, 0, 1)[None]
    torch.testing.assert_close(model.preprocess(array), model.preprocess(larger))
    exact = make(resize=(6, 20), **PLAIN)
    squeezed = larger.resize((20, 6), Image.Resampling.BILINEAR)
    torch.testing.assert_close(
        exact.preprocess(larger)[0], torch.from_numpy(np.array(squeezed)).permute(2, 0, 1) / 255
    )


def with_transparency():
    """Pictures with every kind of transparency, by name, and the alpha of each pixel."""
    alpha = np.random.default_rng(1).integers(0, 256, (6, 20), np.uint8)
    band, palette, key = Image.fromarray(alpha), picture().quantize(60), picture(mode="L")
    numbers = np.array(palette)
    shades = bytes(range(7, 67))  # the alpha of each colour of the palette
    palette.info["transparency"] = shades
    one = picture().quantize(60)
    one.info["transparency"] = int(numbers[3, 5])
    key.info["transparency"] = int(np.array(key)[3, 5])
    grey = picture(mode="L")
    return {
        "RGBA": (Image.merge("RGBA", [*picture().split(), band]), alpha),
        "LA": (Image.merge("LA", [grey, band]), alpha),
        "palette": (palette, np.frombuffer(shades, np.uint8)[numbers]),
        "one colour": (one, np.where(numbers == numbers[3, 5], 0, 255)),
        "one grey": (key, np.where(np.array(grey) == key.info["transparency"], 0, 255)),
    }


@pytest.mark.parametrize("kind", with_transparency())
def test_transparency_is_dropped_or_laid_on_white(kind, tmp_path):
    image, alpha = with_transparency()[kind]
    info = dict(image.info)
    for mode, channels in (("RGB", 3), ("L", 1)):
        plain = dict(channels=channels, mean=[0.0] * channels, std=[1.0] * channels)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about the transparency that is lost
            bytes_ = np.array(image.convert(mode)).reshape(6, 20, channels).transpose(2, 0, 1)
        dropped = make(**plain).preprocess(image)
        assert torch.equal(dropped[0], torch.from_numpy(bytes_) / 255)
        shown = make(transparency="white", **plain).preprocess(image)[0].numpy()
        wanted = (bytes_ / 255.0 - 1) * (alpha / 255) + 1
        np.testing.assert_allclose(shown, wanted, atol=1.01 / 255)
        image.save(tmp_path / "a.png")
        assert torch.equal(make(**plain).preprocess(tmp_path / "a.png"), dropped)
    assert image.info == info  # the picture of the user is as it was


def sixteen():
    return np.random.default_rng(0).integers(0, 2**16, (6, 20), np.uint16)


@pytest.mark.parametrize("form", ["png", "tif", "pgm", "I;16B", "I"])
def test_pictures_of_sixteen_bits(form, tmp_path):
    values = sixteen()
    image = Image.fromarray(values)
    if form in ("png", "tif", "pgm"):
        image.save(tmp_path / f"a.{form}")
        given = tmp_path / f"a.{form}"
    else:
        given = Image.frombytes("I;16B", (20, 6), values.astype(">u2").tobytes())
        given = Image.fromarray(values.astype(np.int32)) if form == "I" else given
        assert given.mode == form
    model = make(bits=16, **PLAIN)
    wanted = torch.from_numpy(values.astype(np.float32)) / 65535
    assert torch.equal(model.preprocess(given)[0], wanted.expand(3, -1, -1))
    both = model.preprocess([picture(), given])  # an 8-bit picture among them stays 8-bit
    assert torch.equal(both[:1], make(**PLAIN).preprocess(picture()))
    assert torch.equal(both[1:], model.preprocess(given))
    match = r"more than 8 bits\): to divide its values by 65,535, write ci.load\(..., bits=16\)\."
    refuses(match, lambda: make(**PLAIN).preprocess(given))


def test_no_pixel_is_invented():
    model = make(resize=5, crop=(6, 20), **PLAIN)
    with pytest.raises(
        ValueError, match=r"crop=\(6, 20\) is larger than an image, which is 5 x 16 after resize=5"
    ):
        model.preprocess(picture())
    model = make(interpolate_pos=True, **PLAIN)
    assert model.preprocess(picture(8, 25)).shape == (1, 3, 8, 25)
    refuses("the images differ in size .6 x", lambda: model.preprocess([picture(), picture(8, 25)]))


def published_preprocessing():
    return [
        row
        for row in MODELS
        if row["config"].get("mean") and row["family"] in ("crate", "crate-alpha")
    ]


@pytest.mark.parametrize("row", published_preprocessing(), ids=lambda row: row["name"])
def test_what_the_papers_say(row):
    """By Pillow alone, pixel by pixel.

    Shorter side to 256 (bilinear), the middle 224 x 224, ImageNet's mean and std.
    """
    assert len(published_preprocessing()) >= 15
    kept = {name: value for name, value in row["config"].items() if name != "d_features"}
    cfg = ci.CrateConfig(
        family=row["family"], d_model=kept.pop("n_heads"), n_layers=1, n_heads=1, **kept
    )
    pixels = np.random.default_rng(0).integers(0, 256, (300, 410, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    small = image.resize((int(256 * 410 / 300), 256), Image.Resampling.BILINEAR)
    left = round((small.width - 224) / 2)
    by_hand = np.asarray(small)[16:240, left : left + 224].astype(np.float64) / 255
    by_hand = (by_hand - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    ours = preprocess(cfg, image)
    assert ours.shape == (1, 3, 224, 224)
    np.testing.assert_allclose(ours[0].permute(1, 2, 0), by_hand, atol=1e-6)


PIXELS = np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)


def tiny(**over):
    size = dict(d_model=12, n_layers=2, n_heads=2, image_size=16, patch_size=8, n_classes=3)
    look = dict(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), resize=16, crop=16)
    return ci.HookedCrate(ci.CrateConfig(family="crate", **{**size, **look, **over})).eval()


@pytest.fixture(scope="module")
def small():
    return tiny()


def colour():
    return Image.fromarray(PIXELS)


def with_alpha(image):
    return Image.merge("RGBA", [*image.split(), Image.new("L", image.size, 128)])


TAKEN = {
    "one-pixel.png": Image.new("RGB", (1, 1), (9, 90, 200)),
    "strip.png": Image.new("RGB", (1, 301)),
    "black-and-white.png": colour().convert("1"),
    "grey.png": colour().convert("L"),
    "grey-alpha.png": colour().convert("LA"),
    "alpha.webp": with_alpha(colour()),
    "palette.gif": colour().convert("P"),
    "cmyk.jpg": colour().convert("CMYK"),
    "cmyk.tif": colour().convert("CMYK"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_odd_pictures_are_taken(small, name, tmp_path):
    path = tmp_path / name
    TAKEN[name].save(path)
    floats = small.preprocess(path)
    assert floats.shape == (1, 3, 16, 16) and floats.isfinite().all()
    with Image.open(path) as image:  # not loaded yet, as users have them
        assert torch.equal(floats, small.preprocess(image))
    result = ci.sweep(small, f"imagefolder:{tmp_path}", probes=["sparsity"], progress=False)
    assert len(result.layers()) > 0 and result.meta["n_samples"] == 1


def broken(folder):
    """Files that are no pictures a model can take, and what is to be said of them."""
    deep = Image.fromarray(np.arange(23 * 31, dtype=np.uint16).reshape(23, 31))
    deep.save(folder / "deep.png")
    Image.fromarray(PIXELS[..., 0].astype(np.float32)).save(folder / "floats.tif")
    colour().save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:1000])
    (folder / "empty.png").write_bytes(b"")
    return {
        "deep.png": r"the image '.*deep.png' has mode 'I;16' \(more than 8 bits\): "
        r"to divide its values by 65,535, write ci.load\(..., bits=16\)",
        "floats.tif": "the image '.*floats.tif' has mode 'F'",
        "cut.jpg": "cannot read the image '.*cut.jpg': image file is truncated",
        "empty.png": "cannot read the image '.*empty.png'",
    }


def test_broken_pictures_are_one_clear_line(small, tmp_path):
    (tmp_path / "all").mkdir()
    for name, match in broken(tmp_path / "all").items():
        (tmp_path / name).mkdir()
        colour().save(tmp_path / name / "a.png")
        (tmp_path / "all" / name).rename(tmp_path / name / name)
        with pytest.raises(ValueError, match=match) as error:
            small.preprocess(tmp_path / name / name)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=match):
            ci.sweep(small, f"imagefolder:{tmp_path / name}", probes=["sparsity"], progress=False)
    with Image.open(tmp_path / "cut.jpg" / "cut.jpg") as image:
        refuses("cannot read an image: image file is truncated", lambda: small.preprocess(image))


def test_a_guessed_grid_is_no_ground_for_other_sizes(tmp_path):
    small = make(image_size=(4, 40), patch_size=(2, 5))  # 16 patches, taken for 4 x 4
    weights = published_layout(small)
    told = dict(n_heads=5, patch_size=(2, 5))
    guessed = ci.load(weights, **told)
    assert guessed.cfg.grid_guessed and guessed.cfg.image_size == (8, 20)
    wide = torch.randn(2, 3, 4, 40, generator=torch.Generator().manual_seed(3))
    refuses(r"resize them.*load it with image_size=\(4, 40\)", lambda: guessed(wide))
    guessed.save_pretrained(tmp_path / "guessed")
    for source, more in ((weights, told), (tmp_path / "guessed", {})):
        with pytest.raises(ci.CheckpointError, match="is known: give image_size"):
            ci.load(source, interpolate_pos=True, **more)
        right = ci.load(source, interpolate_pos=True, image_size=(4, 40), **more)
        assert not right.cfg.grid_guessed and torch.equal(right(wide), small(wide))
        assert "grid_guessed" not in right.cfg.to_dict()
    assert ci.load(tmp_path / "guessed").cfg.grid_guessed
