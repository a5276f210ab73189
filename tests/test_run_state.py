"""A folder goes on only with the same probes, hooks, forward and settings of torch."""

import contextlib
import functools
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make, refuses
from crate_interp.questions.asking import Experiment
from crate_interp.questions.code_digest import parts_of
from crate_interp.questions.provenance import torch_settings


def _in_globals(value, source="def measure(x):\n    return x * factor\n"):
    home = {"__name__": "of_the_user", "factor": value}
    exec(source, home)
    return home["measure"]


def _helper(value):
    source = "def helper(x):\n    return x * factor\ndef measure(x):\n    return helper(x)\n"
    return _in_globals(value, source)


def _in_a_module(value):
    module: Any = types.ModuleType("of_the_user_too")
    exec("def scaled(x):\n    return x * factor\n", vars(module))
    module.factor, module.__name__ = value, "of_the_user_too"
    home = {"__name__": "of_the_user", "helpers": module}
    exec("def measure(x):\n    return helpers.scaled(x)\n", home)
    return home["measure"]


@dataclass
class Holder:
    factor: object

    def measure(self, x):
        return x * self.factor

    def __call__(self, x):
        return self.measure(x)

    @property
    def again(self):
        return self.factor


def _decorated(value):
    def decorate(function):
        return functools.wraps(function)(lambda x: function(x) * value)

    return decorate(lambda x: x)


def _weights(value):
    layer = torch.nn.Linear(2, 3)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, float(np.asarray(value).reshape(-1)[0]))
    return lambda x: layer(x)


WAYS = {
    "closure": lambda value: lambda x: x * value,
    "default": lambda value: lambda x, factor=value: x * factor,
    "partial": lambda value: functools.partial(lambda factor, x: x * factor, value),
    "bound method": lambda value: Holder(value).measure,
    "callable object": Holder,
    "decorator": _decorated,
    "global": _in_globals,
    "global of a helper": _helper,
    "helper in a module": _in_a_module,
    "list": lambda value: (lambda held: lambda x: x * held[1])([0, value]),
    "dict": lambda value: (lambda held: lambda x: x * held["a"])({"a": value}),
    "tensor": lambda value: (lambda held: lambda x: x * held)(torch.tensor(value)),
    "array": lambda value: (lambda held: lambda x: x * held)(np.array(value)),
    "table": lambda value: (lambda held: lambda x: held)(pd.DataFrame({"a": [value]})),
    "weights": _weights,
}


@pytest.mark.parametrize("way", WAYS)
@given(one=st.floats(-9, 9, width=32), other=st.floats(-9, 9, width=32))
def test_a_function_is_told_apart_by_what_it_holds(way, one, other):
    make_function = WAYS[way]
    first = parts_of(make_function(one))
    assert first == parts_of(make_function(one))
    assert (first == parts_of(make_function(other))) == (repr(one) == repr(other))


class Stopped(Exception):
    pass


@pytest.fixture
def begun(monkeypatch):
    """Starts verbs that stop after the settings of their run are in the folder."""

    def start(verb, out):
        with monkeypatch.context() as patch:
            patch.setattr(Experiment, "measured", lambda *args: (_ for _ in ()).throw(Stopped))
            with contextlib.suppress(Stopped):
                verb(out)
        assert (out / "run.json").is_file()

    return start


IMAGES = make(family="crate", n_classes=3)
PICTURES = torch.rand(
    5, *((3,) + tuple(IMAGES.cfg.image_size)), generator=torch.Generator().manual_seed(0)
)
MASKS = torch.zeros(5, *IMAGES.cfg.image_size, dtype=torch.uint8)
MASKS[:, :4, :4] = 1
LABELLED = (PICTURES, torch.tensor([0, 1, 2, 0, 1]))
POINT = "blocks.0.hook_resid_pre"
RUN = {"progress": False, "batch_size": 5}
VERBS = {
    "sweep": lambda out: ci.sweep(IMAGES, PICTURES, controls=0, out=out, **RUN),
    "audit": lambda out: ci.audit(IMAGES, PICTURES, untrained=0, out=out, **RUN),
    "store": lambda out: ci.store(
        IMAGES, PICTURES, points="blocks.0.hook_resid_pre", out=out, **RUN
    ),
    "atlas": lambda out: ci.circuits.atlas(IMAGES, LABELLED, ablate=0, out=out, **RUN),
    "watch": lambda out: ci.watch(IMAGES, PICTURES, out=out).__enter__().__exit__(None),
}


