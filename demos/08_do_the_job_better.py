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
# # Do the job better
#
# **Does the network answer better when a layer does its job better?** Attention in CRATE is derived
# as a gradient step that lowers the rate R^c, and the sparse step as one or two proximal steps on a
# lasso. The layers of crate-tiny-fashion do something else (notebook 02). Replace a layer's own
# step with the derived step, and look at the answers. **Not measurably.** With 5 % of the most
# promising step the loss falls in none of three networks (picture), and changes by .032 nats at
# most.

# %%
import numpy as np
import torch

import crate_interp as ci
from notebook_figures import slopes_by_layer

data = ci.data.embedded("fashion")
model = ci.load("crate-tiny-fashion")
images, labels = model.preprocess(data["image"]), torch.tensor(data["label"])

for mix in (0.0, 0.1, 1.0):
    with torch.no_grad(), ci.surgeries.replaced(model, attention="gradient", mix=mix):
        right = (model(images).argmax(-1) == labels).float().mean().item()
    print(f"{mix:4.0%} of the gradient step in every layer: accuracy {right:.3f}")

# %% [markdown]
# At full strength the derived step destroys the network. That says little: each layer was trained
# on what the layers before it write, and any other step changes what it reads. So ask where the
# loss goes when a step *begins* to replace a layer's own step. The answer is the slope d loss / d t
# of `(1 - t) own + t step` at t = 0, which one backward pass gives exactly.
#
# There are six steps. Four replace attention, at the norm of the layer's own update:
#
# * `gradient`: minus the gradient of R^c (in the language model, over the tokens seen).
# * `neumann`: the first two terms of its Neumann series.
# * `plus`, `minus`: the layer's own attention, with U or -U in place of the output map.
#
# Two replace the sparse step: `4 steps` on the layer's own lasso, and the lasso's `solution`.
#
# Each slope is compared with random directions as long as the change, the same for all samples.

# %%
fast = ["gradient", "neumann", "plus", "minus", 4]
# the beginnings of 22 texts, since windows of one text are alike
texts = [text[:1050] for text in ci.data.embedded("held-out-text")["text"]]
runs = {  # the solution of the language model's lassos would take minutes
    "crate-tiny-fashion": ("embedded:fashion", 128, [*fast, "solution"]),
    "crate-tiny-pictures": ("embedded:pictures", 64, [*fast, "solution"]),
    "crate-tiny-lm": (texts, 32, fast),
}
results, tables = {}, {}
for name, (source, limit, steps) in runs.items():
    how = dict(replacements=steps, limit=limit, mixes=(), progress=False)
    results[name] = ci.surgery(ci.load(name), source, **how)
    tables[name] = results[name].table().query("layer >= 0")
    print(results[name].headline())

# %% [markdown]
# Each point is the slope in one layer, with its 95 % interval over samples. Below 0 the loss falls.
# Grey is where 95 % of random directions lie.

# %% tags=["lead"]
slopes_by_layer(tables, [*fast[:4], "4 steps", "solution"])

# %% [markdown]
# A slope shows only the beginning. Does the loss still fall a little further on? In each network
# take the step and the layer with the steepest fall, and mix 5 % of the step into that layer. Judge
# it on other samples: on the samples that chose it, the steepest slope looks too steep.

# %%
further = {}
for name, table in tables.items():
    best = table.loc[table["slope"].idxmin()]
    source, limit, _ = runs[name]
    network = ci.load(name)
    text = network.unit == "windows"
    read = ci.data.open_text if text else ci.data.open_data
    samples = read(source, network.window_rows if text else network.preprocess)
    step = 4 if best["replacement"] == "4 steps" else best["replacement"]
    how = dict(replacements=[step], mixes=(0.05,), progress=False)
    other = ci.surgery(network, ci.data.part(samples, limit, 2 * limit), **how)
    row = other.table("mixes").query("layer == @best.layer").iloc[0]
    further[name] = row
    print(
        f"{name}, 5 % of {row['replacement']} in layer {row['layer']}: loss {row['loss']:.3f}, "
        f"change {row['loss_change']:+.4f} ({row['loss_low']:+.4f} to {row['loss_high']:+.4f})"
    )

# %%
for name, table in tables.items():
    steepest = table.loc[table["slope"].idxmin()]
    print(
        f"{name}: of {len(table)} slopes {table['falls'].sum()} are below 0 with their intervals "
        f"and {(table['slope_low'] > 0).sum()} above (without any effect, about "
        f"{0.025 * len(table):.0f} of each); {table['better'].sum()} fall more than in random "
        f"directions. Steepest: {steepest['replacement']} in layer {steepest['layer']}, "
        f"{steepest['slope']:.3f} ({steepest['slope_low']:.3f} to {steepest['slope_high']:.3f})."
    )
low, high = np.transpose([[row["loss_low"], row["loss_high"]] for row in further.values()])
helped = [name for name, end in zip(further, high, strict=True) if end < 0]
print()
answer = f"yes, in {', '.join(helped)}" if helped else "not measurably"
print(
    f"Answer: {answer}. With 5 % "
    f"of the most promising step the loss on other samples falls in {len(helped)} of "
    f"{len(further)} networks and rises in {(low > 0).sum()}; the changes lie between "
    f"{min(low):+.3f} and {max(high):+.3f} nats."
)
