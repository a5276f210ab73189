"""Files, configs and arguments that contradict each other or themselves are refused."""

import argparse
import json
import shutil
import threading
import zipfile

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import FIXTURES, make, make_lm, without_digests
from crate_interp.models.text.tokenizer import to_json
from published import GIVEN, published
from reference import published_layout

ALPHA = dict(n_heads=5, image_size=(6, 20))
CHAT = FIXTURES / "nanochat_crate_alpha"
MAE = FIXTURES / "crate_mae" / "checkpoint-799.pth"


def fails(match, source, **given):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(source, **given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1600


def weights():
    return published_layout(make("crate-alpha"))


def zipped_pickle(pickled, path):
    """A torch file whose pickle is `pickled`."""
    torch.save({"a": torch.ones(1)}, path)
    with zipfile.ZipFile(path) as archive:
        items = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in items:
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)
    return path


def test_heads_of_every_layer_of_an_npz(tmp_path):
    arrays = dict(np.load(next((FIXTURES / "crate_alpha_jax").glob("*.npz"))))
    attention = "params/Transformer/encoderblock_1/MultiHeadDotProductSubspaceAttention_0/"
    for key, shape in (("proj/kernel", (32, 8, 4)), ("out/kernel", (8, 4, 32))):
        changed = arrays | {attention + key: arrays[attention + key].reshape(shape)}
        np.savez(tmp_path / "a.npz", **changed)
        fails(f"{key} has shape .*; expected .*, as in the first layer", tmp_path / "a.npz")


def test_one_head_over_the_whole_stream_may_keep_its_matrix(tmp_path):
    """The JAX code has an output kernel for one head too; the torch code has none."""
    arrays = dict(np.load(next((FIXTURES / "crate_alpha_jax").glob("*.npz"))))
    for key in [
        key
        for key in arrays
        if key.startswith("params") and key.endswith("/kernel") and "Attention_0" in key
    ]:
        shape = (32, 1, 32) if "proj" in key else (1, 32, 32)
        arrays[key] = arrays[key].reshape(shape)
    np.savez(tmp_path / "a.npz", **arrays)
    model = ci.load(tmp_path / "a.npz")
    assert (
        model.cfg.n_heads == 1
        and model.cfg.output_matrix
        and model.blocks[0].attn.out_proj is not None
    )
    assert ci.load(model.save_pretrained(tmp_path / "own")).cfg == model.cfg
    plain = make("crate-alpha", n_heads=1, d_head=31)
    assert not plain.cfg.output_matrix and plain.blocks[0].attn.out_proj is None


def test_what_a_training_dict_says(tmp_path):
    gpt = published("gpt-baseline", h=4, p=8, d=32, m=128)
    said = dict(n_layer=2, n_head=4, n_embd=32, block_size=13, bias=True, vocab_size=47)
    whole = {"model": gpt, "model_args": said}
    assert ci.load(whole).cfg.n_heads == 4  # in memory as on disk
    fails("n_heads=8 contradicts the config in the state dict, which says 4", whole, n_heads=8)
    bare = {key: value for key, value in gpt.items() if not key.endswith("bias")}
    fails("bias=True contradicts the tensors", {"model": bare, "model_args": said})
    for odd in (5, True, [1], torch.tensor([1, 2]), "abc"):
        torch.save({"model": gpt, "model_args": odd}, tmp_path / "a.pt")
        fails("n_heads cannot be inferred", tmp_path / "a.pt")
    fails(
        "holds weights under 'model' and 'state_dict': pass one of them, as a state dict",
        {"model": weights(), "state_dict": weights()},
        **ALPHA,
    )


def test_the_command_line_in_a_namespace(tmp_path):
    state = ci.load(MAE, n_heads=4)
    assert not state.cfg.norm_pix_loss
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(MAE, weights_only=True)
    torch.save(
        {"model": loaded["model"], "args": argparse.Namespace(norm_pix_loss=True)},
        tmp_path / "b.pth",
    )
    assert ci.load(tmp_path / "b.pth", n_heads=4).cfg.norm_pix_loss
    assert not ci.load(tmp_path / "b.pth", n_heads=4, norm_pix_loss=False).cfg.norm_pix_loss


def test_a_copy_that_is_another_view():
    lm = published("crate-lm")
    table = lm["transformer.wte.weight"]
    fails(
        "claims 1457 numbers, but stores fewer|differs from",
        lm | {"lm_head.weight": table[:1].clone().expand(47, 31)},
        n_heads=5,
    )
    square = table[:31].clone()
    fails(
        "lm_head.weight differs from",
        lm | {"transformer.wte.weight": square, "lm_head.weight": square.T},
        n_heads=5,
    )


