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
# **What can you see inside a white-box transformer?** Load one, keep its activations, and look at
# them.
#
# The layers of CRATE were derived from an optimisation problem. Each layer takes two steps of it.
# *Compress* is attention in which query, key and value are one code in a learned subspace.
# *Sparsify* is one step towards a sparse code in a learned dictionary.

# %%
# %matplotlib inline
import torch

import crate_interp as ci

# True: CRATE-S trained on ImageNet-1k. Download it first; ci.load says from where.
REAL = False
NAME = "crate-small-imagenet1k" if REAL else "crate-tiny-cutouts"
model = ci.load(NAME)
data = ci.data.embedded("cutouts")
images = model.preprocess(data[:2]["image"])
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, images {list(images.shape)}")
print(f"{model.cfg.n_layers} layers, {model.cfg.n_heads} heads")

# %% [markdown]
# Every equation has a hook point. `run_with_cache` keeps the activation at each of them.

# %%
with torch.no_grad():
    logits, cache = model.run_with_cache(images)
for name in ("attn.hook_u", "attn.hook_pattern", "mlp.hook_post", "hook_resid_post"):
    print(f"{name:20} {list(cache[f'blocks.3.{name}'].shape)}")
print(
    "answers:",
    [model.cfg.labels[k] if model.cfg.labels else int(k) for k in logits.argmax(-1).tolist()],
)
print("labels: ", [data.features["label"].int2str(k) for k in data[:2]["label"]])

# %% [markdown]
# Look at what CLS attends to in every head of one layer. The training data did not say where
# objects are.

# %%
ci.viz.attention_on_image(cache, 3, images)

# %% [markdown]
# Three more views: every layer and head in one page, the code of four atoms over the image, and
# what each layer would answer.

# %%
ci.viz.head_grid(cache, images)

# %%
ci.viz.activations(cache, range(4))

# %%
ci.circuits.logit_lens(cache, sample=0, count=3)

# %% [markdown]
# Now the numbers of each layer. `ci.probe` measures a cache, and `ci.sweep` measures a data set.
# Codes do not become sparser from layer to layer in a straight line, and the rate does not fall in
# every layer. The next notebook tests whether each layer does what the papers say.

# %%
result = ci.probe(cache)
table = result.layers().pivot_table(index="layer", columns=["probe", "statistic"], values="mean")
print(table["compression"].round(1).to_string())
print(table["sparsity"].round(3).to_string())
