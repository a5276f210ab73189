"""Threads that share one model: each gets its own numbers, or one sentence."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import crate_interp as ci
from conftest import leftover_hooks, make
from crate_hooks import edit

POINT = "blocks.1.hook_resid_mid"
SENTENCE = "another thread has temporary hooks on this model"


def images(seed, n=2):
    return torch.randn(n, 3, 6, 20, generator=torch.Generator().manual_seed(seed))


def doubled(value, hook):
    return 2 * value


def in_thread(work):
    """Returns what `work` returns in another thread, or the error that it raises there."""

    def run():
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(timeout=60)


def refused(work):
    error = in_thread(work)
    assert isinstance(error, RuntimeError) and SENTENCE in str(error), error


def sparse_step(model):
    return edit.sparse_step(model.blocks[1], lambd=0.4)


CONTEXTS = {
    "hooks": lambda model: model.hooks(fwd_hooks=[(POINT, doubled)]),
    "backward hooks": lambda model: model.hooks(bwd_hooks=[(POINT, lambda grad, hook: None)]),
    "nested": lambda model: model.hooks(fwd_hooks=[(POINT, doubled)]),
}
ENTERS = {
    "run_with_hooks": lambda model: model.run_with_hooks(images(1), fwd_hooks=[(POINT, doubled)]),
    "run_with_cache": lambda model: model.run_with_cache(images(1)),
    "hooks": lambda model: model.hooks().__enter__(),
}


@pytest.mark.parametrize("enter", ENTERS.values(), ids=ENTERS)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_second_thread_is_refused_while_a_context_is_open(context, enter):
    model = make()
    with context(model), context(model):
        refused(lambda: enter(model))
    enter(model)
    model.reset_hooks()
    assert not leftover_hooks(model)


RUNS = {
    "a plain forward": lambda model: model(images(1)),
    "a part": lambda model: model.blocks[1](torch.zeros(2, 13, 31)),
    "a sweep": lambda model: ci.sweep(model, images(1), probes="sparsity", progress=False),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("context", [CONTEXTS["hooks"], sparse_step], ids=["hooks", "sparse_step"])
def test_a_run_of_another_thread_is_never_edited(context, run):
    model = make()
    before = model(images(1))
    with context(model):
        refused(lambda: run(model))
        assert not torch.equal(model(images(1)), before)
    assert torch.equal(in_thread(lambda: model(images(1))), before)
