"""A run goes on where an earlier one ended, whatever happened to its folder; its options."""

import errno
import inspect
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Features, Image
from PIL import Image as Pillow

import crate_interp as ci
from conftest import make, refuses
from crate_interp.circuits import composition, concentration
from crate_interp.core.run_options import Pass, Run
from crate_interp.data import open_data
from crate_interp.models.sae import SAEConfig
from crate_interp.questions import chunks
from crate_interp.questions.batches import Chunk
from crate_interp.questions.experiment import Work
from selection import few
from working import digest, network, work

N, CHUNK, CHUNKS = 23, 7, 4
SMALL = dict(n=N, chunk_size=CHUNK, batch_size=5, controls=0, probes="sparsity")


@pytest.fixture(scope="module")
def whole():
    return digest(work("sweep", **SMALL))


def run(out, **more):
    return work("sweep", **SMALL, out=out, **more)


class Stopped(Exception):
    pass


def run_until(out, chunk, error=Stopped):
    """Runs until a chunk is reached, and raises there."""
    left = [chunk * 2]  # a chunk is two batches

    def stop():
        left[0] -= 1
        if left[0] < 0:
            raise error

    with before_each_batch(stop), pytest.raises(error):
        run(out, model=network())


@contextmanager
def before_each_batch(act):
    """Calls `act()` before each batch is measured; no hook, which would be an edit of the model."""
    measure = Chunk.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chunk, "measure", lambda *given: (act(), measure(*given))[1])
        yield


def counted(out, **more):
    """Returns the digest of a run, and how many chunks it measured."""
    batches = []
    with before_each_batch(lambda: batches.append(1)):
        result = run(out, model=network(), **more)
    return digest(result), (len(batches) + 1) // 2


def test_an_interrupt_says_that_the_rest_stays(tmp_path, whole, capfd):
    run_until(tmp_path, 1, KeyboardInterrupt)
    assert "interrupted. The same call continues" in capfd.readouterr().err
    assert counted(tmp_path) == (whole, CHUNKS - 1)


def test_a_full_disk_loses_nothing(tmp_path, whole, monkeypatch):
    """The disk is full at the third chunk."""

    def full(path, writer):
        if path.name == "sweep-000002.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, writer)

    written = chunks.write
    monkeypatch.setattr(chunks, "write", full)
    refuses("No space left on device. Finished chunks are kept", partial(run, tmp_path))
    monkeypatch.setattr(chunks, "write", written)
    assert counted(tmp_path) == (whole, CHUNKS - 2)


def test_a_run_in_other_settings_is_refused_by_field(tmp_path, whole):
    run(tmp_path)
    with pytest.raises(
        ValueError, match="another model; settings.config.n_layers is 2 there and 3 here"
    ):
        run(tmp_path, model=ci.HookedCrate(ci.CrateConfig.from_dict(
            network().cfg.to_dict() | {"n_layers": 3})).eval())  # fmt: skip
    with pytest.raises(ValueError, match="settings.batch_size is 5 there and 6 here.*restart"):
        work("sweep", **SMALL | {"batch_size": 6}, out=tmp_path)
    assert counted(tmp_path) == (whole, 0)
    restarted = work("sweep", **SMALL | {"batch_size": 6}, out=tmp_path, resume=False)
    assert restarted.meta["batch_size"] == 6


def test_folders_that_cannot_be_written(tmp_path):
    """The suite may run as root, which may write anywhere but in these places."""
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below", Path("/proc/nothing"), Path("/dev/null/out")):
        refuses("[Gg]ive another folder", partial(run, out))
    assert file.read_text() == "mine"


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
        ({"workers": -1}, "workers=-1: give a whole number of at least 0"),
        ({"engine": "dask"}, "engine='dask'"),
        ({"shard": "0/2"}, "needs a folder that all shards share: give out=DIR"),
    ],
)
def test_wrong_values_are_refused_before_work_starts(given, words, unchecked):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        ci.sweep(make(), torch.zeros(1, 3, 6, 20), progress=False, **given)


ROWS = 11
QUIET = dict(batch_size=2, chunk_size=3, progress=False)  # chunks of 3, 3, 3 and 2
POINT = "blocks.1.hook_resid_post"
LABELS = [place % 2 for place in range(ROWS)]


