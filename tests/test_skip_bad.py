"""Samples that cannot be decoded: refused with their names, or left out and listed."""

from functools import partial

import pytest
import torch

import crate_interp as ci
from conftest import PLAIN, make, refuses
from crate_interp.data import open_data
from gathered import CHUNKS, COUNT, folder, same

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
