"""The networks that train_pairs.py trains, and crate_against_vit.py and whitebox_family.py compare.

A pair is a CRATE and a ViT of one seed. Both read 32x32 RGB images in patches of 4 (65 tokens) and
have 4 layers of 4 heads, and as many parameters within 1 %. The ViT is half as wide, since one of
its layers has four times as many parameters at the same width. So a head of either spans a quarter
of its stream: two random heads overlap as much in both.

Four more members of the white-box family have the same layers, heads and tokens, as many parameters
within 1.2 %, and the width that follows: CRATE-alpha, ToST-ISTA, CBT and AoT, all with CRATE's
linear patches.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pair_verdicts import mean_interval
from torch import Tensor, nn
from training import LABELS

from crate_interp import CrateConfig, HookedCrate

KINDS, SEEDS = ("crate", "vit"), (0, 1, 2, 3, 4)
FAMILY, SHIPPED = ("crate-alpha", "tost-ista", "cbt", "aot"), (0, 1, 2)  # more kinds, their seeds
WEIGHTS = Path(__file__).parent / "weights"
SAMPLE = WEIGHTS / "pairs.parquet"  # the first test composites, with masks and labels
SEARCH = WEIGHTS / "pairs-search.json"  # what train_pairs.py --search writes
SIZE, PATCH, LAYERS, HEADS, MEAN, STD = 32, 4, 4, 4, 0.5, 0.25
WIDTH = {"crate": 128, "vit": 64, "crate-alpha": 72, "tost-ista": 128, "cbt": 128, "aot": 216}
D_MLP = 270  # of the MLP of the ViT


def name_of(kind: str, seed: int) -> str:
    """Returns the name of a network, which is that of its folder."""
    return f"pair-{kind}-seed-{seed}"


def make_hooked(kind: str, seed: int) -> HookedCrate:
    """Returns the untrained network of a family; the same seed gives the same start."""
    torch.manual_seed(seed)
    size: dict[str, Any] = dict(
        d_model=WIDTH[kind], n_layers=LAYERS, n_heads=HEADS, image_size=SIZE, patch_size=PATCH
    )
    look: dict[str, Any] = dict(resize=SIZE, crop=SIZE, mean=(MEAN,) * 3, std=(STD,) * 3)
    names: dict[str, Any] = dict(labels=LABELS, n_classes=10, model_name=name_of(kind, seed))
    return HookedCrate(CrateConfig(family=kind, stem="linear", **size, **look, **names))


def make_vit(seed: int) -> nn.Module:
    """Returns the untrained ViT of transformers; the same seed gives the same start."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    cfg = ViTConfig(
        hidden_size=WIDTH["vit"],
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=D_MLP,
        image_size=SIZE,
        patch_size=PATCH,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    return ViTForImageClassification(cfg)


def make_model(kind: str, seed: int) -> nn.Module:
    """Returns the untrained network of a kind: "vit", or a family of CrateConfig."""
    return make_vit(seed) if kind == "vit" else make_hooked(kind, seed)


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the logits [batch, 10] of images uint8 [batch, 3, 32, 32], for either kind."""
    out = model((images.float() / 255 - MEAN) / STD)
    return out if isinstance(out, Tensor) else out.logits


def write_preprocessor(folder: Path) -> None:
    """Writes beside a ViT how its pictures are scaled, as transformers' ViTImageProcessor does."""
    look: dict[str, Any] = dict(do_resize=True, do_rescale=True, do_normalize=True, resample=2)
    look |= dict(size={"height": SIZE, "width": SIZE}, rescale_factor=1 / 255)
    look |= dict(image_mean=[MEAN] * 3, image_std=[STD] * 3)
    content = look | {"image_processor_type": "ViTImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(content, indent=2) + "\n")


def digest(model: nn.Module) -> str:
    """Returns the SHA-256 of a network's weights, in the order of their names."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def n_params(model: nn.Module) -> int:
    """Returns how many parameters a network has."""
    return sum(value.numel() for value in model.parameters())


def facts_of(kind: str, seed: int) -> dict[str, Any]:
    """Returns what train_pairs.py wrote of a training: steps, accuracies, digest of the start."""
    return json.loads((WEIGHTS / name_of(kind, seed) / "training.json").read_text())


def untuned(kind: str) -> tuple[float, float, float]:
    """Returns what another learning rate adds to a kind's accuracy, in points: mean, low, high.

    By `train_pairs.py --search`: held-out accuracy at the best rate of the grid, less that at the
    rate of the pairs, paired by seed, with Student's 95 % interval. All three are 0 if the pairs
    have the best rate. Raises ValueError if that is an end of the grid: a better rate may lie
    beyond.
    """
    found = json.loads(SEARCH.read_text())[kind]
    if not found["inside"]:
        raise ValueError(
            f"the best rate of {kind}, {found['rate']:g}, is an end of the grid: widen it."
        )
    own, best = facts_of(kind, SEEDS[0])["lr"], found["rate"]
    if own == best:
        return 0.0, 0.0, 0.0
    shares = [np.array(found["accuracies"][f"{rate:g}"]) for rate in (best, own)]
    gain = mean_interval(100 * (shares[0] - shares[1]))
    return gain.value, gain.low, gain.high
