"""Trains crate-tiny-pictures, a CRATE of 0.7 M parameters, on drawings pasted on pictures.

    python demos/train_tiny_pictures.py --drawings FOLDER --out runs/crate-tiny-pictures

It takes under 75 minutes of one CPU core whose matrix products know bfloat16. The model learns
class labels only; its training sees no masks. demos/drawings.py says what to download into FOLDER.

Data: drawings of seven categories by Google and Twitter, and clip art, at a random size, place,
turn and colour on squares of textures and photographs. A test composite shares neither drawing nor
background with training: its drawing is Fluent's, its background lies in columns that training
does not use. --held-out twitter trains without Twitter's drawings and tests on them, to choose a
recipe; Fluent's are then not read.

Pictures grow: most steps show 32 x 32 pixels, which lie anywhere on the grid of positions, so a
step is five times as fast; then come 48 and 64. An object has about as many pixels in all of them.
Matrices of layers are trained by Muon (torch 2.9 or later), the rest by AdamW.

You can interrupt it at any time: the same command goes on from where it stopped.
`crate_interp.load(folder)` loads the folder that it writes.
"""

import argparse
import json
import re
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import drawings
import numpy as np
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pillow
from torch import Tensor
from tqdm.auto import tqdm
from train_tiny_cutouts import png, tint
from training import resumed, save_step, save_training, size_of, stopped

from crate_interp import CrateConfig, HookedCrate
from crate_interp.data.object_masks import paste, random_square

SIZE, PATCH, BATCH, SEED, DECAY = 64, 4, 64, 0, 0.05
GRID = SIZE // PATCH
LR, WARM, FALL = 4e-3, 250, 2350  # the steps in which the rate rises, and falls to zero
COLOURS, SHADE = 1.5, 0.35  # how far the colours and the light of an object change
SHARE = (0.35, 0.7)  # of a test: the longer side of an object, as a share of the picture's


class Phase(NamedTuple):
    """A part of the training.

    side: of its pictures, in pixels. share: the longer side of an object, as a share of the
    picture's.
    """

    steps: int
    side: int
    share: tuple[float, float]


PHASES = (
    Phase(6600, 32, (0.6, 1.0)),
    Phase(1250, 48, (0.45, 0.95)),
    Phase(500, SIZE, (0.35, 0.75)),
)
STEPS = sum(phase.steps for phase in PHASES)
SAVED_STEPS = (0, 8, 32, 125, 500, 2000, STEPS)  # log-spaced; the last step is the model itself
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
N_TEST, N_SAMPLE = 2100, 128

CARD = """---
license: mit
library_name: crate_interp
tags: [crate, white-box-transformer, image-classification, image-segmentation]
---
# crate-tiny-pictures

A CRATE (arXiv 2306.01129) of {params:,} parameters: 64x64 RGB images, patch 4 (257 tokens), d_model
{d_model}, {n_layers} layers, {n_heads} heads. Made for trying out crate_interp without a network;
not a model to build on.

* Data: drawings of seven categories ({labels}) on textures and photographs. To train:
  {n_google:,} by Google (Noto Emoji, Apache-2.0), {n_twitter:,} by Twitter (Twemoji, CC BY 4.0,
  copyright Twitter, Inc. and other contributors) and {n_clip:,} from openclipart.org (public
  domain). Backgrounds: brick, grass, gravel and retina (CC0) and the Hubble deep field (NASA,
  public domain), all from scikit-image. Supervised by class labels only: no mask was seen.
* Embedded test images (embedded:pictures): {sample} composites of Fluent's drawings (Microsoft, MIT
  licence), which training never saw, on columns of the backgrounds that it never saw.
* Recipe: Muon for the matrices of layers, AdamW for the rest, weight decay {decay:g}, label
  smoothing 0.1, batch {batch}; random turns, widths, colours and light; matrix products in
  bfloat16; seed {seed}. Learning rate {lr:g}, rising for {warm:,} steps and falling to zero in the
  last {fall:,}. {phases}. The smaller pictures lie anywhere on the grid of positions.
* Accuracy: {test:.1%} ({low:.1%} to {high:.1%}, 95 % over drawings) on {n_test:,} composites of
  {n_fluent} of Fluent's drawings, as many of each category, on the weights as they are saved.
  Objects have {share[0]:.0%} to {share[1]:.0%} of the side. Chance is 14.3 %; step 0 has
  {untrained:.1%}.
* Time: {minutes:.0f} minutes of one CPU core. Script: demos/train_tiny_pictures.py.
* The weights are float16. Those after steps {saved} lie in demos/weights/crate-tiny-pictures of the
  repository: ci.load("demos/weights/crate-tiny-pictures", revision="step-0").
"""

Cutouts = dict[int, list[tuple[str, list[Pillow.Image]]]]  # category: drawings of each vendor


def cutouts_of(vendors: tuple[str, ...], folder: Path) -> Cutouts:
    """Returns the cut-outs of each category, by vendor."""
    found: Cutouts = {label: [] for label in range(len(drawings.LABELS))}
    for vendor in vendors:
        rows = drawings.read(vendor, folder)
        for label, kinds in found.items():
            own = [cutout for one, _, cutout in rows if one == label]
            kinds += [(vendor, own)] if own else []
    return found


def turned(cutout: Pillow.Image, rng: np.random.Generator) -> Pillow.Image:
    """Returns a cut-out turned by up to 12 degrees, and made wider or narrower by up to a fifth."""
    cutout = cutout.rotate(rng.uniform(-12, 12), Pillow.Resampling.BICUBIC, expand=True)
    return cutout.resize((max(1, round(cutout.width * rng.uniform(0.8, 1.25))), cutout.height))


def shrunk(cutout: Pillow.Image, side: int) -> Pillow.Image:
    """Returns a cut-out at 1.25 times the side of a picture at most, which is cheaper to change."""
    scale = min(1.0, 1.25 * side / max(cutout.size))
    width, height = (max(1, round(scale * length)) for length in cutout.size)
    return cutout.resize((width, height), Pillow.Resampling.BICUBIC)


def shaded(cutout: Pillow.Image, rng: np.random.Generator) -> Pillow.Image:
    """Returns a cut-out that is brighter at one side, as light from there would make it."""
    pixels = np.asarray(cutout).astype(np.float32)
    height, width = pixels.shape[:2]
    way, far = rng.uniform(0, 2 * np.pi), SHADE * rng.standard_normal()
    across, down = np.linspace(-1, 1, width), np.linspace(-1, 1, height)[:, None]
    light = np.exp(far * (np.cos(way) * across + np.sin(way) * down))[..., None]
    pixels[..., :3] = np.clip(pixels[..., :3] * light, 0, 255)
    return Pillow.fromarray(pixels.astype(np.uint8))


def composite(
    cutout: Pillow.Image,
    grounds: list[Pillow.Image],
    side: int,
    share: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[Pillow.Image, Pillow.Image]:
    """Returns a cut-out at a random size and place on a random background, and its mask."""
    square = random_square(grounds[int(rng.integers(len(grounds)))], side, rng)
    if square.mode == "L":
        square = Pillow.fromarray(tint(np.asarray(square), rng))
    if rng.random() < 0.5:
        cutout = cutout.transpose(Pillow.Transpose.FLIP_LEFT_RIGHT)
    return paste(cutout, square, rng, share)


class Training:
    """Random composites; those of a step depend on the step alone."""

    def __init__(self, cutouts: Cutouts, grounds: list[Pillow.Image]) -> None:
        self.grounds = grounds
        self.cutouts = {
            side: {
                label: [(vendor, [shrunk(one, side) for one in own]) for vendor, own in kinds]
                for label, kinds in cutouts.items()
            }
            for side in {phase.side for phase in PHASES}
        }

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns normalised images in random colours [batch, 3, h, w], and labels [batch].

        The step says which phase it is of. Categories are equally likely, and so are the vendors of
        a category.
        """
        rng, phase = np.random.default_rng((SEED, step)), phase_of(step)
        labels = rng.integers(0, len(drawings.LABELS), BATCH)
        images = np.empty((BATCH, phase.side, phase.side, 3), np.uint8)
        for row, label in enumerate(labels):
            kinds = self.cutouts[phase.side][int(label)]
            _, own = kinds[int(rng.integers(len(kinds)))]
            cutout = turned(shaded(own[int(rng.integers(len(own)))], rng), rng)
            picture, _ = composite(cutout, self.grounds, phase.side, phase.share, rng)
            images[row] = np.asarray(picture)
        return in_other_colours(normalised(images), rng), torch.from_numpy(labels)


def normalised(images: np.ndarray) -> Tensor:
    """Returns images uint8 [n, h, w, 3] as the model reads them, [n, 3, h, w]."""
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - MEAN[0]) / STD[0]


def learning_rate(step: int) -> float:
    """Returns the learning rate of a step: it rises, stays, and falls to zero on straight lines."""
    return LR * min(1.0, (step + 1) / WARM, (STEPS - step) / FALL)


def phase_of(step: int) -> Phase:
    """Returns the phase of a step."""
    for phase in PHASES:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise ValueError("the training has no such step")


def in_other_colours(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Returns images with mixed channels, another contrast and another brightness."""

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((len(images), *shape))).float()

    mixed = torch.einsum("nij,njhw->nihw", torch.eye(3) + 0.12 * COLOURS * draw(3, 3), images)
    return mixed * torch.exp(0.15 * COLOURS * draw(1, 1, 1)) + 0.2 * COLOURS * draw(1, 1, 1)


class Test:
    """Composites of every drawing in turn, as many of each category, and their masks."""

    def __init__(self, cutouts: Cutouts, grounds: list[Pillow.Image], n: int) -> None:
        rng = np.random.default_rng((SEED, 1))
        each = n // len(drawings.LABELS)
        self.pictures, self.masks, self.labels, self.drawings = [], [], [], []
        every = [[cutout for _, some in kinds for cutout in some] for kinds in cutouts.values()]
        orders = [rng.permutation(len(own)) for own in every]
        for turn in range(each):
            for label, (own, order) in enumerate(zip(every, orders, strict=True)):
                drawing = int(order[turn % len(own)])
                picture, mask = composite(own[drawing], grounds, SIZE, SHARE, rng)
                self.pictures.append(picture)
                self.masks.append(mask)
                self.labels.append(label)
                self.drawings.append((label, drawing))

    @torch.no_grad()
    def right(self, model: HookedCrate) -> np.ndarray:
        """Returns whether the largest logit of each composite is its label's."""
        found = []
        for start in range(0, len(self.labels), 100):
            images = normalised(np.stack([np.asarray(p) for p in self.pictures[start:][:100]]))
            found.append(model.eval()(images).argmax(-1).numpy())
        return np.concatenate(found) == np.asarray(self.labels)


def interval(right: np.ndarray, groups: list[Any]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean, by 2,000 draws of whole groups with replacement."""
    _, index = np.unique(np.asarray(groups), axis=0, return_inverse=True)
    counts, hits = np.bincount(index), np.bincount(index, weights=right)
    drawn = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    low, high = np.quantile(hits[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def make_model() -> HookedCrate:
    """Returns the untrained network; the same seed gives the same start."""
    torch.manual_seed(SEED)
    size: dict[str, Any] = dict(
        d_model=192, n_layers=6, n_heads=6, image_size=SIZE, patch_size=PATCH
    )
    look: dict[str, Any] = dict(resize=SIZE, crop=SIZE, mean=MEAN, std=STD)
    names = dict(labels=drawings.LABELS, n_classes=len(drawings.LABELS))
    return HookedCrate(
        CrateConfig(family="crate", **size, **look, **names, model_name="crate-tiny-pictures")
    )


def optimizers_of(model: HookedCrate) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices of layers, at the scale of AdamW, and AdamW for the rest."""
    matrices, others = [], []
    for name, value in model.named_parameters():
        (matrices if name.startswith("blocks.") and value.ndim == 2 else others).append(value)
    return [
        torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=DECAY, betas=(0.9, 0.99)),
    ]


def positions(images: Tensor, seed: int) -> Tensor:
    """Returns the positions of CLS and of the patches of pictures that lie anywhere on the grid.

    The result is [batch, 1 + patches]; CLS has position 0.
    """
    n = images.shape[-1] // PATCH
    draw = torch.Generator().manual_seed(seed)
    corners = torch.randint(0, GRID - n + 1, (2, len(images), 1), generator=draw)
    rows, columns = corners + torch.arange(n)  # [batch, n] each
    patches = rows[:, :, None] * GRID + columns[:, None, :]  # [batch, n, n]
    return F.pad(patches.flatten(1) + 1, (1, 0))


def logits(model: HookedCrate, images: Tensor, seed: int) -> Tensor:
    """Returns the logits of pictures of at most the model's size, anywhere on its grid."""
    cls = model.cls_token.expand(len(images), -1, -1)
    z = torch.cat([cls, model.embed(images)], dim=1)
    return model(z + model.pos_embed[0, positions(images, seed)], start_at_layer=0)


def one_step(
    model: HookedCrate, optimizers: list[torch.optim.Optimizer], data: Training, step: int
) -> float:
    """Makes one update, on composites that depend only on the step; returns the loss before it."""
    images, labels = data.batch(step)
    with torch.autocast("cpu", torch.bfloat16):
        out = logits(model.train(), images, step)
    loss = F.cross_entropy(out.float(), labels, label_smoothing=0.1)
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
    return loss.item()


def train(args: argparse.Namespace, data: Training) -> tuple[HookedCrate, float]:
    """Returns the trained model and the seconds of processor time that it took.

    Saves args.out/resume.pt as it goes, and when interrupted.
    """
    model = make_model()
    optimizers = optimizers_of(model)
    settings: dict[str, Any] = dict(phases=[list(phase) for phase in PHASES])
    settings |= dict(held_out=args.held_out, learning_rate=[LR, WARM, FALL])
    resume = args.out / "resume.pt"
    step, seconds = resumed(model, optimizers, resume, settings)
    save = lambda: save_training(model, optimizers, resume, settings, step, seconds)  # noqa: E731
    bar = tqdm(total=STEPS, initial=step, desc="training", unit="step")
    try:
        while step < STEPS:
            started = time.process_time()
            if step in SAVED_STEPS:
                save_step(model, args.out, step)
            loss = one_step(model, optimizers, data, step)
            step += 1
            seconds += time.process_time() - started
            bar.update()
            if step % 100 == 0 or step == STEPS:
                save()
                with open(args.out / "log.csv", "a") as log:
                    log.write(f"{step},{loss:.4f},{seconds / 60:.1f}\n")
    except KeyboardInterrupt:
        save()
        raise stopped(step) from None
    bar.close()
    save_step(model, args.out, step)
    return model.eval(), seconds


def said(phase: Phase) -> str:
    """Returns a phase of the recipe in words."""
    low, high = phase.share
    return (
        f"{phase.steps:,} steps on pictures of {phase.side} pixels with objects of {low:.0%} to "
        f"{high:.0%} of the side"
    )


def wrapped(card: str) -> str:
    """Returns a card with the lines of its paragraphs and list wrapped."""
    head, _, body = card.partition("# crate-tiny-pictures")
    parts = re.split(r"\n(?=\* )|\n\n", body.strip())
    texts = [
        textwrap.fill(" ".join(part.split()), 100, subsequent_indent="  " * part.startswith("*"))
        for part in parts
    ]
    return f"{head}# crate-tiny-pictures\n\n{texts[0]}\n\n" + "\n".join(texts[1:]) + "\n"


def save_sample(test: Test, path: Path) -> None:
    """Saves the first test composites with masks and labels, as PNG bytes in parquet."""
    rows = [
        {"image": png(picture), "mask": png(mask), "label": label}
        for picture, mask, label in zip(test.pictures, test.masks, test.labels, strict=True)
    ]
    names = ClassLabel(names=list(drawings.LABELS))
    features = Features({"image": Image(), "mask": Image(), "label": names})
    Dataset.from_list(rows[:N_SAMPLE], features=features).to_parquet(path)


def finish(args: argparse.Namespace, model: HookedCrate, facts: dict, test: Test) -> None:
    """Writes the trained model's folder: weights, card and the sample of test composites."""
    model.half().save_pretrained(args.out)
    recipe = dict(decay=DECAY, batch=BATCH, share=SHARE, seed=SEED, lr=LR, warm=WARM, fall=FALL)
    recipe |= dict(saved=", ".join(map(str, SAVED_STEPS)), phases="; ".join(map(said, PHASES)))
    counts = {f"n_{name}": len(drawings.read(name, args.drawings)) for name in drawings.VENDORS}
    counts |= dict(n_test=N_TEST, sample=N_SAMPLE, n_fluent=len(set(test.drawings)))
    words = dict(labels=", ".join(drawings.LABELS))
    card = CARD.format(**facts, **size_of(model), **recipe, **counts, **words)
    (args.out / "README.md").write_text(wrapped(card))
    save_sample(test, args.out / "pictures.parquet")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, default=Path("runs/crate-tiny-pictures"))
    parser.add_argument("--drawings", type=Path, default=Path("drawings"))
    parser.add_argument("--held-out", choices=drawings.VENDORS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seen = tuple(vendor for vendor in drawings.VENDORS if vendor != args.held_out)
    unseen = (args.held_out or "fluent",)
    grounds = [drawings.backgrounds(args.drawings, test=test) for test in (False, True)]
    data = Training(cutouts_of(seen, args.drawings), grounds[0])
    test = Test(cutouts_of(unseen, args.drawings), grounds[1], N_TEST)
    model, seconds = train(args, data)
    model = model.half().float()  # the card is about the weights as they are saved
    right = test.right(model)
    facts = {"untrained": float(test.right(make_model()).mean()), "minutes": seconds / 60}
    facts["test"] = float(right.mean())
    facts["low"], facts["high"] = interval(right, test.drawings)
    print(json.dumps(facts))
    if args.held_out is None:
        finish(args, model, facts, test)
        print(f"written to {args.out}")


if __name__ == "__main__":
    main()
