"""What holds for every streamed verb: no samples, one, bad ones, and half precision."""

import copy
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import PLAIN, make, make_lm, refuses
from crate_interp.data import open_data
from crate_interp.models.hook_aliases import RefusedError
from gathered import CHUNKS, COUNT, folder, same
from golden.case import QUIET
from golden.cases import SMALL
from golden.subjects import subject
from selection import few_of
from test_family_fixtures import member


def of(data, rows):
    return {key: data[key][rows] for key in data} if isinstance(data, dict) else data[rows]


@pytest.fixture(params=few_of(SMALL, {*SMALL} - {"audit"}))
def verb(request):
    def asked(model, data):
        return attrgetter(request.param)(ci)(model, data, **SMALL[request.param], **QUIET)

    return asked


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_no_samples_and_bad_ones_are_refused_in_a_line(verb, name):
    model, data = subject(name)
    refuses("the data is empty|has no patches", lambda: verb(model, of(data, slice(0))))
    if name == "crate":
        data = data | {"image": data["image"].clone()}
        data["image"][3, 0, 1, 2] = torch.nan
        refuses("sample 3.* NaN", lambda: verb(model, data))
    else:
        refuses("the token 99|has no patches", lambda: verb(model, data * 0 + 99))


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
@pytest.mark.parametrize("way", ["one sample", "bfloat16"])
def test_numbers_are_finite_or_missing_or_the_verb_says_why(verb, name, way):
    model, data = subject(name)
    if way == "one sample":
        data = of(data, slice(1))
    else:
        model = copy.deepcopy(model).bfloat16()
        data = data | {"image": data["image"].bfloat16()} if name == "crate" else data
    try:
        tables = verb(model, data).stored.values()
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return
    for table in tables:
        assert not np.isinf(table.select_dtypes("number").to_numpy(float)).any()


NAMES = ("tost", "cbt", "tost-ista", "aot", "crate conv", "tost-lm", "crate-bert")
PATTERNLESS = ("tost", "cbt", "tost-ista", "tost-lm")
NO_PATTERN = dict.fromkeys(PATTERNLESS, "needs an attention pattern")
NO_ATOMS = {"aot": "has attention alone"}
NO_CLS = {"tost": "reads one token in every layer"}
ISTA = ("cbt", "tost-ista", "crate conv", "crate-bert")
REPLACED = dict.fromkeys(ISTA, "the sparse step (of this family )?replaces the stream")
TEXT = dict.fromkeys(("tost-lm", "crate-bert"), "give the cache of model.run_with_cache|no patches")


class One:
    def __init__(self, name):
        self.name, generator = name, torch.Generator().manual_seed(5)
        if name in TEXT:
            self.model = make_lm(name)
            self.x = torch.randint(47, (8, 11), generator=generator)
        else:
            self.model, _ = member(name)
            self.x = torch.randn(8, 3, *self.model.cfg.image_size, generator=generator)
        self.images = torch.zeros(8, 3, 6, 20) if name in TEXT else self.x
        self.model.requires_grad_(False)
        self.cache = self.model.run_with_cache(self.x)[1]

    def targets(self):
        count = self.cache["resid_pre", 0].shape[1]
        return {"all": torch.ones(len(self.x), count, count, dtype=torch.bool)}


def saved(one, folder):
    one.model.save_pretrained(folder / "saved")
    again = ci.convert(folder / "saved", folder / "converted")
    return torch.allclose(again(one.x), one.model(one.x), atol=1e-5)


