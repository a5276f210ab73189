"""The reader of torch files: what it admits, what it refuses, and what that costs it."""

import argparse
import itertools
import struct
import zipfile
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
import fuzz_torch
from conftest import FIXTURES, make
from crate_interp.checkpoints import pickles, torchfile
from crate_interp.checkpoints.pickles import Number, PickleError, read_pickle
from crate_interp.checkpoints.tensors import read_file
from crate_interp.checkpoints.torchnames import NAMES, Storage
from reference import published_layout

PUBLISHED = sorted(path for path in FIXTURES.rglob("*") if path.suffix in (".pth", ".pt", ".tar"))
TEXT = b"X\x01\x00\x00\x00"  # a text of one character follows


def fails(match, path, **given):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(path, **given)
    assert "\n" not in str(caught.value)


def zipped(pickled, path, storages=(bytes(4),)):
    """Writes a torch file whose pickle is `pickled`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (
            ("data.pkl", pickled),
            ("byteorder", b"little"),
            *((f"data/{key}", content) for key, content in enumerate(storages)),
            ("version", b"3\n"),
        ):
            archive.writestr(f"archive/{name}", content)
    return path


def run(body):
    """Returns what a pickle without storages holds."""
    return read_pickle(b"\x80\x02" + body, NAMES)


def tensor_of(
    numel=4, first=0, shape=(2, 2), strides=(2, 1), kind="Float", flags=b"\x89", more=b""
):
    """Returns the operations that make one tensor of storage 0."""

    def number(value):
        size = (value.bit_length() + 8) // 8
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = (
        b"(X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"Storage\n" + TEXT + b"0"
        b"X\x03\x00\x00\x00cpu" + number(numel) + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(first) + numbers(shape)
        + numbers(strides) + flags + b"ccollections\nOrderedDict\n)R" + more + b"tR"
    )  # fmt: skip


def state_dict(tensor):
    return b"\x80\x02}" + TEXT + b"a" + tensor + b"s."


# ------------------------------------------------------------------ what is read


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_every_published_file_bit_for_bit(path):
    assert fuzz_torch.compared(path) == "both"
    if path.name == "token_bytes.pt":
        return
    with torch.serialization.safe_globals([argparse.Namespace]):
        wanted = torch.load(path, weights_only=True)
    wanted = next((wanted[key] for key in ("state_dict", "model") if key in wanted), wanted)
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
    seen, read = [], torchfile.read_pickle
    monkeypatch.setattr(torchfile, "read_pickle", lambda *a: seen.append(a) or read(*a))
    ci.load(path, n_heads=5, image_size=(6, 20))
    assert len(seen) == 1


def test_what_nobody_wants_is_not_read(tmp_path, monkeypatch):
    """Of an optimiser's state not one byte is read: its storages may be anything."""
    path = tmp_path / "w.pth"
    weights = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    torch.save({"model": weights, "optimizer": {0: torch.full((5,), 7.0)}}, path)
    read, asked = torchfile.read_into, []

    def watched(file, place, target, where):
        asked.append(len(target))
        return read(file, place, target, where)

    monkeypatch.setattr(torchfile, "read_into", watched)
    assert set(read_file(path).tensors) == set(weights) and sorted(asked) == [12, 16]


# ------------------------------------------------------------------ what is asked for


REFUSED = [
    b"ctorch\nTensor\n(K\x0bK\x1ftR.",  # memory that nobody has written
    b"ctorch\nFloatTensor\n(K\x0btR.",
    b"ctorch.nn.parameter\nParameter\n)R.",
    b"ctorch._utils\n_rebuild_tensor_v3\n)R.",
    b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R.",
    b"ctorch._utils\n_rebuild_qtensor\n)R.",
    b"ctorch._utils\n_rebuild_sparse_tensor\n)R.",
    b"ctorch._tensor\n_rebuild_from_type_v2\n)R.",
    b"cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.",
    b"c__builtin__\neval\n)R.",
    b"ccollections\ndefaultdict\n)R.",
    b"cnumpy.core.multiarray\nscalar\n)R.",
    b"c_codecs\nencode\n)R.",
    b"cos\nsystem\nX\x02\x00\x00\x00id\x85R.",
    b"ctorch\nFloatStorage\nK\x05\x85R.",  # a class of storages is no function
    b"ctorch\nfloat32\n)R.",
    b"cargparse\nNamespace\n)R.",
    b"cargparse\nNamespace\nK\x01\x85\x81.",
    b"ccollections\nOrderedDict\n)\x81.",
    b"ctorch\nSize\n)\x81.",
    b"}K\x01)R.",
    b"K\x01}b.",
    b"(i__main__\nX\n.",
    b"(cos\nsystem\no.",
    b"I1\n.",
    b"F1\n.",
    b"L1L\n.",
    b"S'a'\n.",
    b"V\\u0041\n.",
    b"P1\n.",
    b"\x8b\xff\xff\xff\x7f" + bytes(64),  # LONG4 of 2 GB
    b"\x8d" + b"\xff" * 7 + b"\x7f",  # BINUNICODE8 of 2^63
    b"\x93.",
    b"\x82\x01.",
    b"\x95" + bytes(8),
    b"\x94.",
    b"\x8f.",
    b"0.",
    b"2.",
    b"1.",
]


