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
# **What does a white-box transformer show of itself?** Load one, keep its activations, look at
# them.
#
# A CRATE layer is two steps of an optimisation that was written down first: *compress* (attention,
# in which query, key and value are one code in a learned subspace) and *sparsify* (one step towards
# a sparse code in a learned dictionary).

# %%
# %matplotlib inline
import torch

import crate_interp as ci

REAL = False  # True: CRATE-S trained on ImageNet-1k; download it first, ci.load says from where
NAME = "crate-small-imagenet1k" if REAL else "crate-tiny-cutouts"
model = ci.load(NAME)
data = ci.data.embedded("cutouts")
images = model.preprocess(data[:2]["image"])
print(
    f"{sum(p.numel() for p in model.parameters()):,} parameters, "
    f"{model.cfg.n_layers} layers, {model.cfg.n_heads} heads, images {list(images.shape)}"
)

# %% [markdown]
# Every equation has a hook point; `run_with_cache` keeps what was there.

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
# What CLS attends to, in every head of one layer. Nobody told the model where objects are.

# %%
ci.viz.attention_on_image(cache, 3, images)

# %% [markdown]
# The same with a slider over layers, as a page of its own; the code of four atoms over the image;
# what each layer would answer.

# %%
ci.viz.head_grid(cache, images)

# %%
ci.viz.activations(cache, range(4))

# %%
ci.circuits.logit_lens(cache, sample=0, count=3)

# %% [markdown]
# Numbers, layer by layer: `ci.probe` measures a cache, `ci.sweep` a data set. Codes get no sparser
# in a straight line, and the rate does not fall in every layer: the next notebook asks each layer
# whether it does what the papers say.

# %%
result = ci.probe(cache)
table = result.layers().pivot_table(index="layer", columns=["probe", "statistic"], values="mean")
print(table["compression"].round(1).to_string())
print(table["sparsity"].round(3).to_string())
