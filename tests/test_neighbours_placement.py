"""Where the weights are: the config follows them, and offloaded ones are brought back."""

import copy
import pickle
import warnings

import pandas as pd
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules

import crate_interp as ci
from conftest import make, make_lm
from crate_interp.models.weight_cache import model_digest
from neighbours import ids, make_clip, make_mae, pictures
from selection import few

CPU = torch.device("cpu")


# --- device and dtype ---


def configs(model):
    return model.runtime_configs()


@pytest.mark.parametrize("build", [make, make_lm, make_mae, make_clip])
def test_the_config_follows_every_move(build):
    model = build()
    for cfg in configs(model):
        assert cfg.device == CPU and cfg.dtype is torch.float32
    model.half()
    assert {cfg.dtype for cfg in configs(model)} == {torch.float16}
    model.to(torch.float64)
    assert {cfg.dtype for cfg in configs(model)} == {torch.float64}
    weights = {name: value.float() for name, value in model.state_dict().items()}
    model.to("meta")
    assert {cfg.device.type for cfg in configs(model)} == {"meta"}
    model.to_empty(device="cpu")
    assert {cfg.device for cfg in configs(model)} == {CPU}
    model.load_state_dict(weights, assign=True)
    assert {cfg.dtype for cfg in configs(model)} == {torch.float32}


def test_a_model_made_on_meta_follows_what_is_assigned():
    weights = {name: value.bfloat16() for name, value in make().state_dict().items()}
    with torch.device("meta"):
        model = ci.HookedCrate(make().cfg)
    assert model.cfg.device.type == "meta"
    model.load_state_dict(weights, assign=True)
    assert model.cfg.device == CPU and model.cfg.dtype is torch.bfloat16
    assert model(pictures(1).bfloat16()).isfinite().all()


def test_copies_follow_their_own_weights():
    model = make_mae()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.double()
        assert other.cfg.dtype is other.decoder_cfg.dtype is torch.float64
        assert other.blocks[0].attn.cfg is other.cfg
    assert model.cfg.dtype is torch.float32
    clip = copy.deepcopy(make_clip())
    clip.visual.double()
    assert clip.visual.cfg.dtype is torch.float64 and clip.text.cfg.dtype is torch.float32
    alone = pickle.loads(pickle.dumps(model.cfg))  # holds no model
    assert alone.device is None and alone == model.cfg
    assert len(pickle.dumps(model.cfg)) < 2000


# --- offload ---


def offloaded(model, how, folder):
    model = copy.deepcopy(model)
    if how == "cpu":
        return cpu_offload(model, execution_device=CPU)
    if how == "disk":
        disk_offload(model, folder, execution_device=CPU)
        return model
    parts = {name: "cpu" for name, _ in model.named_children()}
    parts |= {name: "cpu" for name, _ in model.named_parameters(recurse=False)}
    parts["blocks"] = "disk"
    # accelerate takes no parameter of the whole model for a part, and moves it all the same
    warnings.filterwarnings("ignore", "The following device_map keys", UserWarning)
    return dispatch_model(model, parts, main_device="cpu", offload_dir=folder, force_hooks=True)


def same(got, wanted):
    assert set(got.stored) == set(wanted.stored) and len(wanted.table())
    for name, table in wanted.stored.items():
        pd.testing.assert_frame_equal(got.stored[name], table)
    assert got.meta["model_digest"] == wanted.meta["model_digest"]


@pytest.mark.parametrize("how", few(["cpu", "disk", "some"]))
def test_probes_and_sweeps_of_offloaded_weights(how, tmp_path):
    plain, images = make("crate-alpha"), pictures(3)
    model = offloaded(plain, how, tmp_path)
    assert model.blocks[0].attn.u_proj.weight.is_meta and model.cfg.device == CPU
    with torch.no_grad():
        out, cache = model.run_with_cache(images)
        wanted, reference = plain.run_with_cache(images)
    assert torch.equal(out, wanted) and model_digest(model) == model_digest(plain)
    same(ci.probe(cache), ci.probe(reference))
    quiet = dict(progress=False, controls=2)
    same(ci.sweep(model, images, **quiet), ci.sweep(plain, images, **quiet))
    assert model.blocks[0].attn.u_proj.weight.is_meta  # away again
    assert torch.equal(model(images), wanted)
    remove_hook_from_submodules(model)


@pytest.mark.parametrize("build", [
    make,
    lambda: make(variant="c"),
    lambda: make("crate-alpha", d_features=7),
    lambda: make_lm("crate-lm"),
    lambda: make_lm("gpt-baseline"),
    lambda: make_lm("nanochat-crate"),
])  # fmt: skip
def test_weights_and_answers_of_offloaded_models(build):
    plain = build()
    model = offloaded(plain, "cpu", None)
    batch = pictures(2) if plain.unit == "images" else ids(2, 7)
    for switch in (None, "set_use_attn_result", "set_use_split_qkv_input"):
        if switch:
            getattr(model, switch)(True)
            getattr(plain, switch)(True)
        assert torch.equal(model(batch), plain(batch))
    for name in ("W_Q", "W_V", "W_O", "b_O", "W_U", "b_U", "W_E", "W_pos", "W_in", "W_out"):
        if hasattr(plain, name):
            assert torch.equal(getattr(model, name), getattr(plain, name)), name
