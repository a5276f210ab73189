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
# # Segmentation for free?
#
# **Do attention maps of a classifier segment objects, though it never saw a mask?** Score every
# head against masks, beside what chance has.

# %%
# %matplotlib inline
import torch

import crate_interp as ci
from crate_interp.viz.segment import sentence

# True: CRATE-S trained on ImageNet-1k; download it first, and name data with masks, "voc:DIR"
REAL = False
NAME, DATA = (
    ("crate-small-imagenet1k", "voc:VOC2012:val")
    if REAL
    else ("crate-tiny-cutouts", "embedded:cutouts")
)
model = ci.load(NAME)
found = ci.segment(model, DATA, limit=64, untrained=1, progress=False)
print(sentence(found))

# %% [markdown]
# By layer: the score, then in brackets the same maps on the mask of another image, in random order,
# and an untrained network. "Best head for each image" is how scores are published; the mask itself
# chooses the head there, so its chance level is high too.

# %%
found.layers()[
    ["way", "layer", "head", "value", "low", "high", "other_image", "random", "untrained", "centre"]
].round(3)

# %% [markdown]
# The image on which the fixed head does best, and the one on which it does worst.

# %%
ranked = found.images.sort_values("score", ascending=False)
chosen = [int(ranked["sample"].iloc[0]), int(ranked["sample"].iloc[-1])]
images = model.preprocess(ci.data.embedded("cutouts")[chosen]["image"])
layer = int(ranked["layer"].iloc[0])
with torch.no_grad():
    _, cache = model.run_with_cache(images)
print(
    f"best and worst: samples {chosen}, scores {ranked['score'].iloc[0]:.3f} "
    f"and {ranked['score'].iloc[-1]:.3f}, layer {layer}"
)
ci.viz.attention_on_image(cache, layer, images)

# %% [markdown]
# Objects without any attention map: cut the graph of patches whose codes are alike (MaskCut).

# %%
keys = cache["k", layer].flatten(2)[:, 1:]
masks = [ci.measures.maskcut(each, grid=model.cfg.grid, n_masks=1)[0] for each in keys]
for mask in masks:
    print("\n".join("".join("#" if on else "." for on in row) for row in mask.tolist()), "\n")
