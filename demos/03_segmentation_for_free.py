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
# **Do attention maps of a classifier segment objects, although it never saw a mask?** Hardly, in a
# network as small as this. We take the head that is best on one half of 128 new drawings. On the
# other half it is no better than a map that is large in the middle (Jaccard index .32 for both);
# the contrast of colours is far better (.57). The maps do follow their image: on another drawing's
# mask the same heads score .13. The picture shows all heads of a layer, on the images with the
# highest and the lowest score.

# %%
import torch

import crate_interp as ci
from notebook_figures import masks_on

# True: CRATE-S trained on ImageNet-1k. Download it first, and name data with masks, "voc:DIR".
REAL = False
NAME, DATA = (
    ("crate-small-imagenet1k", "voc:VOC2012:val")
    if REAL
    else ("crate-tiny-pictures", "embedded:pictures")
)
model = ci.load(NAME)
# How many networks with random weights are scored too. One is quick; three are steadier.
NETWORKS = 1
segments = ci.segment(model, DATA, untrained=NETWORKS, progress=False)
print(segments.headline())
print(f"Untrained networks: {NETWORKS}. Other random weights would give another score.")

# %% [markdown]
# The table has the score of each layer. Its baselines are the same heads on another image's mask,
# the same heads with patches in random order, and untrained networks (the mean of `NETWORKS`).
# Published scores are of the "best head for each image". There the mask itself chooses the head, so
# the chance level is high too. `strongest` is the best mask that needs no network, such as the
# contrast of colours to the picture's border. `excess` is the score minus that of `strongest`.

# %%
shown = ["way", "layer", "head", "value", "low", "high", "other_image", "random", "untrained"]
segments.layers()[[*shown, "centre", "strongest", "excess", "excess_low", "excess_high"]].round(3)

# %% [markdown]
# Look at the images with the highest and the lowest score; the printed line names the head.

# %% tags=["lead"]
ranked = segments.table("images").sort_values("score", ascending=False)
chosen = [int(ranked["sample"].iloc[0]), int(ranked["sample"].iloc[-1])]
images = model.preprocess(ci.data.embedded("pictures")[chosen]["image"])
layer = int(ranked["layer"].iloc[0])
with torch.no_grad():
    _, cache = model.run_with_cache(images)
best, worst = ranked["score"].iloc[0], ranked["score"].iloc[-1]
print(f"{segments.named()}; best, worst: samples {chosen}, scores {best:.3f} and {worst:.3f}")
ci.viz.attention_on_image(cache, layer, images)

# %% [markdown]
# MaskCut segments objects without an attention map. It cuts the graph of patches with similar
# codes. The cell draws its masks for the two images above; it does not score them.

# %%
keys = cache["k", layer].flatten(2)[:, 1:]
masks = [ci.measures.maskcut(each, grid=model.cfg.grid, n_masks=1)[0] for each in keys]
pictures = ci.data.embedded("pictures")[chosen]["image"]
masks_on(pictures, masks)

# %% [markdown]
# ## What follows

# %%
table = segments.layers()
fixed = table[(table["way"] == "fixed head") & table["layer"].isna()].iloc[0]
levels = fixed[["other_image", "random", "untrained", "all_foreground", "centre"]]
beaten = fixed["low"] > levels.max()
print(
    f"Answer: the fixed head {'is' if beaten else 'is not'} above every chance level: "
    f"{fixed['value']:.3f} ({fixed['low']:.3f} to {fixed['high']:.3f}, {int(fixed['n'])} images), "
    f"the highest level {levels.max():.3f} ({levels.astype(float).idxmax()}), untrained "
    f"{fixed['untrained']:.3f} ({NETWORKS} network{'s' * (NETWORKS > 1)}). It is "
    f"{'above' if fixed['excess_low'] > 0 else 'not above'} the strongest mask without a network "
    f"({fixed['strongest']}, {fixed[fixed['strongest']]:.3f}): difference {fixed['excess']:+.3f} "
    f"({fixed['excess_low']:+.3f} to {fixed['excess_high']:+.3f}). "
    "The layer and head were chosen with masks, on the other half of the images: without masks one "
    "could not know which head to look at."
)
