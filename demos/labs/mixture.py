"""Are tokens a mixture of Gaussians on the model's subspaces? Held-out likelihood, by layer.

The derivation of CRATE assumes that the tokens of a layer lie near the union of the subspaces U_k,
a Gaussian in each (arXiv 2306.01129, section 2.2). Fitted on the tokens y = LN(Z^l) of some images,
and scored on those of others: (a) one Gaussian, (b) the mixture of K low-rank Gaussians on the
model's U_k, (c) the same on random subspaces, (d) the same with fitted subspaces, which has as many
parameters as (b) if those of U_k are counted. The mean token is removed for all of them, and all
covariances are regularised by the same floor, .01 of the mean variance of a direction. Untrained
networks of five seeds stand beside. Then: how the tokens of an image, and the CLS tokens of all
images, spread by layer.
"""

from functools import partial
from typing import Any

import torch
from em import fit, log_likelihood
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from mixtures import random_bases
from torch import Tensor
from tqdm.auto import tqdm
from twins import MODELS, UNTRAINED, answer_of, images_of, spread, streams, untrained

import crate_interp as ci
from crate_interp.measures import effective_rank

FLOOR, ROUNDS = 0.01, 10
N_IMAGES = {"quick": 64, "full": 128}  # half to fit, half held out
KINDS = ("one Gaussian", "own subspaces", "random subspaces", "fitted subspaces")
PAIRS = {  # of kinds: the claim that the first is the better
    ("own subspaces", "one Gaussian"): "U_k describe tokens better than one Gaussian.",
    ("own subspaces", "random subspaces"): "U_k describe tokens better than random subspaces.",
    ("own subspaces", "fitted subspaces"): "U_k describe tokens better than fitted subspaces.",
}
SPREADS = ("cosine of tokens", "rank of tokens", "cosine of CLS", "rank of CLS")


def likelihoods(y: Tensor, u: Tensor, seed: int) -> dict[str, Tensor]:
    """Returns the held-out log-likelihood per token of each kind, in nats, by image `[n / 2]`.

    y `[n, pos, d]`: the first half of the images is fitted, u `[head, d, p]` orthonormal.
    """
    half = len(y) // 2
    y = y.double()
    y = y - y[:half].mean(dim=(0, 1))
    train, held = y[:half].flatten(0, 1), y[half:]
    floor = FLOOR * float(train.square().mean())
    heads, d, p = u.shape
    whole = torch.eye(d, dtype=y.dtype)[None]
    start = random_bases(heads, d, p, seed)
    fits = {
        "one Gaussian": fit(train, whole, floor, False, 1),
        "own subspaces": fit(train, u.double(), floor, False, ROUNDS),
        "random subspaces": fit(train, start, floor, False, ROUNDS),
        "fitted subspaces": fit(train, start, floor, True, ROUNDS),
    }
    rows = held.flatten(0, 1)
    return {
        kind: log_likelihood(rows, fits[kind]).unflatten(0, held.shape[:2]).mean(dim=1)
        for kind in KINDS
    }


def pairwise_cosine(z: Tensor) -> Tensor:
    """Returns each row's mean cosine with the other rows, `[..., n]`, for z `[..., n, d]`."""
    unit = torch.nn.functional.normalize(z, dim=-1)
    n = z.shape[-2]
    return ((unit @ unit.mT).sum(dim=-1) - unit.square().sum(dim=-1)) / (n - 1)


def spreads(z: Tensor) -> dict[str, Tensor]:
    """Returns how tokens spread, for a stream z `[n, pos, d]` with CLS first: values by image.

    The cosine of tokens is the mean over pairs of an image's patches, their rank the effective
    rank. The cosine of CLS is that of an image's CLS with all others. The rank of CLS is one number
    for all images.
    """
    patches, cls = z[:, 1:], z[:, 0]
    return {
        "cosine of tokens": pairwise_cosine(patches).mean(dim=-1),
        "rank of tokens": effective_rank(patches),
        "cosine of CLS": pairwise_cosine(cls),
        "rank of CLS": effective_rank(cls[None]),
    }


@torch.no_grad()
def measure(model: ci.HookedCrate, images: Tensor) -> dict[str, list[dict[str, float]]]:
    """Returns mean and interval over images of each number, by layer."""
    found: dict[str, list] = {}
    blocks: Any = model.blocks
    stream = streams(model, images)
    for layer, z in enumerate(stream[:-1]):
        u = torch.linalg.qr(blocks[layer].attn.U)[0]
        by_kind = likelihoods(blocks[layer].ln1(z), u, seed=layer)
        for kind, values in by_kind.items():
            found.setdefault(kind, []).append(spread(values))
        for first, second in PAIRS:
            gain = by_kind[first] - by_kind[second]
            found.setdefault(f"{first} - {second}", []).append(spread(gain))
    for z in stream:
        for quantity, values in spreads(z).items():
            found.setdefault(quantity, []).append(spread(values))
    lost = effective_rank(stream[0][:, 1:]) - effective_rank(stream[-1][:, 1:])
    found["rank lost"] = [spread(lost)]
    return found


def seeds_interval(
    twins: list[dict], quantity: str, place: int
) -> tuple[float, tuple[float, float]]:
    """Returns mean and interval over untrained networks of one number."""
    return mean_and_interval([twin[quantity][place]["mean"] for twin in twins])


