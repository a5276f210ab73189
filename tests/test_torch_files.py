"""The reader of torch files: the same numbers as torch's own, each within its storage."""

import argparse
import itertools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
import fuzz_torch
from conftest import FIXTURES, make
from crate_interp.checkpoints.formats import tensor_files, torch_files
from crate_interp.checkpoints.formats.pickles import PickleError
from crate_interp.checkpoints.formats.tensor_files import read_file
from crate_interp.checkpoints.formats.torch_names import NAMES, Storage
from pickled import TEXT, fails, state_dict, tensor_of, zipped
from reference import published_layout

PUBLISHED = sorted(path for path in FIXTURES.rglob("*") if path.suffix in (".pth", ".pt", ".tar"))
# ------------------------------------------------------------------ what is read


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_every_published_file_bit_for_bit(path):
    assert fuzz_torch.compared(path) == "both"
    if path.name == "token_bytes.pt":
        return
    with torch.serialization.safe_globals([argparse.Namespace]):
        wanted = torch.load(path, weights_only=True)
    wanted = next((wanted[key] for key in ("state_dict", "model") if key in wanted), wanted)
    counted = ".num_batches_tracked"  # no forward reads it
    wanted = {key: value for key, value in wanted.items() if not key.endswith(counted)}
    found = read_file(path).tensors
    assert len(found) == len(wanted)
    for (name, value), (other, right) in zip(found.items(), wanted.items(), strict=True):
        assert other.removeprefix("module.").removeprefix("_orig_mod.") == name
        assert (value.dtype, value.shape) == (right.dtype, right.shape) and value.is_contiguous()
        assert torch.equal(fuzz_torch.as_bytes(value), fuzz_torch.as_bytes(right))


@pytest.mark.parametrize("zipped", [True, False])
def test_everything_in_a_training_dict(zipped, tmp_path):
    path = fuzz_torch.training_dict(tmp_path, zipped)
    assert fuzz_torch.compared(path) == "both"
    with open(path, "rb") as file:
        head = file.read(4)
    assert (head == b"PK\x03\x04") == zipped


def test_strides_and_ties(tmp_path):
    """Views with gaps, turned matrices and flat storages give their numbers, and ties stay ties."""
    base = torch.arange(60.0)
    table = base.view(10, 6)
    weights = {
        "whole": base, "part": base[7:19], "turned": table.T, "columns": table[:, 2:4],
        "rows": table[::3], "both": table[1::2, ::3].T, "tied": table.T, "one": base[5],
        "empty": base[:0], "half": table.half()[2:4, 1:], "thin": base.view(10, 1, 6)[:, :, 2:3],
    }  # fmt: skip
    for number, legacy in enumerate((True, False)):
        path = tmp_path / f"{number}.pth"
        torch.save(weights, path, _use_new_zipfile_serialization=not legacy)
        found = read_file(path).tensors
        assert list(found) == list(weights)
        for name, value in weights.items():
            wanted = value.clone(memory_format=torch.contiguous_format)
            assert torch.equal(found[name], wanted) and found[name].dtype == value.dtype, name
            assert found[name].stride() == wanted.stride(), name
        assert found["tied"] is found["turned"] and found["whole"] is not found["part"]


def test_a_file_is_parsed_once(tmp_path, monkeypatch):
    path = tmp_path / "w.pth"
    torch.save(published_layout(make("crate-alpha")), path)
    seen, read = [], torch_files.pickles.read_pickle
    monkeypatch.setattr(torch_files.pickles, "read_pickle", lambda *a: seen.append(a) or read(*a))
    ci.load(path, n_heads=5, image_size=(6, 20))
    assert len(seen) == 1


def test_what_nobody_wants_is_not_read(tmp_path, monkeypatch):
    """Of an optimiser's state not one byte is read: its storages may be anything."""
    path = tmp_path / "w.pth"
    weights = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    torch.save({"model": weights, "optimizer": {0: torch.full((5,), 7.0)}}, path)
    read, asked = torch_files.read_into, []

    def watched(file, place, target, where):
        asked.append(len(target))
        return read(file, place, target, where)

    monkeypatch.setattr(torch_files, "read_into", watched)
    assert set(read_file(path).tensors) == set(weights) and sorted(asked) == [12, 16]


