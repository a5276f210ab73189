"""Weights and tokenizers of files: every number as it was saved, and no code is run."""

import argparse
import collections
import os
import pickle
import pickletools
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import crate_interp as ci
from conftest import FIXTURES, fails, make, refuses
from crate_interp.checkpoints import read_weights
from crate_interp.checkpoints.read_weights import read_content, read_file
from crate_interp.checkpoints.sources import read_tiktoken
from reference import published_layout

PUBLISHED = sorted(path for path in FIXTURES.rglob("*") if path.suffix in (".pth", ".pt", ".tar"))
ALPHA, GIVEN = published_layout(make("crate-alpha")), dict(n_heads=5, image_size=(6, 20))
FORMS = [form for form, _ in read_weights._FORMS]


def saved(content, path, zipped=True):
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def same_bytes(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


# ------------------------------------------------------------------ what is read


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_every_published_file_bit_for_bit(path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        wanted = torch.load(path, weights_only=True)
    if isinstance(wanted, torch.Tensor):
        assert same_bytes(read_content(path), wanted)
        return
    wanted = next((wanted[key] for key in ("state_dict", "model") if key in wanted), wanted)
    counted = ".num_batches_tracked"  # no forward reads it
    wanted = {key: value for key, value in wanted.items() if not key.endswith(counted)}
    found = read_file(path).tensors
    assert len(found) == len(wanted)
    for (name, value), (other, right) in zip(found.items(), wanted.items(), strict=True):
        assert other.removeprefix("module.").removeprefix("_orig_mod.") == name
        assert same_bytes(value, right)


@pytest.mark.parametrize("zipped", [True, False])
def test_strides_ties_and_dtypes(zipped, tmp_path):
    base = torch.arange(60.0)
    table = base.view(10, 6)
    weights = {
        "whole": base, "part": base[7:19], "turned": table.T, "columns": table[:, 2:4],
        "rows": table[::3], "both": table[1::2, ::3].T, "tied": table.T, "one": base[5],
        "empty": base[:0], "half": table.half()[2:4, 1:], "short": table.bfloat16(),
        "double": table.double(), "parameter": torch.nn.Parameter(table),
    }  # fmt: skip
    found = read_file(saved(weights, tmp_path / "w.pth", zipped)).tensors
    assert list(found) == list(weights)
    assert all(same_bytes(found[name].detach(), weights[name].detach()) for name in weights)


def test_parameters_share_no_memory(tmp_path):
    """Neither with one another, nor with the caller's tensors, nor with the file."""
    tied = torch.randn(31)
    shared = ALPHA | {f"transformer.layers.0.{n}.norm.weight": tied for n in (0, 1)}
    saved(shared, tmp_path / "a.pth")
    save_file({key: value.clone() for key, value in shared.items()}, tmp_path / "a.safetensors")
    for source in (shared, tmp_path / "a.pth", tmp_path / "a.safetensors"):
        before = source.read_bytes() if isinstance(source, Path) else None
        block = ci.load(source, **GIVEN).blocks[0]
        block.ln1.weight.data += 1
        assert torch.equal(block.ln2.weight, shared["transformer.layers.0.1.norm.weight"])
        assert before is None or source.read_bytes() == before


# ------------------------------------------------------------------ code is never run


class Call:
    """Pickling it writes a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def touching(path):
    return Call(os.system, f"touch {path}")


class Stranger:
    """A class that torch does not know."""


def text(words):
    return b"X" + len(words).to_bytes(4, "little") + words.encode()


NAMESPACE = b"cargparse\nNamespace\n"
DTYPE = b"cnumpy\ndtype\n(" + text("O8") + b"\x89\x88tR"
RAW = {
    "a call by opcode": b"cos\nsystem\n" + text("touch {ran}") + b"\x85R.",
    "an instance": b"(" + text("touch {ran}") + b"ios\nsystem\n.",
    "Python 2's eval": b"c__builtin__\neval\n" + text("1") + b"\x85R.",
    "a name from the stack": text("os") + text("system") + b"\x93.",
    "an extension": b"\x82\x01.",
    "a persistent id": b"cos\nsystem\nQ.",
    "a function as a storage": b"(" + text("storage") + b"cos\nsystem\n" + text("0") + b"NK\x01tQ.",
    "a method of a form": b"cargparse\nNamespace.update\n)R.",
    "NumPy's scalar of objects": b"cnumpy.core.multiarray\nscalar\n" + DTYPE
    + b"c_codecs\nencode\n" + text("a" * 8) + text("latin1") + b"\x86R\x86R.",
    "state for a class": NAMESPACE + b"}" + text("update") + b"Nsb.",
}  # fmt: skip
CALLS = {
    "os.system": lambda ran: touching(ran),
    "eval": lambda ran: Call(eval, f"__import__('os').mkdir({str(ran)!r})"),
    "exec": lambda ran: Call(exec, f"__import__('os').mkdir({str(ran)!r})"),
    "open": lambda ran: Call(open, str(ran), "w"),
    "import": lambda ran: Call(__import__, "antigravity"),
    "torch.load": lambda ran: Call(torch.load, str(ran)),
    "pickle.loads": lambda ran: Call(pickle.loads, pickle.dumps(touching(ran))),
    "a stranger's class": lambda ran: Stranger(),
    "a factory": lambda ran: Call(collections.defaultdict, os.getcwd),
}
PLACES = {
    "the whole": lambda bad: bad,
    "beside": lambda bad: {"model": ALPHA, "optimizer": [{"deep": (1, bad)}]},
    "a weight": lambda bad: ALPHA | {"extra": bad},
    "a command line": lambda bad: {"model": ALPHA, "args": argparse.Namespace(x=bad)},
    "a key": lambda bad: {"model": ALPHA, (1, bad): 2},
}


def by_hand(body, path, zipped):
    """Writes a torch file whose pickle has this body."""
    body = b"\x80\x02" + body
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in (("data.pkl", body), ("byteorder", b"little"), ("version", b"3")):
                archive.writestr(f"archive/{name}", content)
        return path
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    before = [pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, system)]
    path.write_bytes(b"".join([*before, body, pickle.dumps([], 2)]))
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_a_torch_file(name, place, zipped, tmp_path):
    content = PLACES[place](CALLS[name](tmp_path / "ran"))
    fails("nothing was run", saved(content, tmp_path / "w.pth", zipped), **GIVEN)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", RAW)
def test_pickles_written_by_hand(name, zipped, tmp_path):
    before = [(form, dict(vars(form))) for form in FORMS if hasattr(form, "__module__")]
    body = RAW[name].replace(text("touch {ran}"), text(f"touch {tmp_path / 'ran'}"))
    fails("is not a readable checkpoint", by_hand(body, tmp_path / "w.pth", zipped))
    assert not (tmp_path / "ran").exists()
    assert all(dict(vars(form)) == held for form, held in before)


def test_pickles_that_ask_for_what_torch_admits(tmp_path):
    """torch's own list of safe classes is global to the process, and grows."""
    from torch.distributed.device_mesh import DeviceMesh

    asked = b"}X\x01\x00\x00\x00actorch.distributed.device_mesh\nDeviceMesh\n"
    body = asked + text("cpu") + b"](K\x00e\x86Rs."
    with torch.serialization.safe_globals([DeviceMesh]):
        fails("its pickle was refused by torch", by_hand(body, tmp_path / "a.pth", True))
    assert not torch.distributed.is_initialized()


def test_the_payloads_would_work(tmp_path):
    """The tests above test something: an unsafe reader runs them."""
    for name in ("os.system", "eval", "pickle.loads"):
        ran = tmp_path / name
        pickle.loads(pickle.dumps(CALLS[name](ran)))
        assert ran.exists()
    body = RAW["a call by opcode"].replace(text("touch {ran}"), text(f"touch {tmp_path / 'raw'}"))
    pickle.loads(b"\x80\x02" + body)
    assert (tmp_path / "raw").exists()
    assert list(read_content(by_hand(b"}.", tmp_path / "w.pth", True))) == []
    assert list(read_content(by_hand(b"}.", tmp_path / "w.pth", False))) == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_archives_with_code(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "w.pth")
    fails("is a TorchScript archive", tmp_path / "w.pth")
    (tmp_path / "pickle").write_bytes(pickle.dumps(touching(tmp_path / "ran")))
    with tarfile.open(tmp_path / "w.tar", "w") as archive:  # as torch before 0.1.10 wrote them
        for name in ("pickle", "storages", "tensors", "../../escaped"):
            archive.add(tmp_path / "pickle", name)
    fails("is not a readable checkpoint", tmp_path / "w.tar")
    touched = tmp_path / "ran"
    array = np.array([touching(touched)], dtype=object)
    np.savez(tmp_path / "a.npz", **{"params/cls": array})
    fails("is not a readable checkpoint", tmp_path / "a.npz")
    assert not touched.exists() and not (tmp_path.parent.parent / "escaped").exists()


def test_readers_that_run_code_stand_nowhere_in_the_source():
    """A word that would read a pickle stands only where it is told not to run it."""
    words = r"torch\.load\(|torch\.jit\.load|np\.load\(|\bUnpickler\b|marshal|yaml\.load"
    words += r"|extractall|allow_pickle=True|trust_remote_code|weights_only=False\)$"
    words += r"|^(?:import|from) (?:pickle|dill|cloudpickle|joblib|shelve)\b"
    home = Path(ci.__file__).parent
    found = {
        (str(path.relative_to(home)), word)
        for path in home.rglob("*.py")
        for word in re.findall(words, path.read_text(), re.M)
    }
    reader, tokenizers = "checkpoints/read_weights.py", "checkpoints/sources.py"
    assert found == {
        (reader, "import pickle"), (reader, "torch.load("), (reader, "np.load("),
        (tokenizers, "import pickle"), (tokenizers, "Unpickler"),
    }  # fmt: skip
    source = (home / reader).read_text()
    assert source.count("weights_only=True") == source.count("torch.load(path") == 1
    assert "allow_pickle=False" in source


# ------------------------------------------------------------------ what is no weight file


def test_what_is_no_weight_file(tmp_path):
    good = saved(ALPHA, tmp_path / "good.pth").read_bytes()
    old = saved(ALPHA, tmp_path / "old.pth", zipped=False).read_bytes()
    save_file(ALPHA, tmp_path / "a.safetensors")
    safe = (tmp_path / "a.safetensors").read_bytes()
    for content, match in (
        (b"", "is not a readable checkpoint: wanted .safetensors, .npz, or a torch file"),
        (b"hello", "is not a readable checkpoint: wanted"),
        (pickle.dumps({"a": 1}), "is not a readable checkpoint: wanted"),
        (good[: len(good) // 2], "truncated"),
        (old[: len(old) // 2], "truncated"),
        (safe[:-4], "truncated"),
        (safe.replace(b'"F32"', b'"F99"'), "is not a readable checkpoint"),
        (b"<!DOCTYPE html><html>Virus scan warning", "holds an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "holds a git-lfs pointer"),
    ):
        (tmp_path / "w").write_bytes(content)
        fails(match, tmp_path / "w")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    fails("is not a file, folder", tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    fails("is not a readable checkpoint.* pipe", tmp_path / "pipe")
    fails("is not a readable checkpoint.* device", "/dev/zero")


CHAT = FIXTURES / "nanochat_crate_alpha"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# ------------------------------------------------------------------ tiktoken's pickles


def packed(ranks, pattern=GPT2, specials=None, after=b""):
    """A pickle such as nanochat writes, without tiktoken."""
    state = {"name": "x", "pat_str": pattern, "mergeable_ranks": ranks,
             "special_tokens": specials or {}}  # fmt: skip
    head = b"\x80\x04\x8c\x0dtiktoken.core\x8c\x08Encoding\x93)\x81"
    return head + pickletools.optimize(pickle.dumps(state, protocol=4))[2:-1] + b"b" + after + b"."


def bytes_and(*more):
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *more])}


def tokens_of(piece, ranks):
    """tiktoken's rule: the neighbours whose union has the lowest rank merge, the leftmost first."""
    parts = [bytes([byte]) for byte in piece]
    while pairs := [
        (ranks[a + b], place)
        for place, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
        if a + b in ranks
    ]:
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


@settings(max_examples=30)
@given(
    tokens=st.lists(st.text("ab", min_size=2, max_size=7), max_size=20, unique=True),
    order=st.randoms(use_true_random=False),
    words=st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=5),
)
def test_a_pickle_gives_the_ids_of_tiktoken(tokens, order, words):
    """Of any ranks, those that no training gives among them."""
    every = [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in tokens)]
    order.shuffle(every)
    ranks = {token: rank for rank, token in enumerate(every)}
    read = read_tiktoken(packed(ranks, r"\s+"))
    for word in words:
        assert read.encode(word) == [ranks[token] for token in tokens_of(word.encode(), ranks)]


def chat(folder, **files):
    copied = shutil.copytree(CHAT, folder / "chat", dirs_exist_ok=True)
    for name, content in files.items():
        (copied / name.replace("__", ".")).write_bytes(content)
    return copied


def refused(match, folder):
    refuses(match, lambda: ci.load(folder).to_tokens("the"), ci.CheckpointError)


def test_pickles_that_run_code(tmp_path):
    ran = tmp_path / "ran"
    asked = "asks for posix.system, not tiktoken.core.Encoding: nothing ran"
    for protocol in range(6):
        content = pickle.dumps(touching(ran), protocol=protocol)
        refused(asked, chat(tmp_path, tokenizer__pkl=content))
    hidden = packed(bytes_and() | {touching(ran): 256})
    refused(asked, chat(tmp_path, tokenizer__pkl=hidden))
    encoding = b"\x8c\x0dtiktoken.core\x8c\x08Encoding\x93"
    call = pickle.dumps(touching(ran), protocol=4)[2:-1]
    for body in (
        encoding + b"\x8c\x04evil\x85R",  # a call of the admitted class
        encoding + b"}\x8c\x0c__setstate__Nsb",  # state for the class itself
        encoding + b"N}\x8c\x0c__setstate__" + encoding + b"s\x86b",
        encoding + b")\x81N}\x8c\x09__class__" + encoding + b"s\x86b",
        encoding + b")\x81}\x8c\x05state" + call + b"sb",
        b"Pos.system\n",
        b"\x82\x01",
        b"cos\nsystem\n",
    ):
        refused("tokenizer", chat(tmp_path, tokenizer__pkl=b"\x80\x04" + body + b"."))
    assert not ran.exists()
    assert read_tiktoken((CHAT / "tokenizer.pkl").read_bytes()).encode("the") == [260]


def test_other_bad_tokenizers(tmp_path):
    good = (CHAT / "tokenizer.pkl").read_bytes()
    for content, match in (
        (good.replace(b"Encoding", b"Encodinh"), "asks for tiktoken.core.Encodinh"),
        (good[:100], "is not a tokenizer.pkl"),
        (b"", "is not a tokenizer.pkl"),
        (pickle.dumps({"a": 1}), "is not a tokenizer.pkl"),
        (packed({token: 0 for token in bytes_and()}), "are not 0, 1, 2"),
    ):
        refused(match, chat(tmp_path, tokenizer__pkl=content))
    (tmp_path / "chat" / "tokenizer.pkl").unlink()
    refused("there is no tokenizer.json and no tokenizer.pkl in", tmp_path / "chat")
