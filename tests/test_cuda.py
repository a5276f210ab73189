"""Load, cache, sweep and audit on a GPU and in bfloat16: numbers near those of float32 on the CPU.

bfloat16 has a unit roundoff of u = 2^-8. A value that is rounded once is off by up to u of itself;
the error of n dependent roundings grows as sqrt(n) u where they are independent (Higham 2002,
section 2.8). A layer rounds a stream about ten times, and so do the embedding and the head: with
its length as the unit, the stream after l layers may be off by sqrt(10 (l + 1)) u.
"""

import math

import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm

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
@pytest.mark.parametrize(
    "name",
    ["crate-lm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("crate", "crate-alpha"))],
)
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
