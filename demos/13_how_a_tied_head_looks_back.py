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
# # How does a tied head look back?
#
# **It climbs.** In CRATE a token's code is its query, its key and its value. A token scores another
# above itself only if the other's code is longer: a head that looks back stands on a staircase of
# norms. Make all norms equal, and the network forgets how to continue what repeats; its twin of
# free queries and keys hardly notices.

# %%
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import crate_interp as ci
from crate_interp.questions.untrained_twins import shuffled, twin

model, gpt = ci.load("crate-tiny-induction"), ci.load("gpt-tiny-induction")
tokens = torch.tensor(ci.data.embedded("repeats")["input_ids"])  # a separator, then what repeats
logits, cache = model.run_with_cache(tokens)


def period_of(sequence):
    """Returns the shortest period of what follows the separator."""
    body = sequence[1:]
    return next(n for n in range(1, len(body)) if torch.equal(body[n:], body[:-n]))


# the next tokens that can be known: those that stand one period before
known = (
    torch.arange(tokens.shape[1] - 1) > torch.tensor([period_of(one) for one in tokens])[:, None]
)

# %% [markdown]
# ## The staircase
# A string of random tokens repeats. Each dot is a token; its height is the norm of its code in this
# head. An arrow goes to the token that it looks at most. All arrows climb, and at equal norms there
# are none: every token looks at itself.

# %% tags=["lead"]
ci.viz.norm_ladder(cache, layer=1, head=0, sample=3)

# %% [markdown]
# ## Why it must be so
# A token p with code u_p scores another token j above itself by
#
# s(p, j) - s(p, p) = (|u_j|² - |u_p|²) / 2√d − |u_p - u_j|² / 2√d:
#
# what the norm rises, less how far the codes are apart. The second part never helps.

# %%
networks = {"trained": model, "untrained": twin(model, 0), "shuffled weights": shuffled(model, 0)}
rows = {}
for name, network in networks.items():
    table: Any = ci.sweep(network, tokens, probes=["ladder"], controls=0, progress=False).heads()
    rows[name] = table.pivot_table(index="layer", columns="statistic", values="mean")
names = ["norm", "self_share", "rise", "distance", "upward_share", "flat_share", "order"]
pd.concat(rows)[names].round(2)

# %% [markdown]
# ## Does the network need it?
# We keep the direction of every query and key, and exchange the norms in one layer: all equal, each
# position's mean over the sequences (the staircase alone), or in another order. Each is the control
# of the others; the GPT has a matrix each for queries, keys and values.


# %%
def right(network, layer, name):
    """Returns the share of the next tokens that it has right, of those that can be known."""
    edit = ci.surgeries.replaced(network, attention=name, layers=[layer]) if name else nullcontext()
    with edit, torch.no_grad():
        best = network(tokens)[:, :-1].argmax(dim=-1)
    return (best == tokens[:, 1:])[known].double().mean().item()


found = {
    (kind, layer): {name: right(network, layer, name) for name in ("flat_norms", "permuted_norms")}
    for kind, network in (("tied", model), ("untied", gpt))
    for layer in range(3)
}
pd.DataFrame(found).T.round(3)

# %% [markdown]
# ## Five trainings, and intervals
# `ci.surgery` has all four exchanges, in each layer and in all (-1): the share of all next tokens
# that are right, its 95 % interval as a change, and the loss. The first string of a sequence cannot
# be known, so no network is right everywhere.

# %%
options: Any = {"replacements": ["flat_norms", "ladder_only", "permuted_norms", "masked_diagonal"]}
options |= {"mixes": [1.0], "directions": 2, "progress": False}


def changes(network, data, limit=None):
    """Returns the accuracy at other norms, by replacement and layer."""
    table = ci.surgery(network, data, **options, limit=limit).table("mixes")
    table = table.set_index(["replacement", "layer"])
    return table[["accuracy", "accuracy_low", "accuracy_high", "loss_change"]]


pd.concat({"tied": changes(model, tokens), "untied": changes(gpt, tokens)}, axis=1).round(3)

# %%
flat = {("tied", 0): model, ("untied", 0): gpt}
beside = Path(globals().get("__file__", "notebook")).parent / "weights"
for folder in sorted(beside.glob("*-induction-seed-*")):
    flat["tied", int(folder.name[-1])] = ci.load(folder)
seeds = pd.DataFrame(
    {
        key: {"as it is": right(network, 0, None)}
        | {f"flat, layer {layer}": right(network, layer, "flat_norms") for layer in range(3)}
        for key, network in sorted(flat.items())
    }
).T
seeds.round(3)

# %% [markdown]
# ## In other models it costs less
# Pictures lose some points in early layers, a language model some tenths of a nat.

# %%
pictures, lm = ci.load("crate-tiny-pictures"), ci.load("crate-tiny-lm")
options["replacements"] = ["flat_norms"]
others = {
    "pictures": changes(pictures, "embedded:pictures"),
    "text": changes(lm, "embedded:held-out-text"),
}
pd.concat(others, axis=1).loc["flat_norms"].round(3)

# %%
tied, untied = (
    [f"{seeds.loc[kind][column].mean():.0%}" for column in ("as it is", "flat, layer 0")]
    for kind in ("tied", "untied")
)
print(
    f"Answer: with equal norms in layer 0 {len(seeds.loc['tied'])} tied networks keep {tied[1]} of "
    f"the tokens that can be known, from {tied[0]}; the untied twin keeps {untied[1]}, from "
    f"{untied[0]}."
)