FULL = {"audit", "atlas"}


@contextlib.contextmanager
def hooked(factor):
    IMAGES.add_hook(POINT, lambda tensor, hook: tensor * factor)
    try:
        yield
    finally:
        IMAGES.reset_hooks()


@pytest.mark.parametrize("verb", VERBS)
def test_another_hook_or_autocast_is_refused(verb, begun, tmp_path):
    run = VERBS[verb]
    with hooked(2):
        begun(run, tmp_path)
    with hooked(5), pytest.raises(ValueError, match="hook 0 at blocks.0.hook_resid_pre.* changed"):
        run(tmp_path)
    refuses("other settings", lambda: run(tmp_path))
    with hooked(2), torch.autocast("cpu", torch.bfloat16):
        if verb in FULL:  # autocast changes nothing
            begun(run, tmp_path)
        else:
            refuses("autocast", lambda: run(tmp_path))


def test_a_finished_run_does_not_answer_for_another_probe(tmp_path):
    def with_factor(factor):
        measure = lambda block, acts: {"x": acts["hook_resid_pre"].mean((1, 2)) * factor}  # noqa: E731
        probe = ci.Probe("mine", ("hook_resid_pre",), measure, {"x": ("1", None, None, "a mean")})
        return ci.sweep(IMAGES, PICTURES, probes=probe, controls=0, out=tmp_path, **RUN)

    first = with_factor(torch.tensor(2.0))
    assert with_factor(torch.tensor(2.0)).digest() == first.digest()
    refuses("mine.measure.closure factor has changed", lambda: with_factor(torch.tensor(3.0)))


def test_a_forward_of_the_callers_counts(begun, tmp_path):
    def run(out, factor):
        forward = lambda model, batch: model(batch * factor)  # noqa: E731
        return ci.sweep(IMAGES, PICTURES, forward=forward, controls=0, out=out, **RUN)

    begun(functools.partial(run, factor=1), tmp_path)
    refuses("forward.closure factor has changed", lambda: run(tmp_path, 2))


def test_a_tag_stands_for_what_cannot_be_compared(begun, tmp_path):
    def run(out, tag=None):
        measure = lambda block, acts: {"x": acts["hook_resid_pre"].mean((1, 2)) + 0 * file.fileno()}  # noqa: E731
        probe = ci.Probe("mine", ("hook_resid_pre",), measure, {"x": ("1", None, None, "a mean")})
        return ci.sweep(IMAGES, PICTURES, probes=probe, controls=0, out=out, tag=tag, **RUN)

    with open(__file__) as file:
        refuses("mine.measure reads 'file', a TextIO.*tag=", lambda: run(tmp_path))
        assert not list(tmp_path.iterdir())
        run(None)  # nothing is kept, so nothing is compared
        begun(functools.partial(run, tag="one"), tmp_path)
        refuses("'tag one' there and 'tag two' here", lambda: run(tmp_path, tag="two"))
        assert run(tmp_path, tag="one").meta["n_samples"] == 5
    refuses("tag=.*: give a text", lambda: run(tmp_path, tag=""))


def test_torch_settings_are_in_the_meta_and_keep_results_apart():
    plain = ci.sweep(IMAGES, PICTURES[:2], controls=0, **RUN)
    assert "torch_settings" not in plain.meta and torch_settings() == {}
    with torch.autocast("cpu", torch.bfloat16):
        other = ci.sweep(IMAGES, PICTURES[2:], controls=0, **RUN)
    assert other.meta["torch_settings"] == {"autocast cpu": "bfloat16"}
    refuses("differ in torch_settings", lambda: plain.merge(other))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch_settings() == {"matmul precision": "medium"}
    finally:
        torch.set_float32_matmul_precision(before)