@pytest.fixture(scope="module")
def vision():
    """A model that does not answer all pictures alike, and pictures with masks and labels."""
    model = make("crate-alpha", n_layers=2, mean=[0.5] * 3, std=[0.25] * 3)
    random, rows = np.random.default_rng(0), []
    for _ in range(ROWS):
        mask = ((random.random((6, 20)) > 0.6) * 255).astype(np.uint8)
        picture = random.integers(0, 256, (6, 20, 3), dtype=np.uint8)
        rows.append({"image": Pillow.fromarray(picture), "mask": Pillow.fromarray(mask)})
    table = Dataset.from_list(rows, features=Features({"image": Image(), "mask": Image()}))
    with torch.no_grad():
        model.unembed.bias -= model(model.preprocess(table["image"])).mean(dim=0)
    samples = open_data(table, model.preprocess, None, model.preprocess_masks)
    return model, replace(samples, labels=LABELS)


def saes(model, data, coder=0, **more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(coder)
        sae = ci.SparseAutoencoder(SAEConfig(hook_name=POINT, d_in=31, d_sae=17))
    return ci.saes.evaluate(model, data, {POINT: sae}, **more)


# what measures; its options; another setting, and the field that says so
KINDS = {
    "head_ablation": (ci.ablate_heads, {}, {"metric": "accuracy"}, "settings.metric"),
    "atoms": (ci.atoms, {}, {"top": 5}, "settings.top"),
    "atlas": (ci.atlas, {}, {"ablate": 2}, "settings.ablate"),
    "linear_probe": (
        ci.linear_probe, {"test": 0.5}, {"labels": [1 - one for one in LABELS]}, "labels.value"
    ),
    "composition": (composition, {"through": "data"}, {"role": "v"}, "settings.role"),
    "concentration": (
        concentration, {"k": [2], "rotations": 2, "untrained": 1}, {"k": [3]}, "settings.k"
    ),
    "surgery": (
        ci.surgery, {"replacements": ["gradient", 3], "mixes": (0.5,)}, {"mixes": (0.25,)},
        "settings.mixes",
    ),
    "saes": (saes, {}, {"coder": 1}, f"the autoencoder at {POINT}"),
    "audit": (ci.audit, {"grid": False, "untrained": 2}, {"eps": 0.2}, "settings.eps"),
    "segment": (ci.segment, {"untrained": 2}, {"mass": 0.5}, "settings.mass"),
}  # fmt: skip


def same(one, two):
    assert type(one) is type(two) and list(one.stored) == list(two.stored)
    for name, table in one.stored.items():
        pd.testing.assert_frame_equal(table, two.table(name), check_exact=True, obj=name)
    run = ("seconds", "engine", "command", "run")
    metas = [{key: it for key, it in r.meta.items() if key not in run} for r in (one, two)]
    assert metas[0] == metas[1]


@pytest.fixture
def measured_chunks(monkeypatch):
    """The chunks that are measured; `stop` is how many may be, before an error."""
    measured_chunks, measured = SimpleNamespace(done=[], stop=None), Work.measured

    def count(work, task, *more):
        if measured_chunks.stop is not None and len(measured_chunks.done) >= measured_chunks.stop:
            raise OSError("the machine is gone")
        measured_chunks.done.append((work.step.name, task.number))
        return measured(work, task, *more)

    monkeypatch.setattr(Work, "measured", count)
    return measured_chunks


@pytest.mark.parametrize("kind", few(KINDS))
def test_what_is_measured_when_the_work_dies_is_not_measured_again(
    vision, kind, tmp_path, measured_chunks
):
    verb, options, changed, field = KINDS[kind]
    measure = partial(verb, *vision, **QUIET)
    whole = measure(**options)
    chunks = len(measured_chunks.done)
    assert chunks == len(set(measured_chunks.done)) >= 4
    measured_chunks.done.clear()
    measured_chunks.stop = chunks // 2 + 1  # in a second pass, if there is one
    refuses("the machine is gone", lambda: measure(out=tmp_path, **options), OSError)
    measured_chunks.stop = None
    with pytest.raises(ValueError, match="holds a run with other settings") as error:
        measure(out=tmp_path, **options | changed)
    assert field in str(error.value) and len(measured_chunks.done) == chunks // 2 + 1
    same(whole, measure(out=tmp_path, **options))
    assert len(measured_chunks.done) == len(set(measured_chunks.done)) == chunks
    (tmp_path / "meta.json").unlink()
    same(whole, measure(out=tmp_path, **options))
    assert len(measured_chunks.done) == chunks and (tmp_path / "meta.json").exists()
