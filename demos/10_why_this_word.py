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
# # Why this word?
#
# **Which codes made the model say this, and do they lead to the heads that are known to matter?**
# crate-tiny-induction copies strings. Notebook 05 finds the seven heads that do the copying, by
# experiments on thousands of tokens. The graph of one answer finds more of these heads than chance
# does, although nobody tells it about them.

# %%
import numpy as np
import torch

import crate_interp as ci

model = ci.load("crate-tiny-induction")
SEPARATOR = 32  # stands before each string
# what notebook 05 finds: the heads of the token before, and those that look after the copy
SEVEN = {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)}


def repeated(seed):
    """Returns a string twice, cut in the second copy, and the token that comes next."""
    generator = torch.Generator().manual_seed(seed)
    period = int(torch.randint(9, 21, (), generator=generator))
    cut = int(torch.randint(2, period - 1, (), generator=generator))
    body = torch.randint(32, (period,), generator=generator)
    tokens = torch.cat([torch.tensor([SEPARATOR]), body, body[:cut]])
    return tokens[None], int(body[cut])


# %% [markdown]
# ## One answer
# Columns are tokens, layers go upwards. An edge is the direct effect of one code on another; it is
# black if a head carries most of it. The page shows what feeds a node, and what its removal does.

# %% tags=["lead"]
tokens, target = repeated(1)
graph = ci.graph(model, tokens, target=target)
print(graph.headline())
ci.viz.graph_figure(graph, most=30)

# %%
ci.viz.graph(graph)

# %% [markdown]
# ## Does the graph find the seven heads?
# A head's share sums over nodes: a node's influence times the head's part of the edges into it. We
# compare the seven heads with the largest shares with the seven heads of notebook 05. Seven heads
# drawn at random from all twelve would include four of these on average.


# %%
def through_heads(graph):
    """Returns how much influence passes through each head, `[layer, head]`."""
    nodes = graph.table("nodes").set_index("node")
    edges = graph.table("edges")
    whole = edges["weight"].abs().groupby(edges["target"]).sum()
    own = edges[edges["head"] >= 0]
    share = own["weight"].abs() / own["target"].map(whole) * own["target"].map(nodes["influence"])
    found = np.zeros((model.cfg.n_layers, model.cfg.n_heads))
    np.add.at(found, (own["target"].map(nodes["layer"]).astype(int), own["head"]), share)
    return found


def hits(shares):
    """Returns how many of the seven largest shares belong to the seven heads."""
    order = np.argsort(-shares.ravel(), kind="stable")[: len(SEVEN)]
    return sum(divmod(int(place), model.cfg.n_heads) in SEVEN for place in order)


asked = map(repeated, range(100, 150))
graphs = [ci.graph(model, tokens, target=target, most=120) for tokens, target in asked]
shares = np.stack([through_heads(one) for one in graphs])
found = np.array([hits(one) for one in shares])
half = 2.01 * found.std(ddof=1) / len(found) ** 0.5
draws = np.random.default_rng(0)
by_chance = np.array([hits(draws.random(shares.shape[1:])) for _ in range(10_000)])
print(
    f"of 7 heads {found.mean():.2f} ({found.mean() - half:.2f} to {found.mean() + half:.2f}) are "
    f"found, over {len(found)} sequences; at random {by_chance.mean():.2f}, at least "
    f"{int(found.min())} in {np.mean(by_chance >= found.min()):.0%} of random draws"
)
print(f"from the mean over all sequences: {hits(shares.mean(axis=0))}")

# %%
words = "the seven of notebook 05: all of layer 0, and L1H0 to L1H2"
ci.viz.heatmap(shares.mean(axis=0), title=words, unit="influence through the head")

# %% [markdown]
# ## Why crate-tiny-lm closes a quote
# We explain a difference: the logit of `.”` minus the logit of `.`, where quotes end in texts that
# the model has not seen. Does the opening quote take part? We remove its token in real runs, by
# setting all its codes of a layer to 0. To compare, we remove the token two places later.

