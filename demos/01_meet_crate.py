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
# # Meet CRATE
#
# **What can you see inside a white-box transformer?** You can see every step: what each head looks
# at, which atoms are on, and how much a token costs. In the picture CLS attends to the drawing, in
# each head to other parts of it. The code gets sparser by layer, and denser in the last layer.
#
# The layers of CRATE were derived from an optimisation problem. Each layer takes two steps to solve
# it. *Compress* is attention in which query, key and value are one code in a learned subspace.
# *Sparsify* is one step towards a sparse code in a learned dictionary.

# %%
import torch

import crate_interp as ci

# True: CRATE-S trained on ImageNet-1k. Download it first; ci.load says from where.
REAL = False
NAME = "crate-small-imagenet1k" if REAL else "crate-tiny-pictures"
model = ci.load(NAME)
data = ci.data.embedded("pictures")
shown = data[4:6]
images = model.preprocess(shown["image"])
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, images {list(images.shape)}")
model.cfg

# %% [markdown]
# Every equation has a hook point. `run_with_cache` keeps the activation at each of them.

# %%
with torch.no_grad():
    logits, cache = model.run_with_cache(images)
cache

# %%
names = model.cfg.labels or range(model.cfg.n_classes)
print("answers:", [names[k] for k in logits.argmax(-1).tolist()])
print("labels: ", [data.features["label"].int2str(k) for k in shown["label"]])

# %% [markdown]
# Look at what CLS attends to in every head of one layer. The training data did not say where
# objects are.

# %% tags=["lead"]
ci.viz.attention_on_image(cache, 3, images, dpi=110)

# %% [markdown]
# The explorer has every layer and head in one page. Point at a patch: each head shows what the
# patch attends to; a button shows which patches have similar codes instead. Arrow keys move between
# layers. Press "this head" or "this patch" to see the answer without it. `.save(path)` writes the
# page as one file that needs no network.

# %%
off = ci.circuits.switched_off(model, images[0])
ci.viz.explore(cache, images, without=off)

# %% [markdown]
# Two more views show the code of four atoms over the image, and what each layer would answer.

# %%
ci.viz.activations(cache, range(4), images=images)

# %%
ci.circuits.logit_lens(cache, sample=0, count=3)

# %% [markdown]
# ## What follows
# Now measure each layer. `ci.probe` measures a cache, and `ci.sweep` measures a data set. Do codes
# become sparser from layer to layer? Differences are paired by image, with 95 % intervals.

# %%
with torch.no_grad():
    right = model(model.preprocess(data["image"])).argmax(-1) == torch.tensor(data["label"])
share, count = right.float().mean().item(), len(right)
print(f"accuracy {share:.3f} ± {1.97 * (share * (1 - share) / count) ** 0.5:.3f}, {count} images")

result = ci.sweep(model, data, limit=64, controls=0, progress=False)
zeros = result.samples().pivot(index="sample", columns="layer", values="sparsity.zero_fraction")
zeros = zeros.dropna(axis=1)
print("zeros in the code, by layer:", *zeros.mean().round(3))
steps = zeros.diff(axis=1).iloc[:, 1:]
half = 2.0 * steps.std() / len(steps) ** 0.5
sparser, denser = (steps.mean() > half).sum(), (steps.mean() < -half).sum()
whole = zeros.iloc[:, -1] - zeros.iloc[:, 0]
print(
    f"Answer: you can see every step, and not all go one way. On {len(zeros)} images the code "
    f"becomes sparser in {sparser} of {steps.shape[1]} steps from layer to layer and denser in "
    f"{denser}; from the first layer to the last the share of zeros changes by "
    f"{whole.mean():+.3f} ± {2.0 * whole.std() / len(whole) ** 0.5:.3f}. This is one small "
    "network: notebook 02 tests whether each layer does what the papers say, beside untrained ones."
)
