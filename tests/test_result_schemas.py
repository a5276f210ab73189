"""Results of strangers: each field of meta.json and each table may lie; memory is bounded."""

import datetime
import decimal
import json
import os
import shutil
from contextlib import suppress

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.core.files import digest, open_regular
from crate_interp.results import json_schemas, parquet_limits
from crate_interp.results.json_schemas import fault, fault_of_file
from crate_interp.results.result import by
from crate_interp.results.result_reading import table_from
from crate_interp.sweeps.ledgers import ledger as ledgers
from crate_interp.sweeps.ledgers.chunk_tables import unpacked
from crate_interp.sweeps.ledgers.shards import WHOLE
from crate_interp.sweeps.runs.chunked_run import folded_tables
from selection import few

NAMES = [name.removesuffix("?") for name in (*json_schemas.META, "statistics", "probes")]
LIES = [None, True, -1, 1.5, 7, 10**30, "\ud800", "a\nb", "", [], [3], {}, {"a": []}, {"a": None},
        float("nan"), float("inf"), [[None]], "gone"]  # fmt: skip


@pytest.fixture(scope="module")
def result():
    data = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    return ci.sweep(make(), data, probes="sparsity", controls=0, progress=False)


@pytest.fixture(scope="module")
def whole(result, tmp_path_factory):
    return result.save(tmp_path_factory.mktemp("r") / "out")


def with_meta(folder, **change):
    meta = json.loads((folder / "meta.json").read_text()) | change
    meta = {name: value for name, value in meta.items() if value != "gone"}
    (folder / "meta.json").write_text(json.dumps(meta))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(LIES))
def test_each_entry_of_meta_may_lie(result, whole, tmp_path_factory, name, value):
    """A result that merges and is written, or a sentence; never an error of another type."""
    out = shutil.copytree(whole, tmp_path_factory.mktemp("r") / "out")
    with_meta(out, **{name: value})
    json.dumps(ci.verify(out))
    try:
        loaded = ci.SweepResult.load(out)
        loaded.save(out)
        loaded.merge(result)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 3000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(n_samples=True), "n_samples is True, not a whole number"),
        (dict(n_samples=-1), "n_samples is -1, not a whole number"),
        (dict(counts={"a": None}), "counts.a is None, not a number"),
        (dict(config={"family": 3}), "config.family is 3, not a text"),
        (dict(data=[{"fingerprint": 1, "start": 0, "stop": 1}]), "data is .*, not a list of fing"),
        (dict(skipped=[{"sample": 1.5}]), r"skipped\[0\].sample is 1.5"),
        (dict(skipped=3), "skipped is 3, not a list"),
        (dict(edits={"a": 1}), "edits is {'a': 1}, not a list"),
        (dict(versions=[]), r"versions is \[\], not of type dict"),
        (dict(mine="a\x1bb"), "it holds the unprintable text"),
        (dict(statistics="gone"), "statistics is missing"),
    ],
)
def test_the_sentence_names_the_entry(whole, tmp_path, change, words):
    out = shutil.copytree(whole, tmp_path / "out")
    with_meta(out, **change)
    with pytest.raises(ValueError, match=f"meta.json' is damaged: .*{words}.*Save the result"):
        ci.SweepResult.load(out)


def test_deep_and_odd_files(whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    text = (out / "meta.json").read_text()
    for depth, words in ((150, "more than 100 levels"), (10**5, "does not hold a saved")):
        deep = text.replace("{", '{"deep": ' + "[" * depth + "]" * depth + ", ", 1)
        (out / "meta.json").write_text(deep)
        with pytest.raises(ValueError, match=words):
            ci.SweepResult.load(out)
    for content in (b"", b"[]", b"3", b"\xff\xfe", b'{"format": 1}', b"\x00" * 99):
        (out / "meta.json").write_bytes(content)
        with pytest.raises(ValueError, match="does not hold|was not written|holds a result of"):
            ci.SweepResult.load(out)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a device"])
def test_only_files_are_opened(tmp_path, kind):
    path = tmp_path / "x"
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir,
     "link to a device": lambda: path.symlink_to("/dev/zero")}[kind]()  # fmt: skip
    with pytest.raises(OSError, match="is a folder, pipe, socket or device, not a file"):
        open_regular(path)
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with open_regular(tmp_path / "b") as file:
        assert file.read() == b"12"