# ------------------------------------------------------------------ tensors


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(numel=5), "expects 20 bytes in storage 0, but the zip has 16"),
        (dict(kind="Half"), "expects 8 bytes in storage 0, but the zip has 16"),
        (dict(numel=-1), "where a count of numbers belongs"),
        (dict(numel=2**62), "expects .* bytes in storage 0, but the zip has 16"),
        (dict(shape=(2, 3)), "goes beyond its storage 0"),
        (dict(first=1), "goes beyond its storage 0"),
        (dict(first=-1), "where a count of numbers belongs"),
        (dict(strides=(-2, 1)), "where a count of numbers belongs"),
        (dict(shape=(-2, -2)), "where a count of numbers belongs"),
        (dict(strides=(2,)), "with an impossible shape"),
        (dict(shape=(2**40, 2**40), strides=(0, 0)), "with an impossible shape"),
        (dict(shape=(0, 2**40, 2**40), strides=(0, 0, 0)), "with an impossible shape"),
        (dict(shape=(2**40,), strides=(0,)), "stores fewer .it is an expanded view"),
        (dict(shape=(1,) * 65, strides=(1,) * 65), "whose shape is not a tuple"),
        (dict(flags=b"K\x01"), "requires a gradient but cannot have one"),
        (dict(kind="Int", flags=b"\x88"), "requires a gradient but cannot have one"),
        (dict(more=b"}X\x03\x00\x00\x00neg\x88s"), "must be negated or conjugated"),
        (dict(kind="Odd"), "asks for torch.OddStorage"),
    ],
)  # fmt: skip
def test_tensors_stay_within_their_storage(change, match, tmp_path):
    good = zipped(state_dict(tensor_of()), tmp_path / "good.pth", [bytes(16)])
    assert torch.equal(read_file(good).tensors["a"], torch.zeros(2, 2))
    fails(match, zipped(state_dict(tensor_of(**change)), tmp_path / "a.pth", [bytes(16)]))


@given(
    first=st.integers(0, 9),
    shape=st.lists(st.integers(0, 4), max_size=3),
    strides=st.lists(st.integers(0, 9), max_size=3),
)
def test_any_geometry_agrees_with_torch(first, shape, strides):
    """What lies within the storage is read; torch.set_ would make the storage larger instead."""
    fits = len(shape) == len(strides) and first <= 12
    places = [
        first + sum(index * stride for index, stride in zip(indices, strides, strict=False))
        for indices in itertools.product(*map(range, shape))
    ]
    fits = fits and max(places, default=0) < 12
    rebuild = NAMES["torch._utils._rebuild_tensor"].call
    arguments = (Storage("0", torch.float32, 12), first, tuple(shape), tuple(strides))
    if not fits:
        with pytest.raises(PickleError):
            rebuild(arguments, lambda count: None)
        return
    stored = rebuild(arguments, lambda count: None)
    made = torch.arange(12.0).as_strided(shape, strides, first)
    assert (stored.shape, stored.numel) == (tuple(made.shape), made.numel())
    assert stored.span == (1 + max(places) - first if places else 0)


def test_one_storage_is_described_once(tmp_path):
    two = b"(" + tensor_of() + tensor_of(kind="Int") + b"t."
    fails("describes storage 0 in two ways", zipped(b"\x80\x02" + two, tmp_path / "a.pth"))
    other = b"(" + tensor_of() + tensor_of(numel=3, shape=(1, 1)) + b"t."
    fails("describes storage 0 in two ways", zipped(b"\x80\x02" + other, tmp_path / "b.pth"))


def test_a_long_name_is_not_repeated(tmp_path):
    """A key of 16 MB, named once and meant by every tensor, would be written out each time."""
    long = tensor_of().replace(TEXT + b"0", b"X\x41\x00\x00\x00" + b"0" * 65)
    fails("has a storage key of 65 characters", zipped(state_dict(long), tmp_path / "a.pth"))


