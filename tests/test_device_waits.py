"""How often a measurement waits for its device, and that shortcuts change no number."""

from collections import Counter
from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import crate_interp as ci
import crate_interp.audits.run as audits
from conftest import make
from crate_interp.core import device_waits
from crate_interp.core.device_waits import fetched, waits

LAYERS, BATCHES, SIZE = 5, 3, 4
# operators that answer on the CPU, and so wait
ASKING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero",
    "aten::_unique2", "aten::equal",
}  # fmt: skip
# most waits for a layer and batch
VERBS = {
    # one for each rate: whether Cholesky failed somewhere. The goal of 2 is not reached
    "sweep": (lambda model, data: ci.sweep(model, data, controls=0, **QUIET), 6),
    "atoms": (lambda model, data: ci.atoms(model, data, **QUIET), 2),
    "audit": (
        lambda model, data: ci.audit(model, data, untrained=0, grid=False, **QUIET),
        # rates as above, and the lasso's solver asks which tokens are solved
        50,
    ),
}
QUIET = {"progress": False, "batch_size": SIZE}


class Asked(TorchDispatchMode):
    """Counts operators after which a program on an accelerator waits."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        masks = args[1] if name == "aten::index" else ()
        if name in ASKING or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch):
    """Yields a counter of waits, as if the CPU were an accelerator."""
    asked, moved = Asked(), torch.Tensor.cpu

    def cpu(tensor, *args, **more):
        asked.counts["cpu"] += 1
        return moved(tensor, *args, **more)

    with monkeypatch.context() as patch, asked:
        patch.setattr(device_waits, "_AT_ONCE", set())
        patch.setattr(torch.Tensor, "cpu", cpu)
        yield asked.counts


def pictures(n, layers=LAYERS):
    model = make("crate", n_layers=layers)
    return model, torch.randn(n, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("verb", VERBS)
def test_waits_for_a_layer_and_batch(verb, monkeypatch):
    measure, most = VERBS[verb]
    for name in ("SAMPLES", "LIMITED"):  # the first samples, which have nulls, are not counted
        monkeypatch.setattr(audits, name, 0)
    totals = {}
    for layers in (2, LAYERS):  # what is asked once for weights or once for a batch is in both
        for batches in (1, BATCHES):
            model, data = pictures(batches * SIZE, layers)
            with counted(monkeypatch) as counts:
                measure(model, data)
            totals[layers, batches] = sum(counts.values())
    deep, flat = (totals[n, BATCHES] - totals[n, 1] for n in (LAYERS, 2))
    each = (deep - flat) / (LAYERS - 2) / (BATCHES - 1)
    assert 0 < each <= most, (each, counts)


@pytest.mark.parametrize("verb", VERBS)
def test_shortcuts_change_no_number(verb, monkeypatch):
    measure, _ = VERBS[verb]
    model, data = (each.double() for each in pictures(SIZE))
    data[0] = 0  # equal tokens, whose entropies and lengths are the odd ones
    plain = measure(model, data)
    monkeypatch.setattr(device_waits, "_AT_ONCE", set())
    again = measure(model, data)
    for name, table in plain.stored.items():
        numbers = table.select_dtypes("number")
        pd.testing.assert_frame_equal(
            numbers, again.stored[name][numbers.columns], rtol=1e-9, atol=1e-12
        )


def test_tensors_are_fetched_in_one_transfer():
    tensors = [torch.tensor(3), torch.arange(6).view(2, 3), torch.tensor([2**53 - 1])]
    tensors += [torch.tensor([[0.5, torch.nan]], dtype=torch.bfloat16)]
    for tensor, copy in zip(tensors, fetched(tensors), strict=True):
        assert copy.dtype == torch.float64
        torch.testing.assert_close(copy, tensor.double(), rtol=0, atol=0, equal_nan=True)
    assert fetched([]) == [] and not waits(torch.ones(1))
