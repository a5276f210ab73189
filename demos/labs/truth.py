"""What finders find where the truth is known, and where they are at chance.

Circuits are written into tied weights (planted_circuits.py), and ReduNets built from data. A finder
is scored beside the size of activations, random numbers, and itself on shuffled weights. It is at
chance if the interval of its AUROC over networks holds .5.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from drawing import interval, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, mean_and_interval, result, texts, values
from mixtures import draw_tokens, random_bases
from planted_circuits import HEADS, Network, induction, modular_addition
from scipy.stats import rankdata

import crate_interp as ci
from crate_interp.circuits import patching

SEEDS, FIRST, TEXTS, FEW, LAYERS, DRAWS = {"quick": 5, "full": 20}, 100, 64, 2, 12, 20
KEPT = 0.8  # of the influence in a graph; with all of it each code has a rank
WHO = ("finder", "size", "random", "shuffled")
QUIET: Any = {"progress": False}
Found = tuple[Any, Any]  # a number for each unit, and what the finder says yes to
Change = Callable[[Any], Any]  # what is done to a model first: nothing, or its weights shuffled
# a finder and where it looks, truth and size of each unit, how it finds
Case = tuple[str, Any, Any, Callable[[Change], Found]]


def shuffled(model: Any, seed: int) -> Any:
    """Returns a copy of a model with the entries of each weight in random order."""
    other, random = deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        order = torch.randperm(weight.numel(), generator=random)
        weight.data = weight.data.flatten()[order].view_as(weight)
    return other


def scored(seed: int, name: str, truth: Any, size: Any, find: Callable[..., Found]) -> list[list]:
    """Returns the rows of a finder and its rivals; one without a yes says it to the largest."""
    random, truth, rows = np.random.default_rng(seed), np.array(truth), []
    draws, ones = [(each, None) for each in random.random((DRAWS, len(truth)))], truth.sum()
    own, other = find(lambda model: model), find(lambda model: shuffled(model, seed))
    for who, found in zip(WHO, ([own], [(size, None)], draws, [other]), strict=True):
        parts = []
        for numbers, yes in found:
            ranks = rankdata(np.nan_to_num(np.array(numbers, dtype=float)))
            yes = ranks > len(truth) - ones if yes is None else np.array(yes, dtype=bool)
            right, area = (truth & yes).sum(), ranks[truth].sum() - ones * (ones + 1) / 2
            parts.append([area / ones / (~truth).sum(), right / ones, right / max(yes.sum(), 1)])
        told = zip(("auroc", "recall", "precision"), np.mean(parts, axis=0), strict=True)
        rows += [[key, f"{name}, {who}", seed, len(truth), float(x)] for key, x in told]
    return rows


def of_heads(net: Network, kind: str) -> Iterator[Case]:
    """Yields the finders that give each head a number."""
    heads = list(product(range(net.model.cfg.n_layers), range(HEADS)))
    (_, cache), blocks = net.model.run_with_cache(net.tokens), net.model.blocks
    written = [cache["z", k][:, :, h] @ blocks[k].attn.W_O[h].detach() for k, h in heads]

    def metric(logits: Any) -> Any:
        return logits[range(TEXTS), -2, net.tokens[:, -1]].mean()

    def ablate_heads(change: Change) -> Found:
        result = ci.ablate_heads(change(net.model), net.tokens, **QUIET)
        table = result.heads().sort_values(["layer", "head"])
        return table["drop"], (table["p"] <= 0.05) & (table["drop"] > 0)

    def patch(change: Change, first_order: bool = False) -> Found:
        model, sweep = change(net.model), patching.get_act_patch_attn_head_out_all_pos
        base, clean = metric(model(net.other)), model.run_with_cache(net.tokens)[1]
        if first_order:
            change_of = ci.circuits.attribution_patch(model, net.tokens, net.other, metric, **QUIET)
        else:
            change_of = sweep(model, net.other, clean, metric) - base
        shares = (change_of / (metric(model(net.tokens)) - base)).detach().flatten().numpy()
        return shares, shares >= 0.25

    def sinks(change: Change) -> Found:
        model, options = change(net.model), {"probes": ["ladder"], "controls": 0}
        table = ci.sweep(model, net.tokens, **options, **QUIET).heads()
        table = table.query("statistic == 'sinks'").sort_values(["layer", "head"])["mean"]
        return table, table > 0.5

    ways: Any = {"ablate_heads": ablate_heads, "patching": patch}
    ways |= {"attribution_patch": lambda change: patch(change, True)}
    ways |= {"ladder probe (sinks)": sinks} if kind == "induction" else {}
    size = [float(each.norm(dim=-1).mean()) for each in written]
    truth = [head in net.heads for head in heads]
    yield from ((f"{name}, {kind}", truth, size, way) for name, way in ways.items())


def of_codes(net: Network, kind: str) -> Iterator[Case]:
    """Yields the codes that are on, and the pairs of atoms of the look at the pointer's place."""
    given, query = net.tokens[:FEW, :-1], net.tokens.shape[1] - 2
    ((_, head),), (_, cache) = [h for h in net.heads if h[0]], net.model.run_with_cache(given)
    codes = torch.stack([cache["post", layer] for layer in range(2)], dim=1)
    nodes, pairs = list(map(tuple, codes.nonzero().tolist())), []  # text, layer, token, atom
    circuit: set[tuple[int, ...]] = set()
    places, looked = net.atoms[0, "place"].tolist(), (net.sources[:FEW] + 1).tolist()
    for text, at in enumerate(looked):
        pointer, token = int(net.atoms[0, "pointer"][at - 1]), given[text, at]
        value, answer = net.atoms[0, "token"][token], net.atoms[1, "next"][net.tokens[text, -1]]
        circuit |= {
            (text, 0, query, pointer), (text, 0, query, places[query]), (text, 0, at, places[at]),
            (text, 0, at, int(value)), (text, 1, query, int(answer)), (text, pointer, places[at]),
        }  # fmt: skip
        both = (codes[text, 0, place].nonzero()[:, 0].tolist() for place in (query, at))
        pairs += [(text, *pair) for pair in product(*both)]

    def keyed(text: int, table: Any, *columns: str) -> dict[tuple[int, ...], float]:
        rows = table[[*columns]].to_numpy().tolist()
        return {(text, *map(int, key)): value for *key, value in rows}

    def graph(change: Change) -> Found:
        found, model = {1.0: {}, KEPT: {}}, change(net.model)
        for share, text in product(found, range(FEW)):
            table = ci.graph(model, given[text], target=int(net.tokens[text, -1]), nodes=share,
                             edges=min(1.0, share + 0.18), tests=False).table("nodes")  # fmt: skip
            found[share] |= keyed(text, table, "layer", "pos", "atom", "influence")
        whole, kept = found.values()
        return [whole.get(node, 0.0) for node in nodes], [node in kept for node in nodes]

    def why_attends(change: Change) -> Found:
        found, top, model = {}, [], change(net.model)
        for text, at in enumerate(looked):
            table = ci.circuits.why_attends(model, given[text], 1, head, query, at).table("pairs")
            own = keyed(text, table.query("query_atom >= 0"), "query_atom", "key_atom", "part")
            found |= own
            top.append(max(own, key=own.__getitem__, default=None))
        return [found.get(pair, 0.0) for pair in pairs], [pair in top for pair in pairs]

    size = [float(codes[node]) for node in nodes]
    yield f"graph, {kind}", [node in circuit for node in nodes], size, graph
    size = [float(codes[k, 0, query, a] * codes[k, 0, looked[k], b]) for k, a, b in pairs]
    yield f"why_attends, {kind}", [pair in circuit for pair in pairs], size, why_attends


