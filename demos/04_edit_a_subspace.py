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
# value on another image, and see what the model answers. Head L0H2 counts most: without it the loss
# rises by 1.18 nats (.76 to 1.60), on images that did not choose it. Removing heads of the last two
# layers costs nothing (picture). CLS has the answer before layer 3: put there into another image,
# it changes that image's answer.

# %%
import torch

import crate_interp as ci

# plain functions (tensor, hook) -> tensor
edit = ci.hooks.edit

# True: CRATE-S trained on ImageNet-1k. Download it first; ci.load says from where.
REAL = False
model = ci.load("crate-small-imagenet1k" if REAL else "crate-tiny-pictures")
data = ci.data.embedded("pictures")
images, labels = model.preprocess(data["image"]), torch.tensor(data["label"])

# What is chosen is chosen on one half of the images, and judged on the other.
choose, judge = slice(0, None, 2), slice(1, None, 2)


def losses(half, *hooks):
    """Returns the cross-entropy of each image of a half, and whether the answer is right."""
    with torch.no_grad(), model.hooks(list(hooks)):
        logits = model(images[half])
    right = logits.argmax(-1) == labels[half]
    return torch.nn.functional.cross_entropy(logits, labels[half], reduction="none"), right.float()


def said(differences):
    """Returns the mean of paired differences and its 95 % interval, as words."""
    mean, half = differences.mean(), 2 * differences.std() / len(differences) ** 0.5
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


HALVES = {"choose": choose, "judge": judge}
whole = {half: losses(part) for half, part in HALVES.items()}
for half, (loss, right) in whole.items():
    print(
        f"{half}: {len(right)} images, loss {loss.mean():.3f}, accuracy {right.mean():.3f} "
        f"± {2 * right.std() / len(right) ** 0.5:.3f}, chance {1 / model.cfg.n_classes:.3f}"
    )

# %% [markdown]
# ## Ablate each head
# `attn.hook_z` holds the output of each head in its own subspace. `zero` removes it, and `mean`
# replaces it with its mean over images. Few answers change without a head, so accuracy is too
# coarse to rank heads here. The loss changes on every image. If heads really differ, both halves of
# the images must rank them alike.

# %% tags=["lead"]
costs = {}
for half, part in HALVES.items():
    with torch.no_grad():
        _, cache = model.run_with_cache(images[part])
    rows = []
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            hook = (f"blocks.{layer}.attn.hook_z", edit.mean(cache["z", layer], heads=head))
            loss, right = losses(part, hook)
            rows.append(torch.stack([loss - whole[half][0], whole[half][1] - right]))
    costs[half] = torch.stack(rows, dim=1)  # [loss or accuracy, head, image]
alike = [
    torch.corrcoef(torch.stack([costs[half][place].mean(dim=1) for half in costs]))[0, 1]
    for place in (0, 1)
]
print("correlation of the halves over heads, by loss {:+.2f}, by accuracy {:+.2f}".format(*alike))
best = int(costs["choose"][0].mean(dim=1).argmax())
layer, head = divmod(best, model.cfg.n_heads)
lost, wrong = (said(costs["judge"][place][best]) for place in (0, 1))
print(f"L{layer}H{head} costs most on one half. Without it, on the other half:")
print(f"loss {lost}, share of wrong answers {wrong}")
drop = costs["judge"][0].mean(dim=1).view(model.cfg.n_layers, -1)
ci.viz.heatmap(drop, title="rise of the loss without the head", unit="nats")

# %% [markdown]
# ## Project the subspace out
# Project the head's subspace out of the normalised tokens. Then the head has nothing to read, and
# other heads lose what their subspaces share with it. If the subspace is projected out of the
# stream instead, some of its codes come back, because LayerNorm mixes the entries of a token. The
# skip path then loses the subspace, too. Compare with 20 random subspaces of the same width: does
# this subspace count, or would any other do?

