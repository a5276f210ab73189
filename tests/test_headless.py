"""Files without a classifier head, and heads that are left out: features, and no logits."""

import pytest
import torch

import crate_interp as ci
from conftest import D_MODEL, IMAGE, make, refuses
from crate_interp.circuits import logit_attribution, logit_lens
from reference import published_layout
from test_load import given
from test_npz import published

HEADS = {"crate": "mlp_head.1", "crate-alpha": "mlp_head.1", "demo": "head", "jax": "head/kernel"}
NO_HEAD = r"no classifier head \(n_classes=0\), and so no logits"


def written(kind):
    """A model with a head, its file, the keys of its head, and what ci.load must be told."""
    if kind == "jax":
        model = make("crate-alpha", ln_final_eps=1e-6)
        weights = {key: torch.tensor(value) for key, value in published(model).items()}
        head = ["head/kernel", "head/bias"]
    else:
        model = make("crate", d_features=7) if kind == "demo" else make(kind)
        weights = published_layout(model)
        head = [key for key in weights if key.startswith(("mlp_head.1.", "head."))]
    told = dict(image_size=IMAGE["image_size"]) if kind == "jax" else given(model)
    return model, weights, head, told


@pytest.fixture(scope="module")
def headless():
    model = make("crate-alpha")
    with pytest.warns(UserWarning, match="the head is left out"):
        return ci.load(model.state_dict(), config=model.cfg, head=False)


@pytest.mark.parametrize("kind", HEADS)
def test_files_with_and_without_a_head(kind, images, tmp_path):
    model, weights, head, told = written(kind)
    wanted = model.run_with_cache(images)[1]["hook_pooled"]
    with pytest.warns(UserWarning, match=f"the head is left out: .*{head[0]}"):
        cut = ci.load(weights, head=False, **told)
    bare = {key: value for key, value in weights.items() if key not in head}
    for one in (cut, ci.load(bare, head=False, **told), ci.load(bare, n_classes=0, **told)):
        assert not one.has_logits and one.cfg.n_classes == one.cfg.d_vocab == 0
        torch.testing.assert_close(one(images), wanted)
        assert one(images).shape == (len(images), D_MODEL)
    with pytest.raises(ci.CheckpointError, match=f"{HEADS[kind]}.*give head=False"):
        ci.load({key: value for key, value in bare.items() if "features" not in key}, **told)
    cut.save_pretrained(tmp_path / "bare")
    again = ci.load(tmp_path / "bare")
    assert again.cfg == cut.cfg and torch.equal(again(images), cut(images))


def test_a_saved_folder_and_a_config_with_a_head(images, tmp_path):
    model = make(labels=[f"class {number}" for number in range(11)])
    model.save_pretrained(tmp_path / "whole")
    wanted = model.run_with_cache(images)[1]["hook_pooled"]
    for source, more in (
        (tmp_path / "whole", {}),
        (model.state_dict(), {"config": model.cfg}),
        (model.state_dict(), {"config": tmp_path / "whole"}),
    ):
        with pytest.warns(UserWarning, match="the head is left out: unembed"):
            bare = ci.load(source, head=False, **more)
        assert torch.equal(bare(images), wanted) and bare.cfg.labels is None
    assert ci.load(tmp_path / "whole").has_logits


def test_the_readers_of_logits_refuse(headless, images):
    cache = headless.run_with_cache(images)[1]
    for read, match in (
        (lambda: headless.W_U, NO_HEAD),
        (lambda: headless.b_U, NO_HEAD),
        (lambda: headless.tokens_to_residual_directions(1), NO_HEAD),
        (lambda: headless(images, labels=torch.zeros(2, dtype=torch.long)), NO_HEAD),
        (lambda: headless(pixel_values=images), NO_HEAD),
        (lambda: cache.logit_lens(), "no classifier head, and so no logits for a lens"),
        (lambda: logit_lens(cache), "needs the cache of a model with logits"),
        (lambda: logit_attribution(cache, 1), NO_HEAD),
        (lambda: cache.logit_attrs(cache.accumulated_resid(), 1), NO_HEAD),
        (lambda: ci.ablate_heads(headless, images), "has no logits, "),
        (lambda: ci.to_bridge(headless), "returns no logits"),
    ):
        refuses(match, read)
    assert "unembed.W_U" not in headless.tl_parameters()
    assert ci.viz.explore(cache, images).title
    assert ci.maps.attention(cache, 1).shape == (2, 5, *headless.cfg.grid)
    assert headless.fresh()(images).shape == (2, D_MODEL)
