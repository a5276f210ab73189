"""Trains a small sparse autoencoder on stored activations, and evaluates it beside its baselines.

    python demos/train_sae.py --out runs/sae

The activations are the stream after layer 2 of crate-tiny-fashion for 192 images of clothing, every
token of them. They are written once, then a plain torch DataLoader reads them. The autoencoder has
twice as many features as the stream is wide, and keeps the 16 largest of a token (top-k).
`ci.saes.evaluate` puts it in the place of the stream for 64 further images: how much of the
variance it explains, and what the loss becomes.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import crate_interp as ci
from crate_interp.data import open_data, part
from crate_interp.models.sae import SAEConfig

POINT, ACTIVE = "blocks.2.hook_resid_post", 16
TRAINING, IMAGES = 192, 256


def train(loader: DataLoader, sae: ci.SparseAutoencoder, steps: int) -> None:
    """Minimises the squared error; the architecture keeps the features few."""
    optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3)
    step = 0
    while step < steps:
        for batch in loader:
            stream = batch[POINT]  # [batch, pos, d_model]
            error = (sae.decode(sae.encode(stream)) - stream).square().sum(-1).mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0 or step == steps:
                print(f"step {step}: squared error {error.item():.3f}")
            if step == steps:
                return


def main(out: Path, steps: int) -> None:
    """Stores activations, trains, evaluates, prints."""
    torch.manual_seed(0)
    model = ci.load("crate-tiny-fashion")
    samples = open_data("embedded:fashion", model.preprocess, IMAGES)
    stored = ci.store(model, part(samples, 0, TRAINING), points=POINT, out=out)
    rows: Any = stored.select_columns(POINT).with_format("torch")
    loader = DataLoader(rows, batch_size=32, shuffle=True)
    width = model.cfg.d_model
    cfg = SAEConfig(
        hook_name=POINT, d_in=width, d_sae=2 * width, architecture="topk", k=ACTIVE
    )  # fmt: skip
    sae = ci.SparseAutoencoder(cfg)
    train(loader, sae, steps)
    result = ci.saes.evaluate(model, part(samples, TRAINING, IMAGES), {POINT: sae.eval()})
    print(result.headline())
    print(result.table().to_string(index=False, float_format="{:.4g}".format))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/sae"))
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    main(options.out, options.steps)
