"""ci.saes.spliced: autoencoders at hook points, read and edited there, gone afterwards."""

import pytest
import torch
from transformer_lens import HookedRootModule

import crate_interp as ci
from conftest import make, make_lm
from crate_hooks import edit
from crate_interp.models.sae import SAEConfig

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


def test_gradients_reach_features_and_not_the_error(model, images):
    model, images = model.double(), images.double()
    sae, seen = random_sae().double(), {}

    def keep(tensor, hook):
        tensor.retain_grad()
        seen[hook.name] = tensor

    with ci.saes.spliced(model, {POINT: sae}, error=True):
        model.run_with_hooks(images, fwd_hooks=[(ACTS, keep)])[:, 3].sum().backward()
    gradient = seen[ACTS].grad
    leaf = seen[ACTS].detach().requires_grad_()
    put = lambda x, hook: (x - sae(x)).detach() + sae.decode(leaf)  # noqa: E731
    model.run_with_hooks(images, fwd_hooks=[(POINT, put)])[:, 3].sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


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


def test_one_that_remembers_its_input_is_encoded_before_each_decode(model, images):
    sae = random_sae(normalize_activations="layer_norm")
    with ci.saes.spliced(model, {POINT: sae}, error=True):
        assert torch.equal(model(images), model(images))
    own = model.run_with_cache(images)[1][POINT]
    with ci.saes.spliced(model, {POINT: sae}):
        torch.testing.assert_close(model.run_with_cache(images)[1][POINT], sae(own))


def test_language_models_and_other_hooked_models():
    lm = make_lm()
    tokens = torch.randint(0, 47, (3, 9), generator=torch.Generator().manual_seed(0))
    with ci.saes.spliced(lm, {POINT: random_sae()}, error=True):
        assert torch.equal(lm(tokens), lm(tokens))
        assert ACTS in lm.run_with_cache(tokens)[1]

    class Small(HookedRootModule):
        def __init__(self):
            super().__init__()
            from transformer_lens.hook_points import HookPoint

            self.hook_x = HookPoint()
            self.setup()

        def forward(self, x):
            return 2 * self.hook_x(x)

    x, small = torch.randn(2, 3), Small()
    with ci.saes.spliced(small, {"hook_x": Identity()}):
        assert torch.equal(small(x), 2 * x)
    with pytest.raises(KeyError, match="there is no hook point 'hook_y'. Did you mean hook_x"):
        with ci.saes.spliced(small, {"hook_y": Identity()}):
            raise AssertionError("never reached")
