"""Files of pictures as strangers may make them, and tables of them."""

import io

import numpy as np
import pytest
from PIL import Image

from conftest import PLAIN, make
from crate_interp.data import open_data

PIXELS = np.random.default_rng(0).integers(0, 256, (23, 31, 3), np.uint8)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 6\n%%EndComments\n(x) print\n%%EOF\n"
NAMES = {"PNG": "a.png", "JPEG": "a.jpg", "WEBP": "a.webp", "GIF": "a.gif", "BMP": "a.bmp",
         "TIFF": "a.tif", "PPM": "a.ppm"}  # fmt: skip


def picture(size=(31, 23)):
    return Image.fromarray(PIXELS).resize(size, Image.Resampling.NEAREST)


def file_of(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def table(cells, name="image", feature=None, **columns):
    """A datasets.Dataset of pictures. Only who asks for one waits for the import."""
    import datasets

    feature = feature or datasets.Image()
    features = {name: feature} | {other: datasets.Image() for other in columns}
    rows = {name: cells, **columns}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def cell(data):
    return {"bytes": data, "path": None}


def opened(model, data):
    return open_data(data, model.preprocess, preprocess_masks=model.preprocess_masks)


def refused(match, function, *given):
    with pytest.raises(ValueError, match=match) as error:
        function(*given)
    assert len(str(error.value).splitlines()) == 1 and str(error.value).isprintable()


def small():
    """A model that takes pictures of any size."""
    return make(resize=7, crop=(6, 7), image_size=(6, 7), patch_size=(2, 7), **PLAIN)


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif
