"""Trains pairs of a tiny CRATE and a tiny ViT under one budget, on objects pasted on textures.

    python demos/train_pairs.py --out runs/pairs           # ten models, one after the other
    python demos/train_pairs.py --out runs/pairs --family  # twenty of four other families
    python demos/train_pairs.py --out runs/pairs --search  # learning rates, on held-out data

One model takes about 3 minutes of one CPU core. Equal for both kinds: the data, their order (by
seed), the number of steps and images, the batch, AdamW and its schedule, weight decay, label
smoothing, the grid of learning rates, layers, heads, tokens, and the parameters within 1 %. Not
equal: the width (demos/pairs.py says why), the learning rate chosen from the grid, the time a step
takes, and how the weights start (each by its own library's rule).

Data: objects of Fashion-MNIST, tinted and pasted on squares of the tinted textures brick, grass and
gravel; train_tiny_cutouts.py says where to get them (--fashion, --textures) and which columns of a
texture are for training. The object keeps its 28x28 pixels and lies anywhere in the 32x32 pixels of
the picture: that is learnt in minutes, where objects of any size take hours. Training sees labels
only. The first 2,000 training objects are held out for the choice of the learning rate.

The rates were picked by pilots of 200 steps, seed 99, which do not tell the rates of the ViT apart:
held-out accuracy at 5e-4 1e-3 2e-3 4e-3 is 16.8 24.0 35.4 24.7 % of CRATE, 21.8 22.9 16.9 20.6 % of
the ViT. --search is the search of equal budget for both: each rate of a wider grid, as many steps
as the training itself, three seeds that serve no pair, matrix products in float32. It takes 30
trainings of 3 to 6 minutes, goes on when interrupted, and writes pairs-search.json beside the
weights. CRATE has 35.6 52.2 60.5 64.4 49.4 % at 2.5e-4 5e-4 1e-3 2e-3 4e-3, so its rate is the best
one; the ViT has 46.8 51.3 50.3 45.3 38.9 %, so another rate would give it a point more. A claim on
the ViT's accuracy grants it that point, and what its interval adds (`pairs.untuned`).

The same pilots of the family (--family): CRATE-alpha 14.5 21.2 34.0 41.5 %, the last at the end of
the grid; ToST-ISTA 9.3 21.2 26.9 24.2; CBT 17.4 27.1 33.4 29.4; AoT 18.2 21.0 10.0 10.0.

The same command goes on from where it stopped, and leaves a model alone that is done. Each is
written into demos/weights (--weights) as soon as it is trained.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import training
from pairs import (
    FAMILY,
    HEADS,
    KINDS,
    LABELS,
    LAYERS,
    SAMPLE,
    SEARCH,
    SEEDS,
    SIZE,
    WEIGHTS,
    WIDTH,
    digest,
    logits,
    make_model,
    n_params,
    name_of,
    write_preprocessor,
)
from PIL import Image as Pillow
from torch import Tensor, nn
from tqdm.auto import tqdm
from train_tiny_cutouts import SOURCES, read_textures, tint, training_sources

HELD_OUT, N_TRAIN, N_TEST, N_SAMPLE = 2000, 50_000, 4000, 256
DATA_SEED, SQUARE = 0, (64, 129)  # pixels of a texture: the side of a background
STEPS, BATCH, DECAY, SMOOTHING = 800, 64, 0.05, 0.1
PILOTS, PILOT_STEPS = (5e-4, 1e-3, 2e-3, 4e-3), 200
# the best pilots on held-out composites
RATE = {"crate": 0.002, "vit": 0.001}
RATE |= {"crate-alpha": 0.004, "tost-ista": 0.002, "cbt": 0.002, "aot": 0.001}
GRID, SEARCH_SEEDS = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), (97, 98, 99)

CARD = """---
license: mit
library_name: {library}
tags: [{tag}, image-classification]
---
# {name}

A {what} of {params:,} parameters: 32x32 RGB images, patch 4 (65 tokens), width {width}, {layers}
layers, {heads} heads. {of}; not
a model to build on.

* Data: objects of Fashion-MNIST (Zalando SE, MIT licence), tinted and pasted on the textures brick,
  grass and gravel (CC0, from scikit-image): {train:,} composites, mirrored at random. Supervised by
  class labels only: no mask was seen in training.
* Recipe: AdamW, learning rate {lr:g} (cosine, {warmup:.0%} warm-up), weight decay {decay:g}, label
  smoothing {smoothing:g}, batch {batch}, {steps:,} steps, matrix products in {products}, seed
  {seed}. The learning rate is the best of {grid} on held-out composites
  after {pilot} steps; the same grid served every kind.
* Accuracy: {test:.2%} on composites of {n_test:,} test images on unseen parts of the textures,
  {sample:.2%} on the first {n_sample} of them (pairs.parquet), {held_out:.2%} on {held:,} held-out
  composites. Chance is 10 %; step 0 has {untrained:.2%} on the held-out ones.
* The weights at step 0 are those of `pairs.make_model("{kind}", {seed})`, whose digest is in
  training.json. The weights here are rounded to float16, and measured so.
* Wall time: {minutes:.1f} minutes on one of two CPU cores (shared). Script: demos/train_pairs.py.
"""
WHAT = {
    "crate": "CRATE (arXiv 2306.01129)",
    "vit": "ViT (arXiv 2010.11929)",
    "crate-alpha": "CRATE-alpha (arXiv 2405.20299)",
    "tost-ista": "ToST with ISTA in place of its MLP (arXiv 2412.17810)",
    "cbt": "CBT (arXiv 2509.16875)",
    "aot": "AoT (arXiv 2506.03790)",
}
OF_PAIRS = "One of ten networks trained under one budget to compare CRATE with a ViT"
OF_FAMILY = "One of thirty networks trained under one budget to compare families"


class Pasted:
    """Tinted objects of 28x28 pixels on tinted textures. Picture `index` is always the same."""

    def __init__(
        self, objects: tuple[np.ndarray, np.ndarray], textures: list[Pillow.Image]
    ) -> None:
        self.objects, self.labels = objects
        self.textures = textures

    def one(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns one picture, uint8 [h, w, 3], and its mask, bool [h, w]."""
        rng = np.random.default_rng((DATA_SEED, index))
        grey = self.objects[index]
        if rng.random() < 0.5:
            grey = grey[:, ::-1]
        texture, side = self.textures[rng.integers(len(self.textures))], rng.integers(*SQUARE)
        left, top = rng.integers(texture.width - side + 1), rng.integers(texture.height - side + 1)
        box: Any = (left, top, left + side, top + side)
        square = texture.resize((SIZE, SIZE), Pillow.Resampling.BILINEAR, box=box)
        picture, mask = tint(np.asarray(square), rng), np.zeros((SIZE, SIZE), bool)
        x, y = rng.integers(0, SIZE - len(grey) + 1, 2)
        # the background of Fashion-MNIST is exactly 0
        mask[y : y + len(grey), x : x + len(grey)] = grey > 0
        picture[mask] = tint(grey, rng)[grey > 0]
        return picture, mask

    def tensors(self, n: int, words: str) -> tuple[Tensor, Tensor]:
        """Returns the first n pictures, uint8 [n, 3, h, w], and their labels [n]."""
        rows = tqdm(range(n), desc=words, mininterval=5)
        images = torch.from_numpy(np.stack([self.one(index)[0] for index in rows]))
        return images.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(self.labels[:n])


def batch_of(images: Tensor, labels: Tensor, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the batch of a step, half of it mirrored; it depends on step and seed alone."""
    rows = training.rows_of(step, len(labels), BATCH, 1_000 * seed)
    mirrored = torch.rand(len(rows), 1, 1, 1, generator=training.draws(seed, step)) < 0.5
    shown = images[rows]
    return torch.where(mirrored, shown.flip(-1), shown), labels[rows]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images whose largest logit is their label's."""
    batches = zip(images.split(500), labels.split(500), strict=True)
    return training.accuracy(lambda x: logits(model.eval(), x), batches)


def train(
    kind: str,
    seed: int,
    data: tuple[Tensor, Tensor],
    steps: int,
    peak: float,
    out: Path,
    half: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a trained network and facts about its training.

    out: the folder of its state. half: matrix products in bfloat16.
    """
    model = make_model(kind, seed)
    start = digest(model)

    def loss(step: int) -> Tensor:
        x, y = batch_of(*data, step, seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            answer = logits(model.train(), x)
        return F.cross_entropy(answer.float(), y, label_smoothing=SMOOTHING)

    minutes = training.fit(
        model, training.adamw(model, DECAY), loss,
        lambda step: training.learning_rate(step, steps, peak), steps, out,
        dict(kind=kind, seed=seed, steps=steps, peak=peak, batch=BATCH, start=start),
        words=name_of(kind, seed),
    )  # fmt: skip
    return model.eval(), dict(steps=steps, lr=peak, minutes=minutes, start=start)


def search(
    data: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], out: Path, steps: int = STEPS
) -> dict[str, dict[str, Any]]:
    """Returns what a search of equal budget finds for both kinds.

    Each rate of GRID is tried with each seed of SEARCH_SEEDS. rate: that of the highest mean
    accuracy on held-out composites; inside: whether it is no end of the grid; accuracies: by rate
    and seed.
    """
    found = {}
    for kind in KINDS:
        shares: dict[float, list[float]] = {}
        for peak in GRID:
            for seed in SEARCH_SEEDS:
                folder = out / f"search-{kind}-{peak:g}-{seed}"
                model, _ = train(kind, seed, data, steps, peak, folder)
                shares.setdefault(peak, []).append(accuracy(model, *held))
            print(f"{kind:6} {peak:g}: {', '.join(f'{x:.2%}' for x in shares[peak])}", flush=True)
        best = max(GRID, key=lambda rate: sum(shares[rate]))
        found[kind] = dict(rate=best, inside=best not in (GRID[0], GRID[-1]), steps=steps)
        found[kind]["accuracies"] = {f"{rate:g}": each for rate, each in shares.items()}
    return found


def write_model(model: nn.Module, kind: str, folder: Path) -> None:
    """Writes a network's folder, the weights in float16, and rounds those of the model likewise."""
    model.half().save_pretrained(folder)  # type: ignore[operator]
    model.float()
    (folder / "model.safetensors").chmod(0o644)
    if kind == "vit":
        config: Any = model.config
        config.dtype = torch.float32
        config.save_pretrained(folder)
        write_preprocessor(folder)


def finish(kind: str, seed: int, folder: Path, facts: dict[str, Any]) -> None:
    """Writes training.json and the model card beside the weights."""
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    paired = kind in KINDS
    card = CARD.format(
        **facts, warmup=training.WARMUP, decay=DECAY, smoothing=SMOOTHING, batch=BATCH,
        pilot=PILOT_STEPS, train=N_TRAIN, n_test=N_TEST, n_sample=N_SAMPLE, held=HELD_OUT,
        grid=", ".join(map("{:g}".format, PILOTS)), width=WIDTH[kind], layers=LAYERS, heads=HEADS,
        name=name_of(kind, seed), what=WHAT[kind], of=OF_PAIRS if paired else OF_FAMILY,
        library="transformers" if kind == "vit" else "crate_interp",
        tag="vit" if kind == "vit" else "white-box-transformer",
        products="bfloat16" if paired else "float32",
    )  # fmt: skip
    (folder / "README.md").write_text(card)


def main() -> None:
    args = training.arguments(
        __doc__, **SOURCES, out=Path("runs/pairs"), weights=WEIGHTS, seeds=[0, *SEEDS],
        family=False, search=False,
    )  # fmt: skip
    held, data = (Pasted(*source) for source in training_sources(args, HELD_OUT))
    held_out = held.tensors(HELD_OUT, "held-out composites")
    trained = data.tensors(N_TRAIN, "composites")
    if args.search:
        found = search(trained, held_out, args.out)
        (args.weights / SEARCH.name).write_text(json.dumps(found, indent=2) + "\n")
        return
    objects = training.read_idx(args.fashion, "t10k")
    test = Pasted(objects, read_textures(args.textures, "t10k"))
    tested = test.tensors(N_TEST, "test composites")
    if not (args.weights / SAMPLE.name).exists():
        pictures, masks = zip(*(test.one(index) for index in range(N_SAMPLE)), strict=True)
        masks = [mask.astype(np.uint8) * 255 for mask in masks]
        columns = dict(labels=test.labels[:N_SAMPLE], image=pictures, mask=masks)
        training.save_pictures(args.weights / SAMPLE.name, LABELS, **columns)
    networks = [(kind, seed) for seed in args.seeds for kind in (FAMILY if args.family else KINDS)]
    for kind, seed in networks:
        folder = args.weights / name_of(kind, seed)
        if (folder / "README.md").exists() and (folder / "training.json").exists():
            continue
        place = args.out / folder.name
        model, facts = train(kind, seed, trained, STEPS, RATE[kind], place, kind in KINDS)
        write_model(model, kind, folder)
        facts |= dict(kind=kind, seed=seed, params=n_params(model))
        facts |= dict(test=accuracy(model, *tested), held_out=accuracy(model, *held_out))
        facts["sample"] = accuracy(model, *(part[:N_SAMPLE] for part in tested))
        facts["untrained"] = accuracy(make_model(kind, seed), *held_out)
        finish(kind, seed, folder, facts)
        print(f"{folder.name}: test accuracy {facts['test']:.2%}", flush=True)


if __name__ == "__main__":
    main()
