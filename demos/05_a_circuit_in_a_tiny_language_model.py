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
# **Is there a head that continues what it has seen before, or a few that remember an open quote?** The search, the causal check, and
# the answer, also where it is no.

# %%
# %matplotlib inline
import torch

import crate_interp as ci

edit = ci.hooks.edit  # plain functions (tensor, hook) -> tensor

REAL = False  # True: CRATE-LM of 12 layers from the Hub; it needs a tokenizer, ci.load says which
lm = ci.load("crate-lm-12l" if REAL else "crate-tiny-lm")
layers, heads = lm.cfg.n_layers, lm.cfg.n_heads
windows = lm.windows(list(ci.data.embedded("held-out-text")["text"]))
print(f"{layers} layers of {heads} heads, {len(windows)} windows of {windows.shape[1]} tokens of held-out text")

# %% [markdown]
# ## Induction: no
# The same random tokens twice. A model with induction heads predicts the second copy far better than the first, and an induction
# head attends to the token after the earlier copy.

# %%
half = torch.randint(260, lm.cfg.d_vocab, (16, 40), generator=torch.Generator().manual_seed(0))
twice = torch.cat([windows[:1, :1].expand(16, 1), half, half], dim=1)
with torch.no_grad():
    loss = lm(twice, return_type="loss", loss_per_token=True)
    _, cache = lm.run_with_cache(twice)
print(f"loss in the first copy {loss[:, :40].mean():.2f} nats, in the second {loss[:, 41:].mean():.2f}")
induction = torch.stack(
    [cache["pattern", layer].diagonal(-39, dim1=-2, dim2=-1).mean((0, 2)) for layer in range(layers)]
)
print(
    f"attention to the token after the earlier copy: at most {induction.max():.3f}; spread evenly it would be {(1 / torch.arange(41.0, 82)).mean():.3f}"
)

# %% [markdown]
# ## Quotes: a weak yes
# Where a sentence ends inside an open “quote”, does the model prefer `.”` to `.`? The metric: that preference where the text does so,
# minus the preference at full stops outside quotes.

# %%
dot, close = lm.to_single_token("."), lm.to_single_token(".”")
opening, closing = lm.to_single_token(" “"), lm.to_single_token("”")
inside = ((windows == opening).cumsum(1) - ((windows == closing) | (windows == close)).cumsum(1) > 0)[:, :-1]
ends_quote, ends_sentence = (windows[:, 1:] == close) & inside, (windows[:, 1:] == dot) & ~inside
kept = ends_quote.any(dim=1).nonzero().flatten()[:32]  # windows that have one
tokens, quoted, plain = windows[kept], ends_quote[kept], ends_sentence[kept]


def preference(logits):
    gap = (logits[..., close] - logits[..., dot])[:, :-1]
    return gap[quoted].mean() - gap[plain].mean()


with torch.no_grad():
    whole = preference(lm(tokens)).item()
    unopened = preference(lm(torch.where(tokens == opening, lm.to_single_token(" the"), tokens))).item()
print(
    f"{int(quoted.sum())} ends of quotes, {int(plain.sum())} other ends: preference {whole:.3f} nats; with every opening quote replaced by ' the' {unopened:.3f}"
)

# %% [markdown]
# Which heads? Each one put at its mean, position by position, on one half of the windows; the other half is for the check below.


# %%
def on(half):
    mine, others = quoted[half::2], plain[half::2]

    def metric(logits):
        gap = (logits[..., close] - logits[..., dot])[:, :-1]
        return gap[mine].mean() - gap[others].mean()

    return tokens[half::2], metric


inputs, metric = on(0)
lost = torch.zeros(layers, heads)
with torch.no_grad():
    logits, cache = lm.run_with_cache(inputs)
    for layer in range(layers):
        for head in range(heads):
            change = (f"blocks.{layer}.attn.hook_z", edit.mean(cache["z", layer], heads=head))
            lost[layer, head] = metric(logits) - metric(lm.run_with_hooks(inputs, fwd_hooks=[change]))
print("preference lost without each head (rows are layers):")
print(lost.numpy().round(3))

# %% [markdown]
# ## The causal check
# The heads that cost most there, alone on the other half with every other head at its mean, beside random sets of as many heads.

# %%
chosen = [divmod(place, heads) for place in lost.flatten().argsort(descending=True)[:6].tolist()]
scores = ci.circuits.evaluate(lm, chosen, *on(1), random=15, subsets=3, progress=False)
print("chosen on one half:", ", ".join(f"L{layer}H{head}" for layer, head in sorted(chosen)))
scores

# %% [markdown]
# Do those heads talk to each other? How much of what one writes lies in the subspace another reads (a random subspace would get `chance`),
# drawn for the pairs among them.

# %%
pairs = ci.circuits.composition(lm, through="linear").table
places = zip(pairs["from_layer"], pairs["from_head"], pairs["to_layer"], pairs["to_head"], strict=True)
among = pairs[[(a, b) in chosen and (c, d) in chosen for a, b, c, d in places]]
edges = [
    ci.circuits.Edge(f"L{row.from_layer}H{row.from_head}", f"L{row.to_layer}H{row.to_head}", row.score)
    for row in among.itertuples()
]
print(among.round(3).to_string(index=False))
ci.circuits.Circuit(edges, "composition among the chosen heads")

# %%
row = scores.table.set_index("measure").loc["faithfulness"]
verdict = "do" if row["share_as_good"] <= 0.05 else "do not"
print("Answer: no induction head.")
print(f"There is a preference for closing open quotes: {whole:.2f} nats, {unopened:.2f} without the opening quotes.")
print(
    f"Six heads {verdict} carry it better than random sets of six: faithfulness {row['value']:.2f}, random {row['random_mean']:.2f} "
    f"({row['random_low']:.2f} to {row['random_high']:.2f}), {row['share_as_good']:.0%} of them as good."
)
