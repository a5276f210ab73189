"""Files, configs and arguments that contradict each other or themselves are refused."""

import argparse
import zipfile

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import FIXTURES, make
from published import published
from reference import published_layout

ALPHA = dict(n_heads=5, image_size=(6, 20))
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
