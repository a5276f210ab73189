"""Models and autoencoders keep no tensor of a batch after a forward, with gradients or without."""

import copy
import io
import pickle
from types import FunctionType, MethodType, ModuleType

import pytest
import torch
from torch import Tensor

import crate_interp as ci
from crate_interp.models.sae import ARCHITECTURES, NORMALIZATIONS, SAEConfig
from neighbours import every_model, make_mae, pictures


def held_by(thing, path="", seen=None):
    """Yields (path, tensor) for every tensor that can be reached from a module's attributes."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (type, ModuleType, str, bytes, int, float)):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield path, thing
        if thing.grad_fn is not None:
            yield f"{path}.grad_fn", thing
        return
    if isinstance(thing, dict):
        parts = list(thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = list(enumerate(thing))
    elif isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell_is_full(cell)]
        parts = list(enumerate([*cells, thing.__defaults__]))
    elif isinstance(thing, MethodType):
        parts = [("self", thing.__self__)]
    else:
        parts = list(getattr(thing, "__dict__", {}).items())
    for name, part in parts:
        yield from held_by(part, f"{path}.{name}", seen)


def cell_is_full(cell):
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def paths_of(module):
    return {path: id(value) for path, value in held_by(module)}


def saes():
    for architecture in ARCHITECTURES:
        for normalization in NORMALIZATIONS:
            more = {"k": 3} if architecture == "topk" else {}
            cfg = SAEConfig(
                hook_name="blocks.0.hook_resid_post", d_in=31, d_sae=53, architecture=architecture,
                normalize_activations=normalization, **more,
            )  # fmt: skip
            yield ci.SparseAutoencoder(cfg), (torch.randn(2, 7, 31),)


EVERY = [*every_model(), (make_mae(), (pictures(3),)), *saes()]


@pytest.mark.parametrize("place", range(len(EVERY)))
@pytest.mark.parametrize("grad", [False, True])
def test_no_attribute_holds_a_tensor_of_the_batch(place, grad):
    module, batch = EVERY[place]
    module(*batch)  # what is made at the first call and stays, such as a mask, is not of the batch
    before = paths_of(module)
    with torch.set_grad_enabled(grad):
        module(*[x.clone() for x in batch])
        if hasattr(module, "run_with_cache"):
            module.run_with_cache(*[x.clone() for x in batch])
    assert paths_of(module) == before
    copied = copy.deepcopy(module)
    assert paths_of(copied).keys() == before.keys()
    if isinstance(module, ci.SparseAutoencoder):
        pickle.loads(pickle.dumps(module))


def test_the_search_finds_what_a_module_keeps():
    module = torch.nn.Linear(3, 5)
    module.register_forward_hook(lambda module, given, out: setattr(module, "last", [out]))
    before = paths_of(module)
    module(torch.randn(2, 3))
    assert paths_of(module).keys() - before.keys() == {".last.0", ".last.0.grad_fn"}


@pytest.mark.parametrize("normalization", NORMALIZATIONS[1:])
def test_an_autoencoder_decodes_whatever_was_encoded_in_between(normalization, unchecked):
    sae = ci.SparseAutoencoder(
        SAEConfig(hook_name="hook_embed", d_in=31, d_sae=53, normalize_activations=normalization)
    )
    x, other = torch.randn(2, 7, 31), 5 + 3 * torch.randn(2, 7, 31)
    acts = sae.encode(x)
    alone = sae.decode(acts, x)
    sae.encode(other)
    assert torch.equal(sae.decode(acts, x), alone)
    assert torch.equal(sae(x), alone)
    with pytest.raises(
        ValueError, match=r"Give the activations that were encoded, of shape \[2, 7, 31\]"
    ):
        sae.decode(acts)
    with pytest.raises(ValueError, match=r"x of shape \[2, 5, 31\]"):
        sae.decode(acts, x[:, :5])


def test_a_saved_autoencoder_holds_no_activations_of_the_last_batch():
    sae = ci.SparseAutoencoder(
        SAEConfig(hook_name="hook_embed", d_in=31, d_sae=53, normalize_activations="layer_norm")
    )
    sizes = []
    for rows in (1, 1009):
        sae(torch.randn(rows, 31)).sum().backward()
        sae.zero_grad()
        file = io.BytesIO()
        torch.save(sae, file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]