def of_atoms(net: Network) -> Iterator[Case]:
    """Yields names of atoms, and the axes on which two codes of layer 1 carry the answer."""
    # pointers and mixtures of tokens have no name
    wanted = {int(atom): f"{words}'{word}'"
              for name, words in (("token", ""), ("idle0", "after "))
              for word, atom in enumerate(net.atoms[0, name]) if word}  # fmt: skip
    every = [*wanted, *net.atoms[0, "pointer"][1:8].tolist(), *net.atoms[0, "mixed"].tolist()]

    def names(change: Change) -> Found:
        table = ci.circuits.atom_names(change(net.model), net.tokens, **QUIET).table("names")
        told = table.query("layer == 0").set_index("atom").loc[every]
        yes = [name == wanted.get(atom, name) != "" for atom, name in told["name"].items()]
        return told["auc"], yes

    def carried(change: Change) -> Found:
        model, given = change(net.model), net.tokens[:, :-1]
        if len(set(model(given)[:, -1].argmax(dim=-1).tolist())) == 1:  # no difference to carry
            return np.zeros(3), np.zeros(3)
        found = ci.circuits.concentration(model, given, k=[2], untrained=0, **QUIET).table()
        shares = found.query("layer == 1").sort_values("basis")["carried"]
        return shares, shares > 0.95

    size = net.model.run_with_cache(net.tokens)[1]["post", 0].mean(dim=(0, 1))[every].tolist()
    yield "atom_names, induction", [atom in wanted for atom in every], size, names
    yield "concentration, induction", [True, False, False], [1.0] * 3, carried  # native comes first


