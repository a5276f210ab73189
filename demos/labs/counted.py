"""How many operations and parameters a layer has, by formula, and what running it takes, measured.

A product of an [m, k] and a [k, n] matrix counts as 2 m n k operations; softmax, norms and
activations are not counted, as in torch.utils.flop_counter. N tokens, width d; heads fill the width
and an MLP is 4 d wide.
"""

import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from crate_interp import CrateConfig, HookedCrate

sys.path.append(str(Path(__file__).parent.parent))
from plain_vit import PlainViT

KINDS = ("crate", "vit")
IMAGE = {65: (32, 4), 197: (56, 4), 17: (8, 2)}  # tokens with CLS: image and patch size


def attention_operations(n: int, d: int) -> int:
    """Returns operations of attention: q, k, v, output `8 N d^2`, scores and values `4 N^2 d`."""
    return 8 * n * d**2 + 4 * n**2 * d


def mssa_operations(n: int, d: int) -> int:
    """Returns operations of MSSA: one code and the output `4 N d^2`, scores, values `4 N^2 d`."""
    return 4 * n * d**2 + 4 * n**2 * d


def ista_operations(n: int, d: int) -> int:
    """Returns operations of one ISTA step: D y, D^T (D y) and D^T y, `6 N d^2`.

    The official code takes these three products too; D y and D^T (y - D y) would take `4 N d^2`.
    """
    return 6 * n * d**2


def mlp_operations(n: int, d: int) -> int:
    """Returns operations of an MLP of width 4 d: `16 N d^2`."""
    return 16 * n * d**2


def layer_operations(kind: str, n: int, d: int) -> int:
    """Returns the operations of a layer of a CRATE or of a ViT."""
    parts = {
        "crate": (mssa_operations, ista_operations),
        "vit": (attention_operations, mlp_operations),
    }
    return sum(part(n, d) for part in parts[kind])


def layer_parameters(kind: str, d: int) -> int:
    """Returns the parameters of a layer: `3 d^2 + 5 d` of CRATE, `12 d^2 + 10 d` of a ViT.

    CRATE: U and W with its bias, D, two norms. ViT: q, k, v without bias, output, MLP, two norms.
    """
    return {"crate": 3 * d**2 + 5 * d, "vit": 12 * d**2 + 10 * d}[kind]


def make_network(kind: str, d: int, layers: int, tokens: int, heads: int = 4) -> Any:
    """Returns an untrained CRATE or ViT; both embed and classify alike."""
    side, patch = IMAGE[tokens]
    size: dict[str, Any] = dict(d_model=d, n_layers=layers, n_heads=heads, n_classes=10)
    look: dict[str, Any] = dict(image_size=side, patch_size=patch, channels=1)
    cfg = CrateConfig(family="crate", **size, **look)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {"crate": HookedCrate, "vit": PlainViT}[kind](cfg).eval()


def images_for(tokens: int, batch: int) -> Tensor:
    """Returns random images that make this many tokens."""
    side, _ = IMAGE[tokens]
    return torch.randn(batch, 1, side, side, generator=torch.Generator().manual_seed(0))


def counted_layer(kind: str, n: int, d: int) -> int:
    """Returns the operations of a layer as torch's counter sees them run."""
    block = make_network(kind, d, 1, 17).blocks[0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(torch.randn(1, n, d, generator=torch.Generator().manual_seed(0)))
    return counter.get_total_flops()


def published_parameters(kind: str, d: int, layers: int, heads: int) -> int:
    """Returns the parameters at a published size: 224x224 images, patch 16, 1,000 classes.

    Nothing is allocated.
    """
    network: Any = {"crate": HookedCrate, "vit": PlainViT}[kind]
    size: dict[str, Any] = dict(d_model=d, n_layers=layers, n_heads=heads, n_classes=1000)
    with torch.device("meta"):
        model = network(CrateConfig(family="crate", **size))
    return sum(value.numel() for value in model.parameters())


class PeakMemory(TorchDispatchMode):
    """Adds up the bytes of tensors that operations make, until they are freed; keeps the peak.

    What was there before (weights, images) is not counted, and neither is what an operation needs
    inside itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self._sizes = 0, 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id_of(value) for value in tree_leaves((args, kwargs)) if is_tensor(value)}
        for value in tree_leaves(out):
            if is_tensor(value) and id_of(value) not in given and id_of(value) not in self._sizes:
                self._add(value)
        return out

    def _add(self, value: Tensor) -> None:
        storage, key = value.untyped_storage(), id_of(value)
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor."""
    return isinstance(value, Tensor)


def id_of(value: Tensor) -> int:
    """Returns a number that tensors of one storage share."""
    return value.untyped_storage()._cdata


def peaks(model: Any, images: Tensor) -> dict[str, float]:
    """Returns the peak in MiB of a forward, and of a forward with its backward."""
    with torch.no_grad(), PeakMemory() as forward:
        model(images)
    with PeakMemory() as both:
        model(images).sum().backward()
    model.zero_grad(set_to_none=True)
    return {"forward": forward.peak / 2**20, "training": both.peak / 2**20}


@torch.no_grad()
def seconds(models: dict[str, Any], images: Tensor, repeats: int) -> dict[str, list[float]]:
    """Returns the processor times of forwards of each network, after one to warm up.

    The networks take turns, so that what slows the machine for a while slows all of them.
    """
    found: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            started = time.process_time()
            model(images)
            if repeat:
                found[name].append(time.process_time() - started)
    return found