def test_tokenizers_beside_the_weights(tmp_path):
    chat = ci.load(CHAT)
    folder = chat.save_pretrained(tmp_path / "chat")
    file = shutil.copy(
        FIXTURES / "crate_lm_overcomplete" / "ckpt-crate-12l-overparam-600000.pt", folder
    )
    lm = ci.load(file, local_files_only=True, cache_dir=tmp_path / "empty")
    with pytest.raises(
        ci.CheckpointError, match="openai-community/gpt2/tokenizer.json is not in the cache"
    ):
        lm.to_tokens("the")  # it was trained with that of GPT-2, whatever lies beside it
    make_lm("crate-lm").save_pretrained(folder)
    assert not (folder / "tokenizer.json").exists()  # the one of the model before
    content = json.loads(to_json(chat.tokenizer))
    content |= {
        "truncation": {
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        }
    }
    saved = without_digests(ci.load(CHAT).save_pretrained(tmp_path / "cut"))
    (saved / "tokenizer.json").write_text(json.dumps(content))
    assert ci.load(saved).to_tokens("the theory and the thing").shape[1] > 3
    for index in (-5, 1.5, 10**30):
        content["added_tokens"][0]["id"] = index
        (saved / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(
            ci.CheckpointError, match="tokenizer.json: the tokenizers library failed"
        ):
            ci.load(saved).to_tokens("the")
    with pytest.raises(ci.CheckpointError, match="prepend_bos='no': give True or False"):
        ci.load(CHAT, prepend_bos="no")


def test_a_folder_is_never_half_of_two_models(tmp_path):
    make("crate-alpha").save_pretrained(tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    other = make("crate-alpha", seed=3)
    object.__setattr__(other.cfg, "labels", ({"a set, which is no JSON"},))
    with pytest.raises(TypeError):
        other.save_pretrained(tmp_path / "a")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before
    twin = make("crate-alpha")
    twin.blocks[1].mlp.D = twin.blocks[0].mlp.D
    assert torch.equal(
        ci.load(twin.save_pretrained(tmp_path / "b")).blocks[1].mlp.D, twin.blocks[0].mlp.D
    )


@pytest.mark.usefixtures("unchecked")
def test_an_autoencoder_that_contradicts_its_config(tmp_path):
    sae = ci.load(FIXTURES / "crate_lm_sae" / "0.pt")
    folder = sae.save_pretrained(tmp_path / "sae")
    fails("family='crate-lm' contradicts .*, which says 'sae'", folder, family="crate-lm")
    text = (folder / "config.json").read_text()
    for old, new, match in (
        ('"d_in": 128', '"d_in": 999', "d_in=999"),
        ('"l1_coeff": 0.0003', '"l1_coeff": "x"', "l1_coeff='x'"),
    ):
        (folder / "config.json").write_text(text.replace(old, new))
        fails(match, folder)


def test_pickles_that_ask_for_what_torch_admits(tmp_path):
    """torch's own list of safe classes is global to the process, and grows."""
    from torch.distributed.device_mesh import DeviceMesh

    pickled = (
        b"\x80\x02}X\x01\x00\x00\x00actorch.distributed.device_mesh\nDeviceMesh\n"
        b"X\x03\x00\x00\x00cpu](K\x00e\x86Rs."
    )
    with torch.serialization.safe_globals([DeviceMesh]):
        fails(
            "its pickle .*torch.distributed",
            zipped_pickle(pickled, tmp_path / "a.pth"),
            n_heads=1,
        )
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_two_threads_may_load_a_namespace(tmp_path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(MAE, weights_only=True)
    torch.save({"model": loaded["model"], "args": argparse.Namespace(lr=0.1)}, tmp_path / "m.pth")
    errors = []

    def work():
        try:
            for _ in range(8):
                ci.load(tmp_path / "m.pth", n_heads=4)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert errors == []


@pytest.mark.usefixtures("unchecked")
def test_odd_arguments():
    state = weights()
    for device in (None, 1.5, [], "meta"):
        fails("is not a device that torch can compute on", state, device=device, **ALPHA)
    if not torch.cuda.is_available():
        fails("device='cuda' is not a device", state, device="cuda", **ALPHA)
    fails("dtype=torch.float8_e4m3fn", state, dtype=torch.float8_e4m3fn, **ALPHA)
    fails("is not a path inside a repo", "a/b", file=5)
    fails("cannot be loaded|is no file", "~nosuchuser/m.pth")
    fails("has no published layout", {"a\nb": torch.ones(1)}, n_heads=1)
    fails("has no published layout", {"k" * 10**6: torch.ones(1)}, n_heads=1)
    fails(
        "on the meta device",
        {key: value.to("meta") for key, value in published("clipa").items()},
        **GIVEN["clipa"],
    )
    fails("n_heads=array", state, **ALPHA | {"n_heads": np.zeros((50, 20))})
    rows = published("clipa")
    key = "visual.transformer.resblocks.1.attn.in_proj_weight"
    fails(
        "has 4 rows; expected a multiple of 3|wrong shapes",
        rows | {key: torch.ones(4, 31)},
        **GIVEN["clipa"],
    )
    fails(
        r"keys not used \(1\): visual.ln_pre.weight",
        rows | {"visual.ln_pre.weight": torch.ones(31)},
        **GIVEN["clipa"],
    )
