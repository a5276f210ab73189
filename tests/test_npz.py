"""Files of the JAX training: right numbers from every spelling, nothing from harmful files."""

import io
import json
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import crate_interp as ci
from conftest import D_HEAD, D_MODEL, FIXTURES, HEADS, IMAGE, LAYERS, make
from crate_interp.checkpoints.formats.tensor_files import read_file
from test_fixtures import in_block, same

FIXTURE = FIXTURES / "crate_alpha_jax"
GIVEN = dict(image_size=IMAGE["image_size"])


def published(model, old_names=False):
    """The weights of a hooked CRATE-alpha as JAX keeps them, written out by hand."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "pos_embedding": state["pos_embed"],
        "cls": state["cls_token"],
        "embedding/kernel": np.einsum("dchw->hwcd", state["embed.conv.weight"]),
        "embedding/bias": state["embed.conv.bias"],
        "encoder_norm/scale": state["ln_final.weight"],
        "encoder_norm/bias": state["ln_final.bias"],
        "head/kernel": state["unembed.weight"].T,
        "head/bias": state["unembed.bias"],
    }
    for layer in range(model.cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"Transformer/encoderblock_{layer}/"
        attention = theirs + (
            "Attention_0/" if old_names else "MultiHeadDotProductSubspaceAttention_0/"
        )
        proj, back = state[ours + "attn.u_proj.weight"].T, state[ours + "attn.out_proj.weight"].T
        heads, wide = (model.cfg.n_heads, model.cfg.d_head), model.cfg.d_model
        out[attention + "proj/kernel"] = proj if old_names else proj.reshape(wide, *heads)
        out[attention + "out/kernel"] = back if old_names else back.reshape(*heads, wide)
        for number, norm in enumerate(("ln1", "ln2")):
            out[f"{theirs}LayerNorm_{number}/scale"] = state[f"{ours}{norm}.weight"]
            out[f"{theirs}LayerNorm_{number}/bias"] = state[f"{ours}{norm}.bias"]
        for name in ("D", "D1"):
            out[f"{theirs}OvercompleteISTABlock_0/{name}"] = state[f"{ours}mlp.{name}"]
    return out


@pytest.fixture
def alpha():
    model = make("crate-alpha", ln_final_eps=1e-6)
    with torch.no_grad():  # the official start has ones and zeros, which hide a wrong place
        for value in model.parameters():
            value.add_(
                0.1
                * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
            )
    return model


def save(path, weights, **more):
    np.savez(path, **{f"params/{name}": value for name, value in weights.items()}, **more)
    return path


def test_every_recorded_tensor():
    meta, recorded = (
        json.loads((FIXTURE / "meta.json").read_text()),
        load_file(FIXTURE / "io.safetensors"),
    )
    (file,) = [name for name in meta["files"] if name.endswith(".npz")]
    model = ci.load(FIXTURE / file)
    assert (model.cfg.n_heads, model.cfg.ln_final_eps) == (
        meta["config"]["num_heads"],
        meta["config"]["head_ln_eps"],
    )
    with torch.no_grad():
        logits, cache = model.run_with_cache(recorded["images_nhwc"].permute(0, 3, 1, 2))
    seen = {"images_nhwc", "logits", "embed", "patch_embed", "head_ln"}
    same(logits, recorded["logits"], "logits")
    same(cache["resid_pre", 0], recorded["embed"], "embed")
    same(cache["hook_embed"][:, 1:], recorded["patch_embed"], "patch_embed")
    same(cache["hook_pooled"], recorded["head_ln"], "head_ln")
    for name, value in recorded.items():
        if name.startswith("blocks."):
            _, layer, kind = name.split(".")
            same(in_block(cache, layer, kind), value, name)
            seen.add(name)
    assert set(recorded) == seen


def test_the_torch_eps_would_be_seen():
    recorded = load_file(FIXTURE / "io.safetensors")
    model = ci.load(next(FIXTURE.glob("*.npz")), ln_final_eps=1e-5)
    with torch.no_grad():
        off = (model(recorded["images_nhwc"].permute(0, 3, 1, 2)) - recorded["logits"]).abs().max()
    assert model.cfg.ln_final_eps == 1e-5 and off > 1e-4


@pytest.mark.parametrize("how", ["params/", "bare", "compressed", "old names", "fortran order"])
def test_every_spelling(alpha, tmp_path, how):
    path, weights, given = tmp_path / "weights", published(alpha, how == "old names"), dict(GIVEN)
    if how == "old names":  # two axes: heads are not told
        given["n_heads"] = HEADS
    if how == "fortran order":
        weights = {name: np.asfortranarray(value) for name, value in weights.items()}
    if how == "compressed":
        np.savez_compressed(path, **{f"params/{name}": value for name, value in weights.items()})
    elif how == "bare":
        np.savez(path, **weights)
    else:
        save(path, weights)
    loaded = ci.load(path.with_suffix(".npz"), **given)
    assert loaded.cfg == alpha.cfg
    for name, value in alpha.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_bfloat16_is_told_from_bytes(alpha, tmp_path):
    weights = published(alpha)
    short = torch.tensor(weights["head/kernel"]).bfloat16()
    weights["head/kernel"] = short.view(torch.int16).numpy().view("V2")
    loaded = ci.load(save(tmp_path / "w.npz", weights), **GIVEN)
    assert torch.equal(loaded.unembed.weight, short.float().T)


def test_one_head_keeps_its_output_matrix(tmp_path):
    model = make("crate-alpha", n_heads=1, d_head=D_HEAD, ln_final_eps=1e-6)
    loaded = ci.load(save(tmp_path / "w.npz", published(model)), **GIVEN)
    assert loaded.cfg.n_heads == 1 and torch.equal(loaded.W_O, model.W_O)


def test_only_the_weights_are_read(alpha, tmp_path):
    """What lies beside them may be anything: it is not looked at."""
    path = save(
        tmp_path / "w.npz",
        published(alpha),
        **{"opt/0/mu/x": np.ones(3, "V2"), "chrono/time": np.ones(1)},
    )
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("opt/evil.npy", object_array(tmp_path / "ran"))
    assert ci.load(path, **GIVEN).cfg == alpha.cfg and not (tmp_path / "ran").exists()


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def object_array(target):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|O", "fortran_order": False, "shape": (1,)}
    )
    return file.getvalue() + pickle.dumps([_Evil(target)])


def header(shape, dtype="<f4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def refused(match, path, **given):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(path, **GIVEN, **given)
    assert "\n" not in str(caught.value)


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name + ".npy", content)
    return path


def test_files_made_to_harm(tmp_path):
    path, ran = tmp_path / "w.npz", tmp_path / "ran"
    refused("cls holds object; expected", archive(path, **{"params/cls": object_array(ran)}))
    assert not ran.exists()
    refused(
        "weights do not compress so",
        archive(path, **{"params/cls": header((2**24,)) + bytes(2**26)}),
    )
    refused(
        "claims shape .*, but stores 8 bytes",
        archive(path, **{"params/cls": header((2**40,)) + bytes(8)}),
    )
    refused(
        "its header is not one that numpy writes",
        archive(path, **{"params/cls": header((-2, -1)) + bytes(8)}),
    )
    refused(
        "holds int64; expected", archive(path, **{"params/cls": header((1,), "<i8") + bytes(8)})
    )
    refused("holds >f4; expected", archive(path, **{"params/cls": header((2,), ">f4") + bytes(8)}))
    refused("is not a readable checkpoint", archive(path, **{"params/cls": b"no array"}))
    refused(
        "is not a readable checkpoint",
        archive(path, **{"params/cls": b"\x93NUMPY\x01\x00\xff\xff" + b"{" * 70000}),
    )
    slip = archive(
        path, **{"../../../tmp/slip": header((1,)) + bytes(4), "/etc/x": header((1,)) + bytes(4)}
    )
    refused("has no published layout: its 2 keys begin with ../../../tmp/slip", slip)


@pytest.mark.parametrize(
    "text",
    [
        "-" * 9000 + "1",
        "(" * 9000,
        "1+" * 4900 + "1",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 9000 + ",), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2**9,), }",
        "{'descr': '<f4', 'fortran_order': 1, 'shape': (2,), }",
        "{'shape': (2,), 'fortran_order': False, 'descr': '<f4', }",
        "{'descr': '(9999,9999,9999)f8,', 'fortran_order': False, 'shape': (2,), }",
        "",
    ],
    ids=range(9),
)
def test_headers_are_matched_and_never_evaluated(text, tmp_path):
    raw = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(8)
    refused(
        "not one that numpy writes|expected float16",
        archive(tmp_path / "w.npz", **{"params/cls": raw}),
    )
    long = b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(1000)
    refused("not one that numpy writes", archive(tmp_path / "w.npz", **{"params/cls": long}))


@given(
    shape=st.lists(st.integers(0, 5), max_size=5),
    kind=st.sampled_from(["<f2", "<f4", "<f8"]),
    turned=st.booleans(),
    packed=st.booleans(),
)
def test_whatever_numpy_writes_is_read(tmp_path_factory, shape, kind, turned, packed):
    path = tmp_path_factory.mktemp("w") / "w.npz"
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    array = np.asfortranarray(array) if turned else array
    (np.savez_compressed if packed else np.savez)(path, **{"params/a": array, "opt/a": array})
    found = read_file(path).tensors
    assert set(found) == {"a"} and np.array_equal(found["a"].numpy(), array)
    assert found["a"].numpy().dtype == array.dtype and found["a"].is_contiguous()


def test_both_spellings_of_bfloat16(tmp_path):
    """With the package ml_dtypes numpy writes <V2, without it |V2."""
    for spelled in ("|V2", "<V2"):
        content = header((3,), "|V2").replace(b"|V2", spelled.encode()) + bytes(
            [0, 0x80, 0, 0x40] * 2
        )
        path = archive(tmp_path / "w.npz", **{"params/cls": content[:-2]})
        found = read_file(path).tensors["cls"]
        assert found.dtype == torch.bfloat16 and found.tolist() == [-0.0, 2.0, -0.0]


def test_a_small_file_claims_little(tmp_path):
    """Each array may be packed well, as zeros are; all of them together may not."""
    array = np.zeros(2**22, np.float32)
    array[::40] = np.random.default_rng(0).standard_normal(len(array[::40]))
    np.savez_compressed(tmp_path / "w.npz", **{f"params/{n}": array for n in range(5)})
    refused("claims that .* bytes unpack to .*: weights do not compress so", tmp_path / "w.npz")


def test_damaged_files(alpha, tmp_path):
    path = save(tmp_path / "w.npz", published(alpha))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("is not a readable checkpoint", path)
    middle = len(whole) // 2
    path.write_bytes(
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    )  # the archive's checksum tells
    refused("is not a readable checkpoint", path)


def test_what_does_not_fit(alpha, tmp_path):
    weights = published(alpha)
    block = "Transformer/encoderblock_1/"
    proj = block + "MultiHeadDotProductSubspaceAttention_0/proj/kernel"
    less = {
        name: value
        for name, value in weights.items()
        if name != block + "OvercompleteISTABlock_0/D"
    }
    refused(f"keys missing .*{block}OvercompleteISTABlock_0/D", save(tmp_path / "a.npz", less))
    refused(
        "keys not used .*: extra", save(tmp_path / "b.npz", weights | {"extra": np.ones(3, "f4")})
    )
    bad = weights | {proj: np.ones((D_MODEL, HEADS, D_HEAD, 1), "f4")}
    refused(f"{proj} has shape .*; expected .* the first layer", save(tmp_path / "c.npz", bad))
    refused(
        r"n_heads=3 contradicts the tensors, which make it 5",
        save(tmp_path / "d.npz", weights),
        n_heads=3,
    )
    old = save(tmp_path / "e.npz", published(alpha, old_names=True))
    refused("n_heads cannot be inferred", old)
    weights[proj] = weights[proj].copy()
    weights[proj][0, 0, 0] = np.nan
    refused(f"{proj} holds 1 NaN or Inf", save(tmp_path / "f.npz", weights))
    assert LAYERS > 1


MEMORY = """
import sys
import crate_interp as ci
# not ru_maxrss, which begins at what the parent had when it forked
lines = lambda: open("/proc/self/status")
peak = lambda: 1024 * int(next(line for line in lines() if line.startswith("VmHWM")).split()[1])
ci.load(sys.argv[1])
before = peak()
model = ci.load(sys.argv[2])
weights = sum(value.numel() * 4 for value in model.parameters())
print((peak() - before) / weights, weights / 2**20)
"""


@pytest.mark.slow
def test_a_load_holds_the_weights_once(tmp_path):
    """Optimiser state as large as the weights lies beside them and is not read."""
    model = ci.HookedCrate(ci.CrateConfig(family="crate-alpha", d_model=512, n_layers=6, n_heads=8))
    weights = published(model)
    path = save(
        tmp_path / "w.npz", weights, **{f"opt/{name}": value for name, value in weights.items()}
    )
    command = [sys.executable, "-c", MEMORY, next(FIXTURE.glob("*.npz")), path]
    done = subprocess.run(command, capture_output=True, text=True)
    share, size = map(float, done.stdout.split())
    assert size > 60 and share < 1.3, done.stdout
