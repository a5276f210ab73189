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
# tests each claim in each layer, and does the same for an untrained twin.

# %%
# %matplotlib inline
import crate_interp as ci

# True: CRATE-S trained on ImageNet-1k. Download it first; ci.load says from where.
REAL = False
model = ci.load("crate-small-imagenet1k" if REAL else "crate-tiny-fashion")
audit = ci.audit(model, "embedded:fashion", limit=64, untrained=1, progress=False)
print(audit.headline())
print(audit.text())

# %% [markdown]
# `+` is kept, `-` is broken, `?` is undecided. The numbers in brackets are those of the untrained
# twin. A claim says little about training if an untrained network keeps it as well.

# %%
table = audit.table()
kept = table[["claim", "verdict", "untrained_verdict"]].replace(
    {"kept": 1, "broken": 0, "undecided": 0}
)
kept.groupby("claim", sort=False).sum().rename(
    columns={"verdict": "layers that keep it", "untrained_verdict": "of the untrained twin"}
)

# %% [markdown]
# Compare the rate by layer in the trained network and in three checkpoints from its training.

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
