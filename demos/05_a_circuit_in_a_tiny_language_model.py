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
# An induction head finds the earlier copy of a token and reads what came after it. Its query must
# hold the token itself, and its key the token *before*. In CRATE query and key are the same code.
#
# **The position decides which token the code holds.** At an early position the code holds mostly
# the token before it, at a late position mostly the token itself. So late tokens can serve as
# queries and early tokens as keys. This holds in all three trained networks; in an untrained
# network the code holds the token itself everywhere. Exchange the positions by hand, and in two of
# the three networks the head turns round: it prefers the token *before* the earlier copy. In the
# third network neither token gets as much attention as an even head would give. A GPT of the same
# shape (one network) has separate queries and keys, and its head does not turn round.
#
# The model, `crate-tiny-induction`, has 3 layers of 4 heads and was trained on nothing but strings
# of random tokens that repeat. Intervals are over sequences.

# %%
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import crate_interp as ci
from notebook_figures import line_panels, score_bars

edit, name = ci.hooks.edit, lambda head: f"L{head[0]}H{head[1]}"
head_scores, repeat_targets = ci.circuits.head_scores, ci.circuits.repeat_targets
torch.set_grad_enabled(False)

crate, gpt = ci.load("crate-tiny-induction"), ci.load("gpt-tiny-induction")
untrained = ci.load("crate-tiny-induction", revision="step-0")
models = {"CRATE": crate, "GPT": gpt, "untrained CRATE": untrained}
SEPARATOR, LENGTH = 32, crate.cfg.n_ctx
HELD_OUT = (9, 14, 19)  # periods that the training never saw
TRAINED = tuple(period for period in range(6, 25) if period not in HELD_OUT)


