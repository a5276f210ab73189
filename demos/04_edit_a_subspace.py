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
# # Edit a subspace
#
# **What is a head for, and an atom?** Take it away, push along it, or put in what it was on another
# image, and see what the model answers.

# %%
# %matplotlib inline
import torch
from matplotlib.figure import Figure

import crate_interp as ci

edit = ci.hooks.edit  # plain functions (tensor, hook) -> tensor

REAL = False  # True: CRATE-S trained on ImageNet-1k; download it first, ci.load says from where
model = ci.load("crate-small-imagenet1k" if REAL else "crate-tiny-fashion")
data = ci.data.embedded("fashion")
images, labels = model.preprocess(data["image"]), torch.tensor(data["label"])


def accuracy(*hooks):
    with torch.no_grad(), model.hooks(list(hooks)):
        return (model(images).argmax(-1) == labels).float().mean().item()


print(f"accuracy {accuracy():.3f} on {len(labels)} images, chance 0.1")

# %% [markdown]
# ## Ablate each head
# At `attn.hook_z` a head is its output in its own subspace; `zero` takes it away, `mean` leaves
# what it says on average.

# %%
with torch.no_grad():
    _, cache = model.run_with_cache(images)
drop = torch.zeros(model.cfg.n_layers, model.cfg.n_heads)
for layer in range(model.cfg.n_layers):
    for head in range(model.cfg.n_heads):
        drop[layer, head] = accuracy() - accuracy(
            (f"blocks.{layer}.attn.hook_z", edit.mean(cache["z", layer], heads=head))
        )
figure = Figure(figsize=(4, 3), layout="constrained")
axes = figure.subplots()
image = axes.imshow(drop, cmap="RdBu_r", vmin=-drop.abs().max(), vmax=drop.abs().max())
axes.set(xlabel="head", ylabel="layer", title="accuracy lost without the head")
figure.colorbar(image)
figure.savefig("ablated-heads.png", dpi=120)
figure

# %% [markdown]
# ## Take the subspace itself out
# Out of the normalised tokens the head has nothing left to read; other heads lose what their
# subspaces share with it. Out of the stream LayerNorm mixes, so that codes come back, and the skip
# path loses the span too. Beside: a random subspace of the same width.

# %%
layer, head = divmod(int(drop.argmax()), model.cfg.n_heads)
u = model.blocks[layer].attn.U[head]
take = edit.project_out(u)
other = edit.project_out(torch.randn(u.shape, generator=torch.Generator().manual_seed(0)))
for point in ("ln1.hook_normalized", "hook_resid_pre"):
    with torch.no_grad(), model.hooks([(f"blocks.{layer}.{point}", take)]):
        code = model.run_with_cache(images[:8], names_filter=f"blocks.{layer}.attn.hook_u")[1][
            "u", layer, "attn"
        ]
    print(
        f"L{layer}H{head}, span taken out of {point}: "
        f"largest code {code[:, :, head].abs().max():.2g}, "
        f"accuracy {accuracy((f'blocks.{layer}.{point}', take)):.3f}, "
        f"without a random subspace {accuracy((f'blocks.{layer}.{point}', other)):.3f}"
    )

# %% [markdown]
# ## Steer along an atom, and re-threshold
# In CRATE the code is the next stream: adding along atom j pushes that entry of every token. Of the
# 128 atoms of the last layer, the one whose push gathers the most answers, and the median atom
# beside it: most atoms move little.

# %%
last = model.cfg.n_layers - 1
axes = torch.eye(model.cfg.d_mlp)


def answers(atom, strength):
    with (
        torch.no_grad(),
        model.hooks([(f"blocks.{last}.hook_resid_post", edit.steer(axes[atom], strength))]),
    ):
        return model(images[:64]).argmax(-1).bincount(minlength=model.cfg.n_classes)


gathered = torch.stack([answers(atom, 8).max() for atom in range(model.cfg.d_mlp)])
for atom in (int(gathered.argmax()), int(gathered.argsort()[len(gathered) // 2])):
    for strength in (0, 4, 8):
        counts = answers(atom, strength)
        label, most = model.cfg.labels[int(counts.argmax())], int(counts.max())
        print(
            f"atom {atom} of layer {last}, strength {strength:+d}: "
            f"most answered {label!r}, {most} of 64"
        )
for by in (0.0, 0.2, 0.5):
    edits = [(f"blocks.{k}.mlp.hook_post", edit.threshold(by)) for k in range(last + 1)]
    print(f"codes of every layer thresholded by {by} more: accuracy {accuracy(*edits):.3f}")

# %% [markdown]
# ## Patch from another image
# One token of one layer at a time, from an image of another class: where is the answer?

# %%
clean = int((labels == 1).nonzero()[0])  # a trouser
bag = int((labels == 8).nonzero()[0])  # a bag
gap = lambda logits: (logits[:, 1] - logits[:, 8]).mean()
with torch.no_grad():
    _, source = model.run_with_cache(images[clean : clean + 1])
moved = ci.circuits.patching.get_act_patch_resid_pre(
    model, images[bag : bag + 1], source, gap, positions=[0, 18, 25, 32]
)
print(
    "logit of 'Trouser' minus 'Bag' with CLS (first column) "
    "or a middle patch put in from the trouser, by layer:"
)
print(moved.numpy().round(2))
