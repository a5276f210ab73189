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
# # How does a head whose query, key and value are one code do induction?
#
# An induction head finds the earlier copy of a token and reads what came after it. Its query is the
# token itself, its key the token *before*: two different things. In CRATE both are the same code,
# so that a pair of tokens gets one score, whichever of the two is the query.
#
# **What was found: the position tells the two apart.** At an early position the code holds mostly
# the token before it, at a late position mostly the token itself. So late tokens can serve as
# queries and early ones as keys. This holds in all three networks that were trained; in an
# untrained one the code holds the token itself everywhere. Exchange the positions by hand, and in
# two of the three the head turns round: it prefers the token *before* the earlier copy to the one
# after it. In the third, neither gets as much attention as an even head would give. A GPT of the
# same shape (one network) has a query and a key of their own. Its head does not turn round.
#
# The model, `crate-tiny-induction`, has 3 layers of 4 heads and was trained on nothing but strings
# of random tokens that repeat. Two more networks of other seeds have a section of their own.
# Intervals are over sequences. The last cell sums the numbers up.

# %%
# %matplotlib inline
import re
from importlib.resources import files
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import crate_interp as ci

# plain functions (tensor, hook) -> tensor
edit = ci.hooks.edit
head_scores, repeat_targets = ci.circuits.head_scores, ci.circuits.repeat_targets
torch.set_grad_enabled(False)

crate, gpt = ci.load("crate-tiny-induction"), ci.load("gpt-tiny-induction")
untrained = ci.load("crate-tiny-induction", revision="step-0")
models = {"CRATE": crate, "GPT": gpt}
BLUE, ORANGE, GREY = "#1f66a3", "#c4682b", "#777777"
SEPARATOR, LENGTH = 32, crate.cfg.n_ctx
HELD_OUT = (9, 14, 19)  # periods that the training never saw
TRAINED = tuple(period for period in range(6, 25) if period not in HELD_OUT)


