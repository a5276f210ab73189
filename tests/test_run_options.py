"""The options that every streamed verb has: one class, one check, the same names everywhere."""

import inspect

import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.core.run_options import Pass, Run


def verbs(kind):
    """Every public function whose options are of that class."""
    named = [getattr(room, name) for room in (ci, ci.circuits, ci.saes) for name in room.__all__]
    found = dict.fromkeys(item for item in named if inspect.isfunction(item))
    taken = {item: inspect.signature(item).parameters.get("run") for item in found}
    return [item for item, run in taken.items() if run and run.annotation.__args__ == (kind,)]


IN_CHUNKS, IN_A_PASS = verbs(Run), verbs(Pass)


def test_what_streams_data_takes_the_options():
    assert {ci.sweep, ci.audit, ci.segment, ci.atoms, ci.atlas, ci.linear_probe, ci.store} < set(
        IN_CHUNKS
    )
    assert {ci.ablate_heads, ci.circuits.composition, ci.surgery, ci.saes.evaluate} < set(IN_CHUNKS)
    assert {ci.report, ci.compare} <= set(IN_A_PASS)


@pytest.mark.parametrize("verb", [*IN_CHUNKS, *IN_A_PASS])
def test_a_verb_takes_its_options_from_the_class(verb):
    taken = inspect.signature(verb).parameters
    assert not set(taken) & set((Run if verb in IN_CHUNKS else Pass).__annotations__)


@pytest.mark.parametrize("verb", IN_CHUNKS)
def test_an_unknown_option_gets_its_nearest(verb, unchecked):
    more = {"saes": {}} if verb is ci.saes.evaluate else {}
    more |= {"points": None} if verb is ci.store else {}
    with pytest.raises(TypeError, match=r"'batchsize'\. Did you mean batch_size"):
        verb(make(), torch.zeros(1, 3, 6, 20), batchsize=3, **more)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyzzy'\. It takes model,"):
        verb(make(), torch.zeros(1, 3, 6, 20), xyzzy=3, **more)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 0}, "batch_size=0: give a whole number of at least 1"),
        ({"chunk_size": 2.5}, "chunk_size=2.5: give a whole number"),
        ({"limit": 0}, "limit=0: give a whole number of at least 1"),
        ({"workers": -1}, "workers=-1: give a whole number of at least 0"),
        ({"skip_bad": "no"}, "skip_bad"),
        ({"resume": 1}, "resume"),
        ({"engine": "dask"}, "engine='dask'"),
        ({"shard": "0/2"}, "needs a folder that all shards share: give out=DIR"),
    ],
)
def test_wrong_values_are_refused_before_work_starts(given, words, unchecked):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        ci.sweep(make(), torch.zeros(1, 3, 6, 20), progress=False, **given)
