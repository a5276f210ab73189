"""Trains crate-tiny-fashion, a CRATE of 0.3 M parameters, on Fashion-MNIST.

    python demos/train_tiny_fashion.py --out runs/crate-tiny-fashion

It takes about 40 minutes on two CPU cores. Data: Debian's package dataset-fashion-mnist (MIT
licence), unpacked or installed; --data gives the folder of the four .gz files. The recipe and the
number of epochs were chosen on 5,000 held-out training images (learning rates 1e-3 and 3e-3 reach
76.1 % and 79.9 % of them in two epochs with --pilot --epochs 2). The 10,000 test images are read
once, after the last step.

`crate_interp.load(folder)` loads the folder that it writes. --pilot chooses a recipe: it stops
before the test images are read.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
import training
from torch import Tensor
from training import FASHION, LABELS

from crate_interp import CrateConfig, HookedCrate

SAVED_STEPS = (0, 10, 40, 160, 640, 2560)  # log-spaced; the last step is the model itself
HELD_OUT, BATCH, SEED = 5000, 256, 0
MEAN, STD = (0.2860,), (0.3530,)  # of the training images

CARD = """---
license: mit
library_name: crate_interp
tags: [crate, white-box-transformer, image-classification]
---
# crate-tiny-fashion

A CRATE (arXiv 2306.01129) of {params:,} parameters: 28x28 grey images, patch 4, d_model {d_model},
{n_layers} layers, {n_heads} heads. Made for trying out crate_interp without a network; not a model
to build on.

* Data: Fashion-MNIST (Zalando SE, MIT licence), {train:,} training images; 5,000 were held out to
  choose the recipe.
* Recipe: AdamW, learning rate {lr:g} (cosine, {warmup:.0%} warm-up), weight decay {decay:g}, label
  smoothing 0.1, batch {batch}, {epochs} epochs ({steps:,} steps), flips and shifts of up to 2
  pixels, seed {seed}.
* Accuracy: {test:.2%} on the 10,000 test images, measured once after the last step; {held_out:.2%}
  on the held-out images.
* Chance is 10 %; the same network at step 0 has {untrained:.2%} on the held-out images.
* Wall time: {minutes:.0f} minutes on two CPU cores (shared). Script: demos/train_tiny_fashion.py.
* steps/: the weights in float16 after steps {saved}.
"""


def read(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Returns images uint8 [n, 1, 28, 28] and labels int64 [n] of one split ("train" or "t10k")."""
    images, labels = training.read_idx(folder, name)
    return torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flips half of the images and shifts each by up to 2 pixels, filling with black."""
    n, _, height, width = images.shape
    flip = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
    padded = F.pad(torch.where(flip, images.flip(-1), images), (2, 2, 2, 2))
    dy, dx = torch.randint(0, 5, (2, n), generator=generator)
    rows = (dy[:, None] + torch.arange(height))[:, :, None]  # [n, height, 1]
    columns = (dx[:, None] + torch.arange(width))[:, None, :]  # [n, 1, width]
    return padded[torch.arange(n)[:, None, None], 0, rows, columns].unsqueeze(1)


def accuracy(model: HookedCrate, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images whose largest logit is their label's."""
    batches = zip(images.split(500), labels.split(500), strict=True)
    return training.accuracy(lambda x: model.eval()(model.preprocess(x)), batches)


def make_model() -> HookedCrate:
    """Returns the untrained network; the same seed gives the same start."""
    torch.manual_seed(SEED)
    return HookedCrate(CrateConfig(
        family="crate", d_model=128, n_layers=6, n_heads=4, image_size=28, patch_size=4, channels=1,
        n_classes=10, resize=28, crop=28, mean=MEAN, std=STD, labels=LABELS,
        model_name="crate-tiny-fashion",
    ))  # fmt: skip


def main() -> None:
    args = training.arguments(
        __doc__, out=Path("runs/crate-tiny-fashion"), lr=3e-3, decay=0.05, pilot=False,
        data=FASHION, epochs=20,
    )  # fmt: skip
    every = read(args.data, "train")
    order = torch.randperm(len(every[0]), generator=torch.Generator().manual_seed(SEED))
    held, (x, y) = ([part[rows] for part in every] for rows in order.tensor_split([HELD_OUT]))
    model, steps = make_model(), args.epochs * (len(x) // BATCH)

    def loss(step: int) -> Tensor:
        rows = training.rows_of(step, len(x), BATCH, SEED)
        images = model.preprocess(augment(x[rows], training.draws(SEED, step)))
        return F.cross_entropy(model.train()(images), y[rows], label_smoothing=0.1)

    minutes = training.fit(
        model, training.adamw(model, args.decay), loss,
        lambda step: training.learning_rate(step, steps, args.lr), steps, args.out,
        dict(steps=steps, lr=args.lr, decay=args.decay), saved_steps=SAVED_STEPS,
        more=lambda: f"{accuracy(model, *held):.4f}",
    )  # fmt: skip
    facts = dict(steps=steps, minutes=minutes, untrained=accuracy(make_model(), *held))
    facts["held_out"] = accuracy(model, *held)
    print(json.dumps(facts))
    if args.pilot:
        return
    test = read(args.data, "t10k")
    facts["test"] = accuracy(model, *test)
    model.save_pretrained(args.out)
    data = dict(train=len(x), seed=SEED, saved=", ".join(map(str, SAVED_STEPS)), batch=BATCH)
    training.write_card(args.out, CARD, model, facts, vars(args), data)
    images, labels = (part[:256].numpy() for part in test)
    training.save_pictures(args.out / "fashion.parquet", LABELS, labels, image=images[:, 0])
    print(f"test accuracy {facts['test']:.2%} on {len(test[1]):,} images; written to {args.out}")


if __name__ == "__main__":
    main()
