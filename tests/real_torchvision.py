"""torchvision's data sets, loaders and transforms give the numbers of `imagefolder:`.

`make torchvision` runs this file, in an environment that has torchvision; no other run collects it.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

import crate_interp as ci
from conftest import make

SIDE, RESIZE = 15, 17
SIZES = [(23, 31), (41, 19), (17, 17), (29, 13), (11, 37), (53, 43), (19, 23)]  # height, width
NAMES = ["boot", "coat"]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")
SWEEP = dict(batch_size=3, progress=False, controls=0, probes="sparsity")


def vision(interpolation="bicubic"):
    size = dict(image_size=(SIDE, SIDE), patch_size=(5, 5), resize=RESIZE, crop=SIDE)
    labels = [*NAMES, *(f"class {number}" for number in range(2, 11))]
    return make(**size, **IMAGENET, interpolation=interpolation, labels=labels)


def picture(size, seed):
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate(SIZES):
        path = place / NAMES[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        picture(size, number).save(path)
    return place


def steps(module, interpolation="bicubic", first=(), last=None):
    """The preprocessing of `vision()` in the transforms of a module, v1 or v2."""
    mode = transforms.InterpolationMode(interpolation)
    return module.Compose(
        [
            *first,
            module.Resize(RESIZE, mode),
            module.CenterCrop(SIDE),
            last or module.ToTensor(),
            module.Normalize(**IMAGENET),
        ]
    )


@pytest.mark.parametrize("interpolation", FILTERS)
def test_transforms_of_pictures_are_ours(interpolation):
    """Those of v1 to the bit; v2 multiplies by 1 / 255 where v1 and `preprocess` divide by 255."""
    model = vision(interpolation)
    to_floats = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    of_v2 = steps(v2, interpolation, last=to_floats)
    for one in map(picture, SIZES, range(len(SIZES))):
        wanted = model.preprocess(one)[0]
        assert torch.equal(steps(transforms, interpolation)(one), wanted)
        # one rounding of pixels up to 1, then one of results up to 4
        rounding = 2**-23 / min(IMAGENET["std"]) + 2**-22
        torch.testing.assert_close(of_v2(one), wanted, atol=rounding, rtol=0)


@pytest.mark.parametrize("before", [False, True], ids=["bytes", "floats"])
@pytest.mark.parametrize("interpolation, most", [("bilinear", 1), ("bicubic", 20)])
def test_transforms_of_tensors_round_otherwise(interpolation, most, before):
    """Pillow rounds to whole grey levels, and cuts off at 0 and 255, after rows and after columns.

    The pictures are noise, where sampling that overshoots is cut off most.
    """
    to_floats = v2.ToDtype(torch.float32, scale=True)
    first, last = (to_floats, v2.Identity()) if before else (v2.Identity(), to_floats)
    run = steps(v2, interpolation, (v2.ToImage(), first), last)
    noise = list(map(picture, SIZES, range(len(SIZES))))
    wanted = torch.cat([vision(interpolation).preprocess(one) for one in noise])
    apart = (torch.stack(list(map(run, noise))) - wanted).abs()
    levels = 255 * (apart * torch.tensor(IMAGENET["std"]).view(3, 1, 1)).max()
    assert most / 10 < levels < most + 1e-3


def same(found, wanted, names=None):
    """Compares the tables of results; names: what the numbers of classes in `found` mean."""
    for name in wanted.tables:
        one, other = found.table(name), wanted.table(name)
        if names and "label" in one.columns:
            one["label"] = [names[label] for label in one["label"]]
            one["label"] = one["label"].astype(other["label"].dtype)
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def in_our_order(folder, data):
    """`imagefolder:` spreads the classes over its samples, ImageFolder has one after the other."""
    files = [str(path) for path in sorted(folder.rglob("*.png"))]
    assert files == [path for path, _ in ImageFolder(folder).imgs]
    pixels = [vision().preprocess(path)[0] for path in files]
    ours = ci.data.open_data(f"imagefolder:{folder}", vision().preprocess)
    order = [
        next(n for n, one in enumerate(pixels) if torch.equal(one, image))
        for image in ours.read(0, len(files))
    ]
    return Subset(data, order)


def pil(batch):
    images, labels = zip(*batch, strict=True)
    return list(images), torch.tensor(labels)


FORMS = {
    "pictures": lambda plain, ready: plain,
    "tensors": lambda plain, ready: ready,
    "a Subset": lambda plain, ready: Subset(ready, range(len(ready))),
    "a ConcatDataset": lambda plain, ready: ConcatDataset(
        [Subset(plain, range(3)), Subset(plain, range(3, len(plain)))]
    ),
    "a loader": lambda plain, ready: DataLoader(ready, batch_size=2),
    "a loader with workers": lambda plain, ready: DataLoader(ready, batch_size=2, num_workers=2),
    "a loader of pictures": lambda plain, ready: DataLoader(plain, batch_size=3, collate_fn=pil),
    "a loader of a Subset": lambda plain, ready: DataLoader(
        Subset(ready, range(len(ready))), batch_size=2, num_workers=2
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_pictures_in_every_form(form, folder):
    plain = in_our_order(folder, ImageFolder(folder))
    ready = in_our_order(folder, ImageFolder(folder, transform=steps(transforms)))
    wanted = ci.sweep(vision(), f"imagefolder:{folder}", **SWEEP)
    same(ci.sweep(vision(), FORMS[form](plain, ready), **SWEEP), wanted, NAMES)


def test_names_of_classes_come_along(folder):
    samples = ci.data.open_data(ImageFolder(folder), vision().preprocess)
    assert samples.names == tuple(NAMES)
    assert samples.labels == [0] * 4 + [1] * 3


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_pictures_that_a_dataset_draws_by_number(workers):
    plain = FakeData(7, (3, SIDE, SIDE), 11)
    ready = FakeData(7, (3, SIDE, SIDE), 11, transform=steps(transforms))
    wanted = ci.sweep(vision(), ([image for image, _ in plain], [y for _, y in plain]), **SWEEP)
    data = ready if workers is None else DataLoader(ready, batch_size=2, num_workers=workers)
    same(ci.sweep(vision(), data, **SWEEP), wanted)


RANDOM = {
    "flip": lambda: transforms.RandomHorizontalFlip(),
    "flip of v2": lambda: v2.RandomHorizontalFlip(),
    "crop": lambda: transforms.RandomCrop(11),
    "colours": lambda: transforms.ColorJitter(brightness=0.5),
    "resized crop": lambda: v2.RandomResizedCrop(19),
}


@pytest.mark.parametrize("loader", [False, True], ids=["dataset", "loader"])
@pytest.mark.parametrize("step", RANDOM)
def test_a_random_step_is_refused_whatever_the_seed(step, loader, folder):
    data = ImageFolder(folder, transform=steps(transforms, first=[RANDOM[step]()]))
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match="random"):
            ci.sweep(vision(), DataLoader(data, batch_size=2) if loader else data, **SWEEP)
