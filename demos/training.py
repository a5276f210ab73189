"""The one loop of the training scripts beside this file, and what else they share.

A training can be interrupted at any time: the same command goes on from the last save.
"""

import argparse
import gzip
import io
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from crate_interp.core.files import write

WARMUP = 0.05  # of the steps
FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package installs it
LABELS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker",
          "Bag", "Ankle boot")  # of Fashion-MNIST  # fmt: skip
Optimizers = Sequence[torch.optim.Optimizer]


def arguments(words: str | None, **options: Any) -> argparse.Namespace:
    """Returns what the command line says, and makes the folder --out if there is one.

    options: a default by name. False is a switch, a type is an option that has to be there, a tuple
    is choices, the first of them the default, and a list is a value of its kind, then the defaults.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=words, formatter_class=form)
    for name, default in options.items():
        how: dict[str, Any] = dict(type=type(default), default=default, help="default: %(default)s")
        if default is False:
            how = dict(action="store_true")
        elif isinstance(default, type):
            how = dict(type=default, required=True)
        elif isinstance(default, tuple):
            how = dict(choices=default, default=default[0])
        elif isinstance(default, list):
            how = dict(type=type(default[0]), nargs="*", default=default[1:])
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    args = parser.parse_args()
    if "out" in options and not options["out"].suffix:
        args.out.mkdir(parents=True, exist_ok=True)
    return args


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate of a step: linear warm-up, then a cosine to zero."""
    warm = max(1, round(WARMUP * steps))
    cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))
    return peak * min((step + 1) / warm, cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, peak: float) -> None:
    """Gives an optimizer the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps, peak)


def adamw(model: nn.Module, decay: float, second: float = 0.99) -> list[torch.optim.Optimizer]:
    """Returns AdamW of all weights; the loop sets its learning rate."""
    return [torch.optim.AdamW(model.parameters(), weight_decay=decay, betas=(0.9, second))]


def draws(seed: int, step: int) -> torch.Generator:
    """Returns the random numbers of a step."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


def rows_of(step: int, n: int, batch: int, seed: int) -> Tensor:
    """Returns the rows of a step's batch: each epoch has an order of its own."""
    epoch, place = divmod(step, n // batch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
    return order[place * batch : (place + 1) * batch]


@torch.no_grad()
def accuracy(answer: Callable[[Tensor], Tensor], batches: Iterable[Sequence[Tensor]]) -> float:
    """Returns the share of images whose largest logit is their label's; batches: images, labels."""
    hits = [answer(batch[0]).argmax(-1) == batch[1] for batch in batches]
    return sum(one.sum().item() for one in hits) / sum(map(len, hits))


def one_step(model: nn.Module, optimizers: Optimizers, loss: Tensor, rate: float) -> float:
    """Makes one update, and returns the loss."""
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return loss.item()


def fit(
    model: nn.Module,
    optimizers: Optimizers,
    loss_of: Callable[[int], Tensor],
    rate: Callable[[int], float],
    steps: int,
    out: Path,
    settings: Any,
    *,
    stop: int | None = None,
    saved_steps: Sequence[int] = (),
    log_every: int = 100,
    more: Callable[[], str] = str,
    clock: Callable[[], float] = time.perf_counter,
    words: str = "training",
) -> float:
    """Trains a model, and returns the minutes that it took.

    loss_of: the loss of a step, which depends on the step alone. stop: a step before the end. out:
    a folder. Its resume.pt is what a training goes on from that shares `settings`, its log.csv gets
    step, loss, seconds and what `more` says, and its steps/ the weights after `saved_steps`.
    """
    out.mkdir(parents=True, exist_ok=True)
    resume = out / "resume.pt"
    saved = load_resume(resume, settings)
    step: int = saved["step"] if saved else 0
    seconds: float = saved["seconds"] if saved else 0.0
    if saved:
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def save() -> None:
        states = [one.state_dict() for one in optimizers]
        weights = dict(model=model.state_dict(), optimizers=states, settings=settings)
        save_resume(weights | dict(step=step, seconds=seconds), resume)

    with tqdm(total=steps, initial=step, desc=words, unit="step", mininterval=5) as bar:
        try:
            while step < min(steps, stop or steps):
                started = clock()
                if step in saved_steps:
                    save_step(model, out, step)
                loss = one_step(model, optimizers, loss_of(step), rate(step))
                step, seconds = step + 1, seconds + clock() - started
                bar.update()
                if step % 100 == 0 or step in (steps, stop):
                    save()
                if step % log_every == 0 or step == steps:
                    row = f"{step},{loss:.4f},{seconds:.0f},{more()}"
                    bar.set_postfix_str(row)
                    with open(out / "log.csv", "a") as log:
                        log.write(f"{row}\n")
        except KeyboardInterrupt:
            save()
            raise SystemExit(
                f"stopped after {step} steps; the same command goes on from there."
            ) from None
    return seconds / 60


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


def save_pictures(path: Path, names: Sequence[str], labels: Iterable[int], **pictures: Any) -> None:
    """Saves pictures in parquet, as PNG bytes: a column a name, and the label."""
    from datasets import ClassLabel, Dataset, Features, Image

    features = {name: Image() for name in pictures} | {"label": ClassLabel(names=list(names))}
    rows = [
        {name: png(picture) for name, picture in zip(pictures, row, strict=True)} | {"label": label}
        for *row, label in zip(*pictures.values(), map(int, labels), strict=True)
    ]
    Dataset.from_list(rows, features=Features(features)).to_parquet(path)


def png(picture: Pillow.Image | np.ndarray) -> dict[str, Any]:
    """Returns a picture as the datasets library stores it."""
    buffer = io.BytesIO()
    picture = Pillow.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    picture.save(buffer, "PNG", optimize=True)
    return {"bytes": buffer.getvalue(), "path": None}


def write_card(out: Path, card: str, model: Any, *facts: dict[str, Any], **more: Any) -> None:
    """Writes a model's card: its text with facts, and what it states about the model's size."""
    shape = {name: getattr(model.cfg, name) for name in ("d_model", "n_layers", "n_heads")}
    known = dict(params=sum(value.numel() for value in model.parameters()), warmup=WARMUP, **shape)
    for one in (*facts, more):
        known |= one
    (out / "README.md").write_text(card.format(**known))


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
