"""Files made to harm are refused with a clear error, and nothing in them is executed.

tests/fuzz.py has the mutations.
"""

import argparse
import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

import crate_interp as ci
from conftest import FIXTURES, make
from published import GIVEN, published
from reference import published_layout

SOURCES = sorted(Path(ci.__file__).parent.rglob("*.py"))


class Touch:
    """Unpickling it runs a shell command that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def fails(match, source, **given):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(source, **given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def layouts():
    yield (
        "crate",
        published_layout(make("crate")),
        dict(n_heads=5, image_size=(6, 20), patch_size=(2, 5)),
    )
    yield "crate-alpha", published_layout(make("crate-alpha")), dict(n_heads=5, image_size=(6, 20))
    for name in (
        "crate-mae",
        "crate-lm",
        "crate-lm-vanilla",
        "gpt-baseline",
        "nanochat-crate",
        "clipa",
    ):
        sizes = {
            "crate-mae": dict(d=30),
            "nanochat-crate": dict(p=6),
            "crate-lm-vanilla": dict(h=7, p=5),
        }
        yield name, published(name, **sizes.get(name, {})), GIVEN[name]


LAYOUTS = {name: (weights, given) for name, weights, given in layouts()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["beside", "as a value", "as the whole", "under Namespace"])
def test_code_in_a_torch_file_is_not_run(name, zipped, where, tmp_path):
    weights, given = LAYOUTS[name]
    evil, path = Touch(tmp_path / "ran"), tmp_path / "model.pth"
    content = {
        "beside": {"model": weights, "optimizer": evil},
        "as a value": weights | {"extra": evil},
        "as the whole": evil,
        "under Namespace": {"model": weights, "args": argparse.Namespace(x=evil)},
    }[where]
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    fails("is not a readable checkpoint", path, **given)
    assert not (tmp_path / "ran").exists()


def test_the_payload_would_work(tmp_path):
    """The test above tests something: an unsafe reader does run it."""
    pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_command_line_beside_the_weights_changes_nothing(name, tmp_path):
    """An argparse.Namespace is read as plain values, and only the autoencoder's is its config."""
    weights, given = LAYOUTS[name]
    args = argparse.Namespace(lr=0.1, n_head=1, bias=False, window_pattern="L", n_layer=1)
    torch.save({"model": weights, "args": args, "more": {"args": [args]}}, tmp_path / "a.pth")
    assert ci.load(tmp_path / "a.pth", **given).cfg == ci.load(weights, **given).cfg
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def chat(tmp_path, **files):
    folder = shutil.copytree(
        FIXTURES / "nanochat_crate_alpha", tmp_path / "chat", dirs_exist_ok=True
    )
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def refuses_tokenizer(match, folder):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(folder).to_tokens("the")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_calls_the_system(tmp_path):
    for protocol in range(6):
        content = pickle.dumps(Touch(tmp_path / "ran"), protocol=protocol)
        refuses_tokenizer(
            "asks for posix.system, but only tiktoken.core.Encoding is admitted"
            "|asks for the operation .* nothing was run|is not of protocol",
            chat(tmp_path, tokenizer__pkl=content),
        )
    good = (FIXTURES / "nanochat_crate_alpha" / "tokenizer.pkl").read_bytes()
    refuses_tokenizer(
        "asks for tiktoken.core.Encodinh",
        chat(tmp_path, tokenizer__pkl=good.replace(b"Encoding", b"Encodinh")),
    )
    refuses_tokenizer("is damaged", chat(tmp_path, tokenizer__pkl=good[:100]))
    refuses_tokenizer("is damaged", chat(tmp_path, tokenizer__pkl=b""))
    refuses_tokenizer("holds a dict", chat(tmp_path, tokenizer__pkl=pickle.dumps({"a": 1})))
    huge = (
        b"\x80\x04}r" + struct.pack("<I", 2**32 - 1) + b"."
    )  # a memo index that makes C's unpickler allocate 64 GB
    refuses_tokenizer("numbers its values out of order", chat(tmp_path, tokenizer__pkl=huge))
    # calling the admitted class is not admitted
    reduced = b"\x80\x04\x8c\x0dtiktoken.core\x8c\x08Encoding\x93)R."
    refuses_tokenizer("asks for the operation REDUCE", chat(tmp_path, tokenizer__pkl=reduced))
    assert not (tmp_path / "ran").exists()


def test_other_bad_tokenizers(tmp_path):
    refuses_tokenizer("is not a tokenizer.json", chat(tmp_path, tokenizer__json=b"{"))
    refuses_tokenizer("is not a tokenizer.json", chat(tmp_path, tokenizer__json=b"[" * 100_000))
    refuses_tokenizer(
        "is not a tokenizer.json", chat(tmp_path, tokenizer__json=b'{"added_tokens": 3}')
    )
    folder = chat(tmp_path)
    for name in ("tokenizer.json", "tokenizer.pkl"):
        (folder / name).unlink()
    refuses_tokenizer("there is no tokenizer.json and no tokenizer.pkl in", folder)
    with open(folder / "tokenizer.json", "wb") as file:
        file.truncate(2**27)
    refuses_tokenizer("no tokenizer is so large", folder)


