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
# # A circuit in a tiny language model?
#
# **Is there a head that continues what it has seen before, or a few that remember an open quote?**
# The search, the causal check, and the answer, also where it is no.

# %%
# %matplotlib inline
import torch

import crate_interp as ci

edit = ci.hooks.edit  # plain functions (tensor, hook) -> tensor

REAL = False  # True: CRATE-LM of 12 layers from the Hub; it needs a tokenizer, ci.load says which
lm = ci.load("crate-lm-12l" if REAL else "crate-tiny-lm")
layers, heads = lm.cfg.n_layers, lm.cfg.n_heads
windows = lm.windows(list(ci.data.embedded("held-out-text")["text"]))
print(
    f"{layers} layers of {heads} heads, "
    f"{len(windows)} windows of {windows.shape[1]} tokens of held-out text"
)

# %% [markdown]
# ## Induction
# The same random tokens twice. A model with induction heads predicts the second copy far better
# than the first, and an induction head attends to the token after the earlier copy.

# %%
half = torch.randint(260, lm.cfg.d_vocab, (16, 40), generator=torch.Generator().manual_seed(0))
twice = torch.cat([windows[:1, :1].expand(16, 1), half, half], dim=1)
with torch.no_grad():
    loss = lm(twice, return_type="loss", loss_per_token=True)
    _, cache = lm.run_with_cache(twice)
first, second = loss[:, :40].mean().item(), loss[:, 41:].mean().item()
print(f"loss in the first copy {first:.2f} nats, in the second {second:.2f}")
second_copy = slice(2, None)  # the diagonal begins two queries before it
induction = torch.stack(
    [
        cache["pattern", layer].diagonal(-39, dim1=-2, dim2=-1)[..., second_copy].mean((0, 2))
        for layer in range(layers)
    ]
)
even = (1 / torch.arange(42.0, 82)).mean().item()
print(
    f"attention to the token after the earlier copy: at most {induction.max():.3f}; "
    f"spread evenly it would be {even:.3f}"
)

# %% [markdown]
# ## Quotes
# Where a sentence ends inside an open “quote”, does the open quote make the model prefer `.”` to
# `.`? The same windows twice, as they are and with every opening quote replaced by ` the`; the
# effect is the difference of that preference. What else differs between text inside and outside
# quotes is in both.

# %%
dot, close = lm.to_single_token("."), lm.to_single_token(".”")
opening, closing = lm.to_single_token(" “"), lm.to_single_token("”")
inside = (
    (windows == opening).cumsum(1) - ((windows == closing) | (windows == close)).cumsum(1) > 0
)[:, :-1]
ends = (windows[:, 1:] == close) & inside
kept = ends.any(dim=1)
tokens, ends = windows[kept], ends[kept]
unopened = torch.where(tokens == opening, lm.to_single_token(" the"), tokens)


def preference(logits, ends):
    """Of each window: the logit of `.”` minus that of `.`, mean over its ends of quotes."""
    gap = (logits[..., close] - logits[..., dot])[:, :-1]
    return (gap * ends).sum(dim=1) / ends.sum(dim=1)


with torch.no_grad():
    effects = preference(lm(tokens), ends) - preference(lm(unopened), ends)
draws = torch.randint(
    len(effects), (2000, len(effects)), generator=torch.Generator().manual_seed(0)
)
low, high = effects[draws].mean(dim=1).quantile(torch.tensor([0.025, 0.975])).tolist()
effect = effects.mean().item()
print(
    f"{len(effects)} windows: an open quote moves the preference by {effect:.3f} nats "
    f"(95 % interval {low:.3f} to {high:.3f})"
)

# %% [markdown]
# Which heads carry it? Put each head's output of the windows with quotes into the run without, on
# one half of the windows.


# %%
few = 16  # windows are enough to look for heads


def on(half):
    """Both versions of the windows of one half, and the effect as a metric of their logits."""
    mine = ends[:few][half::2]

    def metric(logits):
        with_quotes, without = logits.chunk(2)
        return (preference(with_quotes, mine) - preference(without, mine)).mean()

    return torch.cat([tokens[:few][half::2], unopened[:few][half::2]]), metric


mine, source, base = ends[:few:2], tokens[:few:2], unopened[:few:2]
carried = torch.zeros(layers, heads)
with torch.no_grad():
    _, cache = lm.run_with_cache(source)
    before = preference(lm(base), mine).mean()
    for layer in range(layers):
        for head in range(heads):
            change = (f"blocks.{layer}.attn.hook_z", edit.patch(cache["z", layer], heads=head))
            carried[layer, head] = (
                preference(lm.run_with_hooks(base, fwd_hooks=[change]), mine).mean() - before
            )
print("nats of the effect that each head carries alone (rows are layers):")
print(carried.numpy().round(3))

# %% [markdown]
# ## The causal check
# The six heads that carry most, alone on the other half with every other head at its mean, beside
# random sets of six. The metric is the effect itself; with all heads at their means nothing of the
# quote is left.

# %%
chosen = [divmod(place, heads) for place in carried.flatten().argsort(descending=True)[:6].tolist()]
scores = ci.circuits.evaluate(lm, chosen, *on(1), random=19, subsets=0, progress=False)
print("chosen on one half:", ", ".join(f"L{layer}H{head}" for layer, head in sorted(chosen)))
scores

# %% [markdown]
# Do those heads talk to each other? How much of what one writes lies in the subspace another reads
# (a random subspace would get `chance`), drawn for the pairs among them.

# %%
pairs = ci.circuits.composition(lm, through="linear").table
places = zip(
    pairs["from_layer"], pairs["from_head"], pairs["to_layer"], pairs["to_head"], strict=True
)
among = pairs[[(a, b) in chosen and (c, d) in chosen for a, b, c, d in places]]
edges = [
    ci.circuits.Edge(
        f"L{row.from_layer}H{row.from_head}", f"L{row.to_layer}H{row.to_head}", row.score
    )
    for row in among.itertuples()
]
print(among.round(3).to_string(index=False))
ci.circuits.Circuit(edges, "composition among the chosen heads")

# %%
row = scores.table.set_index("measure").loc["faithfulness"]
found = induction.max() > 3 * even and second < 0.9 * first
print(f"Answer: {'there may be an' if found else 'no'} induction head.")
print(
    f"An open quote {'moves' if low > 0 else 'cannot be told to move'} "
    f"the preference for closing it: {effect:.3f} nats ({low:.3f} to {high:.3f})."
)
print(
    f"Six heads {'do' if row['share_as_good'] <= 0.05 else 'do not'} "
    f"carry it better than random sets of six: faithfulness {row['value']:.2f}, "
    f"random {row['random_mean']:.2f} ({row['random_low']:.2f} to {row['random_high']:.2f}), "
    f"share as good {row['share_as_good']:.2f}."
)
