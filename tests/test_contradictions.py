"""Files, configs and arguments that contradict each other or themselves are refused."""

import zipfile

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import FIXTURES, make
from published import published
from reference import published_layout

ALPHA = dict(n_heads=5, image_size=(6, 20))


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


def test_pickles_that_ask_for_what_torch_admits(tmp_path):
    """torch's own list of safe classes is global to the process, and grows."""
    from torch.distributed.device_mesh import DeviceMesh

    pickled = (
        b"\x80\x02}X\x01\x00\x00\x00actorch.distributed.device_mesh\nDeviceMesh\n"
        b"X\x03\x00\x00\x00cpu](K\x00e\x86Rs."
    )
    with torch.serialization.safe_globals([DeviceMesh]):
        fails(
            "its pickle .*torch.distributed", zipped_pickle(pickled, tmp_path / "a.pth"), n_heads=1
        )
    assert not torch.distributed.is_initialized()
