"""The interpreter of pickles: what it calls, and what that costs it."""

import pickle
import struct
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crate_interp.checkpoints.formats import pickles
from crate_interp.checkpoints.formats.pickles import (
    Function,
    PickleError,
    Record,
    read_pickle,
)
from crate_interp.checkpoints.formats.torch_names import NAMES, TORCH, Number
from pickled import TEXT, fails, run, tensor_of, zipped

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
        "its pickle asks for .*, but only tensors and plain values are admitted; "
        "nothing was run. Save only the state dict",
        path,
    )


@given(st.from_regex(r"[a-zA-Z_.]{1,20}", fullmatch=True), st.text(max_size=20))
def test_no_other_name(module, name):
    name = name.replace("\n", "")
    if f"{module}.{name}" not in NAMES:
        with pytest.raises(PickleError):
            run(b"c" + f"{module}\n{name}\n".encode("utf-8", "surrogatepass") + b")R.")


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body):
    try:
        reading = run(body)
    except PickleError:
        return
    assert reading.steps <= 2 * reading.end


def test_the_callables_are_these():
    called = {name for name, what in NAMES.items() if isinstance(what, Function)}
    assert called == {
        "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
        "torch.Size", "torch.device", "collections.OrderedDict", "collections.Counter",
        "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
        "_codecs.encode",
        "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
        "pathlib._local.PurePosixPath", "pathlib._local.PureWindowsPath",
    }  # fmt: skip
    assert {name for name, what in NAMES.items() if isinstance(what, Record)} == {
        "argparse.Namespace"
    }


def test_a_path_is_a_tuple_of_names():
    """It is never joined, so that a long name that is repeated costs nothing."""
    assert run(b"cpathlib\nPosixPath\n" + (TEXT + b"a") * 2 + b"\x86R.").value == ("a", "a")
    for arguments in (b"K\x01\x85", b"]\x85", TEXT + b"a]\x86"):
        with pytest.raises(PickleError, match="has a path that is not made of names"):
            run(b"cpathlib\nPosixPath\n" + arguments + b"R.")
    with pytest.raises(PickleError, match="attributes of a tuple"):
        run(b"cpathlib\nPosixPath\n" + TEXT + b"a\x85R}b.")


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
        (b"ctorch\nSize\n", b"\x85R.", "whose shape is not a tuple of counts"),
        (b"ccollections\nOrderedDict\n", b"\x85R.", "made of something other than pairs"),
        (b"}(" + TEXT + b"a" + tensor_of(1, shape=(1,), strides=(1,))
         + b"X\x0a\x00\x00\x00model_args}X\x07\x00\x00\x00n_layer", b"su.",
         "has no published layout"),
    ],
)  # fmt: skip
def test_shared_tuples_cost_their_bytes(before, after, match, form, tmp_path):
    """Five hundred bytes held up the reader of before, which hashed and compared such tuples."""
    value = b"\x80\x02" + before + b"(" + shared(60, **form) + after
    assert len(value) < 1000
    fails(match, zipped(value, tmp_path / "a.pth"))


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
    for odd in (b")" * 9 + b"t", b")\x85", b"]", b"]\x85", b"\x8a\x09" + b"\x01" * 9):
        odd = b"(" + odd if odd.endswith(b"t") else odd
        with pytest.raises(PickleError, match="as the key of a dict"):
            run(b"}" + odd + b"Ns.")


def test_keys_that_training_scripts_use():
    keys = {True: 1, None: 2, 2: 3, 0.5: 4, (0, "a", None): 5, "b": 6, False: 7}
    found = run(pickle.dumps(keys, protocol=2)[2:]).value
    assert list(found.values()) == [1, 2, 3, 4, 5, 6, 7]
    assert found["b"] == 6 and found[None] == 2 and found[Number(0.5)] == 4
    assert found[Number(1)] == 1  # True
    assert found[Number(0), "a", None] == 5
    same = run(b"}(K\x01N\x88NG" + struct.pack(">d", 1.0) + b"Nu.").value
    assert list(same) == [Number(1)] and len(same) == 1
    for odd in (float("nan"), float("inf"), 1e300):
        with pytest.raises(PickleError, match="as the key of a dict"):
            run(b"}G" + struct.pack(">d", odd) + b"Ns.")


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
        read_pickle(b"\x80\x04" + body, TORCH)


def test_a_number_of_many_digits_is_never_text():
    reading = run(b"}" + TEXT + b"a\x8a\xff" + b"\x7f" * 255 + b"s.")
    assert reading.value["a"].bit_length() == 2039
