"""SAELens' folders against what SAELens computed from them, and hostile ones refused in a line.

tests/fixtures/sae_lens was written by SAELens 6.54.12: each folder by its `save_model` (or
`save_inference_model`) from random weights, and recorded.safetensors holds what its classes made
of x. before-6 is in the flat layout of version 3.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import crate_interp as ci
from conftest import FIXTURES, refuses

LENS = FIXTURES / "sae_lens"
KINDS = sorted(folder.name for folder in LENS.iterdir() if folder.is_dir())
POINT = "blocks.1.hook_resid_post"


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_reconstructions_are_those_of_saelens(kind):
    recorded = load_file(LENS / "recorded.safetensors")
    sae = ci.saes.load(LENS / kind)
    assert sae.cfg.hook_name == POINT and sae.cfg.model_name == "tiny"
    acts = sae.encode(recorded["x"])
    torch.testing.assert_close(acts, recorded[f"{kind}.acts"])
    torch.testing.assert_close(sae.decode(acts, recorded["x"]), recorded[f"{kind}.recons"])
    assert (acts > 0).any() and (acts == 0).any()
    same = ci.load(LENS / kind, family="sae")
    assert torch.equal(same(recorded["x"]), sae(recorded["x"]))


@pytest.mark.parametrize("kind", ["topk", "gated", "jumprelu"])
def test_one_is_saved_and_loaded_as_ours(kind, tmp_path):
    sae = ci.saes.load(LENS / kind)
    again = ci.load(sae.save_pretrained(tmp_path / "own"))
    assert again.cfg == sae.cfg
    assert all(map(torch.equal, again.state_dict().values(), sae.state_dict().values()))
    assert ci.saes.load(tmp_path / "own").cfg == sae.cfg


def test_a_folder_on_the_hub(hub, tmp_path):
    files = {f"deep/er/{path.name}": path.read_bytes() for path in (LENS / "topk").iterdir()}
    hub.repo("some/saes").commit(files)
    sae = ci.saes.load("some/saes/deep/er", cache_dir=tmp_path)
    assert sae.cfg == ci.saes.load(LENS / "topk").cfg
    with pytest.raises(ci.CheckpointError, match="some/saes has no file 'other/cfg.json'"):
        ci.saes.load("some/saes/other", cache_dir=tmp_path)


@pytest.fixture
def copied(tmp_path):
    """Copies a kind, changes its config and its tensors, and returns the folder."""

    def make(kind="standard", tensors=None, **changes):
        folder = tmp_path / "sae"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(LENS / kind, folder)
        config = json.loads((folder / "cfg.json").read_text()) | changes
        (folder / "cfg.json").write_text(json.dumps(config))
        if tensors is not None:
            weights = load_file(folder / "sae_weights.safetensors")
            kept = {name: value for name, value in (weights | tensors).items() if value is not None}
            save_file(kept, folder / "sae_weights.safetensors")
        return folder

    return make


def refused(folder, match, **given):
    words = refuses(match, lambda: ci.saes.load(folder, **given), ci.CheckpointError)
    assert words.isprintable() and len(words) < 1000, words


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(architecture="transcoder"), "architecture='transcoder' is not supported; expected"),
        (dict(architecture=["topk"]), r"architecture=\['topk'\] is not supported"),
        (dict(architecture="a\x1b[31m\nb" * 99), r"architecture='a\\x1b\[31m"),
        (dict(activation_fn="tanh-relu"), "activation_fn='tanh-relu' is not supported"),
        (dict(normalize_activations="covariance_whitening"), "whitening' is not supported"),
        (dict(reshape_activations="other"), "reshape_activations='other' is not supported"),
        (dict(hook_head_index=3), "hook_head_index=3 is not supported"),
        (dict(apply_b_dec_to_input="yes"), "apply_b_dec_to_input='yes': give True or False"),
        (dict(d_sae=-5), "its config says d_sae=-5, but the tensors make it 11"),
        (dict(d_in="y" * 10**6), "^.{,400}the tensors make it 7.$"),
        (dict(d_in=2**60), "d_in=1152921504606846976, but the tensors make it 7"),
        (dict(architecture="topk", k=2**70), "k=1180591620717411303424: give a whole number"),
        (dict(architecture="topk", k=12), "k=12 is more than the d_sae=11 features"),
        (dict(architecture="topk", k=-1), "k=-1: give a whole number of at least 1"),
        (dict(architecture="topk", k=None), "k=None: give a whole number"),
        (dict(architecture="jumprelu"), "keys missing .*threshold"),
        (dict(metadata=[1]), "does not hold the config of a sparse autoencoder"),
        (dict(metadata={}), "hook_name=None"),
        (dict(metadata={"hook_name": "a\nb"}), r"hook_name='a\\nb': give a text on one line"),
        (dict(normalize_activations="expected_average_only_in"), "give scaling_factor=F, sqrt"),
        (dict(scaling_factor=0), "scaling_factor=0: give a finite number above 0"),
    ],
)
def test_hostile_configs_are_refused_in_a_line(copied, unchecked, changes, match):
    refused(copied(**changes), match)


def test_factors_are_part_of_the_weights(copied):
    x = load_file(LENS / "recorded.safetensors")["x"]
    plain = ci.saes.load(LENS / "standard")
    scale = torch.linspace(0.5, 2, 11)
    folder = copied(tensors={"scaling_factor": scale}, finetuning_scaling_factor=True)
    acts = plain.encode(x)
    torch.testing.assert_close(ci.saes.load(folder)(x), plain.decode(acts * scale))
    average = copied(normalize_activations="expected_average_only_in")
    scaled = ci.saes.load(average, scaling_factor=3.0)
    torch.testing.assert_close(scaled(x), plain(3 * x) / 3)
    other = ci.saes.load(copied(), hook_name="blocks.0.hook_resid_pre")
    assert other.cfg.hook_name == "blocks.0.hook_resid_pre"


def test_what_was_normalised_is_decoded_with_what_was_encoded():
    x = load_file(LENS / "recorded.safetensors")["x"]
    sae = ci.saes.load(LENS / "standard-layer-norm")
    acts = sae.encode(x)
    refuses("and no x. Give the activations that were encoded", lambda: sae.decode(acts))
    assert torch.equal(sae.decode(acts, x), sae(x))
