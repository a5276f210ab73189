"""Are tokens a mixture of Gaussians on the model's subspaces? Held-out likelihood, by layer.

The derivation of CRATE assumes that the tokens of a layer lie near the union of the subspaces U_k,
a Gaussian in each (arXiv 2306.01129, section 2.2). Fitted on the tokens y = LN(Z^l) of some images,
and scored on those of others: (a) one Gaussian, (b) the mixture of K low-rank Gaussians on the
model's U_k, (c) the same on random subspaces, the best of five draws, (d) the same with fitted
subspaces, an upper limit that no claim is asked of. The mean token is
removed for all of them, and all covariances are regularised by the same floor, .01 of the mean
variance of a direction. Untrained networks of five seeds stand beside. Then: how the tokens of an
image, and the CLS tokens of all images, spread by layer.
"""

from functools import partial
from typing import Any

import torch
from em import Mixture, fit, log_likelihood
from lab import LabResult, Steps, claim, finished, main, mean_and_interval, result
from mixtures import random_bases
from rules import beyond
from torch import Tensor
from tqdm.auto import tqdm
from twins import MODELS, UNTRAINED, images_of, loaded, spread, streams, untrained

import crate_interp as ci
from crate_interp.measures import effective_rank

FLOOR, ROUNDS = 0.01, 10
DRAWS = 5  # of random subspaces beside a trained network; one beside an untrained one
N_IMAGES = {"quick": 64, "full": 128}  # half to fit, half held out
KINDS = ("one Gaussian", "own subspaces", "random subspaces", "fitted subspaces")
PAIRS = {  # of kinds, the first of which is claimed to be the better: the rule
    ("own subspaces", "one Gaussian"): "gaussian",
    ("own subspaces", "random subspaces"): "random",
}

HEADLINE = (
    "The log-likelihood of a held-out token under a mixture on the model's subspaces differs from "
    "that under one Gaussian by {gaussian} nats, and from that under the best of {draws} draws of "
    "random subspaces by {chance} (middle layers of two tiny models). From Z^0 to Z^L the tokens "
    "of an image lose effective rank: {lost_rank}."
)


def likelihoods(y: Tensor, u: Tensor, seed: int, draws: int = 1) -> dict[str, Tensor]:
    """Returns the held-out log-likelihood per token of each kind, in nats, by image `[n / 2]`.

    y `[n, pos, d]`: the first half of the images is fitted, u `[head, d, p]` orthonormal. Of the
    draws of random subspaces the one counts that describes the held-out tokens best.
    """
    half = len(y) // 2
    y = y.double()
    y = y - y[:half].mean(dim=(0, 1))
    train, held = y[:half].flatten(0, 1), y[half:]
    floor = FLOOR * float(train.square().mean())
    heads, d, p = u.shape
    whole = torch.eye(d, dtype=y.dtype)[None]
    starts = [random_bases(heads, d, p, DRAWS * seed + draw) for draw in range(draws)]
    fits = {
        "one Gaussian": fit(train, whole, floor, False, 1),
        "own subspaces": fit(train, u.double(), floor, False, ROUNDS),
        "fitted subspaces": fit(train, starts[0], floor, True, ROUNDS),
    }

    def by_image(fitted: Mixture) -> Tensor:
        rows = log_likelihood(held.flatten(0, 1), fitted)
        return rows.unflatten(0, held.shape[:2]).mean(dim=1)

    found = {kind: by_image(fitted) for kind, fitted in fits.items()}
    drawn = [by_image(fit(train, start, floor, False, ROUNDS)) for start in starts]
    return found | {"random subspaces": max(drawn, key=lambda values: float(values.mean()))}


def pairwise_cosine(z: Tensor) -> Tensor:
    """Returns each row's mean cosine with the other rows, `[..., n]`, for z `[..., n, d]`."""
    unit = torch.nn.functional.normalize(z, dim=-1)
    n = z.shape[-2]
    return ((unit @ unit.mT).sum(dim=-1) - unit.square().sum(dim=-1)) / (n - 1)


def spreads(z: Tensor) -> dict[str, Tensor]:
    """Returns how tokens spread, for a stream z `[n, pos, d]` with CLS first: values by image.

    The cosine of tokens is the mean over pairs of an image's patches, their rank the effective
    rank, as it is and without the image's mean token. The cosine of CLS is that of an image's CLS
    with all others. The rank of CLS is one number for all images.
    """
    patches, cls = z[:, 1:], z[:, 0]
    return {
        "cosine of tokens": pairwise_cosine(patches).mean(dim=-1),
        "rank of tokens": effective_rank(patches),
        "rank of centred tokens": effective_rank(patches - patches.mean(dim=1, keepdim=True)),
        "cosine of CLS": pairwise_cosine(cls),
        "rank of CLS": effective_rank(cls[None]),
    }


