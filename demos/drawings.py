"""Drawings of seven categories by three vendors, and clip art, as cut-outs with alpha.

    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0 \\
        @lobehub/fluent-emoji-3d@1.1.0
    for name in google twitter; do mkdir $name; tar xzf emoji-datasource-$name-*.tgz -C $name; done
    mkdir fluent && tar xzf lobehub-fluent-emoji-3d-*.tgz -C fluent
    apt-get download openclipart-png && dpkg -x openclipart-png_*.deb clip
    pip download --no-deps scikit-image==0.26.0 && unzip scikit_image-*.whl 'skimage/data/*'

Run these in an empty folder; the scripts take it as --drawings. Licences: Google's drawings
Apache-2.0, Twitter's CC BY 4.0 (Twemoji, copyright Twitter, Inc. and other contributors), Fluent's
MIT (Microsoft), the clip art public domain (openclipart.org), brick, grass, gravel and retina CC0,
hubble_deep_field public domain (NASA).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

LABELS = ("animal", "building", "face", "food", "person", "plant", "vehicle")
VENDORS = ("google", "twitter", "clip")  # that training sees; Fluent is for the test
# the sub-categories of Unicode, by category
SUBCATEGORIES = {
    "animal": (
        "animal-amphibian", "animal-bird", "animal-bug", "animal-mammal", "animal-marine",
        "animal-reptile",
    ),
    "building": ("place-building", "place-religious"),
    "face": (
        "face-affection", "face-concerned", "face-costume", "face-glasses", "face-hand", "face-hat",
        "face-negative", "face-neutral-skeptical", "face-sleepy", "face-smiling", "face-tongue",
        "face-unwell",
    ),
    "food": (
        "drink", "food-asian", "food-fruit", "food-prepared", "food-sweet", "food-vegetable",
    ),
    "person": (
        "person", "person-activity", "person-fantasy", "person-gesture", "person-resting",
        "person-role", "person-sport",
    ),
    "plant": ("plant-flower", "plant-other"),
    "vehicle": ("transport-air", "transport-ground", "transport-water"),
}  # fmt: skip
# emoji that these sub-categories list, and that are none of the category
NOT = frozenset((
    "wood", "rock", "bricks", "building_construction", "feather", "spider_web", "coral", "feet",
    "fuelpump", "busstop", "motorway", "railway_track", "oil_drum", "wheel", "rotating_light",
    "traffic_light", "vertical_traffic_light", "octagonal_sign", "construction", "anchor",
    "ring_buoy", "seat", "nest_with_eggs", "empty_nest",
))  # fmt: skip
# the folders of Debian's openclipart-png
CLIP_ART = {
    "animal": ("animals/birds", "animals/bugs", "animals/dinosaurs", "animals/fish",
               "animals/mammals"),
    "building": ("buildings/homes",),
    "food": ("food/beverages", "food/breads_and_carbs", "food/dairy", "food/desserts", "food/fruit",
             "food/meats_and_eggs", "food/vegetables"),
    "plant": ("plants/flowers", "plants/trees"),
    "vehicle": ("transportation/vehicles",),
}  # fmt: skip
# parts of the names of clip art that is line art or a road sign
UNFIT = ("_bw", "silhouet", "symbol", "ahead", "lane", "route", "sign", "road", "parking", "light")
BACKGROUNDS = ("brick.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "retina.jpg")
SIDE = 64  # pixels: the longer side of a cut-out at most
_PNG = "usr/share/openclipart/png"


def read(vendor: str, folder: Path) -> list[tuple[int, str, Image.Image]]:
    """Returns the category, the name and the RGBA cut-out of each drawing of a vendor.

    vendor: one of VENDORS, or "fluent". Google's and Twitter's people have three of the five skin
    tones besides the yellow one. Raises SystemExit, which names the file, if one is missing.
    """
    if vendor == "clip":
        return _clip_art(folder / "clip" / _PNG)
    table = folder / "google" / "package" / "emoji.json"
    if not table.exists():
        raise SystemExit(f"{table} is missing. {__doc__}")
    of = {name: label for label, names in SUBCATEGORIES.items() for name in names}
    found = []
    for row in json.loads(table.read_text()):
        if row["subcategory"] not in of or row["short_name"] in NOT:
            continue
        for path in _files(row, vendor, folder):
            label = LABELS.index(of[row["subcategory"]])
            found.append((label, row["short_name"], cut(opened(path))))
    return found


def _files(row: dict[str, Any], vendor: str, folder: Path) -> list[Path]:
    """Returns the files of one emoji: one of each skin tone that is used."""
    package = folder / vendor / "package"
    if vendor == "fluent":
        code = row["unified"].lower()
        files = [package / "assets" / f"{name}.webp" for name in (code, code.replace("-fe0f", ""))]
        return [path for path in files if path.exists()][:1]
    tones = [tone for key, tone in row.get("skin_variations", {}).items() if "-" not in key][::2]
    files = [package / "img" / vendor / "64" / one["image"] for one in (row, *tones)]
    return [path for path in files if path.exists()]


def _clip_art(folder: Path) -> list[tuple[int, str, Image.Image]]:
    if not folder.is_dir():
        raise SystemExit(f"{folder} is missing. {__doc__}")
    found = []
    for label, parts in CLIP_ART.items():
        for path in sorted(path for part in parts for path in (folder / part).rglob("*.png")):
            if path.is_symlink() or any(word in path.name for word in UNFIT):
                continue
            picture = np.asarray(opened(path).convert("RGBA"))
            inside = picture[..., 3] > 127
            colours = picture[inside][:, :3].astype(float)
            # pictures without a cut-out, and grey line art
            if not 0.03 < inside.mean() < 0.9 or np.ptp(colours, axis=1).mean() < 12:
                continue
            found.append((LABELS.index(label), path.stem, cut(Image.fromarray(picture))))
    return found


def opened(path: Path) -> Image.Image:
    """Opens a picture, in one of the formats that the packages have."""
    return Image.open(path, formats=("PNG", "JPEG", "WEBP"))


def cut(picture: Image.Image) -> Image.Image:
    """Returns a picture cropped to its alpha, with a longer side of at most 64 pixels."""
    picture = picture.convert("RGBA")
    box: Any = picture.getchannel("A").point([0] * 41 + [255] * 215).getbbox()
    picture = picture.crop(box)
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return picture


def backgrounds(folder: Path, *, test: bool) -> list[Image.Image]:
    """Returns the textures and photographs, at most 512 pixels high, cropped to one split.

    The left 70 % of the columns are for training, the rest for tests.
    """
    found = []
    for name in BACKGROUNDS:
        path = folder / "skimage" / "data" / name
        if not path.exists():
            raise SystemExit(f"{path} is missing. {__doc__}")
        picture = opened(path)
        picture.thumbnail((512, 512), Image.Resampling.LANCZOS)
        edge = round(0.7 * picture.width)
        box = (edge, 0, picture.width, picture.height) if test else (0, 0, edge, picture.height)
        found.append(picture.crop(box))
    return found
