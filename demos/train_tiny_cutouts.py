"""Trains crate-tiny-cutouts, a CRATE of 0.7 M parameters, on objects pasted on textures.

    python demos/train_tiny_cutouts.py --out runs/crate-tiny-cutouts
    python demos/train_tiny_cutouts.py --out runs/vit-tiny-cutouts --model vit

It takes under 3 hours on two CPU cores. The model learns class labels only; its training sees no
masks.

Data: objects of Fashion-MNIST (Debian's package dataset-fashion-mnist, MIT licence; --fashion),
tinted and pasted on the CC0 textures brick, grass and gravel of the scikit-image wheel (--textures:
the folder skimage/data). Columns 0-351 of each texture are for training and the rest for tests, as
are Fashion-MNIST's own splits, so that a test composite shares neither object nor background with
training. The strip for tests is narrower: its squares (80 to 160 pixels, in training 176 to 352)
are zoomed 2.2 times as far.

You can interrupt it at any time: the same command goes on from where it stopped. --model vit trains
a plain ViT with as many parameters in the same way, for comparison. `crate_interp.load(folder)`
loads the folder that it writes.
"""

import argparse
import io
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pillow
from plain_vit import PlainViT
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from training import (
    FASHION,
    LABELS,
    WARMUP,
    learning_rate,
    load_resume,
    read_idx,
    recipe_parser,
    save_resume,
    save_step,
    size_of,
    stopped,
)

import crate_interp as ci
from crate_interp import CrateConfig, HookedCrate
from crate_interp.data.object_masks import paste, random_square

SHIPPED = Path(__file__).parent / "weights" / "crate-tiny-cutouts"  # with its test composites
SAVED_STEPS = (0, 30, 200, 1500)  # log-spaced; the last step is the model itself
SIZE, BATCH, SEED, HELD_OUT = 64, 128, 0, 2000
TEXTURES, COLUMNS = ("brick", "grass", "gravel"), {"train": (0, 352), "t10k": (352, 512)}
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
WIDTH = {"crate": 192, "vit": 96}  # d_model: as many parameters

CARD = """---
license: mit
library_name: crate_interp
tags: [crate, white-box-transformer, image-classification, image-segmentation]
---
# {name}

A {kind} of {params:,} parameters: 64x64 RGB images, patch 8 (65 tokens), d_model {d_model},
{n_layers} layers, {n_heads} heads. Made for trying out crate_interp without a network; not a model
to build on.

* Data: objects of Fashion-MNIST (Zalando SE, MIT licence; {train:,} training images), tinted and
  pasted on the textures brick, grass and gravel (CC0, from scikit-image). Supervised by class
  labels only: no mask was seen in training.
* Recipe: AdamW, learning rate {lr:g} (cosine, {warmup:.0%} warm-up), weight decay {decay:g}, label
  smoothing 0.1, batch {batch}, {steps:,} steps, a new composite each time, seed {seed}.
* Accuracy: {test:.2%} on composites of the 10,000 test images on unseen parts of the textures,
  zoomed 2.2 times as far as in training, measured once after the last step, on the weights as they
  are saved; {held_out:.2%} on {held:,} held-out composites. Chance is 10 %; step 0 has
  {untrained:.2%}.
* Wall time: {minutes:.0f} minutes on one of two CPU cores (shared). Script:
  demos/train_tiny_cutouts.py.
* The weights are float16. Those after steps {saved} lie in demos/weights/{name} of the
  repository: ci.load("demos/weights/{name}", revision="step-0").
"""


def composites() -> Dataset:
    """Returns the 128 shipped test composites: image, mask and label."""
    # read from the table, since Dataset.from_parquet would write a copy into the user's cache
    return Dataset(pyarrow.parquet.read_table(SHIPPED / "cutouts.parquet"))


def loaded(name: str) -> HookedCrate:
    """Returns an embedded model, or the shipped model of cutouts, by its name."""
    return ci.load(SHIPPED if name == SHIPPED.name else name)