@torch.no_grad()
def measure(model: ci.HookedCrate, images: Tensor, draws: int) -> dict[str, list[dict[str, float]]]:
    """Returns mean and interval over images of each number, by layer; draws: `likelihoods`."""
    found: dict[str, list] = {}
    blocks: Any = model.blocks
    stream = streams(model, images)
    for layer, z in enumerate(stream[:-1]):
        u = torch.linalg.qr(blocks[layer].attn.U)[0]
        by_kind = likelihoods(blocks[layer].ln1(z), u, layer, draws)
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
    """Returns a claim about two kinds of mixture, with a case for each layer."""
    key, cases = f"{pair[0]} - {pair[1]}", {}
    for layer, place in enumerate(found[key]):
        rival = seeds_interval(twins, key, layer)[1]
        cases[f"layer {layer}"] = beyond((place["low"], place["high"]), (0.0, 0.0), rival)
    middle = len(cases) // 2
    place = found[key][middle]
    kept = sum(low > 0 for low, _ in cases.values())
    return claim(
        f"mixture.{PAIRS[pair]}",
        place["mean"],
        interval=(place["low"], place["high"]),
        cases=cases,
        why=f"{kept} of {len(cases)} layers gain more than 0 and than untrained networks, "
        f"{sum(high <= 0 for _, high in cases.values())} less than one of them.",
        size=f"{name}, {n} images fitted, {n} held out",
        baseline=seeds_interval(twins, key, middle)[0],
        n=n,
        name=name,
        middle=middle,
    )


def rank_claim(name: str, found: dict, twins: list[dict], n: int) -> dict:
    """Returns the claim on compression: tokens lose effective rank, more than at random."""
    (lost,) = found["rank lost"]
    mean, rival = seeds_interval(twins, "rank lost", 0)
    ends = (lost["low"], lost["high"])
    return claim(
        "mixture.rank",
        lost["mean"],
        interval=ends,
        cases={"": beyond(ends, (0.0, 0.0), rival)},
        why="The interval over images is set against 0 and untrained networks.",
        size=f"{name}, {2 * n} images",
        baseline=mean,
        n=2 * n,
        name=name,
    )


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by model, kind and layer."""
    claims, numbers = [], []
    for name in tqdm(MODELS, desc="models", unit="model"):
        images, _ = images_of(name, N_IMAGES[form])
        model = loaded(name)
        found = steps.do(name, partial(measure, model, images, DRAWS))
        twins = []
        for seed in UNTRAINED:
            twin = untrained(model.cfg, seed)
            twins.append(steps.do(f"{name}-{seed}", partial(measure, twin, images, 1)))
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
    gaussian, chance, rank = (
        " and ".join(f"{row['ours']:+.1f}" for row in claims if words in row["claim"])
        for words in ("one Gaussian", "random subspaces", "effective rank")
    )
    headline = HEADLINE.format(
        gaussian=gaussian, draws=DRAWS, chance=chance, lost_rank=rank.replace("+", "")
    )
    return result("mixture", form, headline, claims, numbers)


def draw(found: LabResult) -> Any:
    """Returns a figure: likelihoods, and the rank of tokens, by layer; a column for each model."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(MODELS), figsize=(10, 7), sharex=True)
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
    axes[0, 0].set_ylabel("nats per token, less\nthose of one Gaussian")
    axes[1, 0].set_ylabel("effective rank\nof an image's patches")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=3)
    axes[1, 0].legend(fontsize=8)
    rows: Any = found.table()
    gaussian, chance = (
        " and ".join(f"{v:+.1f}" for v in rows[rows["claim"].str.contains(words)]["ours"])
        for words in ("one Gaussian", "random subspaces")
    )
    title = (
        f"Own subspaces differ from one Gaussian by {gaussian} nats per held-out token, from "
        f"random subspaces by {chance}\n(middle layers of two tiny models, {rows['n'].min()} "
        f"images held out; random: best of {DRAWS} draws; untrained: mean of 5 seeds)"
    )
    return finished(figure, title, bottom=0.06)


if __name__ == "__main__":
    main(run, draw)
