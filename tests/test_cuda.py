"""On a CUDA device as on the CPU, and how often the CPU waits for one."""

import math
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from pandas.testing import assert_frame_equal
from torch.utils._python_dispatch import TorchDispatchMode

import crate_interp as ci
import crate_interp.audits.run as audits
from conftest import make, make_lm
from crate_interp.core import device_waits
from crate_interp.core.device_waits import fetched, holds_somewhere, hoping, waits

U = 2**-8
ROUNDINGS = 10  # of a stream, in a layer: two norms, four products, softmax, two sums, a threshold
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
QUIET = dict(progress=False)
IMAGES = torch.randn(8, 3, 6, 20, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 47, (8, 13), generator=torch.Generator().manual_seed(1))
MODELS = {"crate": (make, IMAGES), "crate-alpha": (make, IMAGES), "crate-lm": (make_lm, TOKENS)}


def both(name, tmp_path, device, dtype):
    build, data = MODELS[name]
    folder = build(name).save_pretrained(tmp_path / name)
    return ci.load(folder), ci.load(folder, device=device, dtype=dtype), data


def off(own, other):
    own, other = own.detach().cpu().double(), other.detach().cpu().double()
    return ((own - other).norm() / own.norm()).item()


def smoke(name, tmp_path, device, dtype, u):
    """Loads, caches, sweeps and audits; u: the unit roundoff of the dtype."""
    plain, model, data = both(name, tmp_path, device, dtype)
    given = data.to(device, dtype) if data.is_floating_point() else data.to(device)
    with torch.no_grad():
        logits, cache = model.run_with_cache(given)
        wanted, own = plain.run_with_cache(data)
    assert logits.dtype == dtype and logits.device.type == torch.device(device).type
    for layer in range(3):
        allowed = math.sqrt(ROUNDINGS * (layer + 2)) * u
        assert off(own["resid_post", layer], cache["resid_post", layer]) < allowed, layer
    assert off(wanted, logits) < math.sqrt(ROUNDINGS * 5) * u
    swept, there = ci.sweep(plain, data, **QUIET), ci.sweep(model, given, **QUIET)
    assert there.meta["dtype"] == str(dtype).removeprefix("torch.")
    one, two = swept.layers(), there.layers()
    assert one[["probe", "statistic", "layer"]].equals(two[["probe", "statistic", "layer"]])
    assert two["mean"].notna().equals(one["mean"].notna())
    audited = ci.audit(model, given, grid=False, untrained=2, limit=4, **QUIET)
    values = audited.table()["value"].dropna()
    assert len(values) and values.map(math.isfinite).all()
    return one, two


@pytest.mark.slow
@pytest.mark.parametrize("name", ["crate-lm", "crate", "crate-alpha"])
def test_bfloat16_is_near_float32(name, tmp_path):
    one, two = smoke(name, tmp_path, "cpu", torch.bfloat16, U)
    # shares and cosines of attention are averages of rounded numbers in [0, 1]
    rows = (one["probe"] == "attention") & one["statistic"].str.contains("mass|entropy")
    scale = one["mean"].abs().clip(lower=1)
    assert rows.any()
    assert (
        (one["mean"] - two["mean"]).abs()[rows] < (math.sqrt(ROUNDINGS * 5) * U * scale)[rows]
    ).all()


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_gpu_computes_what_the_cpu_does(name, dtype, tmp_path):
    before = torch.backends.cuda.matmul.allow_tf32
    # float32 may be multiplied as TF32 there, with a unit roundoff of 2^-11
    smoke(name, tmp_path, "cuda", dtype, U if dtype == torch.bfloat16 else 2**-11)
    assert torch.backends.cuda.matmul.allow_tf32 == before


@CUDA
def test_autoencoders_on_a_gpu(tmp_path):
    from crate_interp.models.sae import SAEConfig

    point = "blocks.1.hook_resid_post"
    model = make("crate").cuda()
    sae = ci.SparseAutoencoder(SAEConfig(hook_name=point, d_in=31, d_sae=64)).cuda()
    images = IMAGES.cuda()
    with ci.saes.spliced(model, {point: sae}, error=True):
        assert torch.equal(model(images), model(images))
    result = ci.saes.evaluate(model, images, {point: sae}, **QUIET)
    assert result.table()["loss"].map(math.isfinite).all()


LAYERS, BATCHES, SIZE = 5, 3, 4
# operators that answer on the CPU, and so wait
ASKING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero",
    "aten::_unique2", "aten::equal",
}  # fmt: skip
# most waits for a layer and batch
VERBS = {
    # whether Cholesky failed in a rate is asked once for a batch
    "sweep": (lambda model, data: ci.sweep(model, data, controls=0, **SIZED), 0),
    "atoms": (lambda model, data: ci.atoms(model, data, **SIZED), 2),
    "audit": (
        lambda model, data: ci.audit(model, data, untrained=0, grid=False, **SIZED),
        # once for rates and finite numbers, and the lasso's solver every ten steps
        10,
    ),
}
SIZED = {"progress": False, "batch_size": SIZE}


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
    assert each <= most and flat > 0, (each, counts)


@pytest.mark.parametrize("bad", [False, True])
def test_questions_are_put_off_and_asked_together(bad, monkeypatch):
    calls = []

    def measure():
        calls.append([holds_somewhere(torch.tensor([False, bad])) for _ in range(3)])
        return len(calls)

    assert hoping(measure, torch.ones(1)) == 1 and calls == [[bad] * 3]  # on a CPU at once
    calls.clear()
    with counted(monkeypatch) as counts:
        assert hoping(measure, torch.ones(1)) == 1 + bad
    assert calls == [[False] * 3, [True] * 3][: 1 + bad]
    assert counts["aten::_local_scalar_dense"] == 1 + 3 * bad


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
        assert_frame_equal(numbers, again.stored[name][numbers.columns], rtol=1e-9, atol=1e-12)


def test_tensors_are_fetched_in_one_transfer():
    tensors = [torch.tensor(3), torch.arange(6).view(2, 3), torch.tensor([2**53 - 1])]
    tensors += [torch.tensor([[0.5, torch.nan]], dtype=torch.bfloat16)]
    for tensor, copy in zip(tensors, fetched(tensors), strict=True):
        assert copy.dtype == torch.float64
        torch.testing.assert_close(copy, tensor.double(), rtol=0, atol=0, equal_nan=True)
    assert fetched([]) == [] and not waits(torch.ones(1))
