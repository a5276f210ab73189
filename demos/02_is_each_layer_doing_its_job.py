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
# # Is each layer doing its job?
#
# **Does every layer of a trained CRATE compress and sparsify, as its derivation says?** The audit
# asks each claim of each layer, and asks an untrained twin the same.

# %%
# %matplotlib inline
import crate_interp as ci

REAL = False  # True: CRATE-S trained on ImageNet-1k; download it first, ci.load says from where
model = ci.load("crate-small-imagenet1k" if REAL else "crate-tiny-fashion")
found = ci.audit(model, "embedded:fashion", limit=64, untrained=1, progress=False)
print(found.text())

# %% [markdown]
# `+` kept, `-` broken, `?` undecided; in brackets the untrained twin. A claim that a random network
# keeps just as well says little about training.

# %%
table = found.table()
kept = table[["claim", "verdict", "untrained_verdict"]].replace(
    {"kept": 1, "broken": 0, "undecided": 0}
)
kept.groupby("claim", sort=False).sum().rename(
    columns={"verdict": "layers that keep it", "untrained_verdict": "of the untrained twin"}
)

# %% [markdown]
# The rate along the layers, of the trained network and of three checkpoints along its training.

# %%
steps = [ci.load("crate-tiny-fashion", revision=f"step-{n}") for n in (0, 160, 2560)] + [
    ci.load("crate-tiny-fashion")
]
swept = [
    ci.sweep(step, "embedded:fashion", limit=32, probes="compression", progress=False)
    for step in steps
]
ci.viz.layers(
    swept, "compression.official_rate", labels=["step 0", "step 160", "step 2560", "trained"]
)
