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
# **What is a head for, and what is an atom for?** Remove it, push along it, or replace it with its
# value on another image, and see what the model answers.

# %%
# %matplotlib inline
import torch
from matplotlib.figure import Figure

import crate_interp as ci

# plain functions (tensor, hook) -> tensor
edit = ci.hooks.edit

# True: CRATE-S trained on ImageNet-1k. Download it first; ci.load says from where.
REAL = False
model = ci.load("crate-small-imagenet1k" if REAL else "crate-tiny-fashion")
data = ci.data.embedded("fashion")
images, labels = model.preprocess(data["image"]), torch.tensor(data["label"])


def accuracy(*hooks):
    with torch.no_grad(), model.hooks(list(hooks)):
        return (model(images).argmax(-1) == labels).float().mean().item()


print(f"accuracy {accuracy():.3f} on {len(labels)} images, chance 0.1")

# %% [markdown]
# ## Ablate each head
# At `attn.hook_z` is the output of each head in its own subspace. `zero` removes it, and `mean`
# replaces it with its mean over images.

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
# ## Project the subspace out
# Project the head's subspace out of the normalised tokens. Then the head has nothing to read, and
# other heads lose what their subspaces share with it. Projected out of the stream instead, some of
# its codes come back, because LayerNorm mixes the entries of a token, and the skip path loses the
# span too. Compare with a random subspace of the same width.

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
    without = accuracy((f"blocks.{layer}.{point}", take))
    random = accuracy((f"blocks.{layer}.{point}", other))
    print(
        f"L{layer}H{head}, span taken out of {point}: "
        f"largest code {code[:, :, head].abs().max():.2g}, "
        f"accuracy {without:.3f}, without a random subspace {random:.3f}"
    )

# %% [markdown]
# ## Steer along an atom, and raise the threshold
# In CRATE the code is the next stream, so a push along atom j changes that entry of every token.
# Among the 128 atoms of the last layer, take the one whose push gathers the most answers, and the
# median atom. Most atoms move little.

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
        most = model.cfg.labels[int(counts.argmax())]
        print(
            f"atom {atom} of layer {last}, strength {strength:+d}: "
            f"most frequent answer {most!r}, {int(counts.max())} of 64"
        )
for by in (0.0, 0.2, 0.5):
    hooks = [(f"blocks.{k}.mlp.hook_post", edit.threshold(by)) for k in range(last + 1)]
    print(f"codes of every layer thresholded by {by} more: accuracy {accuracy(*hooks):.3f}")

# %% [markdown]
# ## Patch from another image
# Where is the answer? Patch one token of one layer at a time from an image of another class.

# %%
trouser = int((labels == 1).nonzero()[0])
bag = int((labels == 8).nonzero()[0])
gap = lambda logits: (logits[:, 1] - logits[:, 8]).mean()
with torch.no_grad():
    _, source = model.run_with_cache(images[trouser : trouser + 1])
moved = ci.circuits.patching.get_act_patch_resid_pre(
    model, images[bag : bag + 1], source, gap, positions=[0, 18, 25, 32]
)
print("The logit of 'Trouser' minus that of 'Bag', by layer, with one token from the trouser.")
print("The first column is CLS, the others are patches in the middle.")
print(moved.numpy().round(2))
