"""Autoencoders at hook points, read and edited there; folders of SAELens, and hostile ones."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import crate_interp as ci
from conftest import FIXTURES, make, refuses
from crate_hooks import edit
from crate_interp.models.sae import NORMALIZATIONS, SAEConfig

POINT, OTHER, HEADS = "blocks.1.hook_resid_post", "blocks.0.hook_resid_post", "blocks.2.attn.hook_z"
ACTS, ERROR = f"{POINT}.hook_sae_acts_post", f"{POINT}.hook_sae_error"
PARTS = ["hook_sae_input", "hook_sae_acts_post", "hook_sae_recons", "hook_sae_output"]


@pytest.fixture
def model():
    return make("crate-alpha")


class Identity:
    """W_enc = [I, -I], ReLU: the reconstruction is exact."""

    def encode(self, x):
        return torch.cat([x.relu(), (-x).relu()], dim=-1)

    def decode(self, acts):
        half = acts.shape[-1] // 2
        return acts[..., :half] - acts[..., half:]


def random_sae(width=31, features=53, seed=0, point=POINT, **more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ci.SparseAutoencoder(
            SAEConfig(hook_name=point, d_in=width, d_sae=features, **more)
        ).eval()


def hooks_of(model):
    """What a splice could leave behind."""
    return (
        list(model.hook_dict),
        list(model.mod_dict),
        [name for name, _ in model.named_modules()],
        sum(len(module._forward_hooks) for module in model.modules()),
        list(model.state_dict()),
    )


def test_error_terms_leave_the_answers_bit_for_bit(model, images):
    sae = random_sae()
    with ci.saes.spliced(model, {POINT: sae, HEADS: random_sae(35)}, error=True):
        assert torch.equal(model(images), model(images))
        spliced, cache = model.run_with_cache(images)
    clean, own = model.run_with_cache(images)
    assert torch.equal(spliced, clean)
    assert torch.equal(cache[POINT], own[POINT])
    assert torch.equal(cache[f"{POINT}.hook_sae_input"], own[POINT])
    torch.testing.assert_close(cache[ACTS], sae.encode(own[POINT]))
    torch.testing.assert_close(cache[ERROR], own[POINT] - sae(own[POINT]))
    assert not torch.equal(cache[ERROR], torch.zeros_like(cache[ERROR]))


def test_without_error_the_reconstruction_goes_on(model, images):
    sae = random_sae()
    with ci.saes.spliced(model, {POINT: sae}):
        logits, cache = model.run_with_cache(images)
    assert [f"{POINT}.{part}" in cache for part in PARTS] == [True] * 4 and ERROR not in cache
    put = lambda x, hook: sae(x)  # noqa: E731
    assert torch.equal(logits, model.run_with_hooks(images, fwd_hooks=[(POINT, put)]))
    assert not torch.allclose(logits, model(images))


def test_edits_of_features_change_the_reconstruction_and_not_the_error(model, images):
    sae, point = random_sae(), POINT
    own = model.run_with_cache(images)[1][point]
    acts = sae.encode(own)
    without = acts.clone()
    without[..., 5] = 0

    def put(x, hook):
        return x - sae.decode(acts) + sae.decode(without)

    wanted = model.run_with_hooks(images, fwd_hooks=[(point, put)])
    with ci.saes.spliced(model, {point: sae}, error=True):
        edited = model.run_with_hooks(images, fwd_hooks=[(ACTS, edit.zero(atoms=5))])

        def write(tensor, hook):  # into what it gets, and returns nothing
            tensor[..., 5] = 0

        with torch.no_grad():
            written = model.run_with_hooks(images, fwd_hooks=[(ACTS, write)])
        no_error = model.run_with_hooks(images, fwd_hooks=[(ERROR, edit.zero())])
        assert torch.equal(model(images), model(images))
    torch.testing.assert_close(edited, wanted)
    torch.testing.assert_close(written, wanted)
    assert not torch.allclose(edited, model(images))
    with ci.saes.spliced(model, {point: sae}):
        torch.testing.assert_close(no_error, model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [False, True])
def test_nothing_is_left_behind(model, images, error):
    before, clean = hooks_of(model), model(images)
    sae = random_sae()
    with ci.saes.spliced(model, {POINT: sae}, error=error) as inside:
        assert inside is model and ACTS in model.hook_dict
        with ci.saes.spliced(model, {OTHER: sae, HEADS: random_sae(35)}, error=error):
            model(images)
            with pytest.raises(ValueError, match=f"'{POINT}' already has an autoencoder"):
                with ci.saes.spliced(model, {POINT: sae}):
                    raise AssertionError("never reached")
        assert f"{OTHER}.hook_sae_input" not in model.hook_dict
        model.reset_hooks()
        assert ACTS in model.run_with_cache(images)[1]
    assert hooks_of(model) == before
    with pytest.raises(RuntimeError, match="on purpose"):
        with ci.saes.spliced(model, {POINT: sae}, error=error):
            raise RuntimeError("on purpose")
    assert hooks_of(model) == before and torch.equal(model(images), clean)
    with pytest.raises(KeyError, match="there is no hook point"):
        model.run_with_cache(images, names_filter=ACTS)


def test_heads_are_flattened_or_read_one_by_one(model, images):
    own = model.run_with_cache(images)[1][HEADS]
    flat, each = random_sae(35, point=HEADS), random_sae(7, point=HEADS)
    for sae, acts in ((flat, flat.encode(own.flatten(-2))), (each, each.encode(own))):
        with ci.saes.spliced(model, {HEADS: sae}):
            cache = model.run_with_cache(images)[1]
        torch.testing.assert_close(cache[f"{HEADS}.hook_sae_acts_post"], acts)
        assert cache[HEADS].shape == own.shape
    with ci.saes.spliced(model, {HEADS: Identity()}):  # its width is not known
        cache = model.run_with_cache(images)[1]
    assert cache[f"{HEADS}.hook_sae_acts_post"].shape == (2, 13, 70)
    assert torch.equal(cache[HEADS], own)


LENS = FIXTURES / "sae_lens"
KINDS = sorted(folder.name for folder in LENS.iterdir() if folder.is_dir())


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
        (dict(architecture="transcoder"), "architecture='transcoder' is none of"),
        (dict(architecture="a\x1b[31m\nb" * 99), r"architecture='a\\x1b\[31m"),
        (dict(normalize_activations="covariance_whitening"), "whitening' is none of"),
        (dict(apply_b_dec_to_input="yes"), "apply_b_dec_to_input='yes': give True or False"),
        (dict(d_sae=-5), "its config says d_sae=-5, but the tensors make it 11"),
        (dict(d_in="y" * 10**6), "^.{,400}the tensors make it 7.$"),
        (dict(architecture="topk", k=12), "k=12 is more than the d_sae=11 features"),
        (dict(architecture="jumprelu"), "keys missing .*threshold"),
        (dict(metadata=[1]), "does not hold the config of a sparse autoencoder"),
        (dict(metadata={"hook_name": "a\nb"}), r"hook_name='a\\nb': give a text on one line"),
        (dict(normalize_activations="expected_average_only_in"), "give scaling_factor=F, sqrt"),
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


@pytest.mark.parametrize("normalization", NORMALIZATIONS[1:])
def test_an_autoencoder_decodes_whatever_was_encoded_in_between(normalization, unchecked):
    sae = ci.SparseAutoencoder(
        SAEConfig(hook_name="hook_embed", d_in=31, d_sae=53, normalize_activations=normalization)
    )
    x, other = torch.randn(2, 7, 31), 5 + 3 * torch.randn(2, 7, 31)
    acts = sae.encode(x)
    alone = sae.decode(acts, x)
    sae.encode(other)
    assert torch.equal(sae.decode(acts, x), alone)
    assert torch.equal(sae(x), alone)
    with pytest.raises(
        ValueError, match=r"Give the activations that were encoded, of shape \[2, 7, 31\]"
    ):
        sae.decode(acts)
    refuses(r"x of shape \[2, 5, 31\]", lambda: sae.decode(acts, x[:, :5]))
