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
# # Why does this head look there?
#
# **Which atoms of the two tokens match?** In pictures the 10 strongest atoms of a token carry most
# of a look at it: without them 3 % of the attention is left, without 10 random axes 15 % (median of
# 26 looks; atoms carry more in all of them). In texts it is the other way round: 37 % and 15 %, and
# random axes carry more in 21 of 22 looks. In both, atoms beat the largest codes and random atoms.

# %%
from typing import Any

import pandas as pd
import torch

import crate_interp as ci

lm = ci.load("crate-tiny-lm")
text = "Once upon a time there was a little girl who had a"

# %% [markdown]
# ## One look in a text
# The parts of all pairs add up to the score, exactly: nothing is fitted.

# %%
reason = ci.circuits.why_attends(lm, text, layer=2, head=1, query=11)
print(reason.headline())
print(reason.table("pairs")["part"].sum() - reason.meta["score"])
reason.table("pairs").query("query_atom >= 0 and key_atom >= 0").head(8)

# %%
ci.viz.why_figure(reason)

# %% [markdown]
# ## One look in a picture

# %% tags=["lead"]
model = ci.load("crate-tiny-pictures")
images = model.preprocess(ci.data.embedded("pictures")["image"])
reason = ci.circuits.why_attends(model, images[5], layer=3, head=0, query=0)
print(reason.headline())
ci.viz.why_figure(reason)

# %% [markdown]
# ## Many looks
# For heads and tokens drawn at random, what is left of the attention on the token that the head
# looks at most, without 10 entries of this token? A head that gives every token about the same
# looks nowhere, so we leave out tokens that get less than twice the even share.


# %%
def looks(network, samples, places, seed):
    """Returns the share of the attention that is left, by kind, for random heads and queries."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sample in samples:
        layer = int(torch.randint(1, network.cfg.n_layers, (), generator=generator))
        head = int(torch.randint(network.cfg.n_heads, (), generator=generator))
        query = int(torch.randint(places // 2, places, (), generator=generator))
        reason = ci.circuits.why_attends(network, sample, layer, head, query)
        if reason.meta["attention"] < 2 * reason.meta["even"]:
            continue
        table: Any = reason.table("effects")
        key = table[(table["side"] == "key") & (table["k"] == 10)]
        whole = table[table["k"] == 0].set_index("network")["attention"]
        left = key["attention"] / key["network"].map(whole).to_numpy()
        rows.append(key.assign(left=left).set_index(["network", "kind"])["left"])
    return pd.DataFrame(rows)


texts = [lm.to_tokens(one[:160])[0, :48] for one in ci.data.embedded("held-out-text")["text"]]
every = {"pictures": looks(model, images[:64], 257, 0), "texts": looks(lm, texts, 48, 0)}
pd.concat({name: table.median() for name, table in every.items()}, axis=1).round(3)

# %%
for name, table in every.items():
    left: Any = table["model"]
    for rival in ("random", "largest", "rotated"):
        won = int((left["strongest"] < left[rival]).sum())
        print(f"{name}: the strongest atoms carry more than {rival} in {won} of {len(left)} looks")

# %%
middle = {name: table["model"].median() for name, table in every.items()}
atoms, axes = (
    {name: one[kind] for name, one in middle.items()} for kind in ("strongest", "rotated")
)
print(
    f"Answer: without the 10 strongest atoms {atoms['pictures']:.0%} of a look is left in pictures "
    f"and {atoms['texts']:.0%} in texts; without 10 random axes {axes['pictures']:.0%} and "
    f"{axes['texts']:.0%}."
)