def mixture_claim(name: str, found: dict, twins: list[dict], pair: tuple, n: int) -> dict:
    """Returns a claim about two kinds of mixture.

    Rule: a layer keeps it if the interval over held-out images of the gain lies above 0 and above
    the interval of untrained networks; supported where all do, depends where some do.
    """
    key = f"{pair[0]} - {pair[1]}"
    highs = [seeds_interval(twins, key, layer)[1][1] for layer in range(len(found[key]))]
    kept = [place["low"] > max(0.0, high) for place, high in zip(found[key], highs, strict=True)]
    middle = len(kept) // 2
    place = found[key][middle]
    return claim(
        f"{name}: {PAIRS[pair]} (nats per token, layer {middle})",
        "arXiv 2306.01129, section 2.2, eq. 4 (the assumption)",
        place["mean"],
        interval=(place["low"], place["high"]),
        answer=answer_of(kept),
        why=f"{sum(kept)} of {len(kept)} layers gain more than 0 and than untrained networks.",
        size=f"{name}, {n} images fitted, {n} held out",
        baseline=seeds_interval(twins, key, middle)[0],
        baseline_is="untrained",
        n=n,
    )


def rank_claim(name: str, found: dict, twins: list[dict], n: int) -> dict:
    """Returns the claim on compression: tokens lose effective rank, more than at random.

    Rule: the interval over images lies above 0 and above that of untrained networks.
    """
    (lost,) = found["rank lost"]
    mean, (_, high) = seeds_interval(twins, "rank lost", 0)
    return claim(
        f"{name}: the tokens of an image lose effective rank from Z^0 to Z^L.",
        "arXiv 2306.01129, section 2.3 (compression)",
        lost["mean"],
        interval=(lost["low"], lost["high"]),
        answer="supported" if lost["low"] > max(0.0, high) else "not supported",
        why="The interval over images is set against 0 and untrained networks.",
        size=f"{name}, {2 * n} images",
        baseline=mean,
        baseline_is="untrained",
        n=2 * n,
    )


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by model, kind and layer."""
    claims, numbers = [], []
    for name in tqdm(MODELS, desc="models", unit="model"):
        images, _ = images_of(name, N_IMAGES[form])
        model = ci.load(name)
        found = steps.do(name, partial(measure, model, images))
        twins = []
        for seed in UNTRAINED:
            twin = untrained(model.cfg, seed)
            twins.append(steps.do(f"{name}-{seed}", partial(measure, twin, images)))
        n = len(images) // 2
        claims += [mixture_claim(name, found, twins, pair, n) for pair in PAIRS]
        claims.append(rank_claim(name, found, twins, n))
        for who, seed, table in [("trained", 0, found)] + [
            ("untrained", seed, twin) for seed, twin in enumerate(twins)
        ]:
            for quantity, places in table.items():
                for layer, place in enumerate(places):
                    for end in ("mean", "low", "high"):
                        words = quantity if end == "mean" else f"{quantity}, {end}"
                        numbers.append((words, f"{name}|{who}", seed, layer, place[end]))
    gaussian, turned = (
        " and ".join(f"{row['ours']:+.1f}" for row in claims if pair in row["claim"])
        for pair in ("one Gaussian", "random subspaces")
    )
    headline = (
        f"In the middle layer of {len(MODELS)} tiny models, a mixture on the model's subspaces "
        f"describes a held-out token by {gaussian} nats against one Gaussian, and by {turned} "
        "against random subspaces."
    )
    return result("mixture", form, headline, claims, numbers)


def draw(found: LabResult) -> Any:
    """Returns a figure: likelihoods, and the rank of tokens, by layer; a column for each model."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(MODELS), figsize=(10, 6.5), sharex=True)
    for column, name in enumerate(MODELS):
        top, bottom = axes[:, column]
        for colour, kind in enumerate(k for k in KINDS if k != "one Gaussian"):
            for who, style in (("trained", "o-"), ("untrained", "x:")):
                of = {"setting": f"{name}|{who}"}
                own: Any = found.numbers(kind, **of).groupby("place")["value"].mean()
                one: Any = found.numbers("one Gaussian", **of).groupby("place")["value"].mean()
                top.plot(own - one, style, color=f"C{colour}", label=f"{kind}, {who}")
        top.axhline(0, color="grey", linewidth=0.5)
        top.set_title(name, fontsize=10)
        for who, style in (("trained", "o-"), ("untrained", "x:")):
            table: Any = found.numbers("rank of tokens", setting=f"{name}|{who}")
            bottom.plot(table.groupby("place")["value"].mean(), f"{style}", color="k", label=who)
        bottom.set_xlabel("layer l of Z^l")
    axes[0, 0].set_ylabel("nats per token above\none Gaussian")
    axes[1, 0].set_ylabel("effective rank\nof an image's patches")
    axes[0, 1].legend(fontsize=7)
    axes[1, 0].legend(fontsize=8)
    rows: Any = found.table()
    answers = rows[rows["claim"].str.contains("one Gaussian")]["ours"]
    words = " and ".join(f"{value:+.0f}" for value in answers)
    figure.suptitle(
        f"Own subspaces against one Gaussian: {words} nats per held-out token in the middle layer\n"
        f"(two tiny models, {rows['n'].min()} images held out; untrained: mean of 5 seeds)",
        fontsize=11,
    )
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(run, draw)