def test_archives_that_lie(tmp_path):
    weights, given = LAYOUTS["crate-alpha"]
    good = tmp_path / "good.pth"
    torch.save(weights, good)
    packed = tmp_path / "packed.pth"
    with (
        zipfile.ZipFile(good) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    fails("has compressed entries, but torch writes none", packed, **given)
    slip = tmp_path / "slip.npz"
    arrays = {"params/../../../../tmp/evil": np.ones(3, np.float32)}
    np.savez(slip, **arrays)
    fails("has no published layout", slip, **given)
    assert not list(tmp_path.parent.rglob("evil*"))


def test_objects_in_an_archive_of_arrays(tmp_path):
    touched = tmp_path / "ran"
    np.savez(tmp_path / "a.npz", **{"params/cls": np.array([Touch(touched)], dtype=object)})
    fails("expected float16", tmp_path / "a.npz", n_heads=4)
    assert not touched.exists()


def test_headers_of_safetensors_that_lie(tmp_path):
    path = tmp_path / "model.safetensors"
    weights, given = LAYOUTS["nanochat-crate"]
    good = save(weights)
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])

    def written(changed, body=good[8 + size :]):
        text = json.dumps(changed).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        return path

    ci.load(written(header), **given)
    path.write_bytes((2**62).to_bytes(8, "little") + good[8:])
    fails("claims a header of", path, **given)
    path.write_bytes((10**8).to_bytes(8, "little") + b"{" * 100)
    fails("claims a header of", path, **given)
    first, second = [name for name in header if name != "__metadata__"][:2]
    fails(
        "is not a readable checkpoint", written(header | {second: header[first]}), **given
    )  # overlapping
    beyond = header[first] | {"data_offsets": [0, 2**40], "shape": [2**38]}
    fails("is not a readable checkpoint", written(header | {first: beyond}), **given)
    fails(
        "is not a readable checkpoint",
        written(header | {first: header[first] | {"dtype": "F99"}}),
        **given,
    )
    integers = header | {first: header[first] | {"dtype": "I32"}}
    fails(
        f"{re.escape(first)} is torch.int32; expected a dense floating point",
        written(integers),
        **given,
    )
    fails("is not a readable checkpoint", written(header, good[8 + size : -4]), **given)


def test_what_is_no_file(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    fails("is no file, no folder", tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    fails("is no file, no folder", tmp_path / "gone")
    (tmp_path / "secret").symlink_to("/etc/passwd")
    fails("is not a readable checkpoint", tmp_path / "secret")
    fails("is not a regular file", "/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    fails("is not a regular file", tmp_path / "pipe")
    (tmp_path / "empty").touch()
    fails("is not a readable checkpoint", tmp_path / "empty")


def test_symlinks_in_an_archive(tmp_path):
    """A member that is a link to another file is read as the bytes it holds, never followed."""
    path = tmp_path / "a.npz"
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ones(3, np.float32))
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("params/cls.npy")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    fails("is not a readable checkpoint", path)


def test_finite_weights_with_an_infinite_output():
    weights, given = LAYOUTS["crate-alpha"]
    key = "mlp_head.1.weight"
    fails(
        "the output for a fixed input is not",
        weights | {key: torch.full_like(weights[key], 3e38)},
        **given,
    )


def test_no_unsafe_load_in_the_source():
    assert len(SOURCES) > 50
    for path in SOURCES:
        text = path.read_text()
        for word in (
            "torch.load(",
            "weights_only",
            "torch.jit.load",
            "memmap",
            "np.load(",
            "literal_eval",
            "import zipfile",
            "allow_pickle=True",
            "trust_remote_code",
            "Unpickler(",
            "marshal",
            "yaml.load",
            "extractall",
        ):
            assert word not in text, f"{path}: {word}"
        assert not re.search(
            r"^\s*(import|from) (pickle|dill|cloudpickle|joblib|shelve)\b", text, re.M
        ), path


@pytest.mark.slow
@pytest.mark.parametrize("number", [30, 500])
def test_mutations_of_every_layout(number):
    """In a process of its own, with an audit hook that sees every command, fork and connection."""
    command = [sys.executable, str(Path(__file__).parent / "fuzz.py"), str(number)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    lines = out.stdout.splitlines()
    pattern = rf"(.{{20,}}) {number} mutations: (\d+) loaded, (\d+) refused, slowest (.*) s"
    beside = rf"(.{{20,}}) {number} mutations of (bytes|pickle): (\d+) as torch .*, 0 wrong"
    compared = [found for line in lines if (found := re.fullmatch(beside, line))]
    assert len(compared) == 2 * 14 and all(int(found[3]) for found in compared)
    counts = [re.fullmatch(pattern, line) for line in lines[: -1 - len(compared)]]
    assert len(counts) == 19
    for count in counts:
        assert int(count[2]) + int(count[3]) == number and int(count[2]) >= number / 10
    assert lines[-1] == "executed: 0"


def test_unowned_memory_is_not_taken(tmp_path):
    """A caller keeps the weights of a state dict; parameters of a file never share memory."""
    weights, given = LAYOUTS["crate-alpha"]
    same = torch.randn(31)
    shared = weights | {
        "transformer.layers.0.0.norm.weight": same,
        "transformer.layers.0.1.norm.weight": same,
    }
    torch.save(shared, tmp_path / "a.pth")
    save_file({key: value.clone() for key, value in shared.items()}, tmp_path / "a.safetensors")
    for source in (shared, tmp_path / "a.pth", tmp_path / "a.safetensors"):
        block = ci.load(source, **given).blocks[0]
        block.ln1.weight.data += 1
        assert torch.equal(block.ln2.weight, same)