def sequences(count, periods, seed, length=LENGTH):
    """Returns tokens [count, length], a separator and a random string that repeats, and periods."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.tensor(periods).repeat(-(-count // len(periods)))[:count]
    strings = torch.randint(SEPARATOR, (count, length - 1), generator=generator)
    body = strings.gather(1, torch.arange(length - 1) % period[:, None])
    return torch.cat([torch.full((count, 1), SEPARATOR), body], dim=1), period


# The heads are found on one set, of periods of the training, and judged on another.
find, find_period = sequences(128, TRAINED, seed=1)
judge, judge_period = sequences(42, HELD_OUT, seed=2)


def name(layer, head):
    return f"L{layer}H{head}"


def parts(model, layer, head, role, places, count=1000):
    """Returns how much of a code's variance the token `back` places back explains, [back, place].

    Of codes of strings that do not repeat, less what chance explains (adjusted R squared).
    """
    tokens, _ = sequences(count, (LENGTH - 1,), seed=3)
    point = f"blocks.{layer}.attn.hook_{role}"
    cache = model.run_with_cache(tokens, names_filter=point, stop_at_layer=layer + 1)[1]
    codes = cache[point][:, :, head].double()
    shares = torch.zeros(3, len(places))
    for row, place in [(row, place) for row in range(3) for place in range(len(places))]:
        kinds = torch.nn.functional.one_hot(tokens[:, places[place] - row], 33).double()
        kinds = kinds[:, kinds.sum(dim=0) > 0]
        own = codes[:, places[place]] - codes[:, places[place]].mean(dim=0)
        means = (kinds.T @ own) / kinds.sum(dim=0)[:, None]
        within = (own - kinds @ means).square().sum() / (count - kinds.shape[1])
        shares[row, place] = 1 - within * (count - 1) / own.square().sum()
    return shares


# %% [markdown]
# ## In one picture
# What the code of the strongest induction head holds, by position: how much of its variance the
# token itself explains, and the two tokens before it. Chance is 0. Left: this network, where query
# and key are this one code. The lines cross. Right: the GPT's head. Its query holds mostly the
# token itself and its key an earlier token, wherever they stand. The thin line is position 24,
# where the longest first copy of the training ends.

# %% tags=["lead"]
targets = repeat_targets(find, offsets=(0, 1, 2))


def scored(model):
    return head_scores(model.run_with_cache(find)[1], targets)


scores = {which: scored(model) for which, model in {**models, "untrained": untrained}.items()}


def strongest(which, target):
    """Returns (layer, head) of the head with the highest score, and the score."""
    table = scores[which]
    row = table[table["target"] == target].sort_values("score").iloc[-1]
    return (int(row["layer"]), int(row["head"])), row["score"]


# An induction head of the GPT may look one token further: its keys know of two tokens before.
after = {
    which: max(("copy+1", "copy+2"), key=lambda target: strongest(which, target)[1])
    for which in models
}
best = {which: strongest(which, after[which])[0] for which in models}
places = list(range(3, LENGTH - 1, 3))
shares = {
    (which, role): parts(models[which], *best[which], role, places)
    for which in models
    for role in "qk"
}
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True, layout="constrained")
panels = [("CRATE", "q", "query and key"), ("GPT", "q", "query"), ("GPT", "k", "key")]
looks = [(BLUE, "-", "the token itself"), (ORANGE, "--", "the token before"), (GREY, ":", "2 back")]
for ax, (which, role, words) in zip(axes, panels, strict=True):
    for line, (colour, dashes, label) in zip(shares[which, role], looks, strict=True):
        ax.plot(places, line, color=colour, ls=dashes, lw=2, label=label)
    ax.axvline(max(TRAINED), color=GREY, lw=0.7)
    ax.set(title=f"{which} {name(*best[which])}: {words}", xlabel="position", ylim=(0, 1))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("share of the code's variance")
axes[0].legend(frameon=False)
plt.show()


def crossing(shares):
    """Returns from which position on the token itself has more than the token before, or None."""
    behind = [place for place, more in zip(places, shares[0] > shares[1], strict=True) if not more]
    later = [place for place in places if place > max(behind, default=LENGTH)]
    return later[0] if later else None


own, before = shares["CRATE", "q"][:2]
print(
    f"CRATE {name(*best['CRATE'])}: at position {places[0]} the token before explains "
    f"{before[0]:.2f} of its code and the token itself {own[0]:.2f}; at position {places[-1]} "
    f"{before[-1]:.2f} and {own[-1]:.2f}. The token itself has more from position "
    f"{crossing(shares['CRATE', 'q'])} on."
)
own, before = parts(untrained, *best["CRATE"], "q", places)[:2]
print(
    f"untrained: the token itself {own.min():.2f} to {own.max():.2f}, the token before "
    f"{before.min():.2f} to {before.max():.2f}, at all positions"
)

# %% [markdown]
# ## The task
# A separator, then a random string of 6 to 24 tokens that repeats to the end. From the second token
# of the second copy on, every token can be known. Periods 9, 14 and 19 were held out. Copying what
# followed the latest copy of the token at hand is not enough: a string may have a token twice.


# %%
def interval(values):
    """Returns the mean over sequences and its 95 % interval, from 2,000 resamples."""
    values = np.asarray(values, dtype=float)
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def by_sequence(values, period):
    """Returns the mean over the tokens that can be known, [sequence]."""
    known = torch.arange(values.shape[1]) > period[:, None]
    return (values * known).sum(dim=1) / known.sum(dim=1)


def right(logits, tokens=judge, period=judge_period):
    """Returns the share of known tokens that are predicted, [sequence]."""
    return by_sequence((logits[:, :-1].argmax(dim=-1) == tokens[:, 1:]).float(), period)


def nats(logits, tokens=judge, period=judge_period):
    """Returns the log probability of the known tokens, in nats per token, [sequence]."""
    answers = logits[:, :-1].log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
    return by_sequence(answers, period)


copies = repeat_targets(judge)["copy"]
last = (copies * torch.arange(LENGTH)).argmax(dim=-1)  # of no copy: 0
rule = (judge.gather(1, (last + 1).clamp(max=LENGTH - 1))[:, :-1] == judge[:, 1:]).float()
print(f"accuracy on {len(judge)} sequences of held-out periods (95 % intervals over sequences)")
for which, model in {**models, "untrained CRATE": untrained}.items():
    print(f"  {which:16} {interval(right(model(judge)))}")
print(f"  {'the latest copy':16} {interval(by_sequence(rule, judge_period))}")
print(f"  {'chance':16} {1 / SEPARATOR:.3f}")

# %% [markdown]
# ## The search
# Three scores for every head: how much of its attention goes to the token before, to earlier copies
# of the token, and to the tokens right after those. Dashed: the same network untrained. Dotted: an
# even head, which is also what any head has on average if its keys are permuted. A head belongs to
# a kind if it has at least two thirds of the highest score of that kind, and more than even and
# than any untrained head. A head can be of two kinds: it may look at the copy and at the token
# after it.

# %%
KINDS = {
    "previous": "the token before",
    "copy": "earlier copies",
    "copy+1": "the token after a copy",
}


def found(which, target):
    """Returns the heads of a kind, and how even heads score."""
    own, random = (one[one["target"] == target] for one in (scores[which], scores["untrained"]))
    least = max(own["score"].max() * 2 / 3, random["high"].max(), own["even"].max())
    chosen = own[own["score"] >= least]
    return [(int(row.layer), int(row.head)) for row in chosen.itertuples()]


labels = [name(layer, head) for layer in range(3) for head in range(4)]
figure, axes = plt.subplots(3, 1, figsize=(6, 5.2), sharex=True, layout="constrained")
for ax, (target, words) in zip(axes, KINDS.items(), strict=True):
    own, random = (one[one["target"] == target] for one in (scores["CRATE"], scores["untrained"]))
    chosen = [
        head in found("CRATE", target) for head in zip(own["layer"], own["head"], strict=True)
    ]
    errors = [own["score"] - own["low"], own["high"] - own["score"]]
    ax.bar(labels, own["score"], color=[BLUE if one else "#c3d4e5" for one in chosen], yerr=errors)
    ax.plot(labels, random["score"], color=ORANGE, ls="--", label="untrained")
    ax.axhline(own["even"].mean(), color=GREY, ls=":", label="even, or keys permuted")
    ax.set_title(f"attention to {words}; dark: found", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False)
plt.show()
previous, duplicate, induction = (found("CRATE", target) for target in KINDS)
print("previous-token heads:", ", ".join(name(*head) for head in previous))
print("duplicate-token heads:", ", ".join(name(*head) for head in duplicate))
print("induction heads:", ", ".join(name(*head) for head in induction))

# %% [markdown]
# ## What each head is worth
# Each head in turn is replaced by its mean over the other set of sequences, position by position.


# %%
def without(model, gone):
    """Returns the hooks that replace heads by their means on the set that found the heads."""
    cache = model.run_with_cache(find, names_filter=lambda point: point.endswith("hook_z"))[1]
    hooks = []
    for layer in sorted({layer for layer, _ in gone}):
        heads = [head for own, head in gone if own == layer]
        hooks.append((f"blocks.{layer}.attn.hook_z", edit.mean(cache["z", layer], heads=heads)))
    return hooks


whole = right(crate(judge))
for layer in range(3):
    for head in range(4):
        left = right(crate.run_with_hooks(judge, fwd_hooks=without(crate, [(layer, head)])))
        kind = " ".join(
            words
            for words, heads in (
                ("previous-token", previous),
                ("duplicate-token", duplicate),
                ("induction", induction),
            )
            if (layer, head) in heads
        )
        print(f"without {name(layer, head)}: accuracy falls by {interval(whole - left)} {kind}")

# %% [markdown]
# ## Who reads whom
# Composition looks at the weights alone: how much of what one head writes lies in the subspace that
# a later head reads? Path patching looks at the running model: what is lost if only this path
# carries what the sender wrote on *other* strings of the same periods? It is done for the query,
# the key and the value of the receivers by themselves. A path can cost more than the 3.47 nats of
# chance, because the heads then predict the other string. These numbers have no interval: each is
# one mean over the judging set.

# %%
pairs = ci.circuits.composition(crate).table()
pairs_untrained = ci.circuits.composition(untrained).table()


def among(table, senders, receivers):
    """Returns the rows of a table of composition from some heads to others."""
    ends = zip(*(table[f"{a}_{b}"] for a in ("from", "to") for b in ("layer", "head")), strict=True)
    return table[[(a, b) in senders and (c, d) in receivers for a, b, c, d in ends]]


own, random = (among(table, previous, induction) for table in (pairs, pairs_untrained))
print(
    f"composition of previous-token and induction heads: mean {own['score'].mean():.2f}, lowest "
    f"{own['score'].min():.2f}; untrained {random['score'].mean():.2f}, a random subspace "
    f"{own['chance'].mean():.2f}, its 99th percentile {own['percentile_99'].max():.2f}"
)

others, _ = sequences(len(judge), HELD_OUT, seed=4)
patching = dict(metric=lambda logits: nats(logits).mean(), progress=False)
as_it_is = nats(crate(judge)).mean().item()
senders = [head for head in previous if head[0] < min(layer for layer, _ in induction)]
lost = {}
for roles in (("q",), ("k",), ("v",), ("q", "k", "v")):
    values = ci.circuits.path_patch(
        crate, others, judge, receivers=induction, senders=senders, roles=roles, **patching
    )
    lost["".join(roles)] = [as_it_is - values[head].item() for head in senders]
print("\nnats lost per token, from each head to all induction heads, by the role that reads it:")
print(pd.DataFrame(lost, index=[name(*head) for head in senders]).round(2).to_string())

# Edges of the circuit: from each head to each receiver in all roles, and to the logits.
edges = []
for receiver in induction:
    values = ci.circuits.path_patch(
        crate, others, judge, receivers=[receiver], senders=senders, **patching
    )
    edges += [
        ci.circuits.Edge(name(*head), name(*receiver), as_it_is - values[head].item())
        for head in senders
    ]
values = ci.circuits.path_patch(crate, others, judge, senders=induction, **patching)
edges += [
    ci.circuits.Edge(name(*head), "logits", as_it_is - values[head].item()) for head in induction
]
circuit = ci.circuits.Circuit(edges, "nats lost per token if the path carries another string")

# %% [markdown]
# ## A circuit
# The found heads work alone, with every other head at its mean, on sequences and periods that did
# not choose them. All heads together add some accuracy to what is left without any. Faithfulness is
# the share of it that the found heads keep. It stands beside 100 random circuits of the same size.
# Minimality is what the least of the found heads adds to them. For completeness, parts of the
# circuit are taken out twice, with and without the other heads there. It is the largest gap between
# the two: 0 would be best, and means that no other head does the same work.

# %%
chosen = sorted({*previous, *duplicate, *induction})


def judged(which, heads, random, subsets=0):
    options = dict(reference=find, random=random, subsets=subsets, progress=False)
    return ci.circuits.evaluate(models[which], heads, judge, right, **options)


result = judged("CRATE", chosen, 100)
parts_of = judged("CRATE", chosen, 0, subsets=10)
row, part = (one.table().set_index("measure") for one in (result, parts_of))
print(result.table().drop(index=1).round(3).to_string(index=False))
print(
    "completeness of it and 10 random parts {value:.3f} ({low:.3f} to {high:.3f})".format(
        **part.loc["completeness"]
    )
)
print(result.table("heads").round(3).to_string(index=False))

# %% [markdown]
# ## What the tie changes, shown by editing
# In CRATE query i and key j have the same score as query j and key i: first line below. Say that b
# follows a. The second a should look at the first b, the token after its copy. The second b would
# then look at the first a, the token *before* its copy. Without positions the codes of both copies
# would be the same, and so would the two scores.
#
# Here the same strings stand at early and at late positions, and the induction head alone gets its
# query or its key from the other run (`hook_q`, `hook_k`). Bars show the attention around the
# earlier copy, dark the place that the head looks at in the model as it is. The last column gives
# queries the early positions and keys the late ones: the positions are exchanged.

# %%
layer, head = best["CRATE"]
cache = crate.run_with_cache(judge)[1]
q, k = (cache[role, layer][:, :, head] for role in "qk")
dots = q @ k.mT
print(f"largest |score(i, j) - score(j, i)|: CRATE {(dots - dots.mT).abs().max():.0e}, ", end="")
q, k = (gpt.run_with_cache(judge)[1][role, best["GPT"][0]][:, :, best["GPT"][1]] for role in "qk")
dots = q @ k.mT
print(f"GPT {(dots - dots.mT).abs().max():.0f}")

PERIOD, LATER = 12, 24
# No token stands in a string twice, so that each has one earlier copy.
strings = torch.rand(128, SEPARATOR, generator=torch.Generator().manual_seed(5)).argsort(dim=1)
short = torch.cat([judge[:1, :1].expand(128, 1), *[strings[:, :PERIOD]] * 2], dim=1)
around = repeat_targets(short, offsets=range(-3, 5))
around = {target: around[target] for target in around if target != "previous"}
RUNS = {
    "queries and keys early": (0, 0),
    "queries late, keys early": (LATER, 0),
    "queries and keys late": (LATER, LATER),
    "queries early, keys late": (0, LATER),
}


def placed(model, by):
    """Returns the cache of a run whose strings stand `by` positions later."""
    rows = torch.arange(short.shape[1]) + by
    rows[0] = 0  # the separator stays first
    move = ("hook_pos_embed", lambda table, hook: model.W_pos[rows].expand_as(table).clone())
    with model.hooks([move]):
        return model.run_with_cache(short)[1]


def looks_at(which, q_late, k_late):
    """Returns where the strongest head looks, with codes from early or late positions."""
    model, (layer, head) = models[which], best[which]
    caches = {by: placed(model, by) for by in {0, q_late, k_late}}
    hooks = [
        (f"blocks.{layer}.attn.hook_{role}", edit.patch(caches[by][role, layer]))
        for role, by in (("q", q_late), ("k", k_late))
    ]
    with model.hooks(hooks):
        table = head_scores(model.run_with_cache(short)[1], around)
    return table[(table["layer"] == layer) & (table["head"] == head)].set_index("target")


looked = {(which, words): looks_at(which, *run) for which in models for words, run in RUNS.items()}
figure, axes = plt.subplots(2, 4, figsize=(10, 4), sharex=True, sharey="row", layout="constrained")
for line, which in zip(axes, models, strict=True):
    for ax, words in zip(line, RUNS, strict=True):
        own = looked[which, words]
        spots = np.arange(-3, 5)
        bars = [BLUE if f"copy{spot:+d}" == after[which] else "#c3d4e5" for spot in spots]
        ax.bar(spots, own["score"], yerr=[own["score"] - own["low"], own["high"] - own["score"]],
               color=bars)  # fmt: skip
        ax.axvline(0, color=GREY, ls=":", lw=1)
        ax.set_title(words, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    line[0].set_ylabel(f"{which} {name(*best[which])}: attention")
for ax in axes[1]:
    ax.set_xlabel("places after the copy")
plt.show()


def shown(which, words, target):
    own = looked[which, words].loc[target]
    return f"{own['score']:.3f} ({own['low']:.3f} to {own['high']:.3f})"


mirrored = {which: after[which].replace("+", "-") for which in models}
for which in models:
    for words in RUNS:
        print(
            f"{which}, {words}: {after[which]} {shown(which, words, after[which])}, mirrored "
            f"{mirrored[which]} {shown(which, words, mirrored[which])}"
        )

# %% [markdown]
# The preference follows the positions, not the roles of query and key. If the keys are late, little
# of it is left; if the queries are early as well, it points the other way. (The copy itself gets
# the most attention then: a code is like itself.) The GPT's head looks at the same place or at no
# place. Late keys are unusual for both models: in the training every string has a first copy that
# ends by position 24.
#
# The second edit unties the roles. A run gets what the layer of the previous-token heads gathers
# from *other positions* out of other strings, so that the tokens before are wrong; or everything
# but that, so that the token itself is wrong. The query, the key or the value of the induction
# heads gets the codes of that run. Which role needs which token?


# %%
def mixed(model, layer, tokens, strings, wrong):
    """Returns the cache of a run with the token itself, or the tokens before, of other strings."""
    first, second = (model.run_with_cache(one)[1] for one in (tokens, strings))

    def gathered(cache):
        """What the heads of the layer bring from other positions, [batch, pos, d_model]."""
        pattern = cache["pattern", layer].clone()
        pattern.diagonal(dim1=-2, dim2=-1)[:] = 0
        z = pattern @ cache["v", layer].transpose(1, 2)  # [batch, head, pos, d_head]
        return torch.einsum("bhnp,hpd->bnd", z, model.blocks[layer].attn.W_O)

    itself, before = (first, second) if wrong == "before" else (second, first)
    point = f"blocks.{layer}.hook_resid_mid"
    mid = itself[point] - gathered(itself) + gathered(before)
    with model.hooks([(point, edit.patch(mid))]):
        return model.run_with_cache(tokens)[1]


roles_table, kept = [], {}
for which, model in models.items():
    writers, readers = found(which, "previous"), found(which, after[which])
    from_layer = strongest(which, "previous")[0][0]
    for wrong in ("itself", "before"):
        other = mixed(model, from_layer, judge, others, wrong)
        for role in "qkv":
            hooks = [
                (
                    f"blocks.{layer}.attn.hook_{role}",
                    edit.patch(other[role, layer], heads=[h for own, h in readers if own == layer]),
                )
                for layer in {layer for layer, _ in readers}
            ]
            with model.hooks(hooks):
                logits, cache = model.run_with_cache(judge)
            seen = head_scores(cache, {"": repeat_targets(judge, (1, 2))[after[which]]})
            seen = seen.set_index(["layer", "head"]).loc[best[which], "score"]
            kept[which, wrong, role] = right(logits)
            roles_table.append((which, wrong, role, interval(right(logits)), round(seen, 3)))
names = ["model", "wrong", "in the", "accuracy", "attention to the target"]
print(pd.DataFrame(roles_table, columns=names).to_string(index=False))

# %% [markdown]
# ## The other two seeds
# So far this is one network. Two more were trained by the same script, from other random numbers.
# The functions above look at all three. Each has its own strongest induction head, and 20 random
# circuits of the size of its own (seed 0: the 100 of above). The search compares with the untrained
# network of seed 0. A head turns round if it gives the token before the copy more than the token
# after it, the intervals apart, and more than an even head would give.

# %%
early, swapped = "queries and keys early", "queries early, keys late"


def is_above(own, first, second):
    """Tells whether one score is above another, and their intervals apart."""
    return own.loc[first, "low"] > own.loc[second, "high"]


def turns_round(which):
    """Tells whether, exchanged, the mirrored place has more, and more than even."""
    own, ahead, behind = looked[which, swapped], after[which], after[which].replace("+", "-")
    return is_above(own, behind, ahead) and own.loc[behind, "low"] > own.loc[behind, "even"]


def in_short(which):
    """Returns what is said of a network, and which of it holds: {claim: True or False}."""
    kinds = {target: found(which, target) for target in KINDS}
    heads = sorted(set(sum(kinds.values(), [])))
    place = crossing(parts(models[which], *best[which], "q", places))
    if which == "CRATE":  # looked at above
        own = row.loc["faithfulness"]
    else:
        looked.update({(which, words): looks_at(which, *RUNS[words]) for words in (early, swapped)})
        own = judged(which, heads, 20).table().set_index("measure").loc["faithfulness"]
    ahead, behind = "copy+1", "copy-1"
    words = {f"heads: {words}": " ".join(name(*one) for one in kinds[target])
             for target, words in KINDS.items()}  # fmt: skip
    words |= {
        "strongest induction head": name(*best[which]),
        "the lines cross at position": place or "none",
        "attention after the copy": shown(which, early, ahead),
        "attention before it": shown(which, early, behind),
        "exchanged: after the copy": shown(which, swapped, ahead),
        "exchanged: before it": shown(which, swapped, behind),
        "an even head": f"{looked[which, swapped].loc[behind, 'even']:.3f}",
        "faithfulness": "{value:.3f} ({low:.3f} to {high:.3f})".format(**own),
        "random circuits": "{random_mean:.3f} ({random_low:.3f} to {random_high:.3f})".format(
            **own
        ),
    }
    holds = {
        "the lines cross": place is not None,
        "the head looks after the copy": is_above(looked[which, early], ahead, behind),
        "exchanged positions turn it round": turns_round(which),
        "the found heads are a circuit": own["low"] > max(0.8, own["random_high"]),
    }
    return words, holds


networks = {"seed 0": "CRATE"}
for folder in sorted(Path("weights").glob("crate-tiny-induction-seed-*")):
    which = networks[f"seed {folder.name[-1]}"] = folder.name
    models[which] = ci.load(folder)
    scores[which] = scored(models[which])
    after[which], best[which] = "copy+1", strongest(which, "copy+1")[0]
if len(networks) == 1:
    print("The other two are in demos/weights of the repository: put that folder beside this file.")
shorts = {seed: in_short(which) for seed, which in networks.items()}
print(pd.DataFrame({seed: words for seed, (words, _) in shorts.items()}).to_string())

# %% [markdown]
# Not every network builds the same circuit. In seed 1 the duplicate-token heads stand in layer 1
# and the induction heads behind them in layer 2. That is the network whose head does not turn
# round.
#
# ## When it forms
# Eight steps of the training of seed 0. Accuracy on the judging set, the strongest induction score,
# and the composition of the heads that are found at the end. The GPT's accuracy is that of its
# card.

# %%
card = (files("crate_interp") / "assets/gpt-tiny-induction/README.md").read_text(encoding="utf-8")
points = re.findall(r"([0-9.]+) (?:after ([0-9,]+) steps|at the end)", card)
of_gpt = {int(step.replace(",", "") or 5000): float(share) for share, step in points}
steps = sorted(of_gpt)
along = []
for step in steps:
    revision = None if step == steps[-1] else f"step-{step}"
    model = ci.load("crate-tiny-induction", revision=revision)
    logits, cache = model.run_with_cache(judge)
    table = head_scores(cache, {"copy+1": repeat_targets(judge)["copy+1"]})
    score = table.set_index(["layer", "head"])["score"].loc[induction].max()
    linked = among(ci.circuits.composition(model).table(), previous, induction)["score"].mean()
    loss = -nats(logits).mean().item()
    along.append((step, right(logits).mean().item(), loss, score, linked, of_gpt[step]))
names = ["step", "accuracy", "loss", "induction score", "composition", "GPT accuracy (card)"]
along = pd.DataFrame(along, columns=names)
print(along.round(3).to_string(index=False))


def half_way(values):
    """Returns the first step at which a line has gone half of its way."""
    gone = (values - values.iloc[0]) / (values.iloc[-1] - values.iloc[0])
    return along["step"][(gone >= 0.5).to_numpy().argmax()]


for line in ("composition", "induction score", "accuracy"):
    print(f"{line}: half of its way by step {half_way(along[line])}")
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
where = along["step"].clip(lower=20)  # step 0 stands at 20 on the log axis
axes[0].plot(where, along["accuracy"], color=BLUE, marker="o", label="CRATE")
axes[0].plot(where, along["GPT accuracy (card)"], color=GREY, ls="--", marker="s", label="GPT")
axes[0].axhline(1 / SEPARATOR, color=GREY, ls=":", label="chance")
axes[0].set_title("accuracy on held-out periods", fontsize=10)
axes[1].plot(where, along["loss"] / along["loss"].iloc[0], color=GREY, label="loss over the first")
axes[1].plot(where, along["composition"], color=ORANGE, ls="--", marker="s", label="composition")
axes[1].plot(where, along["induction score"], color=BLUE, marker="o", label="induction score")
axes[1].set_title("CRATE: what forms", fontsize=10)
for ax in axes:
    ax.set(xscale="log", xlabel="step (the first is 0)", ylim=(0, 1.1))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].legend(frameon=False, fontsize=8)
axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## The circuit
# An edge is as wide as what is lost, in nats per token, if it carries another string.

# %%
ci.viz.circuit(circuit, title="induction in crate-tiny-induction")

# %% [markdown]
# The explorer rings the heads of the circuit. Point at a token of the second copy and see in layer
# 1 how its heads look at the earlier copy and at the token after it.

# %%
ci.viz.explore(crate.run_with_cache(judge[:1])[1], judge[:1], circuit=circuit)

# %% [markdown]
# ## The same search in text
# `crate-tiny-lm` was trained on books and a dictionary. Does it have an induction head? Random
# tokens are shown twice. And does an open “quote” make it prefer `.”` to `.`? The windows run as
# they are, and with every opening quote replaced by ` the`. Neighbouring windows are of one text,
# so that the interval comes from drawing whole texts again.

# %%
lm = ci.load("crate-tiny-lm")
torch.manual_seed(0)
no_lm = ci.HookedCrateLM(lm.cfg).eval()  # the same shape, random weights
texts = list(ci.data.embedded("held-out-text")["text"])
windows = lm.windows(texts)
ends_of_texts = torch.tensor([len(lm.tokenizer.encode(text)) + 1 for text in texts])
begins = torch.arange(len(windows)) * (windows.shape[1] - lm.cfg.prepend_bos)
text_of = torch.searchsorted(ends_of_texts.cumsum(0), begins, right=True)
spots = torch.randint(windows.numel(), (16, 40), generator=torch.Generator().manual_seed(0))
half = windows.flatten()[spots]  # tokens of the texts, in random order
twice = torch.cat([windows[:1, :1].expand(16, 1), half, half], dim=1)
loss, cache = lm(twice, return_type="loss", loss_per_token=True), lm.run_with_cache(twice)[1]
first, second = loss[:, :40].mean().item(), loss[:, 41:].mean().item()
target = {"copy+1": repeat_targets(twice)["copy+1"]}
text_best = head_scores(cache, target).sort_values("score").iloc[-1]
text_none = head_scores(no_lm.run_with_cache(twice)[1], target)["high"].max()
even = np.log(lm.cfg.d_vocab)
print(f"loss in the first copy {first:.2f} nats, in the second {second:.2f}, of a guess {even:.2f}")
print(
    f"highest induction score {text_best['score']:.3f} ({text_best['low']:.3f} to "
    f"{text_best['high']:.3f}), untrained at most {text_none:.3f}, even {text_best['even']:.3f}"
)

dot, close = lm.to_single_token("."), lm.to_single_token(".”")
opening, closing = lm.to_single_token(" “"), lm.to_single_token("”")
is_closing = (windows == closing) | (windows == close)
inside = ((windows == opening).cumsum(1) - is_closing.cumsum(1) > 0)[:, :-1]
ends = (windows[:, 1:] == close) & inside
kept_windows = ends.any(dim=1)
tokens, ends, text_of = windows[kept_windows], ends[kept_windows], text_of[kept_windows]
unopened = torch.where(tokens == opening, lm.to_single_token(" the"), tokens)


def preference(model, tokens):
    """Returns the logit of `.”` minus that of `.` at the ends of quotes, [window]."""
    logits = model(tokens)
    gap = (logits[..., close] - logits[..., dot])[:, :-1]
    return (gap * ends).sum(dim=1) / ends.sum(dim=1)


def quote_effect(model):
    """Returns the mean effect of the open quote, and a 95 % interval from 2,000 draws of texts."""
    effects = (preference(model, tokens) - preference(model, unopened)).numpy()
    _, place = np.unique(text_of, return_inverse=True)
    sums, counts = np.bincount(place, effects), np.bincount(place)
    draws = np.random.default_rng(0).integers(len(sums), size=(2000, len(sums)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    return effects.mean(), *np.quantile(means, [0.025, 0.975])


quote, no_quote = quote_effect(lm), quote_effect(no_lm)
print(
    "an open quote moves the preference by {:.3f} nats ({:.3f} to {:.3f}), ".format(*quote)
    + "untrained {:.3f} ({:.3f} to {:.3f})".format(*no_quote)
)

# %% [markdown]
# ## Conclusion
# The sentences are made from the numbers above. Intervals are over sequences (of the quotes: over
# texts). They do not say what another training would have found. For that there are the three
# seeds of crate-tiny-induction; the sentence on the GPT is of one network.


# %%
def role_words(which):
    """Returns in which roles the token before must be right: there the accuracy falls by .1."""
    whole = right(models[which](judge))
    needed = [role for role in "qkv" if (whole - kept[which, "before", role]).mean() > 0.1]
    words = {"q": "query", "k": "key", "v": "value"}
    return ", ".join(words[role] for role in needed) or "no role"


for which in ("CRATE", "GPT"):
    ahead, behind = after[which], mirrored[which]
    as_is = is_above(looked[which, early], ahead, behind)
    turned = turns_round(which)
    print(
        f"{which}: {name(*best[which])} {'looks' if as_is else 'does not look'} after the copy, "
        f"{shown(which, early, ahead)} against {shown(which, early, behind)} before it. With the "
        f"positions of queries and keys exchanged it {'turns round' if turned else 'does not'}: "
        f"{shown(which, swapped, ahead)} against {shown(which, swapped, behind)}. "
        f"It needs the token before in: {role_words(which)}."
    )
for claim in shorts["seed 0"][1]:
    count = sum(holds[claim] for _, holds in shorts.values())
    print(f"{claim}: in {count} of {len(shorts)} networks")
is_there = text_best["low"] > max(2 * text_best["even"], text_none) and second < 0.9 * first
print(
    f"In text: {'there may be an' if is_there else 'no'} induction head; an open quote "
    f"{'moves' if quote[1] > max(no_quote[2], 0) else 'does not measurably move'} the preference "
    f"for closing it, by {quote[0]:.3f} nats ({quote[1]:.3f} to {quote[2]:.3f}; untrained "
    f"{no_quote[0]:.3f})."
)
own = row.loc["faithfulness"]
print(
    f"Answer: {', '.join(name(*head) for head in chosen)} are "
    f"{'a circuit' if own['low'] > max(0.8, own['random_high']) else 'no circuit'}."
)
print(
    f"faithfulness {own['value']:.3f} (95 % {own['low']:.3f} to {own['high']:.3f}); 100 random "
    f"circuits of {len(chosen)} heads {own['random_mean']:.3f} ({own['random_low']:.3f} to "
    f"{own['random_high']:.3f}), share as good {own['share_as_good']:.2f}"
)
