"""Models under torch.compile, torch.export, torch.func, nnsight, pickle and accelerate."""

import copy
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch.func import vmap

import crate_interp as ci
from conftest import make, make_lm
from crate_interp.models.weights import model_digest
from neighbours import LMS, VARIANTS, ids, make_clip, make_mae, pictures
from selection import few

TRACED = Path(__file__).parent / "traced.py"
ANY = torch.export.Dim.DYNAMIC

pytestmark = pytest.mark.usefixtures("unchecked")  # the type checks themselves cannot be traced


def exported(model, args, dynamic):
    return torch.export.export(model, args, dynamic_shapes=dynamic).module()


# --- torch.func ---


@pytest.mark.parametrize("family", LMS)
def test_vmap_over_a_language_model(family):
    model, tokens = make_lm(family), ids(3, 7)
    rows = vmap(lambda row: model(row[None])[0])(tokens)
    torch.testing.assert_close(rows, model(tokens), atol=1e-5, rtol=1e-5)


# --- torch.export ---


@pytest.mark.slow
def test_every_family_is_exported():
    for over in VARIANTS:
        model = make(**over)
        program = exported(model, (pictures(3),), ({0: ANY},))
        assert torch.equal(program(pictures(5)), model(pictures(5)))
    for family in LMS:
        model = make_lm(family)
        program = exported(model, (ids(3, 7),), ({0: ANY, 1: ANY},))
        assert torch.equal(program(ids(2, 11)), model(ids(2, 11)))
    clip = make_clip()
    program = exported(clip, (pictures(3), ids(4, 7)), ({0: ANY}, {0: ANY}))
    assert torch.equal(program(pictures(2), ids(5, 7)), clip(pictures(2), ids(5, 7)))


# --- torch.compile ---


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compile", "gradients", "export", "hooks"])
def test_in_a_process_without_type_checks(what):
    done = subprocess.run([sys.executable, TRACED, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


POINT = "blocks.1.hook_attn_out"
SAYS = "this model was compiled with torch.compile"


def zero(tensor, hook):
    return torch.zeros_like(tensor)


class Counting:
    """A backend that counts what it compiles and leaves it as it is."""

    def __init__(self):
        self.times = 0
        torch._dynamo.reset()

    def __call__(self, graph, inputs):
        self.times += 1
        return graph


@pytest.fixture
def counting():
    yield Counting()
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_hook_added_later_fires_and_the_model_says_so_once(counting):
    model, images = make(n_layers=2), pictures(2)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    model.add_hook("blocks.0.hook_resid_pre", lambda tensor, hook: None)  # not compiled: no word
    model.reset_hooks()
    plain = compiled(images)
    with pytest.warns(UserWarning, match=SAYS):
        compiled.add_hook(POINT, zero)
    hooked = compiled(images)
    assert torch.equal(hooked, model(images)) and not torch.equal(hooked, plain)
    compiled.add_hook("blocks.0.hook_attn_out", zero)  # said already: a warning would be an error
    assert not torch.equal(compiled(images), hooked)
    compiled.reset_hooks()
    times = counting.times
    assert torch.equal(compiled(images), plain) and counting.times == times


@pytest.mark.slow
def test_a_model_compiled_in_place_runs_plainly_while_it_has_hooks(counting):
    model, images = make(), pictures(2)
    plain = model(images)
    model.compile(fullgraph=True, backend=counting)
    assert torch.equal(model(images), plain) and counting.times == 1
    _, cache = model.run_with_cache(images)
    assert torch.equal(cache["blocks.2.hook_resid_post"], make()(images, stop_at_layer=3))
    with model.hooks(fwd_hooks=[(POINT, zero)]):
        assert not torch.equal(model(images), plain)
    assert torch.equal(model(images), plain) and counting.times == 1


def test_nnsight_traces_and_edits_a_layer():
    from nnsight import NNsight

    model, images = make(), pictures(2)
    _, cache = model.run_with_cache(images)
    zero = [("blocks.1.hook_attn_out", lambda tensor, hook: torch.zeros_like(tensor))]
    wanted = model.run_with_hooks(images, fwd_hooks=zero)
    traced = NNsight(model)
    with torch.no_grad(), traced.trace(images):
        codes = traced.blocks[1].mlp.output.save()
        plain = traced.output.save()
    assert torch.equal(codes, cache["blocks.1.hook_resid_post"])
    assert torch.equal(plain, model(images))
    with torch.no_grad(), traced.trace(images):
        traced.blocks[1].attn.output[:] = 0
        edited = traced.output.save()
    assert torch.equal(edited, wanted) and not torch.equal(edited, plain)


@pytest.mark.parametrize("build", [make, make_lm, lambda: ci.load("crate-tiny-lm")])
def test_pickles_and_copies_answer_alike_and_keep_their_hooks_apart(build):
    model = build()
    batch = pictures(2) if model.unit == "images" else ids(2, 7)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(batch), model(batch))
        other.add_hook("blocks.0.hook_resid_pre", lambda tensor, hook: tensor * 0)
        assert not torch.equal(other(batch), model(batch))


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
