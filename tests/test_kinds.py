"""What models say of themselves, so that nothing has to ask for their kind."""

import torch

import crate_interp as ci
from conftest import make, make_lm

SIZE = dict(d_model=30, n_layers=2, n_heads=5, image_size=(6, 20), patch_size=(2, 5))
TEXT = dict(d_embed=8, text_d_model=12, text_n_layers=1, text_n_heads=2, n_ctx=5, d_vocab=11)


def facts(model):
    return model.unit, model.has_cls, model.has_logits, model.towers


def test_models_say_what_they_take_and_return(images):
    mae = ci.HookedCrateMAE(ci.CrateConfig(family="crate-mae", decoder_n_heads=5, **SIZE)).eval()
    clip = ci.HookedCrateCLIP(ci.CrateConfig(family="clipa", **SIZE, **TEXT)).eval()
    assert facts(make()) == ("images", True, True, ())
    assert facts(make_lm()) == ("windows", False, True, ())
    assert facts(mae) == ("images", True, False, ())
    assert facts(mae.run_with_cache(images)[1].decoder.model) == facts(mae)
    assert facts(clip) == ("images", False, False, ("visual", "text"))
    assert facts(clip.visual) == ("images", True, True, ())
    assert facts(clip.text) == ("windows", False, True, ())


def test_a_full_forward_runs_every_layer_on_every_token(images):
    tokens = torch.randint(47, (2, 7))
    mae = ci.HookedCrateMAE(ci.CrateConfig(family="crate-mae", decoder_n_heads=5, **SIZE)).eval()
    for model, batch in ((make(), images), (make_lm(), tokens), (mae, images)):
        seen = []
        hooks = [
            (name, lambda tensor, hook, seen=seen: seen.append(hook.name))
            for name in model.hook_dict
            if name.endswith(("hook_resid_post", "ln_final.hook_normalized"))
        ]
        with torch.no_grad(), model.hooks(hooks):
            assert model.full_forward(batch) is None
        layers = [name for name in model.hook_dict if name.endswith("hook_resid_post")]
        assert [name for name in seen if name in layers] == layers
        assert ("ln_final.hook_normalized" in seen) == (model.unit == "images")
    with torch.no_grad():
        _, cache = mae.run_with_cache(images, names_filter="hook_mask", **mae.full_options)
    assert not cache["hook_mask"].any()
