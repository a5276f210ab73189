"""Threads that share one model: each gets its own numbers, or one sentence."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import crate_interp as ci
from bridged import make_clip
from conftest import leftover_hooks, make
from crate_hooks import edit, read

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


def test_contexts_of_one_layer_in_two_threads():
    model = make()
    with sparse_step(model):
        refused(lambda: sparse_step(model).__enter__())
        with sparse_step(model):
            pass
    assert model.blocks[1].mlp.lambd == model.cfg.lambd


def test_caches_of_many_threads_are_right_or_refused():
    model = make()
    wanted = [model.run_with_cache(images(seed))[1] for seed in range(4)]
    together = threading.Barrier(4)

    def work(seed):
        got = []
        for _ in range(10):
            together.wait(60)
            try:
                got.append(model.run_with_cache(images(seed))[1])
            except RuntimeError as error:
                assert SENTENCE in str(error)
        return got

    with ThreadPoolExecutor(4) as pool:
        for seed, caches in enumerate(pool.map(work, range(4))):
            for cache in caches:
                assert all(torch.equal(cache[name], wanted[seed][name]) for name in cache)
    assert not leftover_hooks(model) and model.context_level == 0
    assert torch.equal(model.run_with_cache(images(0))[0], model(images(0)))


def test_a_copy_for_each_thread():
    model = make()
    wanted = [model.run_with_hooks(images(seed), fwd_hooks=[(POINT, doubled)]) for seed in (0, 1)]

    def work(seed):
        own = copy.deepcopy(model)
        return own.run_with_hooks(images(seed), fwd_hooks=[(POINT, doubled)])

    with model.hooks(), ThreadPoolExecutor(2) as pool:
        got = list(pool.map(work, (0, 1)))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("context", [lambda one: one.hooks(), sparse_step], ids=["hooks", "step"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_made_in_a_context_belong_to_nobody(context, copied):
    model = make()
    with context(model):
        own, wanted = copied(model), model(images(0))
        assert torch.equal(in_thread(lambda: own.run_with_cache(images(0))[0]), wanted)


def test_nothing_is_left_by_errors_and_generators():
    model = make()

    def steps():
        with model.hooks([(POINT, doubled)]):
            yield model(images(0))

    with pytest.raises(ZeroDivisionError), model.hooks([(POINT, doubled)]):
        raise ZeroDivisionError
    with pytest.raises(KeyError), model.hooks([("blocks.1.hook_nothing", doubled)]):
        pass
    running = steps()
    next(running)
    refused(lambda: model(images(0)))
    del running
    assert not isinstance(in_thread(lambda: model.run_with_cache(images(0))), Exception)


def test_readings_see_only_their_own_thread():
    model = make()
    seen = []
    with read(model, "hook_resid_mid", lambda layer, acts: seen.append(acts["hook_resid_mid"])):
        other = in_thread(lambda: model.run_with_cache(images(1))[1])
        assert torch.equal(other[POINT], model.run_with_cache(images(1))[1][POINT])
        assert len(seen) == 3


def test_the_towers_of_a_clip_share_their_owner():
    clip = make_clip()
    with clip.hooks():
        refused(lambda: clip.visual.run_with_cache(images(0)))
    with clip.visual.hooks():
        refused(lambda: clip.hooks().__enter__())
    own = copy.deepcopy(clip)
    with own.visual.hooks():
        refused(lambda: own.hooks().__enter__())


def replica_of(module):
    """Returns a module as nn.DataParallel copies it: parts are new, hooks are shared."""
    own = module._replicate_for_data_parallel()
    own._parameters = dict(module._parameters)
    own._modules = {name: replica_of(part) for name, part in module._modules.items()}
    return own


def test_replicas_of_data_parallel():
    """They run in threads and share the hooks: the last one's activations would be the cache."""
    model = make()
    replica, wanted = replica_of(model), model(images(0))
    assert torch.equal(in_thread(lambda: replica(images(0))), wanted)
    with model.hooks([(POINT, doubled)]):
        refused(lambda: replica(images(0)))


def test_hooks_keep_the_functions_of_users():
    model = make()
    with model.hooks([(POINT, doubled)], [(POINT, doubled)]):
        handles = model.list_hooks()[POINT]
        assert [handle.user_hook for handle in handles] == [doubled, doubled]