def read_textures(folder: Path, split: str) -> list[Pillow.Image]:
    """Returns the grey textures, cropped to the columns of one split.

    Raises SystemExit, with how to get them, if a texture is missing.
    """
    missing = [name for name in TEXTURES if not (folder / f"{name}.png").exists()]
    if missing:
        raise SystemExit(
            f"{folder / missing[0]}.png is missing. Run `pip download --no-deps scikit-image && "
            "unzip scikit_image-*.whl 'skimage/data/*'`, and give --textures skimage/data."
        )
    left, right = COLUMNS[split]
    pictures = (Pillow.open(folder / f"{name}.png").convert("L") for name in TEXTURES)
    return [picture.crop((left, 0, right, picture.height)) for picture in pictures]


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Adds the folders of objects and textures to a parser."""
    parser.add_argument("--fashion", type=Path, default=FASHION)
    parser.add_argument("--textures", type=Path, default=Path("skimage/data"))


def training_sources(args: argparse.Namespace, held_out: int) -> list[tuple[Any, Any]]:
    """Returns the first objects of the training split, and the others, each with the textures."""
    images, labels = read_idx(args.fashion, "train")
    textures = read_textures(args.textures, "train")
    parts = slice(held_out), slice(held_out, None)
    return [((images[part], labels[part]), textures) for part in parts]


def tint(grey: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a grey picture [h, w] as RGB between a random dark and a random bright colour."""
    dark, bright = rng.uniform(0, 110, 3), rng.uniform(120, 255, 3)
    table = (dark + (bright - dark) * np.linspace(0, 1, 256)[:, None]).astype(np.uint8)  # [256, 3]
    return table[grey]


