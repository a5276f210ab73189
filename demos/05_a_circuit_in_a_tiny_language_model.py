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
# **Is there a head that continues what the model has seen before? Are there heads that remember an
# open quote?** This notebook searches for them, tests them causally, and gives the answer, even if
# it is no.

# %%
# %matplotlib inline
import torch

import crate_interp as ci

# plain functions (tensor, hook) -> tensor
edit = ci.hooks.edit

# True: CRATE-LM of 12 layers from the Hub. It needs a tokenizer; ci.load says which.
REAL = False
lm = ci.load("crate-lm-12l" if REAL else "crate-tiny-lm")
layers, heads = lm.cfg.n_layers, lm.cfg.n_heads
windows = lm.windows(list(ci.data.embedded("held-out-text")["text"]))
print(f"{layers} layers of {heads} heads")
print(f"{len(windows)} windows of {windows.shape[1]} tokens of held-out text")

# %% [markdown]
# ## Induction
# Give the model the same random tokens twice. A model with induction heads predicts the second copy
# far better than the first. An induction head attends to the token after the earlier copy.

# %%
half = torch.randint(260, lm.cfg.d_vocab, (16, 40), generator=torch.Generator().manual_seed(0))
twice = torch.cat([windows[:1, :1].expand(16, 1), half, half], dim=1)
with torch.no_grad():
    loss = lm(twice, return_type="loss", loss_per_token=True)
    _, cache = lm.run_with_cache(twice)
first, second = loss[:, :40].mean().item(), loss[:, 41:].mean().item()
print(f"loss in the first copy {first:.2f} nats, in the second {second:.2f}")
# The diagonal begins two queries before the second copy.
second_copy = slice(2, None)
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
# If a sentence ends inside an open “quote”, does the open quote make the model prefer `.”` to `.`?
# Run the same windows twice: unchanged, and with every opening quote replaced by ` the`. The effect
# is the difference of that preference. All other differences between text inside and outside quotes
# are in both runs.

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
    """Returns for each window the logit of `.”` minus that of `.`, mean over its ends of quotes."""
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
# Which heads carry the effect? Patch each head's output on windows with quotes into the run without
# quotes, on one half of the windows.


# %%
# Few windows are enough to look for heads.
few = 16


def on(half):
    """Returns both versions of the windows of one half, and the effect as a metric of logits."""
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
# Take the six heads that carry most. Run them alone on the other half of the windows, with every
# other head at its mean, and compare with random sets of six. The metric is the effect itself. With
# all heads at their means, nothing of the quote remains.

# %%
chosen = [divmod(place, heads) for place in carried.flatten().argsort(descending=True)[:6].tolist()]
scores = ci.circuits.evaluate(lm, chosen, *on(1), random=19, subsets=0, progress=False)
print("chosen on one half:", ", ".join(f"L{layer}H{head}" for layer, head in sorted(chosen)))
scores

# %% [markdown]
# Do those heads read each other? The score of a pair is the share of what one head writes that lies
# in the subspace that the other reads. A random subspace would get `chance`. The drawing shows the
# pairs among the six heads.

# %%
pairs = ci.circuits.composition(lm, through="linear").table()
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
row = scores.table().set_index("measure").loc["faithfulness"]
likely = induction.max() > 3 * even and second < 0.9 * first
print(f"Answer: {'there may be an' if likely else 'no'} induction head.")
print(
    f"An open quote {'moves' if low > 0 else 'does not measurably move'} the preference for "
    f"closing it: {effect:.3f} nats ({low:.3f} to {high:.3f})."
)
print(
    f"Six heads {'do' if row['share_as_good'] <= 0.05 else 'do not'} carry it better than random "
    f"sets of six: faithfulness {row['value']:.2f}, random {row['random_mean']:.2f} "
    f"({row['random_low']:.2f} to {row['random_high']:.2f}), "
    f"share as good {row['share_as_good']:.2f}."
)
