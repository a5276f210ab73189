"""The parts that the training scripts beside this file share.

They are the data of Fashion-MNIST and its labels, the learning rate, and the weights of a training.
"""

import argparse
import gzip
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from crate_interp.core.files import write

WARMUP = 0.05  # of the steps
FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package installs it
LABELS = (  # of Fashion-MNIST
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine to zero."""
    warm = max(1, round(WARMUP * steps))
    cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))
    return peak * min((step + 1) / warm, cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, peak: float) -> None:
    """Gives an optimizer the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps, peak)


def stopped(step: int) -> SystemExit:
    """Returns the exit of a training that was interrupted and has saved its state."""
    return SystemExit(f"stopped after {step} steps; the same command goes on from there.")


def save_step(model: nn.Module, out: Path, step: int) -> None:
    """Saves the weights after `step` steps, in float16."""
    (out / "steps").mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    weights = {name: value.to(torch.float16).contiguous() for name, value in state.items()}
    path = out / "steps" / f"step-{step}.safetensors"
    save_file(weights, path)
    path.chmod(0o644)


def save_resume(state: dict[str, Any], path: Path) -> None:
    """Saves the state from which a training goes on; an interrupt leaves the state before."""
    write(path, partial(torch.save, state))


def load_resume(path: Path, settings: Any) -> dict[str, Any] | None:
    """Returns the state that `save_resume` saved, or None if there is none.

    Raises SystemExit if it belongs to a run with other settings.
    """
    if not path.exists():
        return None
    state = torch.load(path, weights_only=True)
    if state["settings"] != settings:
        raise SystemExit(
            f"{path} belongs to a run with other settings: remove it, or give another --out."
        )
    return state


def save_training(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    path: Path,
    settings: Any,
    step: int,
    seconds: float,
) -> None:
    """Saves what `resumed` goes on from."""
    weights = dict(model=model.state_dict(), optimizers=[one.state_dict() for one in optimizers])
    save_resume(weights | dict(step=step, settings=settings, seconds=seconds), path)


def resumed(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], path: Path, settings: Any
) -> tuple[int, float]:
    """Loads what `save_training` saved; returns its step and seconds, or zeros without a file.

    Raises SystemExit if it belongs to a run with other settings.
    """
    saved = load_resume(path, settings)
    if saved is None:
        return 0, 0.0
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return saved["step"], saved["seconds"]


def recipe_parser(words: str | None, out: str, lr: float, decay: float) -> argparse.ArgumentParser:
    """Returns a parser of the options that trainings of images share, with their defaults."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=words, formatter_class=form)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--decay", type=float, default=decay)
    parser.add_argument(
        "--pilot", action="store_true", help="choose a recipe: stop before the test images are read"
    )
    return parser


def size_of(model: nn.Module) -> dict[str, int]:
    """Returns what a model's card states about its size."""
    shape = {name: getattr(model.cfg, name) for name in ("d_model", "n_layers", "n_heads")}
    return {"params": sum(value.numel() for value in model.parameters()), **shape}


def read_idx(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns one split of Fashion-MNIST ("train" or "t10k"): images and labels.

    The images are uint8 [n, 28, 28], the labels int64 [n]. Raises SystemExit, with how to get the
    data, if a file is missing.
    """
    try:
        images = gzip.open(folder / f"{name}-images-idx3-ubyte.gz").read()
        labels = gzip.open(folder / f"{name}-labels-idx1-ubyte.gz").read()
    except FileNotFoundError as error:
        raise SystemExit(
            f"{error.filename} is missing. Get the data with `apt-get install "
            "dataset-fashion-mnist`. Without root, run `apt-get download dataset-fashion-mnist && "
            "dpkg -x dataset-fashion-mnist_*.deb fm`, and give the folder "
            "fm/usr/share/datasets/fashion-mnist."
        ) from None
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)
    return x, np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)