# %%
lm = ci.load("crate-tiny-lm")
windows = lm.windows(list(ci.data.embedded("held-out-text")["text"]))
dot, close, opening, closing = map(lm.to_single_token, (".", ".”", " “", "”"))


def quotes(count, longest=40):
    """Yields (tokens, place of the opening quote): the next token is `.”`."""
    for window in windows:
        ids, opened = window.tolist(), None
        for place, token in enumerate(ids[:-1]):
            opened = place if token == opening else None if token in (closing, close) else opened
            if opened is not None and ids[place + 1] == close and 4 < place - opened < longest:
                yield torch.tensor(ids[max(0, opened - 8) : place + 1])[None], min(opened, 8)
                count -= 1
                break
        if not count:
            return


cases = list(quotes(20))
asked = [ci.graph(lm, tokens, target=(close, dot), most=120) for tokens, _ in cases]
clearest = max(asked, key=lambda one: one.meta["target"]["logit"])
print(clearest.headline())


# %%
def without(tokens, place, layer=0):
    """Returns the preference for `.”` if the codes of a token are 0 in a layer."""

    def gone(code, hook):
        code = code.clone()
        code[:, place] = 0
        return code

    logits = lm.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", gone)])
    return float(logits[0, -1, close] - logits[0, -1, dot])


lost, other, attributed = [], [], []
with torch.no_grad():
    for (tokens, place), one in zip(cases, asked, strict=True):
        whole = one.meta["target"]["logit"]
        lost.append(whole - without(tokens, place))
        other.append(whole - without(tokens, place + 2))
        places = one.table("places").query("layer == 0").set_index("pos")["attribution"]
        attributed.append(places[place])


def said(values):
    half = 2.09 * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.2f} ({np.mean(values) - half:.2f} to {np.mean(values) + half:.2f})"


paired = np.array(lost) - np.array(other)
print(f"without the opening quote the preference falls by {said(lost)} nats, without the token two")
print(f"after it by {said(other)}; difference {said(paired)}, {len(cases)} ends of quotes")
print(f"the graph attributes {said(attributed)} to the opening quote's codes in layer 0;")
print(f"correlation with the real effect {np.corrcoef(attributed, lost)[0, 1]:.2f}")

# %% [markdown]
# ## How far to trust it
# We compare attributions with real ablations of nodes outside the graph. Then we keep only the
# graph's nodes, or remove only these. We do the same with the largest activations at the same
# tokens and layers, which need no attribution.


# %%
def trust(graphs):
    """Returns words on the agreement, and on what the nodes keep, over graphs."""
    untrained = [one.of("agreement", "untrained")["pearson"].mean() for one in graphs]
    left = [one.of("whole").set_index("edit").loc["remove", "logit"] for one in graphs]
    left = np.divide(left, [one.meta["target"]["logit"] for one in graphs])
    more, less = np.transpose([one.beyond_size for one in graphs])
    predicted, kept = ([getattr(one, name) for one in graphs] for name in ("predicts", "kept"))
    return (
        f"r {said(predicted)}, untrained {said(untrained)}; nodes alone keep {said(kept)} of the "
        f"answer, {said(more)} more than the largest activations; without them {said(left)} is "
        f"left, {said(less)} less than without the largest activations"
    )


print("copying:", trust(graphs))
print("quotes:  r", said([one.predicts for one in asked]))
enough = found.mean() - half > by_chance.mean()
quoted = paired.mean() - 2.09 * paired.std(ddof=1) / len(paired) ** 0.5 > 0
print(
    f"Answer: the graph of one sequence {'finds more of' if enough else 'does not find'} the seven "
    f"heads {'than chance' if enough else 'more often than chance'} ({found.mean():.1f} of 7, "
    f"chance {by_chance.mean():.1f}); the opening quote "
    f"{'takes part' if quoted else 'is not shown to take part'} in closing it."
)