@pytest.mark.parametrize("body", REFUSED, ids=repr)
def test_only_the_listed_functions_are_called(body, tmp_path):
    path = zipped(b"\x80\x02" + body, tmp_path / "a.pth")
    fails(
        "its pickle asks for .*, and only tensors and plain values are admitted; "
        "nothing was run. Save the state dict alone",
        path,
    )


@settings(max_examples=150, deadline=None)
@given(st.from_regex(r"[a-zA-Z_.]{1,20}", fullmatch=True), st.text(max_size=20))
def test_no_other_name(module, name):
    name = name.replace("\n", "")
    if f"{module}.{name}" not in NAMES:
        with pytest.raises(PickleError):
            run(b"c" + f"{module}\n{name}\n".encode("utf-8", "surrogatepass") + b")R.")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body):
    try:
        reading = run(body)
    except PickleError:
        return
    assert reading.steps <= 2 * reading.end


def test_the_callables_are_these():
    from crate_interp.checkpoints.pickles import Function, Record

    called = {name for name, what in NAMES.items() if isinstance(what, Function)}
    assert called == {
        "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
        "torch.Size", "torch.device", "collections.OrderedDict", "collections.Counter",
    }  # fmt: skip
    assert {name for name, what in NAMES.items() if isinstance(what, Record)} == {
        "argparse.Namespace"
    }


# ------------------------------------------------------------------ tensors


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(numel=5), "wants 20 bytes as storage 0, the zip has 16"),
        (dict(kind="Half"), "wants 8 bytes as storage 0, the zip has 16"),
        (dict(numel=-1), "where a count of numbers belongs"),
        (dict(numel=2**62), "wants .* bytes as storage 0, the zip has 16"),
        (dict(shape=(2, 3)), "goes beyond its storage 0"),
        (dict(first=1), "goes beyond its storage 0"),
        (dict(first=-1), "where a count of numbers belongs"),
        (dict(strides=(-2, 1)), "where a count of numbers belongs"),
        (dict(shape=(-2, -2)), "where a count of numbers belongs"),
        (dict(strides=(2,)), "whose shape is none"),
        (dict(shape=(2**40, 2**40), strides=(0, 0)), "whose shape is none"),
        (dict(shape=(0, 2**40, 2**40), strides=(0, 0, 0)), "whose shape is none"),
        (dict(shape=(2**40,), strides=(0,)), "stores fewer .an expanded view"),
        (dict(shape=(1,) * 65, strides=(1,) * 65), "whose shape is no tuple"),
        (dict(flags=b"K\x01"), "cannot have a gradient"),
        (dict(kind="Int", flags=b"\x88"), "cannot have a gradient"),
        (dict(more=b"}X\x03\x00\x00\x00neg\x88s"), "is negated or conjugated"),
        (dict(kind="Odd"), "asks for torch.OddStorage"),
    ],
)  # fmt: skip
def test_tensors_stay_within_their_storage(change, match, tmp_path):
    good = zipped(state_dict(tensor_of()), tmp_path / "good.pth", [bytes(16)])
    assert torch.equal(read_file(good).tensors["a"], torch.zeros(2, 2))
    fails(match, zipped(state_dict(tensor_of(**change)), tmp_path / "a.pth", [bytes(16)]))


@settings(max_examples=200, deadline=None)
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


# ------------------------------------------------------------------ what it costs


def shared(depth, between=b"", marked=False):
    """A tuple of a tuple of ..., each twice in the next: 2^depth leaves in a few bytes each."""
    parts = [b"K\x01\x85q\x00"]
    for index in range(depth):
        pair = b"h%c" % index
        parts.append(b"(" + pair + between + pair + b"t" if marked else pair + pair + b"\x86")
        parts.append(b"q%c" % (index + 1))
    return b"".join(parts) + b"t"


@pytest.mark.parametrize("form", [{}, {"marked": True}, {"marked": True, "between": b"NN"}])
@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (b"}" + TEXT + b"a", b"s.", "'a' is a tuple, not a tensor"),
        (b"}", b"K\x01s.", "has a tuple as the key of a dict"),
        (b"ctorch\nSize\n", b"\x85R.", "has a tuple where a count of numbers belongs"),
        (b"ccollections\nOrderedDict\n", b"\x85R.", "made of something else than pairs"),
        (b"}(" + TEXT + b"a" + tensor_of(1, shape=(1,), strides=(1,))
         + b"X\x0a\x00\x00\x00model_args}X\x07\x00\x00\x00n_layer", b"su.",
         "is a dict, not a tensor"),
    ],
)  # fmt: skip
def test_shared_tuples_cost_their_bytes(before, after, match, form, tmp_path):
    """Five hundred bytes held up the reader of before, which hashed and compared such tuples."""
    value = b"\x80\x02" + before + b"(" + shared(60, **form) + after
    assert len(value) < 1000
    fails(match, zipped(value, tmp_path / "a.pth"))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 250), st.booleans(), st.sampled_from([b"", b"N", b"NN", b"K\x00", b")"]))
