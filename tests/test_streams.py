"""Data without a length, texts that fill no window, and samples decoded ahead by processes."""

import gc
import multiprocessing
import os
import signal
import time

import datasets
import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import PLAIN, make, make_lm
from crate_interp.core.run_options import RunOptions
from crate_interp.data import open_data, open_text
from crate_interp.questions.batches import Chunk, samples_of
from gathered import CHUNKS, COUNT, pictures, same, table
from selection import few
from texts import Words

MORE = "give limit=n, or data with a length"


@pytest.fixture(scope="module")
def model():
    return make(**PLAIN)


@pytest.fixture(scope="module")
def data():
    return table()


@pytest.fixture(scope="module")
def wanted(model, data):
    return ci.sweep(model, data, **CHUNKS)


FORMS = ("torch", "steps", "plain", "sharded", "numpy", "parquet")


@pytest.mark.parametrize("form", few(FORMS, 2))
def test_a_stream_is_measured_as_its_table_is(model, data, wanted, form, tmp_path):
    stream = data.to_iterable_dataset(num_shards=5 if form == "sharded" else 1)
    if form in ("torch", "numpy"):
        stream = stream.with_format(form)
    if form == "parquet":
        data.to_parquet(tmp_path / "rows.parquet")
        stream = datasets.load_dataset(
            "parquet", data_files=str(tmp_path / "rows.parquet"), split="train", streaming=True,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
    if form == "steps":
        bare = stream.cast_column("picture", datasets.Image(decode=False))
        stream = bare.map(lambda row: row, features=bare.features).skip(0).take(COUNT)
        stream = stream.cast_column("picture", datasets.Image())
    result = ci.sweep(model, stream, **CHUNKS)
    same(result, wanted)
    (entry,) = result.meta["data"]
    assert (entry["start"], entry["stop"], result.meta["n_samples"]) == (0, COUNT, COUNT)
    assert entry["fingerprint"].startswith("stream:") and "not hashed" in entry["fingerprint"]


def test_limits(model, data):
    stream = data.to_iterable_dataset()
    few = ci.sweep(model, stream, limit=11, **CHUNKS)
    same(few, ci.sweep(model, data, limit=11, **CHUNKS))
    assert "the first 11" in few.meta["data"][0]["fingerprint"]
    kept = open_data(stream, model.preprocess, 11)
    assert kept.n == kept.of == 11 and kept.labels == [n % 3 for n in range(11)]
    assert torch.equal(kept.read(2, 9), open_data(data, model.preprocess).read(2, 9))
    with pytest.raises(ValueError, match=MORE):
        open_data(stream, model.preprocess)
    with pytest.raises(ValueError, match=MORE):
        ci.audit(model, stream, progress=False)


@pytest.mark.slow
def test_a_stream_that_is_another_one(model, data, tmp_path):
    def of(count, out):
        return ci.sweep(model, data.select(range(count)).to_iterable_dataset(), out=out, **CHUNKS)

    def broken(rows):
        for number in range(rows):
            yield {"picture": pictures()[number], "label": 0}
        raise OSError("the line is cut")

    of(COUNT, tmp_path / "one")
    for count, words in (
        (21, "has 4 chunks of 'sweep', but this data has 3"),
        (22, "stream differs from the one with which .* in chunk 3"),
    ):
        with pytest.raises(ValueError, match=words):
            of(count, tmp_path / "one")
    cut = datasets.IterableDataset.from_generator(
        broken, features=data.features, gen_kwargs={"rows": 17}
    )
    with pytest.raises(OSError, match="the line is cut"):  # finished chunks are kept
        ci.sweep(model, cut, out=tmp_path / "two", **CHUNKS)
    assert (tmp_path / "two" / "chunks" / "sweep-000000+2.parquet").exists()


@pytest.fixture
def texts():
    drawn = torch.randint(0, 45, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    ends = [0, 50, 50, 53, 60, 260, 301]
    parts = zip(ends, ends[1:], strict=False)
    return [" ".join(map(str, drawn[start:stop])) for start, stop in parts]


# the first with a token of its own at the beginning of each window
@pytest.mark.parametrize("family", few(["nanochat-crate", "crate-lm"]))
def test_windows_of_a_stream_of_texts(family, texts):
    lm = make_lm(family)
    lm.tokenizer = Words()
    table = datasets.Dataset.from_dict({"number": range(6), "words": texts})
    result = ci.sweep(lm, table.to_iterable_dataset(), **CHUNKS)
    same(result, ci.sweep(lm, texts, **CHUNKS))
    assert result.meta["n_samples"] == open_text(table, lm.windows).n > 14
    few = samples_of(lm, table.to_iterable_dataset(), RunOptions(limit=5))
    assert few.n == 5 and torch.equal(few.read(1, 4), open_text(texts, lm.windows).read(1, 4))
    with pytest.raises(ValueError, match="3 tokens do not fill a window of 13"):
        ci.sweep(lm, table.select([2]).to_iterable_dataset(), **CHUNKS)
    with pytest.raises(ValueError, match="cannot take text from IterableDataset: give token ids"):
        open_text(table.to_iterable_dataset(), lm.windows)


@pytest.mark.parametrize("kind", ["tensor", "array", "tokens"])
def test_batches_in_one_buffer_are_samples_of_their_own(model, kind):
    made = model if kind != "tokens" else make_lm()
    size = (7, 2, 13) if kind == "tokens" else (7, 2, 3, 6, 20)
    drawn = torch.Generator().manual_seed(1)
    batches = torch.randn(size, generator=drawn)
    batches = (batches.abs() * 11).long() if kind == "tokens" else batches

    def stream():
        buffer = batches[0].clone()
        for batch in batches:
            buffer.copy_(batch)
            yield buffer.numpy() if kind == "array" else buffer

    same(ci.sweep(made, stream(), **CHUNKS), ci.sweep(made, batches.flatten(0, 1), **CHUNKS))


QUIET = {"batch_size": 3, "progress": False}
RAGGED = ["3 1 4", "1 5", "9 2 6 5", "3 5 8 9", "7"]
EQUAL = ["3 1 4", "1 5 9", "2 6 5"]
FAMILIES = ["crate-lm", "nanochat-crate"]  # without and with a separator before each text


def reader(family="crate-lm"):
    lm = make_lm(family, n_ctx=37)
    lm.tokenizer = Words()
    return lm


def numbers(table):
    return table.drop(columns=["sample", "label"], errors="ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_text_has_the_numbers_of_its_cache(family):
    lm = reader(family)
    for text in ("3 1 4 1 5", "2 7"):
        swept = ci.sweep(lm, [text], controls=0, **QUIET)
        probed = ci.probe(lm.run_with_cache(text)[1])
        assert numbers(swept.samples()).equals(numbers(probed.samples()))
        assert np.array_equal(swept.heads()["mean"], probed.heads()["mean"], equal_nan=True)


@pytest.mark.parametrize("family", few(FAMILIES))
@pytest.mark.parametrize("texts", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_each_short_text_of_a_list_is_a_sample(family, texts, tmp_path):
    lm = reader(family)
    whole = ci.sweep(lm, texts, **QUIET).samples()
    for number, text in enumerate(texts):
        alone = ci.sweep(lm, [text], **QUIET).samples()
        own = numbers(whole[whole["sample"] == number]).reset_index(drop=True)
        assert np.allclose(own.iloc[:, 1:], numbers(alone).iloc[:, 1:], rtol=2e-5, equal_nan=True)
    padded = ci.probe(lm.run_with_cache(texts, padding_side="right")[1]).samples()
    columns = padded.columns.intersection(whole.columns).drop(["sample", "label"], errors="ignore")
    order = ["sample", "layer"]
    ours, theirs = (table.sort_values(order)[columns] for table in (whole, padded))
    assert np.allclose(ours, theirs, rtol=2e-4, atol=1e-6, equal_nan=True)
    chunked = ci.sweep(lm, texts, out=tmp_path, chunk_size=2, **QUIET)
    assert np.allclose(numbers(chunked.samples()).iloc[:, 1:], numbers(whole).iloc[:, 1:],
                       rtol=2e-5, equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("how", ["mean", "zero"])
def test_heads_are_ablated_in_short_texts_as_by_hand(how, tmp_path):
    """The mean at a position is over the texts that have it."""
    lm, texts = reader(), RAGGED[:4]
    result = ci.ablate_heads(lm, texts, how=how, out=tmp_path, chunk_size=3, **QUIET)
    rows = [lm.to_tokens(text) for text in texts]
    head, point = 2, "blocks.1.attn.hook_z"
    z = [lm.run_with_cache(row)[1][point][0, :, head].double() for row in rows]
    longest = max(map(len, z))
    mean = torch.zeros(longest, z[0].shape[1], dtype=torch.float64)
    if how == "mean":
        for place in range(longest):
            mean[place] = torch.stack([one[place] for one in z if len(one) > place]).mean(0)

    def edit(value, hook):
        value = value.clone()
        value[:, :, head] = mean[: value.shape[1]].float()
        return value

    own = result.table("samples").query("layer == 1 and head == @head")
    for (_, row), tokens in zip(own.sort_values("sample").iterrows(), rows, strict=True):
        loss = lm.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(point, edit)])
        assert row["ablated"] == pytest.approx(loss.item(), rel=1e-5)
        base = result.table("base").set_index("sample")["base"][row["sample"]]
        assert base == pytest.approx(lm(tokens, return_type="loss").item(), rel=1e-5)


class Calls:
    n = 0


def children():
    """The processes of this one that still run; those that end get a moment."""
    gc.collect()
    for _ in range(200):
        if not multiprocessing.active_children():
            break
        time.sleep(0.05)
    return multiprocessing.active_children()


@pytest.mark.parametrize("workers", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_do_not_change_a_bit(model, wanted, workers):
    random = torch.get_rng_state()
    same(ci.sweep(model, table(), workers=workers, **CHUNKS), wanted)
    assert torch.equal(random, torch.get_rng_state())
    assert children() == []


@pytest.mark.parametrize("how", ["killed", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_what_is_done_stays(model, wanted, how, tmp_path, monkeypatch):
    calls, measure = Calls(), Chunk.measure

    def stopped(*given):  # a forward would be a setting of the run
        calls.n += 1
        if calls.n == 5:
            (one, *_) = multiprocessing.active_children()
            if how == "interrupted":
                raise KeyboardInterrupt
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            # a signal tells of it, as an error in whatever runs then: here, and not in a library
            # that makes a warning of it
            time.sleep(60)
        measure(*given)

    monkeypatch.setattr(Chunk, "measure", stopped)
    with pytest.raises(RuntimeError if how == "killed" else KeyboardInterrupt) as error:
        ci.sweep(model, table(), workers=2, out=tmp_path, **CHUNKS)
    if how == "killed":
        assert "DataLoader worker" in str(error.value)
    del error
    assert children() == []
    assert (tmp_path / "chunks" / "sweep-000000.parquet").is_file()
    same(ci.sweep(model, table(), workers=2, out=tmp_path, **CHUNKS), wanted)