class Composites:
    """Tinted objects on tinted textures.

    Composite `index` of draw `draw` is always the same picture.
    """

    def __init__(
        self, objects: tuple[np.ndarray, np.ndarray], textures: list[Pillow.Image]
    ) -> None:
        self.images, self.labels = objects
        self.textures = textures

    def one(self, index: int, draw: int) -> tuple[Pillow.Image, Pillow.Image]:
        """Returns one composite and its mask."""
        rng = np.random.default_rng((SEED, draw, index))
        grey = self.images[index]
        if rng.random() < 0.5:
            grey = grey[:, ::-1]
        # the background of Fashion-MNIST is exactly 0
        alpha = np.where(grey > 0, 255, 0).astype(np.uint8)
        cutout = Pillow.fromarray(np.dstack([tint(grey, rng), alpha]))
        texture = self.textures[int(rng.integers(len(self.textures)))]
        square = random_square(texture, SIZE, rng)
        return paste(cutout, Pillow.fromarray(tint(np.asarray(square), rng)), rng)

    def batch(self, indices: Iterable[int], draw: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns images uint8 [batch, 3, h, w], labels [batch] and masks bool [batch, h, w]."""
        indices = list(indices)
        pairs = [self.one(index, draw) for index in indices]
        images = torch.from_numpy(np.stack([np.asarray(image) for image, _ in pairs]))
        masks = torch.from_numpy(np.stack([np.asarray(mask) > 127 for _, mask in pairs]))
        return images.permute(0, 3, 1, 2), torch.from_numpy(self.labels[indices]), masks


def make_model(kind: str) -> HookedCrate:
    """Returns the untrained network; the same seed gives the same start."""
    torch.manual_seed(SEED)
    size: dict[str, Any] = dict(
        d_model=WIDTH[kind], n_layers=6, n_heads=6, image_size=SIZE, patch_size=8, n_classes=10
    )
    look: dict[str, Any] = dict(resize=SIZE, crop=SIZE, mean=MEAN, std=STD, labels=LABELS)
    cfg = CrateConfig(family="crate", **size, **look, model_name=f"{kind}-tiny-cutouts")
    return PlainViT(cfg) if kind == "vit" else HookedCrate(cfg)


@torch.no_grad()
def accuracy(model: HookedCrate, data: Composites, n: int, draw: int) -> float:
    """Returns the share of the first n composites whose largest logit is their label's."""
    hits = 0
    for start in range(0, n, 500):
        images, labels, _ = data.batch(range(start, min(start + 500, n)), draw)
        hits += (model.eval()(model.preprocess(images)).argmax(-1) == labels).sum().item()
    return hits / n


def train(
    args: argparse.Namespace, data: Composites, held: Composites
) -> tuple[HookedCrate, dict[str, Any]]:
    """Returns the trained model and facts about its training.

    Saves args.out/resume.pt as it goes, and when interrupted.
    """
    model = make_model(args.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, weight_decay=args.decay, betas=(0.9, 0.99)
    )
    settings = dict(steps=args.steps, lr=args.lr, decay=args.decay, model=args.model)
    resume = args.out / "resume.pt"
    saved = load_resume(resume, settings)
    if saved is not None:
        model.load_state_dict(saved["weights"])
        optimizer.load_state_dict(saved["optimizer"])
        step, facts = saved["step"], saved["facts"]
    else:
        step, facts = 0, {"untrained": accuracy(model, held, HELD_OUT, 0), "minutes": 0.0}

    def save() -> None:
        state = dict(weights=model.state_dict(), optimizer=optimizer.state_dict())
        save_resume(state | dict(step=step, settings=settings, facts=facts), resume)

    bar = tqdm(total=args.steps, initial=step, desc="training", unit="step")
    try:
        while step < args.steps:
            started = time.perf_counter()
            if step in SAVED_STEPS:
                save_step(model, args.out, step)
            loss = one_step(model, optimizer, data, step, learning_rate(step, args.steps, args.lr))
            step += 1
            facts["minutes"] += (time.perf_counter() - started) / 60
            bar.update()
            if step % 100 == 0 or step == args.steps:
                save()
            if step % 500 == 0 or step == args.steps:
                share = accuracy(model, held, HELD_OUT, 0)
                bar.set_postfix(loss=f"{loss:.3f}", held_out=f"{share:.2%}")
                with open(args.out / "log.csv", "a") as log:
                    log.write(f"{step},{loss:.4f},{share:.4f},{facts['minutes']:.1f}\n")
    except KeyboardInterrupt:
        save()
        raise stopped(step) from None
    bar.close()
    return model.eval(), facts


def one_step(
    model: HookedCrate, optimizer: torch.optim.Optimizer, data: Composites, step: int, lr: float
) -> float:
    """Makes one update, on composites that depend only on the step; returns the loss before it."""
    per_epoch = len(data.labels) // BATCH
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(SEED + epoch))
    rows = order[place * BATCH : (place + 1) * BATCH].tolist()
    images, labels, _ = data.batch(rows, 1 + epoch)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = F.cross_entropy(model.train()(model.preprocess(images)), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def save_sample(data: Composites, path: Path, n: int = 128) -> None:
    """Saves the first n test composites with masks and labels, as PNG bytes in parquet."""
    rows = []
    for index in range(n):
        picture, mask = data.one(index, 0)
        rows.append({"image": png(picture), "mask": png(mask), "label": int(data.labels[index])})
    features = Features(
        {"image": Image(), "mask": Image(), "label": ClassLabel(names=list(LABELS))}
    )
    Dataset.from_list(rows, features=features).to_parquet(path)


def png(picture: Pillow.Image) -> dict[str, Any]:
    """Returns a picture as the datasets library stores it."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return {"bytes": buffer.getvalue(), "path": None}


def finish(
    args: argparse.Namespace,
    model: HookedCrate,
    facts: dict[str, Any],
    n_train: int,
    test: Composites,
) -> None:
    """Writes the trained model's folder: weights, card and the sample of test composites."""
    if args.model == "vit":
        # plain_vit.PlainViT reads it, ci.load does not
        save_file(model.state_dict(), args.out / "model.safetensors")
    else:
        model.half().save_pretrained(args.out)
    kind = {"crate": "CRATE (arXiv 2306.01129)", "vit": "plain ViT"}[args.model]
    recipe = dict(lr=args.lr, decay=args.decay, warmup=WARMUP, batch=BATCH, steps=args.steps)
    data = dict(train=n_train, held=HELD_OUT, seed=SEED, saved=", ".join(map(str, SAVED_STEPS)))
    name = f"{args.model}-tiny-cutouts"
    card = CARD.format(**facts, **size_of(model), **recipe, **data, name=name, kind=kind)
    (args.out / "README.md").write_text(card)
    save_sample(test, args.out / "cutouts.parquet")


def main() -> None:
    parser = recipe_parser(__doc__, "runs/crate-tiny-cutouts", lr=2e-3, decay=0.05)
    add_sources(parser)
    parser.add_argument("--model", choices=("crate", "vit"), default="crate")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    held, data = (Composites(*source) for source in training_sources(args, HELD_OUT))
    model, facts = train(args, data, held)
    if args.model == "crate":
        model = model.half().float()  # the card is about the weights as they are saved
    facts["held_out"] = accuracy(model, held, HELD_OUT, 0)
    print(json.dumps(facts))
    if not args.pilot:
        test = Composites(read_idx(args.fashion, "t10k"), read_textures(args.textures, "t10k"))
        facts["test"] = accuracy(model, test, len(test.labels), 0)
        finish(args, model, facts, len(data.labels), test)
        count = len(test.labels)
        print(f"test accuracy {facts['test']:.2%} on {count:,} composites; written to {args.out}")


if __name__ == "__main__":
    main()