# %%
u = model.blocks[layer].attn.U[head]
generator = torch.Generator().manual_seed(0)
others = [torch.randn(u.shape, generator=generator) for _ in range(20)]
shares = {}
for point in ("ln1.hook_normalized", "hook_resid_pre"):
    name = f"blocks.{layer}.{point}"
    take = edit.project_out(u)
    with torch.no_grad(), model.hooks([(name, take)]):
        code = model.run_with_cache(images[:8])[1]["u", layer, "attn"]
    edits = [(name, take), *((name, edit.project_out(v)) for v in others)]
    cost, *null = (losses(judge, one)[0] - whole["judge"][0] for one in edits)
    null = torch.stack(null).mean(dim=1)
    shares[point] = (1 + int((null >= cost.mean()).sum())) / (1 + len(null))
    print(
        f"L{layer}H{head}, span taken out of {point}: "
        f"largest code {code[:, :, head].abs().max():.2g}, loss {said(cost)}; without a random "
        f"subspace {null.mean():+.3f} ({null.min():+.3f} to {null.max():+.3f}), share that costs "
        f"as much or more {shares[point]:.2f}"
    )

# %% [markdown]
# ## Steer along an atom, and raise the threshold
# In CRATE the code is the next stream, so a push along atom j changes that entry of every token.
# Take two of the last layer's 192 atoms: the atom whose push turns the most images to one answer,
# and the median atom. One half of the images chooses both atoms; the other half gives the answers.
# Only the last norm and the head run anew for each push.

# %%
last = model.cfg.n_layers - 1
axes = torch.eye(model.cfg.d_mlp)
with torch.no_grad():
    streams = {half: model(images[part], stop_at_layer=last + 1) for half, part in HALVES.items()}


def answers(half, atom, strength):
    pushed = edit.steer(axes[atom], strength)(streams[half], None)
    with torch.no_grad():
        logits = model(pushed, start_at_layer=last + 1)
    return logits.argmax(-1).bincount(minlength=model.cfg.n_classes)


gathered = torch.stack([answers("choose", atom, 8).max() for atom in range(model.cfg.d_mlp)])
for atom in (int(gathered.argmax()), int(gathered.argsort()[len(gathered) // 2])):
    for strength in (0, 4, 8):
        counts = answers("judge", atom, strength)
        most = model.cfg.labels[int(counts.argmax())]
        print(
            f"atom {atom} of layer {last}, strength {strength:+d}: "
            f"most frequent answer {most!r}, {int(counts.max())} of {int(counts.sum())}"
        )
for by in (0.0, 0.2, 0.5):
    hooks = [(f"blocks.{k}.mlp.hook_post", edit.threshold(by)) for k in range(last + 1)]
    right = losses(judge, *hooks)[1].mean()
    print(f"codes of every layer thresholded by {by} more: accuracy {right:.3f}")

# %% [markdown]
# ## Patch from another image
# Where is the answer? Patch one token of one layer at a time from an image of another class.

# %%
face, vehicle = (model.cfg.labels.index(name) for name in ("face", "vehicle"))
with torch.no_grad():
    guess = model(images).argmax(-1)
one, other = (int(((labels == kind) & (guess == kind)).nonzero()[0]) for kind in (face, vehicle))
gap = lambda logits: (logits[:, face] - logits[:, vehicle]).mean()
with torch.no_grad():
    _, source = model.run_with_cache(images[one : one + 1])
moved = ci.circuits.patching.get_act_patch_resid_pre(
    model, images[other : other + 1], source, gap, positions=[0, 103, 120, 137]
)
print("The logit of 'face' minus that of 'vehicle', by layer, with one token from the face.")
print("The first column is CLS, the others are patches in the middle.")
print(moved.numpy().round(2))

# %% [markdown]
# ## What follows

# %%
known = costs["judge"][0][best]
clear = known.mean() > 1.98 * known.std() / len(known) ** 0.5
special = [point for point, share in shares.items() if share <= 0.05]
print(
    f"Answer: on images that did not choose it, removing L{layer}H{head} "
    f"{'raises the loss' if clear else 'does not measurably raise the loss'}: {said(known)} nats, "
    f"{len(known)} images. Both halves order the heads with a correlation of {alike[0]:+.2f}."
)
print(
    f"Its subspace counts for more than a random one when taken out of {' and '.join(special)}."
    if special
    else "Taking its subspace out costs no more than taking out a random one."
)