def test_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "_MAX_TENSORS", 3)
    torch.save({str(number): torch.ones(1) for number in range(4)}, tmp_path / "a.pth")
    fails("has 4 tensors: no checkpoint has so many", tmp_path / "a.pth")


# ------------------------------------------------------------------ files of the older kind


def legacy(weights, path):
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    return bytearray(path.read_bytes())


def test_an_older_file_is_checked_before_anything_is_allocated(tmp_path):
    path = tmp_path / "a.pth"
    base = torch.zeros(2**18)
    legacy({f"k{index}": base[index:] for index in range(300)}, path)
    fails("claims more numbers than it holds", path)
    content = legacy({"a": torch.arange(600.0)}, path)
    place = content.index(b"M" + struct.pack("<H", 600))
    claimed = content[:place] + b"J\x00\x00\x00\x7f" + content[place + 3 :]  # 8 GB
    path.write_bytes(claimed)
    fails("expects 8522825728 bytes in storage .*, but the file has another", path)
    path.write_bytes(content[:-4])
    fails("expects 2400 bytes in storage .*, but the file has another", path)
    path.write_bytes(content + b"\0")
    fails("continues after its last storage, with 1 bytes that belong to nothing", path)
    for old, new in (
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89"),
        (struct.pack("<H", 1001), struct.pack("<H", 1002)),
        (b"\x8a\x0al\xfc", b"\x8a\x0al\xfd"),
        (b"]q\x00X", b"]q\x00G"),
    ):
        assert old in content
        path.write_bytes(content.replace(old, new))
        fails("is not a readable checkpoint", path)


def test_views_of_an_older_file(tmp_path):
    """Older versions of torch named parts of storages, which are read and checked as such."""
    content = legacy({"a": torch.arange(6.0)[2:5]}, tmp_path / "a.pth")
    whole = content.index(b"K\x06N")
    rest = content.index(b"K\x02", whole)

    def changed(part, first):
        view = b"(X\x01\x00\x00\x00v" + part + b"t"
        made = content[: whole + 2] + view + content[whole + 3 : rest] + b"K" + bytes([first])
        (tmp_path / "b.pth").write_bytes(made + content[rest + 2 :])
        return tmp_path / "b.pth"

    assert torch.equal(
        read_file(changed(b"K\x01K\x05", 1)).tensors["a"], torch.tensor([2.0, 3.0, 4.0])
    )
    assert fuzz_torch.compared(changed(b"K\x01K\x05", 1)) == "both"
    fails("describes storage v in two ways", changed(b"K\x02K\x05", 1))
    fails("goes beyond its storage", changed(b"K\x01K\x03", 1))
    fails("where a count of numbers belongs", changed(b"J\xff\xff\xff\xffK\x03", 0))


# ------------------------------------------------------------------ the other reader


def test_the_comparison_would_tell(tmp_path, monkeypatch):
    path = fuzz_torch.training_dict(tmp_path, True)
    content = path.read_bytes()
    real = torch_files.read_into

    def wrong(file, place, target, where):
        real(file, place, target, where)
        target[0] ^= 1

    monkeypatch.setattr(torch_files, "read_into", wrong)
    assert fuzz_torch.compared(path).startswith("differs: ")
    monkeypatch.undo()
    monkeypatch.setitem(NAMES, "builtins.set", NAMES["torch.float16"])
    assert b"ctorch\nfloat16\n" in content
    assert fuzz_torch.compared(path) == "both"
    swapped = zipped(b"\x80\x02cbuiltins\nset\n.", tmp_path / "set.pth")
    monkeypatch.setitem(NAMES, "os.system", NAMES["torch.float16"])
    assert fuzz_torch.compared(swapped) in ("both", "differs: ")
    swapped = zipped(b"\x80\x02cos\nsystem\n.", tmp_path / "system.pth")
    assert fuzz_torch.compared(swapped).startswith("ours alone: ")


def test_a_file_that_may_not_be_read_is_called_so(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "w.pth"
    path.write_bytes(b"x")
    monkeypatch.setattr(tensor_files, "open", denied, raising=False)
    with pytest.raises(ci.CheckpointError, match=r"w.pth cannot be read: Permission denied\."):
        ci.load(path)
