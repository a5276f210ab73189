"""Probes of users that write into what they are given, or report less than they should."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import make, refuses

POINT, N = "hook_resid_mid", 5


def data(n=N):
    return torch.randn(n, 3, 6, 20, generator=torch.Generator().manual_seed(3))


def own(measure, name="own", **over):
    facts = {"points": (POINT,), "statistics": {"a": ("", None, None, "")}} | over
    return ci.Probe(name=name, measure=measure, **facts)


def mean_of(block, acts):
    return {"a": acts[POINT].mean((1, 2))}


WRITES = {
    "in place": lambda x: x.mul_(3),
    "through .data": lambda x: x.data.mul_(3),
    "through numpy": lambda x: np.multiply(x.numpy(), 3, out=x.numpy()),
    "through a view": lambda x: x[:, 1:].transpose(1, 2).fill_(7),
    "through its storage": lambda x: x.untyped_storage().fill_(1),
    "through set_": lambda x: x.set_(torch.zeros(2)),
    "through resize_": lambda x: x.resize_(1),
    "through DLPack": lambda x: torch.from_dlpack(x).zero_(),
}


@pytest.fixture(scope="module")
def alone():
    """The numbers of a good probe, without another; and those of the built-in ones."""
    model = make()
    good = [own(mean_of, "good", final=final_mean), "sparsity", "compression"]
    return model, good, ci.sweep(model, data(), probes=good, batch_size=N, progress=False)


def final_mean(z):
    return {"a": z.mean((1, 2))}


def same(result, wanted):
    """Whether the numbers of the good probes are those that they are alone, bit for bit."""
    for table in ("samples", "moments", "controls"):
        one, two = result.table(table), wanted.table(table)
        if "probe" in one:
            one = one[one["probe"] != "writing"].reset_index(drop=True)
        else:
            one = one[[name for name in one if not name.startswith("writing.")]]
        assert one.equals(two), table
    return True


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_changes_nothing_of_others(alone, write):
    model, good, wanted = alone

    def measure(block, acts):
        answer = mean_of(block, acts)
        write(acts[POINT])
        return answer

    def final(z):
        answer = final_mean(z)
        write(z)
        return answer

    writing = own(measure, "writing", final=final)
    options = dict(batch_size=N, progress=False)
    result = ci.sweep(model, data(), probes=[writing, *good], **options)
    assert same(result, wanted)
    samples = result.samples()
    assert samples["writing.a"].equals(samples["good.a"])
    _, cache = model.run_with_cache(data())
    before = {name: value.clone() for name, value in cache.items()}
    ci.probe(cache, writing)
    assert all(torch.equal(value, before[name]) for name, value in cache.items())


def writes_weights(block, acts):
    block.attn.u_proj.weight.data.mul_(1.5)
    return mean_of(block, acts)


@pytest.mark.parametrize("how", ["sweep", "probe"])
def test_a_probe_that_writes_into_weights(how):
    model = make()
    with pytest.raises(
        ValueError, match="(model's weights have changed|changed the model's weights)"
    ):
        if how == "sweep":
            ci.sweep(model, data(), probes=own(writes_weights), progress=False)
        else:
            ci.probe(model.run_with_cache(data())[1], own(writes_weights))


def less(answers):
    """A measure that gives these answers, one at each call, and goes on with the last."""
    calls = iter(answers)
    return lambda block, acts: next(calls)(mean_of(block, acts)["a"])


FULL = lambda value: {"a": value, "b": value}  # noqa: E731
LESS = {
    "None": (lambda value: None, "returned NoneType"),
    "a statistic less": (lambda value: {"a": value}, "reports not the statistics"),
    "fewer rows": (lambda value: {"a": value[:-1], "b": value}, r"batch=\d, got shape"),
    "no tensor": (lambda value: {"a": 1.0, "b": value}, "got float"),
    "NaN": (lambda value: FULL(value * torch.nan), "NaN or Inf in layer 1"),
}


@pytest.mark.parametrize("which", LESS)
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("how", ["sweep", "probe"])
def test_a_probe_that_reports_less(which, batch, how):
    wrong, match = LESS[which]
    statistics = {name: ("", None, None, "") for name in "ab"}
    place = 1 + 3 * batch
    probe = own(less([FULL] * place + [wrong] + [FULL] * 9), "lazy", statistics=statistics)
    model = make()
    where = "" if which == "NaN" else "lazy in layer 1, samples "
    if how == "sweep":
        where += {"": "", "lazy in layer 1, samples ": f"{3 * batch} to {2 + 2 * batch}: "}[where]
        with pytest.raises(ValueError, match=f"{where}.*{match}"):
            ci.sweep(model, data(), probes=probe, batch_size=3, controls=0, progress=False)
    elif not batch:
        refuses(f"{where}.*{match}", lambda: ci.probe(model.run_with_cache(data())[1], probe))


FORWARDS = {
    "not at all": lambda model, batch: model(batch, stop_at_layer=2),
    "more than once": lambda model, batch: [model(batch) for _ in range(2)],
}


@pytest.mark.parametrize("often", FORWARDS)
def test_a_forward_that_does_not_run_every_layer_once(often):
    layer = 2 if often == "not at all" else 0
    with pytest.raises(ValueError, match=f"layer {layer} ran {often} on samples 0 to 4"):
        ci.sweep(make(), data(), probes="sparsity", forward=FORWARDS[often], progress=False)
