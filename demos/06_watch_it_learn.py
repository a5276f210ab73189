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
# **When in training do compression, sparsity and accuracy take their final values?** All three
# settle in the same stretch, after step 640 and by step 2,560. In training the last layer's
# objective falls through LayerNorm, as attention reads the stream (picture), and rises at a fixed
# norm. The first checkpoint, step 0, is the untrained network.

# %%
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
    right = torch.stack([model(images).argmax(-1) == labels for model in models]).double()
for name, own in zip(names, right, strict=True):
    half = 1.97 * own.std() / len(own) ** 0.5
    print(f"{name:>10}: accuracy {own.mean():.3f} ± {half:.3f} on {len(own)} images (chance 0.1)")

# %%
PROBES = [*ci.probes.DEFAULT, "objective"]
how = dict(limit=64, probes=PROBES, controls=0, progress=False)
swept = [ci.sweep(model, DATA, **how) for model in models]
ci.viz.layers(swept, "compression.official_rate", labels=names)

# %%
ci.viz.layers(swept, "sparsity.zero_fraction", labels=names)

# %% [markdown]
# Below is the share of zeros in the code, for each layer and step:

# %%
import pandas as pd

is_it = "probe == 'sparsity' and statistic == 'zero_fraction'"
zeros = [result.layers().query(is_it).set_index("layer")["mean"] for result in swept]
pd.concat(zeros, axis=1, keys=names).round(3)

# %% [markdown]
# ## The objective
# A layer is meant to lower lambda |Z|_1 + R^c - R, where R^c is over the layer's own subspaces. All
# three terms depend on the length of Z, so we use three scalings: the stream as it is, after the
# LayerNorm of the layer's attention, and at a fixed norm. Lower is better. U changes in training,
# so trust the shapes of the lines more than their heights.

# %% tags=["lead"]
ci.viz.layers(swept, "objective.l1_read", labels=names)

# %%
ci.viz.layers(swept, "objective.l1_unit", labels=names)

# %%
ci.viz.layers(swept, "objective.l1_stream", labels=names)

# %% [markdown]
# What do the last two layers and the training add to the objective? The changes are paired by
# image, with 95 % intervals over images.

# %%
FRAMES = {"stream": "Stream as it is", "read": "Through LayerNorm", "unit": "At a fixed norm"}
for frame, title in FRAMES.items():
    first, last = (
        result.samples().pivot(index="sample", columns="layer", values=f"objective.l1_{frame}")
        for result in (swept[0], swept[-1])
    )
    changes = {"layer 3 to 5, step 0": first[5] - first[3], "layer 3 to 5, trained":
               last[5] - last[3], "step 0 to trained, layer 5": last[5] - first[5]}  # fmt: skip
    for what, change in changes.items():
        half = 2.0 * change.std() / len(change) ** 0.5
        print(f"{title}, {what}: {change.mean():+.0f} ± {half:.0f} nats")

# %% [markdown]
# On the stream as it is, the objective falls from layer to layer after layer 1, and falls more in
# the trained network. Under the other two scalings the last two layers of the trained network raise
# the objective. In layer 5 training lowered it on the stream and through LayerNorm, and raised it
# at a fixed norm. So the verdict on the objective depends on the scaling, as for R^c (notebook 02).

# %% [markdown]
# ## When is it done?
# A number has settled once it stays close to its last value, within 10 % of its total change. The
# checkpoint where this happens depends on the images. So we draw the images again 2,000 times, and
# give the middle 95 % of the checkpoints. This is one training run; others may differ.


# %%
def by_image(statistic):
    """Returns a statistic of each step and image, mean over layers."""
    rows = [result.samples().groupby("sample")[statistic].mean() for result in swept]
    return torch.tensor(pd.concat(rows, axis=1).to_numpy().T)


def settled(means):
    """Returns the first checkpoint from which on means `[step, draw]` stay near the last."""
    far = (means - means[-1]).abs() > 0.1 * (means[0] - means[-1]).abs()
    return (far * torch.arange(1, len(means) + 1)[:, None]).amax(dim=0)


series = {
    "rate after attention": by_image("compression.official_rate"),
    "share of zeros": by_image("sparsity.zero_fraction"),
    "accuracy": right,
}
shares = {}
for what, values in series.items():
    first, last = values[0], values[-1]
    print(
        f"{what}: {first.mean():.3f} untrained (sd {first.std():.3f} over {len(first)} images), "
        f"{last.mean():.3f} trained (sd {last.std():.3f})"
    )
    means = values.mean(dim=1)
    shares[what] = ((means - means[0]) / (means[-1] - means[0]) + 0.0).tolist()
print("\nshare of the total change at each checkpoint:")
print(pd.DataFrame(shares, index=names).round(2).to_string())

# %%
generator, said = torch.Generator().manual_seed(0), []
for what, values in series.items():
    draws = torch.randint(values.shape[1], (2000, values.shape[1]), generator=generator)
    ends = settled(values[:, draws].mean(dim=2)).sort().values
    low, high = (names[ends[place]] for place in (50, 1949))
    at = int(settled(values.mean(dim=1, keepdim=True)))
    said.append(
        f"the {what} settles after {names[max(at - 1, 0)]} and by {names[at]} "
        f"(95 % of the draws: {low if low == high else f'{low} to {high}'})"
    )
print("Answer:", "; ".join(said) + ".")