def of_layers(seed: int) -> Iterator[Case]:
    """Yields what a ReduNet's audit says of its layers, among layers that were not built there."""
    bases = random_bases(3, 24, 3, seed)
    noisy = [draw_tokens(40, u[None], 0.1, seed + k)[0] for k, u in enumerate(bases)]
    given = torch.cat(noisy), torch.arange(3).repeat_interleave(40)
    net = ci.redunet(*given, layers=LAYERS)
    moved, order = deepcopy(net), torch.randperm(LAYERS, generator=torch.Generator().manual_seed(1))
    for block, k in zip(moved.blocks, order.tolist(), strict=True):
        block.load_state_dict(net.blocks[k].state_dict())
    others = {"weights": shuffled(net, seed + 1), "order": moved}
    for (kind, other), answer in product(others.items(), ("raises", "along")):

        def audit(change: Change, other: Any = other, answer: str = answer) -> Found:
            told = pd.concat([one.audit(*given) for one in (change(net), other)])
            rise = told["rate_after"] - told["rate_before"]
            return rise if answer == "raises" else told["cosine"], told[answer] == "yes"

        caches = [one.run_with_cache(*given)[1] for one in (net, other)]
        size = [float(c[f"blocks.{k}.hook_step"].norm()) for c in caches for k in range(LAYERS)]
        yield f"audit ({answer}), {kind}", np.repeat([True, False], LAYERS), size, audit


def of_seed(seed: int) -> list[list]:
    """Returns the rows of all finders on the networks of a seed."""
    soft, hard = (induction(seed, margin=margin, count=TEXTS) for margin in (6.0, 12.0))
    copies, sums = induction(seed, copies=2, count=TEXTS), modular_addition(seed, count=TEXTS)
    cases = [*of_heads(soft, "induction"), *of_heads(copies, "copies"), *of_heads(sums, "sum"),
             *of_codes(soft, "induction"), *of_codes(hard, "hard attention"), *of_atoms(soft),
             *of_layers(seed)]  # fmt: skip
    return [row for case in cases for row in scored(seed, *case)]


def table_of(rows: list[list]) -> pd.DataFrame:
    """Returns a line for each finder: the AUROC of whom, and who is at chance."""
    table: Any = {name: {} for name in dict.fromkeys(row[1].rsplit(", ", 1)[0] for row in rows)}
    for name, line in table.items():
        for who in WHO:
            each = values(rows, "auroc", f"{name}, {who}")
            mean, (low, high) = mean_and_interval(each, (0.0, 1.0))
            line[who] = f"{mean:.2f} ({low:.2f} to {high:.2f})" + "*" * (low <= 0.5 <= high)
        for key in ("recall", "precision"):
            line[key] = values(rows, key, f"{name}, finder").mean()
    return pd.DataFrame.from_dict(table, orient="index")


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about finders."""
    jobs = {f"seed-{k}": lambda k=k: of_seed(FIRST + k) for k in range(SEEDS[form])}
    table = table_of(rows := steps.rows(jobs, "networks"))
    print(table.to_string(float_format="{:.2f}".format), "AUROC; * at chance", sep="\n")
    of = {name: [values(rows, "auroc", f"{name}, {who}") for who in WHO] for name in table.index}
    claims = [
        claim(f"truth.{key}", np.mean([of[name][0] for name in names], axis=0),
              cases={name: of[name][0] for name in names},
              baseline=np.mean([of[name][-1] for name in names]))
        for key, names in texts("truth")["asked"].items()
    ]  # fmt: skip
    more = {name: own - np.max(rivals, axis=0) for name, (own, *rivals) in of.items()}
    claims.append(claim("truth.rivals", np.mean([*more.values()], axis=0), cases=more, baseline=0))
    chance = table.index[table["finder"].str.endswith("*")]
    words = {"count": len(of), "chance": len(chance), "names": "; ".join(chance) or "none"}
    return result("truth", form, claims, rows, **words)


def draw(found: LabResult) -> Any:
    """Draws the AUROC of each finder, and of its rivals."""
    (figure, axis), rows = panels(1, size=(10, 5.5)), found.table("numbers").to_numpy().tolist()
    names = table_of(rows).index
    for (at, name), (k, who) in product(enumerate(names), enumerate(WHO)):
        look: Any = {"color": f"C{(0, 1, 7, 3)[k]}", "label": who if at == 0 else None, "ms": 4}
        interval(axis, at + k / 6, values(rows, "auroc", f"{name}, {who}"), **look)
    level(axis, 0.5)
    tidy(axis, 0, ylabel="AUROC (line: chance)", xticks=range(len(names)), ylim=(-0.05, 1.05))
    axis.set_xticklabels(names, rotation=40, ha="right", fontsize=8)
    return titled(figure, found, axis)


if __name__ == "__main__":
    main(run, draw)
