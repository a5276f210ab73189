# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # CRATE-alpha from the Hub
#
# **What can you do with real weights?** CRATE-alpha B/16 has 72 million parameters (Apache-2.0).
# Its authors trained it on ImageNet-21k and then on ImageNet-1k. Load it, look at it, and attribute
# a logit. Without a network, this notebook says so and shows a random network instead.

# %%
import torch

import crate_interp as ci

NAME = "crate-alpha-b16"
row = ci.list_models().set_index("name").loc[NAME]
print(f"{row['repo']}/{row['file']}, {row['params']:,} parameters, {row['licence']}")
print(f"layout {row['status']}")
try:
    model = ci.load(NAME)
except (ci.CheckpointError, OSError, ValueError) as error:
    model = None
    print(f"skipped: {error}")

# %% [markdown]
# Its stream is a sum, so a logit can be divided exactly among heads and atoms. There are 196
# patches, each 16 pixels wide.

# %%
if model is not None:
    images = model.preprocess(ci.data.embedded("pictures")[:2]["image"])
    with torch.no_grad():
        logits, cache = model.run_with_cache(images)
    best = int(logits[0].argmax())
    parts = ci.circuits.logit_attribution(cache, best)
    print(f"logit of class {best}: {logits[0, best]:.3f}, sum of all parts {parts.total()[0]:.3f}")
    display(parts.table().head(12))  # noqa: F821
    display(ci.viz.attention_on_image(cache, 8, images))  # noqa: F821

# %% [markdown]
# The same steps work on a random network of the same family, so this page shows something offline
# too. Its numbers mean nothing.

# %%
if model is None:
    torch.manual_seed(0)
    size = dict(d_model=64, n_layers=3, n_heads=4, image_size=64, patch_size=16, n_classes=10)
    small = ci.HookedCrate(
        ci.CrateConfig(
            family="crate-alpha", mean=[0.5] * 3, std=[0.5] * 3, resize=64, crop=64, **size
        )
    ).eval()
    images = small.preprocess(ci.data.embedded("pictures")[:2]["image"])
    with torch.no_grad():
        logits, cache = small.run_with_cache(images)
    parts = ci.circuits.logit_attribution(cache, 3)
    print(f"logit of class 3: {logits[0, 3]:.4f}, sum of all parts {parts.total()[0]:.4f}")
    display(parts.table().head(6))  # noqa: F821

# %% [markdown]
# ## What follows
# The parts add up, by arithmetic, for any weights (up to rounding). We saw which part is the
# largest on one image only; other images may differ.

# %%
answer, kind = (3, "a random network") if model is None else (best, NAME)
gap = abs(parts.total()[0].item() - logits[0, answer].item())
print(f"Answer, for {kind}: heads and atoms add up to the logit to within {gap:.1e}.")
if model is None:
    print("Nothing was seen of CRATE-alpha, because its weights are not here.")