def written(table, **options):
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def varint(number, size=0):
    """A number as Thrift writes it, in `size` bytes if that is more than it needs."""
    number, out = number << 1, []
    while number or len(out) < max(size, 1):
        out.append(128 | number & 127)
        number >>= 7
    return bytes([*out[:-1], out[-1] & 127])


def less_claimed(content, number):
    """The bytes of a parquet file whose summary, but not its pages, says 1 for a number."""
    place = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    true = varint(number)
    assert true in content[place:]
    return content[:place] + content[place:].replace(true, varint(1, len(true)))


MANY = 2**25


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
def test_a_summary_that_says_less_than_the_pages(codec):
    """A list is read whole, however few values the file's summary claims."""
    zeros = pa.array(np.zeros(MANY, np.int8))
    ends = pa.array([0, MANY], pa.int32())
    content = written(pa.table({"a": pa.ListArray.from_arrays(ends, zeros)}), compression=codec)
    assert len(content) < 2**21
    for lying in (content, less_claimed(content, MANY)):
        with pytest.raises(ValueError, match="claims [0-9,]+ (values|bytes), more than its size"):
            table_from(lying)


def test_zeros_that_decompress():
    """Zeros without a dictionary: 128 MB of them take a few kB."""
    table = pa.table({"a": np.zeros(2**24 + 8)})
    content = written(table, compression="zstd", use_dictionary=False)
    assert len(content) < 2**17
    with pytest.raises(ValueError, match="it claims [0-9,]+ values, more than its size"):
        table_from(content)
    honest = pd.DataFrame({"a": np.zeros(2**16), "b": 3, "c": "x", "d": [[1, 2]] * 2**16})
    assert table_from(honest.to_parquet(index=False))["d"].iloc[-1].tolist() == [1, 2]


def test_honest_tables_of_flags_come_near_the_limit(monkeypatch):
    """A flag takes a bit in the file and eight bytes in memory; tables of zeros take less."""
    monkeypatch.setattr(parquet_limits, "_BYTES", 0)
    sample = np.arange(2**16) // 12
    flags = np.random.default_rng(0).integers(0, 2, (4, len(sample))).astype(float)
    content = pd.DataFrame({"sample": sample, **dict(zip("abcd", flags, strict=True))}).to_parquet()
    assert 32 < 5 * 8 * len(sample) / len(content) < 64
    assert len(table_from(content)) == len(sample)
    zeros = pd.DataFrame({"sample": sample, **dict.fromkeys("abcdefgh", 0.0)}).to_parquet()
    with pytest.raises(ValueError, match="values, more than its size allows"):
        table_from(zeros)


def test_lists_count_by_the_objects_that_they_become():
    """A million empty lists take three kB in the file, and 130 MB as arrays."""
    lists = pa.ListArray.from_arrays(pa.array(np.zeros(2**20 + 1, np.int32)), pa.array([1.0]))
    content = written(pa.table({"a": lists}))
    assert len(content) < 2**12
    with pytest.raises(ValueError, match="values, more than its size allows"):
        table_from(content)


OBJECTS = {
    "decimals": [decimal.Decimal(1)], "dates": [datetime.date(2020, 1, 1)], "objects": [{"a": 1}],
    "times": [datetime.time(1)], "moments": [datetime.datetime(2020, 1, 1)], "texts": [["a"]],
    "lists of lists": [[[1]]],
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTS)
def test_types_that_no_saved_table_has(kind):
    content = written(pa.table({"mine": OBJECTS[kind]}))
    with pytest.raises(ValueError, match="its column mine holds values of type"):
        table_from(content)