def sequences(count, periods, seed):
    """Returns tokens [count, length], a separator and a random string that repeats, and periods."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.tensor(periods).repeat(-(-count // len(periods)))[:count]
    strings = torch.randint(SEPARATOR, (count, LENGTH - 1), generator=generator)
    body = strings.gather(1, torch.arange(LENGTH - 1) % period[:, None])
    return torch.cat([torch.full((count, 1), SEPARATOR), body], dim=1), period


# The heads are found on one set, of periods of the training, and judged on another.
find, _ = sequences(128, TRAINED, seed=1)
judge, judge_period = sequences(42, HELD_OUT, seed=2)
others, _ = sequences(len(judge), HELD_OUT, seed=4)


def parts(model, head, role, places, count=1000):
    """Returns how much of a code's variance the token `back` places back explains, [place, back].

    Of codes of strings that do not repeat, less what chance explains (adjusted R squared).
    """
    tokens, _ = sequences(count, (LENGTH - 1,), seed=3)
    codes = model.run_with_cache(tokens)[1][role, head[0]][:, :, head[1]].double()
    shares = np.zeros((len(places), 3))
    for row, back in np.ndindex(shares.shape):
        kinds = torch.nn.functional.one_hot(tokens[:, places[row] - back], 33).double()
        kinds = kinds[:, kinds.sum(dim=0) > 0]
        own = codes[:, places[row]] - codes[:, places[row]].mean(dim=0)
        means = (kinds.T @ own) / kinds.sum(dim=0)[:, None]
        within = (own - kinds @ means).square().sum() / (count - kinds.shape[1])
        shares[row, back] = 1 - within * (count - 1) / own.square().sum()
    columns = ["the token itself", "the token before", "2 back"]
    return pd.DataFrame(shares, index=places, columns=columns)


# %% [markdown]
# ## In one picture
# What does the strongest induction head's code hold at each position? A line shows how much of the
# code's variance a token explains: the token itself, or one of the two before it (chance is 0).
# Left is CRATE, where query and key are this code: the lines cross. Right is the GPT: at every
# position its query holds mostly the token itself, and its key an earlier token. The thin line
# marks where the longest first copy of the training ends.

# %% tags=["lead"]
targets = repeat_targets(find, offsets=(0, 1, 2))
PLACE = ["layer", "head"]


def scored(model):
    """Returns the scores of every head, by target."""
    table = head_scores(model.run_with_cache(find)[1], targets)
    return {target: rows.set_index(PLACE) for target, rows in table.groupby("target", sort=False)}


scores = {which: scored(model) for which, model in models.items()}
# An induction head of the GPT may look one token further: its keys know of two tokens before.
ahead = {which: max(("copy+1", "copy+2"), key=lambda target: table[target]["score"].max())
         for which, table in scores.items()}  # fmt: skip
best = {which: table[ahead[which]]["score"].idxmax() for which, table in scores.items()}
places = list(range(3, LENGTH - 1, 3))
held = {(which, role): parts(models[which], best[which], role, places)
        for which, role in [("CRATE", "q"), ("GPT", "q"), ("GPT", "k")]}  # fmt: skip


def crossing(shares):
    """Returns from which position on the token itself has more than the token before, or None."""
    behind = shares.index[~(shares["the token itself"] > shares["the token before"])]
    later = shares.index[shares.index > max(behind, default=LENGTH)]
    return later[0] if len(later) else None


place, start = crossing(held["CRATE", "q"]), parts(untrained, best["CRATE"], "q", places)
print(f"CRATE {name(best['CRATE'])}: the token itself has more from position {place} on")
print(held["CRATE", "q"].iloc[[0, -1]].round(2).to_string())
print("untrained, over all positions")
print(start.agg(["min", "max"]).round(2).to_string())
ROLES = {("CRATE", "q"): "query and key", ("GPT", "q"): "query", ("GPT", "k"): "key"}
panels = {f"{at[0]} {name(best[at[0]])}: {ROLES[at]}": shares for at, shares in held.items()}
line_panels(panels, "position", "share of the code's variance", max(TRAINED))

# %% [markdown]
# ## The task
# A sequence is a separator, then a random string of 6 to 24 tokens that repeats to the end. From
# the second token of the second copy on, every token can be predicted. Training left out strings of
# 9, 14 and 19 tokens. It is not enough to repeat what followed the current token last time: a
# string may have a token twice.


# %%
def between(values):
    """Returns a mean with its interval, as text, of a row with the columns value, low, high."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*values)


