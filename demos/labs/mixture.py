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
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from layerwise import streams
from mixtures import Mixture, fit, log_likelihood, random_bases
from rules import beyond
from torch import Tensor
from tqdm.auto import tqdm
from twins import MODELS, UNTRAINED, images_of, loaded, spread, untrained

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


def of_place(name: str, rule: str, key: str, tables: list[dict], **words: Any) -> dict:
    """Returns a claim about a number of a model, beyond 0 and untrained networks at each place.

    tables: those of the model and of its twins. Its number is that of the middle place.
    """
    found, *twins = tables
    cases, rivals = {}, []
    for layer, place in enumerate(found[key]):
        rivals.append(mean_and_interval([twin[key][layer]["mean"] for twin in twins]))
        ends = beyond((place["low"], place["high"]), (0.0, 0.0), rivals[-1][1])
        cases["" if len(found[key]) == 1 else f"layer {layer}"] = ends
    middle = len(cases) // 2
    place = found[key][middle]
    return claim(
        f"mixture.{rule}", place["mean"], interval=(place["low"], place["high"]), cases=cases,
        baseline=rivals[middle][0], name=name, middle=middle, count=len(cases),
        kept=sum(low > 0 for low, _ in cases.values()),
        below=sum(high <= 0 for _, high in cases.values()), **words,
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by model, kind and layer."""
    claims, numbers = [], []
    for name in tqdm(MODELS, desc="models", unit="model"):
        images, _ = images_of(name, N_IMAGES[form])
        model = loaded(name)
        tables = [steps.do(name, partial(measure, model, images, DRAWS))]
        tables += [
            steps.do(f"{name}-{seed}", partial(measure, untrained(model.cfg, seed), images, 1))
            for seed in UNTRAINED
        ]
        n = len(images) // 2
        for pair, rule in PAIRS.items():
            claims.append(of_place(name, rule, " - ".join(pair), tables, n=n))
        claims.append(of_place(name, "rank", "rank lost", tables, n=2 * n))
        for at, table in enumerate(tables):
            who, seed = f"{name}|{'untrained' if at else 'trained'}", max(0, at - 1)
            for quantity, places in table.items():
                for layer, place in enumerate(places):
                    for end in ("mean", "low", "high"):
                        words = quantity if end == "mean" else f"{quantity}, {end}"
                        numbers.append((words, who, seed, layer, place[end]))
    gaussian, chance, rank = (
        " and ".join(f"{row['ours']:+.1f}" for row in claims if words in row["claim"])
        for words in ("one Gaussian", "random subspaces", "effective rank")
    )
    words = {"gaussian": gaussian, "chance": chance, "lost_rank": rank.replace("+", "")}
    return result("mixture", form, claims, numbers, draws=DRAWS, **words)


def draw(found: LabResult) -> Any:
    """Returns a figure: likelihoods, and the rank of tokens, by layer; a column for each model."""
    figure, axes = panels(len(MODELS), 2, size=(10, 7), sharex=True)
    for column, name in enumerate(MODELS):
        top, bottom = axes[:, column]
        for who, style in (("trained", "o-"), ("untrained", "x:")):
            of = {"setting": f"{name}|{who}"}
            one: Any = found.numbers("one Gaussian", **of)
            for colour, kind in enumerate(KINDS[1:]):
                rows = found.numbers(kind, **of)
                rows["value"] -= one["value"]
                curve(top, rows, style, 0, color=f"C{colour}", label=f"{kind}, {who}")
            curve(bottom, found.numbers("rank of tokens", **of), style, 0, color="k", label=who)
        level(top, 0, color="grey", lw=0.5)
        tidy(top, legend=0, title=name)
        tidy(bottom, legend=8 * (column == 0), xlabel="layer l of Z^l")
    axes[0, 0].set_ylabel("nats per token, less\nthose of one Gaussian")
    axes[1, 0].set_ylabel("effective rank\nof an image's patches")
    rows: Any = found.table()
    gaussian, chance = (
        " and ".join(f"{v:+.1f}" for v in rows[rows["claim"].str.contains(words)]["ours"])
        for words in ("one Gaussian", "random subspaces")
    )
    words = {"gaussian": gaussian, "chance": chance, "n": rows["n"].min(), "draws": DRAWS}
    return titled(figure, found, axes[0, 0], 3, **words)


if __name__ == "__main__":
    main(run, draw)
