"""Odd pictures give a defined result or one clear line, in preprocess and in a sweep."""

import numpy as np
import pytest
import torch
from PIL import Image

import crate_interp as ci
from conftest import make
from reference import published_layout

PIXELS = np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)


def tiny(**over):
    size = dict(d_model=12, n_layers=2, n_heads=2, image_size=16, patch_size=8, n_classes=3)
    look = dict(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), resize=16, crop=16)
    return ci.HookedCrate(ci.CrateConfig(family="crate", **{**size, **look, **over})).eval()


@pytest.fixture(scope="module")
def model():
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
def test_odd_pictures_are_taken(model, name, tmp_path):
    path = tmp_path / name
    TAKEN[name].save(path)
    floats = model.preprocess(path)
    assert floats.shape == (1, 3, 16, 16) and floats.isfinite().all()
    with Image.open(path) as image:  # not loaded yet, as users have them
        assert torch.equal(floats, model.preprocess(image))
    result = ci.sweep(model, f"imagefolder:{tmp_path}", probes=["sparsity"], progress=False)
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


def test_broken_pictures_are_one_clear_line(model, tmp_path):
    (tmp_path / "all").mkdir()
    for name, match in broken(tmp_path / "all").items():
        (tmp_path / name).mkdir()
        colour().save(tmp_path / name / "a.png")
        (tmp_path / "all" / name).rename(tmp_path / name / name)
        with pytest.raises(ValueError, match=match) as error:
            model.preprocess(tmp_path / name / name)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=match):
            ci.sweep(model, f"imagefolder:{tmp_path / name}", probes=["sparsity"], progress=False)
    with Image.open(tmp_path / "cut.jpg" / "cut.jpg") as image:
        with pytest.raises(ValueError, match="cannot read an image: image file is truncated"):
            model.preprocess(image)


def test_whole_patches(model, tmp_path):
    model = tiny(interpolate_pos=True)
    images = torch.randn(2, 3, 37, 51)
    with pytest.raises(
        ValueError,
        match=r"images are \(37, 51\): both sides must be multiples of the patch \(8, 8\)",
    ):
        model(images)
    with pytest.raises(ValueError, match=r"images are \(5, 19\): .* Pad them"):
        model(images[:, :, :5, :19])
    # what the message advises works
    assert model.pad(images).shape == (2, 3, 40, 56) and model(model.pad(images)).shape == (2, 3)
    model.save_pretrained(tmp_path / "model")
    resized = ci.load(tmp_path / "model", resize=(40, 56), crop=None, interpolate_pos=True)
    assert resized(resized.preprocess([colour(), TAKEN["grey.png"]])).shape == (2, 3)
    mask = Image.new("L", (31, 23), 7)
    assert resized.preprocess_masks(mask).shape == (1, 40, 56)


def test_a_guessed_grid_is_no_ground_for_other_sizes(tmp_path):
    model = make(image_size=(4, 40), patch_size=(2, 5))  # 16 patches, taken for 4 x 4
    weights = published_layout(model)
    told = dict(n_heads=5, patch_size=(2, 5))
    guessed = ci.load(weights, **told)
    assert guessed.cfg.grid_guessed and guessed.cfg.image_size == (8, 20)
    wide = torch.randn(2, 3, 4, 40, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=r"resize them.*load it with image_size=\(4, 40\)"):
        guessed(wide)
    guessed.save_pretrained(tmp_path / "guessed")
    for source, more in ((weights, told), (tmp_path / "guessed", {})):
        with pytest.raises(ci.CheckpointError, match="is no guess: give image_size"):
            ci.load(source, interpolate_pos=True, **more)
        right = ci.load(source, interpolate_pos=True, image_size=(4, 40), **more)
        assert not right.cfg.grid_guessed and torch.equal(right(wide), model(wide))
        assert "grid_guessed" not in right.cfg.to_dict()
    assert ci.load(tmp_path / "guessed").cfg.grid_guessed


def test_a_guessed_grid_is_said_and_refused_for_maps(capsys):
    weights = published_layout(make(image_size=(4, 40), patch_size=(2, 5)))
    told = dict(n_heads=5, patch_size=(2, 5))
    guessed = ci.load(weights, **told)
    assert "image_size=(8, 20) is a guess" in capsys.readouterr().err
    images = torch.randn(2, 3, 8, 20, generator=torch.Generator().manual_seed(3))
    cache = guessed.run_with_cache(images)[1]
    for draw in (
        lambda: ci.maps.attention(cache, 0),
        lambda: ci.viz.attention(cache, 0),
        lambda: ci.segment(guessed, {"image": images, "mask": images[:, 0] > 0}, progress=False),
    ):
        with pytest.raises(
            ValueError, match=r"grid of \(4, 4\) is a guess: .* image_size=\(8, 20\)"
        ):
            draw()
    capsys.readouterr()
    # a crop with as many patches tells the size; another does not
    assert ci.load(weights, crop=(4, 40), **told).cfg.image_size == (4, 40)
    assert "is a guess" not in capsys.readouterr().err
    assert ci.load(weights, crop=(4, 45), **told).cfg.image_size == (8, 20)
    assert "is a guess" in capsys.readouterr().err
    right = ci.load(weights, image_size=(4, 40), **told)
    assert "guess" not in capsys.readouterr().err and right.cfg.known_grid == (2, 8)