def test_sharing_of_any_depth(depth, marked, between):
    reading = run(b"(" + shared(depth, between, marked) + b".")
    assert reading.steps <= reading.end


def test_steps_are_counted_and_bounded(monkeypatch):
    """A list of many pairs is looked at once for its bytes, however often it is called for."""
    pairs = b"](" + b"".join(TEXT + b"%cK\x01\x86" % (97 + n % 26) for n in range(1000)) + b"eq\x00"
    once = b"ccollections\nOrderedDict\nq\x01h\x00\x85R"
    assert run(pairs + b"N" + once + b"\x87.").steps < 8000
    with pytest.raises(PickleError, match="repeats itself more often than its size allows"):
        run(b"(" + pairs + once + b"h\x01h\x00\x85R" * 1000 + b"t.")
    counts = b"}(" + b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(1000)) + b"uq\x00"
    with pytest.raises(PickleError, match="repeats itself"):
        run(b"(" + counts + b"ccollections\nCounter\nq\x01" + b"h\x01h\x00\x85R" * 1000 + b"t.")
    monkeypatch.setattr(pickles, "_MOST_CONTAINERS", 500)
    with pytest.raises(PickleError, match="makes more than 500 containers"):
        run(b"(" + b"]" * 501 + b"t.")
    monkeypatch.setattr(pickles, "_MOST_STEPS", 600)
    with pytest.raises(PickleError, match="has more than 600 values"):
        run(b"(" + b"N" * 601 + b"t.")


def test_keys_that_would_collide():
    """Ints hash to themselves, those of k (2^61 - 1) all to 0: here they hash as text does."""

    def key(value):
        return b"\x8a\x08" + struct.pack("<q", value)

    for numbers in (
        [k * (2**61 - 1) for k in range(-4, 5)],
        [k << 44 for k in range(2000)],
        range(-1000, 1000),
    ):
        found = run(b"}(" + b"".join(key(number) + b"N" for number in numbers) + b"u.").value
        assert {held.value for held in found} == set(numbers)
        slots = Counter(hash(held) % 4096 for held in found)
        assert max(slots.values()) < 16
    assert Number(1) == Number(1) and Number(1) != 1 and repr(Number(-3)) == "-3"
    for odd in (
        b"\x88",
        b"N",
        b"G" + bytes(8),
        b")",
        b"K\x01\x85",
        b"]",
        b"\x8a\x09" + b"\x01" * 9,
    ):
        with pytest.raises(PickleError, match="as the key of a dict"):
            run(b"}" + odd + b"Ns.")


@pytest.mark.parametrize(
    "body",
    [
        b"r\xff\xff\xff\xff.",  # a memo of 2^32 places
        b"Nr\xff\xff\xff\xff.",
        b"Nq\x05.",
        b"h\x00.",
        b"j\xff\xff\xff\xff.",
        b"X\xff\xff\xff\xffa.",
        b"X\x05\x00\x00\x00ab.",
        b"\x8a\xff\x01.",
        b"cos" + b"x" * 300 + b"\n.",
        b"cos\nsystem",
        b"\x86.", b"t.", b"a.", b"e.", b"s.", b"u.", b"R.", b"\x81.", b"b.", b"Q.", b".", b"",
        b"NN.", b"(.", b"(N.", b"N(\x85.", b"}(Nu.", b"]NNs.", b"NNa.", b"}Nb.",
        b"X\x01\x00\x00\x00\xff.",
        b"\x80\x02N.",
    ],
)  # fmt: skip
def test_damaged_pickles(body):
    with pytest.raises(PickleError):
        run(body)
    with pytest.raises(PickleError, match="protocol 2"):
        read_pickle(b"\x80\x04" + body, NAMES)


def test_a_number_of_many_digits_is_never_text():
    reading = run(b"}" + TEXT + b"a\x8a\xff" + b"\x7f" * 255 + b"s.")
    assert reading.value["a"].bit_length() == 2039


# ------------------------------------------------------------------ files of the older kind


def legacy(weights, path):
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    return bytearray(path.read_bytes())


def test_an_older_file_is_checked_before_anything_is_allocated(tmp_path):
    path = tmp_path / "a.pth"
    base = torch.zeros(2**18)
    legacy({f"k{index}": base[index:] for index in range(1500)}, path)
    fails("claims more numbers than it holds", path)
    content = legacy({"a": torch.arange(600.0)}, path)
    place = content.index(b"M" + struct.pack("<H", 600))
    claimed = content[:place] + b"J\x00\x00\x00\x7f" + content[place + 3 :]  # 8 GB
    path.write_bytes(claimed)
    fails("wants 8522825728 bytes as storage .*, the file has others", path)
    path.write_bytes(content[:-4])
    fails("wants 2400 bytes as storage .*, the file has others", path)
    path.write_bytes(content + b"\0")
    fails("goes on after its last storage: 1 bytes belong to nothing", path)
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
    real = torchfile.read_into

    def wrong(file, place, target, where):
        real(file, place, target, where)
        target[0] ^= 1

    monkeypatch.setattr(torchfile, "read_into", wrong)
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
