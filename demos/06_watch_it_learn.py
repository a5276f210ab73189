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
# # Watch it learn
#
# **When in training do compression, sparsity and attention take their final form?** Run the same
# probes on checkpoints from the training.

# %%
# %matplotlib inline
import torch

import crate_interp as ci

# For your own run, load a list of folders with ci.load.
NAME, DATA = "crate-tiny-fashion", "embedded:fashion"
steps = [0, 10, 40, 160, 640, 2560]
models = [ci.load(NAME, revision=f"step-{step}") for step in steps] + [ci.load(NAME)]
names = [*(f"step {step}" for step in steps), "trained"]
data = ci.data.embedded("fashion")
images, labels = models[0].preprocess(data["image"]), torch.tensor(data["label"])
with torch.no_grad():
    for name, model in zip(names, models, strict=True):
        accuracy = (model(images).argmax(-1) == labels).float().mean()
        print(f"{name:>10}: accuracy {accuracy:.3f} (chance 0.1)")

# %%
swept = [ci.sweep(model, DATA, limit=64, controls=0, progress=False) for model in models]
ci.viz.layers(swept, "compression.official_rate", labels=names)

# %%
ci.viz.layers(swept, "sparsity.zero_fraction", labels=names)

# %% [markdown]
# The share of zeros in the code, one number for each layer and step:

# %%
import pandas as pd

zeros = [
    result.layers()
    .query("probe == 'sparsity' and statistic == 'zero_fraction'")
    .set_index("layer")["mean"]
    for result in swept
]
pd.concat(zeros, axis=1, keys=names).round(3)
