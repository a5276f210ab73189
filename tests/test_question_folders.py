"""Every question in a folder: what is measured when the work dies stays, and settings are compared.

That shards, other batches and a resumed run give the numbers of one run is in test_golden.py.
"""

from dataclasses import replace
from functools import partial
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
from crate_interp.data import open_data
from crate_interp.models.sae import SAEConfig
from crate_interp.questions.experiment import Work
from selection import few

N = 11
QUIET = dict(batch_size=2, chunk_size=3, progress=False)  # chunks of 3, 3, 3 and 2
POINT = "blocks.1.hook_resid_post"
LABELS = [place % 2 for place in range(N)]


@pytest.fixture(scope="module")
def vision():
    """A model that does not answer all pictures alike, and pictures with masks and labels."""
    model = make("crate-alpha", n_layers=2, mean=[0.5] * 3, std=[0.25] * 3)
    random, rows = np.random.default_rng(0), []
    for _ in range(N):
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
def counted(monkeypatch):
    """The chunks that are measured; `stop` is how many may be, before an error."""
    counted, measured = SimpleNamespace(done=[], stop=None), Work.measured

    def count(work, task, *more):
        if counted.stop is not None and len(counted.done) >= counted.stop:
            raise OSError("the machine is gone")
        counted.done.append((work.step.name, task.number))
        return measured(work, task, *more)

    monkeypatch.setattr(Work, "measured", count)
    return counted


@pytest.mark.parametrize("kind", few(KINDS))
def test_what_is_measured_when_the_work_dies_is_not_measured_again(vision, kind, tmp_path, counted):
    verb, options, changed, field = KINDS[kind]
    measure = partial(verb, *vision, **QUIET)
    whole = measure(**options)
    chunks = len(counted.done)
    assert chunks == len(set(counted.done)) >= 4
    counted.done.clear()
    counted.stop = chunks // 2 + 1  # in a second pass, if there is one
    refuses("the machine is gone", lambda: measure(out=tmp_path, **options), OSError)
    counted.stop = None
    with pytest.raises(ValueError, match="holds a run with other settings") as error:
        measure(out=tmp_path, **options | changed)
    assert field in str(error.value) and len(counted.done) == chunks // 2 + 1
    same(whole, measure(out=tmp_path, **options))
    assert len(counted.done) == len(set(counted.done)) == chunks
    (tmp_path / "meta.json").unlink()
    same(whole, measure(out=tmp_path, **options))
    assert len(counted.done) == chunks and (tmp_path / "meta.json").exists()
