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
# # Is it CRATE, or any transformer?
#
# **Which of the properties measured on CRATE come from its design?** A CRATE layer is made to
# compress tokens and to make them sparse. A ViT is not, but training may make it do the same. So
# here are five tiny CRATEs and five tiny ViTs, trained under one budget (`demos/train_pairs.py`):
# the same pictures in the same order, and equal numbers of steps, layers, heads and tokens. Their
# parameters are 215,786 and 215,298. We measure them at the same hook points, each kind beside
# networks with random weights. **Training compresses tokens and sharpens attention more in CRATE,
# and makes codes sparser more in the ViT** (picture). By the overlap of heads and by segmentation
# we can't tell the kinds apart.

# %%
import datasets
import numpy as np
import pyarrow.parquet
import torch
from scipy.stats import t as student
from transformers.utils import logging

import crate_interp as ci
from notebook_figures import networks_of_kinds

logging.disable_progress_bar()
SEEDS = range(5)
crates = [ci.load(f"weights/pair-crate-seed-{seed}") for seed in SEEDS]
vits = [ci.bridge.load(f"weights/pair-vit-seed-{seed}") for seed in SEEDS]
data = datasets.Dataset(pyarrow.parquet.read_table("weights/pairs.parquet"))

probes = [ci.probes.compression(norm=True, basis="orthonormal"), "sparsity", "alignment"]
probes += ["attention", "segmentation"]
comparison = ci.compare(
    crates, vits, data, probes=probes, limit=128, names=("CRATE", "ViT"), progress=False
)
networks = comparison.networks().query("layer < 4")

# %% [markdown]
# Each dot is a network's mean over its layers: hollow for random weights, filled for trained ones.
# The arrow says whether CRATE's design wants the number lower or higher.
#
# * **Compression**: how attention changes R^c of the stream as attention reads it. A ViT has no U,
#   so its value maps stand in for U.
# * **Sparsity**: Hoyer's index of the codes (ViT: of MLP neurons). It is 1 for one entry alone.
# * **Overlap of heads**: the mean squared cosine between two heads' subspaces. Chance is 0.25.
# * **Entropy of attention**, divided by the entropy of even attention.
# * **Segmentation**: how well the best head's attention mask fits the object, minus how well the
#   same mask fits another picture's object.


# %% tags=["lead"]
def one_each(side, trained, statistic):
    """One number for each network: the mean over layers."""
    probe, name = statistic.split(".")
    rows = networks.query(
        "side == @side and trained == @trained and probe == @probe and statistic == @name"
    )
    return rows.groupby("network")["mean"].mean().to_numpy()


RATE, MASS = "compression.subspace_rate_", "segmentation.mass_token_"
PROPERTIES = {  # what is drawn -> numbers of a side, which way CRATE's design wants it
    "compression": (lambda *it: one_each(*it, f"{RATE}mid") / one_each(*it, f"{RATE}pre") - 1, -1),
    "sparsity": (lambda *it: one_each(*it, "sparsity.hoyer"), 1),
    "overlap of heads": (lambda *it: one_each(*it, "alignment.head_overlap"), -1),
    "entropy of attention": (lambda *it: one_each(*it, "attention.entropy") / np.log(65), -1),
    "segmentation":
        (lambda *it: one_each(*it, f"{MASS}best") - one_each(*it, f"{MASS}other_best"), 1),
}  # fmt: skip
values = {
    name: {(side, trained): of(side, trained) for side in "ab" for trained in (False, True)}
    for name, (of, _) in PROPERTIES.items()
}

networks_of_kinds(
    {f"{name} {'↓' if PROPERTIES[name][1] < 0 else '↑'}": own for name, own in values.items()}
)

# %% [markdown]
# What does training bring? The table has trained minus random for each kind, and the difference
# between the kinds. Intervals (Welch's, 95 %) are over networks, so they hold for other seeds.


# %%
def contrast(*groups):
    """The sum of sign * mean over (sign, values), with Welch's interval."""
    value = sum(sign * x.mean() for sign, x in groups)
    parts = np.array([x.var(ddof=1) / len(x) for _, x in groups])
    sizes = np.array([len(x) for _, x in groups])
    freedom = parts.sum() ** 2 / (parts**2 / (sizes - 1)).sum()
    half = student.ppf(0.975, freedom) * np.sqrt(parts.sum())
    return value, value - half, value + half


def words(interval):
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*interval)


found = {}
print(f"{'trained less random':22} {'CRATE':>26} {'ViT':>26} {'CRATE less ViT':>26}")
for name, own in values.items():
    gains = [contrast((1, own[side, True]), (-1, own[side, False])) for side in "ab"]
    both = contrast(
        (1, own["a", True]), (-1, own["a", False]), (-1, own["b", True]), (1, own["b", False])
    )
    found[name] = (*gains, both)
    print(f"{name:22} {words(gains[0]):>26} {words(gains[1]):>26} {words(both):>26}")

# %% [markdown]
# Single layers of CRATE and ViT may differ even if their means over layers do not. Bands are 95 %
# intervals over networks; dashed lines are random networks. The lower row is CRATE minus ViT.

# %%
ci.viz.compare(comparison, "sparsity.hoyer")

# %% [markdown]
# A ViT's keys could stand in for U instead of its values. Does the answer depend on this choice?

# %%
keyed = [ci.bridge.load(f"weights/pair-vit-seed-{seed}", subspaces="key") for seed in SEEDS]
for choice, networks_of in (("values", vits), ("keys", keyed)):
    overlap = [ci.measures.head_overlap(block.attn.U.detach()).mean()
               for network in networks_of for block in network.blocks]  # fmt: skip
    print(f"overlap of heads, {choice}: {torch.stack(overlap).mean():.3f}; chance 0.250")

# %% [markdown]
# ## What follows
# A number that both kinds reach by training says nothing about CRATE's design. A number that CRATE
# already has with random weights comes from how its layers are built, not from what they learn.

# %%
WHOM = ("CRATE more than the ViT", "the ViT more than CRATE", "both, or it cannot be told",
        "neither")  # fmt: skip
groups = {whom: [] for whom in WHOM}
for name, intervals in found.items():
    way = PROPERTIES[name][1]
    crate, vit, both = (sorted(way * end for end in interval[1:]) for interval in intervals)
    more = (crate[0] > 0 and both[0] > 0, vit[0] > 0 and both[1] < 0, crate[0] > 0 or vit[0] > 0)
    groups[WHOM[(*more, True).index(True)]].append(name)
print("Answer: training brings what CRATE's design wants to")
for whom, names in groups.items():
    print(f"  {whom}: {', '.join(names) or 'nothing'}")

# %% [markdown]
# Under this budget the CRATEs answer better than the ViTs, as their cards say. So part of the
# difference may come from how well each network learned, and not from how it is built.
# `demos/crate_against_vit.py` measures more, with a random baseline for the compression, and p
# values adjusted for all measures.