def resampled(values, group=None):
    """Returns the mean and its 95 % interval, from 2,000 resamples of sequences, or of groups."""
    _, at = np.unique(np.arange(len(values)) if group is None else group, return_inverse=True)
    sums, counts = np.bincount(at, np.asarray(values, dtype=float)), np.bincount(at)
    draws = np.random.default_rng(0).integers(len(sums), size=(2000, len(sums)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    return np.asarray(values).mean(), *np.quantile(means, [0.025, 0.975])


def known(values):
    """Returns the mean over the tokens that can be known, [sequence]."""
    which = torch.arange(values.shape[1]) > judge_period[:, None]
    return (values * which).sum(dim=1) / which.sum(dim=1)


def right(logits):
    """Returns the share of known tokens that are predicted, [sequence]."""
    return known((logits[:, :-1].argmax(dim=-1) == judge[:, 1:]).float())


def nats(logits):
    """Returns the log probability of the known tokens, in nats per token, [sequence]."""
    return known(logits[:, :-1].log_softmax(dim=-1).gather(2, judge[:, 1:, None])[..., 0])


last = (repeat_targets(judge)["copy"] * torch.arange(LENGTH)).argmax(dim=-1)  # of no copy: 0
rule = judge.gather(1, (last + 1).clamp(max=LENGTH - 1))[:, :-1] == judge[:, 1:]
shares = {which: right(model(judge)) for which, model in models.items()}
print(f"accuracy on {len(judge)} sequences of held-out periods (95 % intervals over sequences)")
for which, share in {**shares, "the latest copy": known(rule.float())}.items():
    print(f"  {which:16} {between(resampled(share))}")
print(f"  {'chance':16} {1 / SEPARATOR:.3f}")

# %% [markdown]
# ## The search
# The bars show how much of each head's attention goes to the token before, to earlier copies of the
# token, and to the tokens right after those copies. Dashed is the untrained network. Dotted is an
# even head, which is also the average of any head whose keys are permuted. A head belongs to a kind
# (dark) if it scores at least two thirds of that kind's best head, and more than the even head and
# every untrained head. A head can be of two kinds. The printed lines say how far the accuracy falls
# if a head is replaced by its mean over the other set of sequences.

# %%
KINDS = {"previous": ("previous-token", "the token before"),
         "copy": ("duplicate-token", "earlier copies"),
         "copy+1": ("induction", "the token after a copy")}  # fmt: skip


def found(which, target):
    """Returns the heads of a kind."""
    own, random = scores[which][target], scores["untrained CRATE"][target]
    least = max(own["score"].max() * 2 / 3, random["high"].max(), own["even"].max())
    return list(own.index[own["score"] >= least])


drawn, heads = {}, {}
for target, (kind, words) in KINDS.items():
    own, heads[kind] = scores["CRATE"][target], found("CRATE", target)
    random = scores["untrained CRATE"][target]["score"]
    own = own.assign(dark=own.index.isin(heads[kind]), untrained=random)
    drawn[kind] = {f"attention to {words}": own.set_axis(map(name, own.index))}
    print(f"{kind} heads: {', '.join(map(name, heads[kind]))}")
previous, duplicate, induction = heads.values()
means = crate.run_with_cache(find)[1]
for layer, head in own.index:
    hook = edit.mean(means["z", layer], heads=[head])
    left = right(crate.run_with_hooks(judge, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", hook)]))
    kinds = " ".join(kind for kind, those in heads.items() if (layer, head) in those)
    fall = between(resampled(right(crate(judge)) - left))
    print(f"without {name((layer, head))}: accuracy falls by {fall} {kinds}")
score_bars(drawn, (6, 5.2))

# %% [markdown]
# ## Who reads whom
# Composition looks at the weights alone: how much of what one head writes lies in the subspace that
# a later head reads? Path patching looks at the running model: what is lost if only this path
# carries what the sender wrote on *other* strings of the same periods? We patch the receivers'
# query, key and value one by one. A path can cost more than chance does (3.47 nats), because the
# heads then predict the other string. These numbers have no interval.


# %%
def composed(model):
    """Returns the composition of previous-token and induction heads."""
    table = ci.circuits.composition(model).table()
    table = table.set_index(["from_layer", "from_head", "to_layer", "to_head"])
    return table.loc[[(*a, *b) for a in previous for b in induction]]


print("composition of previous-token and induction heads, and of random subspaces")
linked = pd.concat({"trained": composed(crate), "untrained": composed(untrained)}).groupby(level=0)
print(linked[["score", "chance", "percentile_99"]].agg(["mean", "min", "max"]).round(2).to_string())


def lost(senders, **receiving):
    """Returns the nats lost per token if the paths from each sender carry another string."""
    metric = lambda logits: nats(logits).mean()
    values = ci.circuits.path_patch(
        crate, others, judge, senders=senders, metric=metric, progress=False, **receiving
    )
    return [nats(crate(judge)).mean().item() - values[head].item() for head in senders]


senders = [head for head in previous if head[0] < min(induction)[0]]
table = {
    role: lost(senders, receivers=induction, roles=tuple(role)) for role in ("q", "k", "v", "qkv")
}
print("\nnats lost per token, from each head to all induction heads, by the role that reads it:")
print(pd.DataFrame(table, index=map(name, senders)).round(2).to_string())
ends = [(senders, one, dict(receivers=[one])) for one in induction] + [(induction, None, {})]
edges = [
    ci.circuits.Edge(name(head), name(end) if end else "logits", loss)
    for those, end, how in ends
    for head, loss in zip(those, lost(those, **how), strict=True)
]
circuit = ci.circuits.Circuit(edges, "nats lost per token if the path carries another string")

# %% [markdown]
# ## A circuit
# The heads that we found work alone: every other head is replaced by its mean. The sequences and
# periods did not choose them. *Faithfulness* is the share that these heads keep of the accuracy
# that all heads add, beside 100 random circuits of the same size. *Minimality* is what the least
# useful of these heads adds. For *completeness* we remove parts of the circuit, with and without
# the other heads there, and take the largest gap between the two accuracies. A gap of 0 would mean
# that no other head does the same work.


# %%
def judged(which, chosen, random, subsets=0):
    result = ci.circuits.evaluate(
        models[which], chosen, judge, right, reference=find, random=random, subsets=subsets,
        progress=False,
    )  # fmt: skip
    return result, result.table().set_index("measure")


chosen = sorted({*previous, *duplicate, *induction})
result, measures = judged("CRATE", chosen, 100)
completeness = judged("CRATE", chosen, 0, subsets=10)[1].loc[
    "completeness", ["value", "low", "high"]
]
print(measures.drop("completeness").round(3).to_string())
print("completeness of it and 10 random parts", between(completeness))
print(result.table("heads").round(3).to_string(index=False))

# %% [markdown]
# ## What the tie changes, shown by editing
# In CRATE query i and key j score the same as query j and key i (first line printed). Say that b
# follows a, and that there are no positions. If the second a looks at the first b, the second b
# then looks as much at the first a, the token *before* its copy.
#
# Here we run the same strings at early and at late positions, and give only the induction head its
# query or its key from the other run. The bars show attention around the earlier copy, dark where
# the head looks in the unedited model. In the last column the positions are exchanged.

# %%
for which in ("CRATE", "GPT"):
    layer, head = best[which]
    cache = models[which].run_with_cache(judge)[1]
    dots = cache["q", layer][:, :, head] @ cache["k", layer][:, :, head].mT
    print(f"{which}: largest |score(i, j) - score(j, i)| {(dots - dots.mT).abs().max():.0f}")

PERIOD, LATER = 12, 24
# No token stands in a string twice, so that each has one earlier copy.
strings = torch.rand(128, SEPARATOR, generator=torch.Generator().manual_seed(5)).argsort(dim=1)
short = torch.cat([judge[:1, :1].expand(128, 1), *[strings[:, :PERIOD]] * 2], dim=1)
around = repeat_targets(short, offsets=range(-3, 5))
around.pop("previous")
early, swapped = "queries and keys early", "queries early, keys late"
RUNS = {early: (0, 0), "queries late, keys early": (LATER, 0),
        "queries and keys late": (LATER, LATER), swapped: (0, LATER)}  # fmt: skip


def placed(model, by):
    """Returns the cache of a run whose strings stand `by` positions later."""
    rows = torch.arange(short.shape[1]) + by
    rows[0] = 0  # the separator stays first
    move = ("hook_pos_embed", lambda table, hook: model.W_pos[rows].expand_as(table).clone())
    with model.hooks([move]):
        return model.run_with_cache(short)[1]


def looks_at(which):
    """Returns where the strongest head looks in each run, with its codes from early or late."""
    model, layer, tables = models[which], best[which][0], {}
    caches = {by: placed(model, by) for by in (0, LATER)}
    for words, bys in RUNS.items():
        hooks = [(f"blocks.{layer}.attn.hook_{role}", edit.patch(caches[by][role, layer]))
                 for role, by in zip("qk", bys, strict=True)]  # fmt: skip
        with model.hooks(hooks):
            table = head_scores(model.run_with_cache(short)[1], around)
        tables[words] = table.set_index(PLACE).loc[best[which]].set_index("target")
    return tables


def shown(which, words, target):
    return between(looked[which][words].loc[target, ["score", "low", "high"]])


looked = {which: looks_at(which) for which in ("CRATE", "GPT")}
drawn = {}
for which in looked:
    target, mirrored = ahead[which], ahead[which].replace("+", "-")
    row = drawn[f"{which} {name(best[which])}: attention"] = {}
    for words, own in looked[which].items():
        row[words] = own.assign(dark=own.index == target).set_axis(range(-3, 5))
        print(f"{which}, {words}: {target} {shown(which, words, target)}, mirrored {mirrored} "
              f"{shown(which, words, mirrored)}")  # fmt: skip
score_bars(drawn, (10, 4), "places after the copy")

# %% [markdown]
# CRATE's preference follows the positions: it does not matter which code is the query and which is
# the key. (The copy itself gets the most attention, since equal codes match best.) The GPT's head
# looks at the same place in every column, or nowhere. One doubt remains: late keys are unusual for
# both models, because in training every first copy ends by position 24.
#
# The second edit makes one of the two tokens wrong. In one run, what the layer of the
# previous-token heads gathers from *other positions* comes from other strings, so the tokens before
# are wrong. In the other run everything else comes from other strings, so the token itself is
# wrong. The induction heads then read their query, key or value from such a run. CRATE needs the
# previous token in query, key and value (each costs more than .1 of accuracy). The GPT needs it in
# the key alone.


# %%
def mixed(model, layer, wrong):
    """Returns the cache of a run with the token itself, or the tokens before, of other strings."""
    itself, before = (model.run_with_cache(one)[1] for one in (judge, others))
    itself, before = (itself, before) if wrong == "before" else (before, itself)

    def gathered(cache):
        """What the heads of the layer bring from other positions, [batch, pos, d_model]."""
        pattern = cache["pattern", layer].clone()
        pattern.diagonal(dim1=-2, dim2=-1)[:] = 0
        z = pattern @ cache["v", layer].transpose(1, 2)  # [batch, head, pos, d_head]
        return torch.einsum("bhnp,hpd->bnd", z, model.blocks[layer].attn.W_O)

    point = f"blocks.{layer}.hook_resid_mid"
    with model.hooks([(point, edit.patch(itself[point] - gathered(itself) + gathered(before)))]):
        return model.run_with_cache(judge)[1]


rows = []
for which, wrong in [(which, wrong) for which in looked for wrong in ("itself", "before")]:
    model, readers = models[which], found(which, ahead[which])
    other = mixed(model, scores[which]["previous"]["score"].idxmax()[0], wrong)
    for role in "qkv":
        hooks = [(f"blocks.{layer}.attn.hook_{role}", edit.patch(other[role, layer], heads=[head]))
                 for layer, head in readers]  # fmt: skip
        with model.hooks(hooks):
            logits, cache = model.run_with_cache(judge)
        score = head_scores(cache, {"": repeat_targets(judge, (1, 2))[ahead[which]]})
        score = score.set_index(PLACE).loc[best[which], "score"]
        rows.append((which, wrong, role, between(resampled(right(logits))), round(score, 3)))
names = ["model", "wrong", "in the", "accuracy", "attention to the target"]
print(pd.DataFrame(rows, columns=names).to_string(index=False))

# %% [markdown]
# ## The other two seeds
# Two more networks were trained by the same script, from other random numbers. Each network has its
# own strongest induction head and circuit, beside 20 random circuits of the same size (seed 0: the
# 100 above). A head turns round if it attends more to the token before the copy than to the token
# after it, with intervals apart, and more than an even head. Seed 1's head does not turn round; its
# duplicate-token heads are in layer 1, its induction heads in layer 2.


# %%
def turns_round(which):
    own, target = looked[which][swapped], ahead[which]
    behind = own.loc[target.replace("+", "-")]
    return behind["low"] > max(own.loc[target, "high"], behind["even"])


def in_short(which):
    """Returns what is said of a network, and which of it holds."""
    kinds = {target: found(which, target) for target in KINDS}
    place = crossing(parts(models[which], best[which], "q", places))
    own = measures
    if which != "CRATE":  # looked at above
        looked[which] = looks_at(which)
        own = judged(which, sorted(set(sum(kinds.values(), []))), 20)[1]
    own, first = own.loc["faithfulness"], looked[which][early]
    words = {f"heads: {words}": " ".join(map(name, kinds[target]))
             for target, (_, words) in KINDS.items()}  # fmt: skip
    words |= {
        "strongest induction head": name(best[which]),
        "the lines cross at position": place or "none",
        "attention after the copy": shown(which, early, "copy+1"),
        "attention before it": shown(which, early, "copy-1"),
        "exchanged: after the copy": shown(which, swapped, "copy+1"),
        "exchanged: before it": shown(which, swapped, "copy-1"),
        "an even head": f"{looked[which][swapped].loc['copy-1', 'even']:.3f}",
        "faithfulness": between(own[["value", "low", "high"]]),
        "random circuits": between(own[["random_mean", "random_low", "random_high"]]),
    }
    return words, {
        "the lines cross": place is not None,
        "the head looks after the copy": first.loc["copy+1", "low"] > first.loc["copy-1", "high"],
        "exchanged positions turn it round": turns_round(which),
        "the found heads are a circuit": own["low"] > max(0.8, own["random_high"]),
    }


networks = {"seed 0": "CRATE"}
for folder in sorted(Path("weights").glob("crate-tiny-induction-seed-*")):
    which = networks[f"seed {folder.name[-1]}"] = folder.name
    models[which], ahead[which] = ci.load(folder), "copy+1"
    scores[which] = scored(models[which])
    best[which] = scores[which]["copy+1"]["score"].idxmax()
if len(networks) == 1:
    print("The other two are in demos/weights of the repository: put that folder beside this file.")
shorts = {seed: in_short(which) for seed, which in networks.items()}
print(pd.DataFrame({seed: words for seed, (words, _) in shorts.items()}).to_string())
for claim in shorts["seed 0"][1]:
    count = sum(holds[claim] for _, holds in shorts.values())
    print(f"{claim}: in {count} of {len(shorts)} networks")

# %% [markdown]
# ## When it forms
# The table follows seed 0 over eight training steps: its strongest induction score, and the
# composition of the heads that we found at the end. The GPT's accuracy comes from its card.

# %%
card = (files("crate_interp") / "assets/gpt-tiny-induction/README.md").read_text(encoding="utf-8")
points = re.findall(r"([0-9.]+) (?:after ([0-9,]+) steps|at the end)", card)
of_gpt = {int(step.replace(",", "") or 5000): float(share) for share, step in points}
rows = []
for step in sorted(of_gpt):
    model = ci.load("crate-tiny-induction", revision=f"step-{step}" if step < 5000 else None)
    logits, cache = model.run_with_cache(judge)
    table = head_scores(cache, {"copy+1": repeat_targets(judge)["copy+1"]}).set_index(PLACE)
    score, linked = table["score"].loc[induction].max(), composed(model)["score"].mean()
    loss = -nats(logits).mean().item()
    rows.append((step, right(logits).mean().item(), loss, score, linked, of_gpt[step]))
names = ["step", "accuracy", "loss", "induction score", "composition", "GPT accuracy (card)"]
along = pd.DataFrame(rows, columns=names).set_index("step")
print(along.round(3).to_string())
for line in ("composition", "induction score", "accuracy"):
    gone = (along[line] - along[line].iloc[0]) / (along[line].iloc[-1] - along[line].iloc[0])
    print(f"{line}: half of its way by step {(gone >= 0.5).idxmax()}")
drawn = along.assign(**{"loss over the first": along["loss"] / along["loss"].iloc[0]})
drawn.index = drawn.index.where(drawn.index > 0, 20)
panels = {"CRATE and GPT": names[1::4],
          "CRATE": ["loss over the first", "composition", "induction score"]}  # fmt: skip
panels = {title: drawn[columns] for title, columns in panels.items()}
line_panels(panels, "step (the first is 0)", logx=True, marker="o")

# %% [markdown]
# ## The circuit
# The wider an edge, the more is lost (in nats per token) if the edge carries another string.

# %%
ci.viz.circuit(circuit, title="induction in crate-tiny-induction")

# %% [markdown]
# The explorer rings the heads of the circuit. Point at a token of the second copy and see in layer
# 1 how its heads look at the earlier copy and at the token after it.

# %%
ci.viz.explore(crate.run_with_cache(judge[:1])[1], judge[:1], circuit=circuit)

# %% [markdown]
# ## The same search in text
# `crate-tiny-lm` was trained on books and a dictionary. Does it have an induction head? We show it
# random tokens twice. And does an open “quote” make it prefer `.”` to `.`? We run windows of text
# as they are, and with every opening quote replaced by ` the`. Neighbouring windows belong to one
# text, so the interval comes from resampling whole texts.

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
loss = lm(twice, return_type="loss", loss_per_token=True)
first, second = loss[:, :40].mean().item(), loss[:, 41:].mean().item()
target = {"copy+1": repeat_targets(twice)["copy+1"]}
own, random = (head_scores(one.run_with_cache(twice)[1], target) for one in (lm, no_lm))
own, random, guess = own.loc[own["score"].idxmax()], random["high"].max(), np.log(lm.cfg.d_vocab)
print(
    f"loss in the first copy {first:.2f} nats, in the second {second:.2f}, of a guess {guess:.2f}"
)
print(f"highest induction score {between(own[['score', 'low', 'high']])}, untrained at most "
      f"{random:.3f}, even {own['even']:.3f}")  # fmt: skip

dot, close, opening, closing, the = map(lm.to_single_token, (".", ".”", " “", "”", " the"))
is_closing = (windows == closing) | (windows == close)
inside = ((windows == opening).cumsum(1) - is_closing.cumsum(1) > 0)[:, :-1]
ends = (windows[:, 1:] == close) & inside
quoted = ends.any(dim=1)
tokens, ends, text_of = windows[quoted], ends[quoted], text_of[quoted]


def preference(model, tokens):
    """Returns the logit of `.”` minus that of `.` at the ends of quotes, [window]."""
    logits = model(tokens)
    gap = (logits[..., close] - logits[..., dot])[:, :-1]
    return (gap * ends).sum(dim=1) / ends.sum(dim=1)


unopened = torch.where(tokens == opening, the, tokens)
quote, no_quote = (
    resampled((preference(one, tokens) - preference(one, unopened)).numpy(), text_of)
    for one in (lm, no_lm)
)
is_there = own["low"] > max(2 * own["even"], random) and second < 0.9 * first
moves = "moves" if quote[1] > max(no_quote[2], 0) else "does not measurably move"
print(
    f"In text: {'there may be an' if is_there else 'no'} induction head; an open quote {moves} the "
    f"preference for closing it, by {between(quote)} nats; untrained {between(no_quote)}."
)

# %% [markdown]
# ## Conclusion
# Intervals do not say what another training run would give; the three seeds do.

# %%
for which in ("CRATE", "GPT"):
    words = "turns round" if turns_round(which) else "does not turn round"
    print(f"{which}: with the positions of queries and keys exchanged {name(best[which])} {words}")
own, kept = measures.loc["faithfulness"], shorts["seed 0"][1]["the found heads are a circuit"]
random = between(own[["random_mean", "random_low", "random_high"]])
print(f"Answer: {', '.join(map(name, chosen))} are {'a circuit' if kept else 'no circuit'}.")
print(
    f"faithfulness {own['value']:.3f} (95 % {own['low']:.3f} to {own['high']:.3f}); 100 random "
    f"circuits of {len(chosen)} heads {random}, share as good {own['share_as_good']:.2f}"
)
