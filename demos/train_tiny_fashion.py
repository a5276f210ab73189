"""Trains crate-tiny-fashion, a CRATE of 0.3 M parameters, on Fashion-MNIST.

    python demos/train_tiny_fashion.py --out runs/crate-tiny-fashion

It takes about 40 minutes on two CPU cores. Data: Debian's package dataset-fashion-mnist (MIT
licence), unpacked or installed; --data gives the folder of the four .gz files. The recipe and the
number of epochs were chosen on 5,000 held-out training images (learning rates 1e-3 and 3e-3 reach
76.1 % and 79.9 % of them in two epochs with --pilot --epochs 2). The 10,000 test images are read
once, after the last step.

You can interrupt it at any time: the same command goes on from the last save.
`crate_interp.load(folder)` loads the folder that it writes.
"""

import argparse
import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import training
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pillow
from tqdm.auto import tqdm

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


def read(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images uint8 [n, 1, 28, 28] and labels int64 [n] of one split ("train" or "t10k")."""
    images, labels = training.read_idx(folder, name)
    return torch.from_numpy(images.copy()).unsqueeze(1), torch.from_numpy(labels)


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Flips half of the images and shifts each by up to 2 pixels, filling with black."""
    n, _, height, width = images.shape
    flip = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
    padded = F.pad(torch.where(flip, images.flip(-1), images), (2, 2, 2, 2))
    dy, dx = torch.randint(0, 5, (2, n), generator=generator)
    rows = (dy[:, None] + torch.arange(height))[:, :, None]  # [n, height, 1]
    columns = (dx[:, None] + torch.arange(width))[:, None, :]  # [n, 1, width]
    return padded[torch.arange(n)[:, None, None], 0, rows, columns].unsqueeze(1)


@torch.no_grad()
def accuracy(model: HookedCrate, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of images whose largest logit is their label's."""
    hits = sum(
        (model(model.preprocess(x)).argmax(-1) == y).sum().item()
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    return hits / len(labels)


def save_sample(images: torch.Tensor, labels: torch.Tensor, path: Path, n: int = 256) -> None:
    """Saves the first n test images with labels, as PNG bytes in parquet."""
    rows = []
    for image, label in zip(images[:n, 0].numpy(), labels[:n].tolist(), strict=True):
        buffer = io.BytesIO()
        Pillow.fromarray(image).save(buffer, "PNG", optimize=True)
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": label})
    features = Features({"image": Image(), "label": ClassLabel(names=list(training.LABELS))})
    Dataset.from_list(rows, features=features).to_parquet(path)


def make_model() -> HookedCrate:
    """Returns the untrained network; the same seed gives the same start."""
    torch.manual_seed(SEED)
    size: dict[str, Any] = dict(
        d_model=128, n_layers=6, n_heads=4, image_size=28, patch_size=4, channels=1, n_classes=10
    )
    look: dict[str, Any] = dict(
        resize=28,
        crop=28,
        mean=MEAN,
        std=STD,
        labels=training.LABELS,
        model_name="crate-tiny-fashion",
    )
    return HookedCrate(CrateConfig(family="crate", **size, **look))


def train(
    args: argparse.Namespace, x: torch.Tensor, y: torch.Tensor, held: tuple
) -> tuple[HookedCrate, dict]:
    """Returns the trained model and facts about its training; saves resume.pt as it goes."""
    model = make_model()
    per_epoch = len(x) // BATCH
    steps, step, seconds, untrained = args.epochs * per_epoch, 0, 0.0, None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, weight_decay=args.decay, betas=(0.9, 0.99)
    )
    resume = args.out / "resume.pt"
    settings = dict(steps=steps, lr=args.lr, decay=args.decay)
    saved = training.load_resume(resume, settings)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, seconds, untrained = saved["step"], saved["seconds"], saved["untrained"]
    if untrained is None:
        untrained = accuracy(model.eval(), *held)
    bar = tqdm(total=steps, initial=step, desc="training", unit="step")
    while step < steps:
        started = time.perf_counter()
        if step in SAVED_STEPS:
            training.save_step(model, args.out, step)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED + epoch))
        rows = order[place * BATCH : (place + 1) * BATCH]
        images = augment(x[rows], torch.Generator().manual_seed(1_000_003 * (SEED + 1) + step))
        training.set_learning_rate(optimizer, step, steps, args.lr)
        logits = model.train()(model.preprocess(images))
        loss = F.cross_entropy(logits, y[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        seconds += time.perf_counter() - started
        bar.update()
        if step % 100 == 0 or step == steps:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
            state |= dict(settings=settings, seconds=seconds, untrained=untrained)
            training.save_resume(state, resume)
        if step % per_epoch == 0:
            held_out = accuracy(model.eval(), *held)
            bar.set_postfix(loss=f"{loss.item():.3f}", held_out=f"{held_out:.2%}")
            row = [step, f"{loss.item():.4f}", f"{held_out:.4f}", f"{seconds:.0f}"]
            with open(args.out / "log.csv", "a", newline="") as log:
                csv.writer(log).writerow(row)
    bar.close()
    return model.eval(), dict(steps=steps, minutes=seconds / 60, untrained=untrained)


def main() -> None:
    parser = training.recipe_parser(__doc__, "runs/crate-tiny-fashion", lr=3e-3, decay=0.05)
    parser.add_argument("--data", type=Path, default=training.FASHION)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    x, y = read(args.data, "train")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    held, rest = order[:HELD_OUT], order[HELD_OUT:]
    model, facts = train(args, x[rest], y[rest], (x[held], y[held]))
    facts["held_out"] = accuracy(model, x[held], y[held])
    print(json.dumps(facts))
    if args.pilot:
        return
    test_x, test_y = read(args.data, "t10k")
    facts["test"] = accuracy(model, test_x, test_y)
    model.save_pretrained(args.out)
    recipe = dict(
        lr=args.lr, decay=args.decay, warmup=training.WARMUP, batch=BATCH, epochs=args.epochs
    )
    data = dict(train=len(rest), seed=SEED, saved=", ".join(map(str, SAVED_STEPS)))
    card = CARD.format(**facts, **training.size_of(model), **recipe, **data)
    (args.out / "README.md").write_text(card)
    save_sample(test_x, test_y, args.out / "fashion.parquet")
    print(f"test accuracy {facts['test']:.2%} on {len(test_y):,} images; written to {args.out}")


if __name__ == "__main__":
    main()
