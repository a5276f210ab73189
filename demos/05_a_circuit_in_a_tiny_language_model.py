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
texts = list(ci.data.embedded("held-out-text")["text"])
windows = lm.windows(texts)
# The text in which each window begins: texts are joined with a separator between them.
ends_of_texts = torch.tensor([lm.to_tokens(text, prepend_bos=False).shape[1] + 1 for text in texts])
begins = torch.arange(len(windows)) * (windows.shape[1] - lm.cfg.prepend_bos)
text_of = torch.searchsorted(ends_of_texts.cumsum(0), begins, right=True)
# The same network with random weights: what it shows, no training has made.
with torch.random.fork_rng():
    torch.manual_seed(0)
    untrained = ci.HookedCrateLM(lm.cfg).eval()
print(f"{layers} layers of {heads} heads")
print(f"{len(windows)} windows of {windows.shape[1]} tokens from {len(texts)} held-out texts")

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
# are in both runs. Neighbouring windows are of one text and not independent, so the interval comes
# from drawing whole texts again.

# %%
dot, close = lm.to_single_token("."), lm.to_single_token(".”")
opening, closing = lm.to_single_token(" “"), lm.to_single_token("”")
inside = (
    (windows == opening).cumsum(1) - ((windows == closing) | (windows == close)).cumsum(1) > 0
)[:, :-1]
ends = (windows[:, 1:] == close) & inside
kept = ends.any(dim=1)
tokens, ends, text_of = windows[kept], ends[kept], text_of[kept]
unopened = torch.where(tokens == opening, lm.to_single_token(" the"), tokens)


def preference(logits, ends):
    """Returns for each window the logit of `.”` minus that of `.`, mean over its ends of quotes."""
    gap = (logits[..., close] - logits[..., dot])[:, :-1]
    return (gap * ends).sum(dim=1) / ends.sum(dim=1)


def effect_of(model):
    """Returns the mean effect over windows, and a 95 % interval from 2,000 draws of the texts."""
    with torch.no_grad():
        effects = preference(model(tokens), ends) - preference(model(unopened), ends)
    own, place = text_of.unique(return_inverse=True)
    sums, counts = torch.zeros(2, len(own)).index_add(
        1, place, torch.stack([effects, torch.ones_like(effects)])
    )
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(own), (2000, len(own)), generator=generator)
    means = sums[draws].sum(dim=1) / counts[draws].sum(dim=1)
    return effects.mean().item(), *means.quantile(torch.tensor([0.025, 0.975])).tolist()


effect, low, high = effect_of(lm)
no_effect, no_low, no_high = effect_of(untrained)
print(f"{int(kept.sum())} windows with such an end, from {len(text_of.unique())} texts")
print(f"an open quote moves the preference by {effect:.3f} nats (95 % {low:.3f} to {high:.3f})")
print(f"in the untrained network by {no_effect:.3f} ({no_low:.3f} to {no_high:.3f})")

# %% [markdown]
# Which heads carry the effect? Patch each head's output on windows with quotes into the run without
# quotes, on one half of the texts. The six heads that carry most are judged on the other half.


# %%
def some_of(half):
    """Returns up to 16 windows of every second text, and where their quotes end."""
    rows = (text_of % 2 == half).nonzero().flatten()[:16]
    return tokens[rows], unopened[rows], ends[rows]


def carried_by(model):
    """Returns the nats of the effect that each head carries alone, `[layer, head]`."""
    source, base, mine = some_of(0)
    carried = torch.zeros(layers, heads)
    with torch.no_grad():
        _, cache = model.run_with_cache(source)
        before = preference(model(base), mine).mean()
        for layer in range(layers):
            for head in range(heads):
                change = (f"blocks.{layer}.attn.hook_z", edit.patch(cache["z", layer], heads=head))
                after = preference(model.run_with_hooks(base, fwd_hooks=[change]), mine).mean()
                carried[layer, head] = after - before
    return carried


def six_of(carried):
    order = carried.flatten().argsort(descending=True)[:6].tolist()
    return [divmod(place, heads) for place in order]


carried = carried_by(lm)
chosen = six_of(carried)
print("nats of the effect that each head carries alone (rows are layers):")
print(carried.numpy().round(3))
print("chosen on one half:", ", ".join(f"L{layer}H{head}" for layer, head in sorted(chosen)))

# %% [markdown]
# ## The causal check
# Run the six heads alone on the other half of the texts, with every other head at its mean, and
# compare with 40 random sets of six. The number is the effect that is left, in nats. With all heads
# at their means, nothing of the quote remains. The same search in the untrained network shows what
# choosing alone can do.


# %%
def left_with(model, sets):
    """Returns the nats of the effect that are left with each set of heads alone."""
    with_quotes, without, mine = some_of(1)
    both = torch.cat([with_quotes, without])
    left = []
    with torch.no_grad():
        _, cache = model.run_with_cache(both)
        for own in sets:
            hooks = []
            for layer in range(layers):
                gone = [head for head in range(heads) if (layer, head) not in own]
                if gone:
                    mean = edit.mean(cache["z", layer], heads=gone)
                    hooks.append((f"blocks.{layer}.attn.hook_z", mean))
            one, other = model.run_with_hooks(both, fwd_hooks=hooks).chunk(2)
            left.append((preference(one, mine) - preference(other, mine)).mean())
    return torch.stack(left)


every = [(layer, head) for layer in range(layers) for head in range(heads)]
generator = torch.Generator().manual_seed(0)
random = [
    [every[place] for place in torch.randperm(len(every), generator=generator)[:6].tolist()]
    for _ in range(40)
]
found = {}
for name, model in {"trained": lm, "untrained": untrained}.items():
    own = chosen if model is lm else six_of(carried_by(model))
    whole, none, six, *others = left_with(model, [every, [], own, *random]).tolist()
    as_good = (1 + sum(other >= six for other in others)) / (1 + len(others))
    others = torch.tensor(others)
    spread = others.quantile(torch.tensor([0.025, 0.975])).tolist()
    found[name] = (whole, six, others.mean().item(), spread, as_good)
    print(
        f"{name}: all heads {whole:+.3f} nats, none {none:+.3f}, the six {six:+.3f}; random sets "
        f"{others.mean():+.3f} ({spread[0]:+.3f} to {spread[1]:+.3f}), share as good {as_good:.2f}"
    )

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
whole, six, mean, spread, as_good = found["trained"]
likely = induction.max() > 3 * even and second < 0.9 * first
print(f"Answer: {'there may be an' if likely else 'no'} induction head.")
print(
    f"An open quote {'moves' if low > max(no_high, 0) else 'does not measurably move'} the "
    f"preference for closing it: {effect:.3f} nats ({low:.3f} to {high:.3f}), untrained "
    f"{no_effect:.3f} ({no_low:.3f} to {no_high:.3f})."
)
print(
    f"Six heads {'keep' if as_good <= 0.05 else 'do not measurably keep'} more of it than random "
    f"sets of six: {six:.3f} of {whole:.3f} nats, random {mean:.3f} ({spread[0]:.3f} to "
    f"{spread[1]:.3f}), share as good {as_good:.2f}; the same search in the untrained network "
    f"{found['untrained'][4]:.2f}."
)