# verb -> (what it does, the members that refuse and a part of their sentence)
VERBS = {
    "logit lens": (lambda one, _: ci.circuits.logit_lens(one.cache), NO_CLS),
    "lens of the cache": (lambda one, _: one.cache.logit_lens(), NO_CLS),
    "direct attribution": (
        lambda one, _: ci.circuits.logit_attribution(one.cache, 1), {**REPLACED, **NO_CLS}
    ),
    "head scores": (lambda one, _: ci.circuits.head_scores(one.cache, one.targets()), NO_PATTERN),
    "patterns": (lambda one, _: ci.viz.attention(one.cache, 0), NO_PATTERN),
    "head grid": (lambda one, _: ci.viz.head_grid(one.cache, one.images), TEXT),
    "page": (lambda one, _: ci.viz.explore(one.cache, one.x), {}),
    "neurons": (
        lambda one, _: one.cache.stack_neuron_results(2), {**REPLACED, **NO_ATOMS}
    ),
    "heads": (lambda one, _: one.cache.stack_head_results(), REPLACED),
    "save and convert": (saved, {}),
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def one(request):
    return One(request.param)


def runs_or_refuses(verb, one, folder):
    call, refused = verb
    if one.name not in refused:
        answer = call(one, folder)
        assert answer is not None and answer is not False
        return
    with pytest.raises((ValueError, RefusedError), match=refused[one.name]) as caught:
        call(one, folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_each_verb_runs_or_says_why_not(one, tmp_path):
    for verb in VERBS.values():
        runs_or_refuses(verb, one, tmp_path)


BAD = {4: "a/04.png", 13: "b/13.png", 16: "a/16.png"}  # the two classes take turns


@pytest.fixture(scope="module")
def model():
    return make(labels=tuple("abcdefghijk"), **PLAIN)


@pytest.fixture
def damaged(tmp_path):
    root = folder(tmp_path / "in")
    for name in BAD.values():
        (root / name).write_bytes(b"no picture")
    return root


def test_bad_samples_are_refused_with_their_names(model, damaged):
    with pytest.raises(ValueError, match=r"a/04\.png.* 1 of the samples 0 to 6 cannot be decoded"):
        ci.sweep(model, f"imagefolder:{damaged}", **CHUNKS)
    (damaged / "a" / "04.png").unlink()  # two are left, in two chunks
    with pytest.raises(ValueError, match=r"b/13\.png.* 1 of the samples 7 to 13") as error:
        ci.sweep(model, f"imagefolder:{damaged}", **CHUNKS)
    assert "skip_bad=True leaves such samples out" in str(error.value)
    with pytest.raises(ValueError, match=r"b/13\.png.*a/16\.png.* 2 of the samples .* cannot be"):
        ci.sweep(model, f"imagefolder:{damaged}", **CHUNKS | dict(chunk_size=COUNT, batch_size=5))


def test_they_are_left_out_and_listed(model, damaged):
    source = f"imagefolder:{damaged}"
    result = ci.sweep(model, source, skip_bad=True, **CHUNKS)
    left = [number for number in range(COUNT) if number not in BAD]
    samples = result.samples()
    assert list(dict.fromkeys(samples["sample"])) == left
    assert result.meta["n_samples"] == len(left) == 20 and result.meta["data"][0]["stop"] == COUNT
    shown = {row["sample"]: row["name"] for row in result.meta["skipped"]}
    assert shown == BAD
    assert all("is not a picture" in row["why"] for row in result.meta["skipped"])
    # labels go with their samples, and each number is that of the picture alone
    whole = open_data(source, model.preprocess)
    assert whole.labels is not None
    for number in (5, 17):
        own = samples[samples["sample"] == number]
        assert set(own["label"]) == {whole.labels[number]}
        alone = ci.sweep(model, whole.read(number, number + 1), **CHUNKS).samples()
        columns = list(samples.columns[3:])
        torch.testing.assert_close(
            torch.tensor(own[columns].to_numpy()), torch.tensor(alone[columns].to_numpy()),
            equal_nan=True,
        )  # fmt: skip
    same(result, ci.sweep(model, source, skip_bad=True, workers=2, **CHUNKS))


def test_a_chunk_without_a_sample_and_data_without_any(model, tmp_path):
    root = folder(tmp_path / "in")
    names = sorted(root.rglob("*.png"), key=lambda path: path.name)
    for path in names[:7]:  # the first chunk
        path.write_bytes(b"")
    options = CHUNKS | dict(probes=["sparsity", "alignment"], controls=9)
    result = ci.sweep(model, f"imagefolder:{root}", skip_bad=True, **options)
    assert result.samples()["sample"].min() == 7 and len(result.table("weights"))
    assert result.meta["n_samples"] == COUNT - 7 and result.controls()["n"].max() == 2
    for path in names:
        path.write_bytes(b"")
    few = {"limit": 8, "batch_size": 3, "chunk_size": 7, "progress": False}
    for verb in (ci.sweep, ci.atlas, ci.circuits.atom_names):
        call = partial(verb, model, f"imagefolder:{root}", skip_bad=True, **few)
        refuses("none of the 8 samples can be decoded. First error: ", call)
