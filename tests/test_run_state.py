"""Other probes, hooks, settings and modes of torch: the same numbers, or a sentence."""

import contextlib
import functools
import types
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make, make_lm, refuses
from crate_interp.questions.asking import Experiment
from crate_interp.questions.code_digest import parts_of
from golden.cases import SMALL
from golden.subjects import subject
from selection import few_of


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


CIRCUITS = ci.circuits
TEXTS = make_lm("nanochat-crate")
TOKENS = torch.randint(47, (5, 7), generator=torch.Generator().manual_seed(1))
CACHE, TEXT_CACHE = IMAGES.run_with_cache(PICTURES)[1], TEXTS.run_with_cache(TOKENS)[1]
ONE_CACHE = TEXTS.run_with_cache(TOKENS[1:2])[1]
OTHER = make(family="crate", n_classes=3, seed=1)
HEADS = {"before": torch.ones(5, 7, 7).tril() > 0}
QUIET = {"progress": False}
GRAPH = functools.partial(CIRCUITS.graph, IMAGES, PICTURES[:1], most=8)
NODE = "L0A0@1"
STATE = SimpleNamespace()


def first_logit(logits):
    return logits[..., 0].mean()


def streamed(*verbs):
    """The small form of each verb in the golden table, on its model and data."""
    calls = {verb: functools.partial(attrgetter(verb)(ci), **SMALL[verb], **RUN) for verb in verbs}
    return {verb: lambda call=call: call(*subject("crate")) for verb, call in calls.items()}


# the model runs as the caller wants, and meta says so; probes measure without autocast
NOTED = {"probe": lambda: ci.probe(CACHE)}
NOTED |= streamed("sweep", "atoms", "segment", "linear_probe")
MEASURED = streamed("audit", "surgery", "atlas", "ablate_heads", "circuits.atom_names")
MEASURED |= streamed("circuits.composition", "circuits.concentration", "circuits.head_meaning") | {
    "compare": lambda: ci.compare(IMAGES, OTHER, PICTURES, probes=["sparsity"], untrained=1, **RUN),
    "graph": lambda: GRAPH(),
    "steer": lambda: STATE.graph.steer({NODE: 2.0}).table,
    "attribution_patch": lambda: CIRCUITS.attribution_patch(
        IMAGES, PICTURES[:1], PICTURES[1:2], first_logit, **QUIET
    ),
    "evaluate": lambda: CIRCUITS.evaluate(
        IMAGES, [(0, 0)], PICTURES, lambda logits: logits[:, 0], random=2, subsets=2, **QUIET
    ),
    "head_scores": lambda: CIRCUITS.head_scores(TEXT_CACHE, HEADS),
    "logit_attribution": lambda: CIRCUITS.logit_attribution(TEXT_CACHE, 0),
    "logit_lens": lambda: CIRCUITS.logit_lens(CACHE),
    "path_patch": lambda: CIRCUITS.path_patch(
        TEXTS, TOKENS[:1], TOKENS[1:2], first_logit, receivers=[(1, 0)], **QUIET
    ),
    "patching": lambda: CIRCUITS.patching.get_act_patch_resid_pre(
        TEXTS, TOKENS[:1], ONE_CACHE, first_logit, positions=[3]
    ),
    "switched_off": lambda: CIRCUITS.switched_off(IMAGES, PICTURES[0]),
    "why_attends": lambda: CIRCUITS.why_attends(TEXTS, TOKENS[:1], 1, 0, 3),
}


@contextlib.contextmanager
def default_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def frames(result):
    if isinstance(result, torch.Tensor):
        result = pd.DataFrame(result.detach().reshape(len(result), -1).numpy())
    return {"": result} if isinstance(result, pd.DataFrame) else result.tables


def same(one, other):
    for name, table in frames(one).items():
        columns = [column for column in table if column != "webp"]
        again = frames(other)[name][columns]
        pd.testing.assert_frame_equal(again, table[columns], rtol=1e-6, check_dtype=False, obj=name)


def test_every_circuit_is_in_the_table():
    functions = {name for name in CIRCUITS.__all__ if name.islower()} - {"repeat_targets"}
    assert functions <= {name.removeprefix("circuits.") for name in MEASURED}


EACH = [*NOTED, *MEASURED]


@pytest.mark.parametrize("verb", few_of(EACH, {*EACH} - {"audit"}))
def test_modes_of_torch_change_no_number_without_a_word(verb):
    if verb == "steer":
        STATE.graph = GRAPH()
    run = (NOTED | MEASURED)[verb]
    plain = run()
    with default_float64():
        same(plain, run())
    with torch.inference_mode():
        try:
            same(plain, run())
        except ValueError as error:
            assert "inference_mode()" in str(error)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    if verb in NOTED:
        assert cast.meta["torch_settings"] == {"autocast cpu": "bfloat16"}
    else:
        same(plain, cast)
        assert "torch_settings" not in getattr(cast, "meta", {})