def test_names_of_columns_are_texts():
    """A file may say to pandas that its columns are called by numbers."""
    table = pa.Table.from_pandas(pd.DataFrame({"0": [1.0]}), preserve_index=False)
    known = json.loads(table.schema.metadata[b"pandas"])
    known["column_indexes"] = [dict.fromkeys(("pandas_type", "numpy_type"), "int64")]
    known["column_indexes"][0] |= dict.fromkeys(("name", "field_name", "metadata"))
    content = written(table.replace_schema_metadata({b"pandas": json.dumps(known).encode()}))
    with pytest.raises(ValueError, match="the column name 0"):
        table_from(content)


ZEROS = written(pa.table({"a": np.zeros(2**20)}))  # 8 MB


def test_the_tables_of_a_chunk_share_its_memory():
    def chunk(count):
        cells = [(f"t{number}", ZEROS) for number in range(count)]
        return pd.DataFrame(cells, columns=["table", "content"]).to_parquet(index=False)

    assert len(unpacked(chunk(2))) == 2
    assert len(chunk(17)) < 2**18
    with pytest.raises(ValueError, match="values, more than its size allows"):
        unpacked(chunk(17))


def test_the_chunks_of_a_run_share_their_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_limits, "_BYTES", 2**22)
    with ledgers.opened(tmp_path, {}, WHOLE, True) as ledger:
        for chunk in range(5):
            tables = {"a": pd.DataFrame({"a": np.zeros(2**17)}), "chunk": ROW}
            ledger.write("sweep", chunk, chunk, chunk + 1, tables, 0.0)
        ledger.begin("sweep", 5)
    with pytest.raises(ValueError, match="chunks of sweep in .* claim over 4,194,304 bytes"):
        folded_tables(ledger, "sweep", {"a": by()}, {})


ROW = pd.DataFrame([{"start": 0, "stop": 1, "seconds": 0.0}])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_byte_of_a_parquet_file_may_be_another(data):
    """A table or a sentence; the process goes on."""
    content = bytearray(PARQUET)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        table_from(bytes(content))
    except ValueError as error:
        assert str(error).isprintable() and "\n" not in str(error)


@pytest.mark.parametrize("byte", few([0, 9, 19, 35, 64, 124]))
def test_damaged_statistics_of_a_column_end_no_process(byte):
    """pyarrow ends the process when it is asked for a column whose statistics do not fit it."""
    begin = len(PARQUET) - 8 - int.from_bytes(PARQUET[-8:-4], "little")
    for place in range(begin, PARQUET.index(b"pandas", begin)):
        content = PARQUET[:place] + bytes([byte]) + PARQUET[place + 1 :]
        with suppress(ValueError):
            table_from(content)


PARQUET = pd.DataFrame(
    {"sample": [0, 1, 2], "name": ["a", "b", None], "value": [0.5, 1.5, None], "on": True}
).to_parquet(index=False)


def test_schemas():
    schema = {"a": int, "b?": [str], "c?": {"*": {"d": json_schemas.COUNT}}}
    assert fault({"a": 1, "more": None}, schema) == ""
    assert fault({"a": 1, "b": ["x"], "c": {"e": {"d": 0}}}, schema) == ""
    assert fault({}, schema) == "a is missing"
    assert fault({"a": True}, schema) == "a is True, not of type int"
    assert fault({"a": 1, "b": ["x", 3]}, schema) == "b[1] is 3, not of type str"
    assert fault({"a": 1, "c": {"e": {"d": -1}}}, schema).startswith("c.e.d is -1, not a whole")
    assert fault({"a": 1, "c": {"e": 3}}, schema) == "c.e is 3, not an object"
    assert fault([], schema) == "is [], not an object"
    assert fault_of_file({"a": 1, "x": ["\ud800"]}, schema).startswith("it holds the unprintable")


def test_a_folder_loads_that_holds_what_schemas_do_not_name(whole, result, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    with_meta(out, mine={"a": [1, None, {"b": True}]})
    assert ci.SweepResult.load(out).meta["mine"] == {"a": [1, None, {"b": True}]}
    assert digest(out / "samples.parquet") == digest(whole / "samples.parquet")
