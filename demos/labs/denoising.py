"""Does attention denoise? MSSA's step beside the step to the posterior mean of its subspaces.

The paper derives MSSA from the posterior mean of a token that is drawn from a mixture of Gaussians
on the subspaces U_k and has noise added (arXiv 2306.01129, section 2.2, eq. 4 to 6). Here noise is
added to the tokens that a trained layer reads, y = LN(Z^l), and the step that MSSA takes, with the
learned output matrix and bias, is compared with the step to the posterior mean. The mixture's one
scale is fitted: c y has the mean energy p that a token of the mixture has. Baselines: the same
layer turned by a random rotation (its singular values, and how its matrices fit each other, stay),
the posterior mean of turned subspaces, five rotations each, and untrained networks of five seeds.

To shorten a token is a large part of the step to the posterior mean. And the code adds MSSA and
does not take Z away, as the paper's step MSSA(Z) - Z does. So a second cosine, and a second share
of removed noise, are of the parts across the token, which no shortening changes. The paper's step
on tokens of a planted mixture is their control.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from layerwise import streams
from mixtures import draw_tokens, random_bases, rotation, tweedie
from rules import beyond
from torch import Tensor
from tqdm.auto import tqdm
from twins import MODELS, UNTRAINED, images_of, loaded, spread, untrained

import crate_interp as ci
from crate_interp.measures import paper_posterior_mean, posterior_mean, subspace_attention
from crate_interp.measures.gradients import written
from crate_interp.measures.rates import head_codes

SIGMAS, SHOWN = (0.1, 0.3, 1.0), 0.3
TURNS = 5  # random rotations of a layer
N_IMAGES = {"quick": 48, "full": 128}
N_TOKENS, DRAWS = {"quick": 500, "full": 5000}, 10
HEADS, D, P = 6, 48, 8  # of the planted mixture: complete, as a head is d / K wide
QUANTITIES = (
    "cosine", "cosine, eq. 6", "cosine across the token", "noise removed",
    "noise removed by the posterior mean", "noise removed across the token",
)  # fmt: skip
KEYS = {  # the rules of the claims about a model
    "cosine": "cosine",
    "cosine across the token": "across",
    "noise removed": "removed",
    "noise removed across the token": "removed_across",
}
WHO = ("trained", "turned", "turned subspaces", "untrained")


def steps_of(read: Tensor, attn: Callable, u: Tensor, sigma: float, seed: int) -> dict[str, Tensor]:
    """Returns the numbers of `QUANTITIES` for each image.

    read `[batch, pos, d]`, attn: read tokens -> what MSSA adds, u `[head, d, p]` orthonormal. Noise
    of standard deviation sigma / c is added, c^2 = p / mean |y|^2. The cosine is the mean over
    tokens of cos(MSSA(y~), E[y | y~] - y~), the one across the token that of their
    parts orthogonal to y~.
    """
    c = (u.shape[2] / read.square().sum(dim=-1).mean()).sqrt()
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(read.shape, generator=random).to(read) * sigma / c
    noisy = read + noise
    step = attn(noisy)
    exact = posterior_mean(c * noisy, u, sigma) / c - noisy
    paper = paper_posterior_mean(c * noisy, u, sigma) / c - noisy
    cosine = torch.nn.functional.cosine_similarity
    numbers = (
        cosine(step, exact, dim=-1).mean(dim=1),
        cosine(step, paper, dim=-1).mean(dim=1),
        cosine(across(step, noisy), across(exact, noisy), dim=-1).mean(dim=1),
        removed(step, -noise),
        removed(exact, -noise),
        removed(across(step, noisy), -across(noise, noisy)),
    )
    return dict(zip(QUANTITIES, numbers, strict=True))


def across(step: Tensor, token: Tensor) -> Tensor:
    """Returns the part of a step that is orthogonal to the token, `[..., d]`."""
    along = (step * token).sum(dim=-1, keepdim=True) / token.square().sum(dim=-1, keepdim=True)
    return step - along * token


def removed(step: Tensor, wanted: Tensor) -> Tensor:
    """Returns the share of the noise's energy that the best multiple of a step removes, `[batch]`.

    `1 - min_{t >= 0} |wanted - t step|^2 / |wanted|^2`, one t for all tokens of an image: the
    learned output matrix leaves the length of the paper's step open.
    """
    along = (step * wanted).sum(dim=(1, 2)).clamp(min=0)
    energy = step.square().sum(dim=(1, 2)) * wanted.square().sum(dim=(1, 2))
    return along.square() / energy.clamp(min=1e-30)


def variants(block: Any, layer: int) -> Iterator[tuple[str, Callable, Tensor]]:
    """Yields who steps, the step, and the orthonormal subspaces of the posterior mean.

    who: "trained", and "turned/t" and "turned subspaces/t" for each rotation t.
    """
    u = torch.linalg.qr(block.attn.U.detach())[0]
    yield "trained", block.attn, u
    for t in range(TURNS):
        turn = rotation(u.shape[1], TURNS * layer + t).float()
        turned = torch.einsum("ed,kdp->kep", turn, u)
        yield f"turned/{t}", lambda y, turn=turn: block.attn(y @ turn) @ turn.T, turned
        yield f"turned subspaces/{t}", block.attn, turned


@torch.no_grad()
def measure(model: ci.HookedCrate, images: Tensor, all_variants: bool) -> dict[str, Any]:
    """Returns mean and interval over images: by who, sigma, quantity, each layer and "all"."""
    found: dict[str, Any] = {}
    blocks: Any = model.blocks
    for layer, z in enumerate(streams(model, images)[:-1]):
        read = blocks[layer].ln1(z)
        for who, attn, u in variants(blocks[layer], layer):
            if who != "trained" and not all_variants:
                continue
            for sigma in SIGMAS:
                for quantity, values in steps_of(read, attn, u, sigma, seed=layer).items():
                    found.setdefault(f"{who}|{sigma}|{quantity}", []).append(values)
    return {
        key: [spread(values) for values in (*by_layer, torch.stack(by_layer).mean(dim=0))]
        for key, by_layer in found.items()
    }


def identity_errors(form: str) -> dict[str, list[float]]:
    """Returns, for each draw of a planted mixture, how far two formulas are from E[z | x].

    Relative errors |difference| / |E[z | x]|: of Tweedie's formula at all sigmas (the largest), and
    of eq. 6 at sigma = .3.
    """
    found: dict[str, list[float]] = {"score": [], "printed": []}
    error = lambda guess, mean: float((guess - mean).norm() / mean.norm())  # noqa: E731
    for seed in range(DRAWS):
        u, worst = random_bases(HEADS, D, P, seed), []
        for sigma in SIGMAS:
            x, _ = draw_tokens(N_TOKENS[form], u, sigma, seed)
            mean = posterior_mean(x, u, sigma)
            worst.append(error(tweedie(x, u, sigma), mean))
            if sigma == SHOWN:
                found["printed"].append(error(paper_posterior_mean(x, u, sigma), mean))
        found["score"].append(max(worst))
    return found


def planted_cosines(form: str) -> dict[str, list[float]]:
    """Returns, for each draw, the `QUANTITIES` of a step, by "who|quantity".

    "own" is the paper's step MSSA(x) - x with MSSA on the planted subspaces, "turned" with MSSA on
    turned ones, "shorter" the step -x. sigma is .3, and a sample has 49 tokens of a mixture of
    orthogonal subspaces, which fill the space.
    """
    found: dict[str, list[float]] = {}
    for seed in range(DRAWS):
        u = rotation(D, seed).reshape(D, HEADS, P).transpose(0, 1)  # [head, d, p]
        _, clean = draw_tokens(49 * (N_TOKENS[form] // 50), u, SHOWN, seed)
        read = clean.unflatten(0, (-1, 49))  # [sample, pos, d]
        turned = torch.einsum("ed,kdp->kep", rotation(D, DRAWS + seed), u)
        taken = {"own": partial(paper_step, u=u), "turned": partial(paper_step, u=turned),
                 "shorter": torch.neg}  # fmt: skip
        for who, step in taken.items():
            for quantity, values in steps_of(read, step, u, SHOWN, seed).items():
                found.setdefault(f"{who}|{quantity}", []).append(float(values.mean()))
    return found


def paper_step(y: Tensor, u: Tensor) -> Tensor:
    """Returns `sum_k softmax(C_k C_k^T) C_k U_k^T - y`, eq. 12's step up to its length."""
    return written(subspace_attention(head_codes(y, u)), u) - y


def control_claims(errors: dict[str, list], cosines: dict[str, list]) -> list[dict]:
    """Returns the claims about Tweedie's formula, beside eq. 6 as printed, and planted tokens."""
    worst, printed = max(errors["score"]), sum(errors["printed"]) / DRAWS
    own, turned = (np.array(cosines[f"{who}|cosine across the token"]) for who in ("own", "turned"))
    size: Any = {"heads": HEADS, "p": P, "d": D}
    return [
        claim("denoising.tweedie", worst, cases={"": worst}, baseline=printed, n=DRAWS, **size),
        claim("denoising.planted", own, cases={"cosine": own, "beyond": own - turned},
              baseline=sum(turned) / len(turned), **size),
    ]  # fmt: skip


def rivals(found: dict[str, Any], sigma: float, quantity: str, place: int) -> dict[str, tuple]:
    """Returns mean and interval of each baseline, of one layer (-1: all) and sigma.

    The intervals are over rotations, and over untrained networks.
    """
    key = f"{sigma}|{quantity}"
    draws = {
        who: [found["trained"][f"{who}/{t}|{key}"][place]["mean"] for t in range(TURNS)]
        for who in ("turned", "turned subspaces")
    }
    if quantity.startswith("noise"):
        draws.pop("turned subspaces")  # it takes the step of the layer itself
    draws["untrained"] = [seed[f"trained|{key}"][place]["mean"] for seed in found["untrained"]]
    return {who: mean_and_interval(values) for who, values in draws.items()}


def model_claim(name: str, found: dict[str, Any], quantity: str, n: int) -> dict:
    """Returns a claim about a trained model, with a case for each layer and sigma."""
    cases = {}
    for sigma in SIGMAS:
        for layer, own in enumerate(found["trained"][f"trained|{sigma}|{quantity}"][:-1]):
            others = [ends for _, ends in rivals(found, sigma, quantity, layer).values()]
            gap = beyond((own["low"], own["high"]), (0.0, 0.0), *others)
            cases[f"layer {layer}, sigma {sigma}"] = gap
    own = found["trained"][f"trained|{SHOWN}|{quantity}"][-1]
    others = rivals(found, SHOWN, quantity, -1)
    who = max(others, key=lambda each: others[each][1][1])
    return claim(
        f"denoising.{KEYS[quantity]}", own["mean"], interval=(own["low"], own["high"]),
        cases=cases, baseline=others[who][0], baseline_is=who, n=n, name=name, count=len(cases),
        kept=sum(low > 0 for low, _ in cases.values()), shown=SHOWN,
        below=sum(high <= 0 for _, high in cases.values()),
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by model, who, sigma and layer."""
    errors = steps.do("formulas", lambda: identity_errors(form))
    planted = steps.do("planted", lambda: planted_cosines(form))
    claims, numbers = control_claims(errors, planted), []
    for key, values in planted.items():
        who, quantity = key.split("|")
        numbers += [(quantity, f"planted|{who}|{SHOWN}", s, 0, v) for s, v in enumerate(values)]
    for key, values in errors.items():
        numbers += [(f"relative error, {key}", "planted", s, 0, v) for s, v in enumerate(values)]
    for name in tqdm(MODELS, desc="models", unit="model"):
        images, _ = images_of(name, N_IMAGES[form])
        model = loaded(name)
        found: dict[str, Any] = {
            "trained": steps.do(f"{name}-trained", partial(measure, model, images, True)),
            "untrained": [
                steps.do(f"{name}-untrained-{seed}",
                         partial(measure, untrained(model.cfg, seed), images, False))
                for seed in UNTRAINED
            ],
        }  # fmt: skip
        claims += [model_claim(name, found, quantity, len(images)) for quantity in KEYS]
        numbers += rows(name, found)
    cosines = [row for row in claims if "across the token, MSSA points" in row["claim"]]
    control, *trained = [f"{row['ours']:.2f}" for row in cosines]
    removed_by = " and ".join(f"{r['ours']:.2g}" for r in claims if "noise across" in r["claim"])
    own, _ = mean_and_interval(planted["own|noise removed across the token"])
    words = {"trained_ones": " and ".join(trained), "models": len(MODELS), "control": control}
    words |= {"shown": SHOWN, "removed_by": removed_by, "own": own}
    return result("denoising", form, claims, numbers, **words)


def rows(name: str, found: dict[str, Any]) -> list[tuple]:
    """Returns a model's rows of numbers; setting: model|who|sigma, place: layer (-1: mean).

    The seed of what is turned is its rotation.
    """
    made = []
    measured = [("trained", 0, found["trained"])]
    measured += [("untrained", seed, twin) for seed, twin in enumerate(found["untrained"])]
    for kind, seed, table in measured:
        for key, places in table.items():
            who, sigma, quantity = key.split("|")
            who, _, turn = who.partition("/")
            setting = f"{name}|{kind if who == 'trained' else who}|{sigma}"
            draw = int(turn) if turn else seed
            for place, value in enumerate(places):
                layer = -1 if place == len(places) - 1 else place
                made.append((quantity, setting, draw, layer, value["mean"]))
                if kind == "trained":
                    for end in ("low", "high"):
                        made.append((f"{quantity}, {end}", setting, draw, layer, value[end]))
    return made


def draw(found: LabResult) -> Any:
    """Returns a figure: cosine and removed noise by layer at sigma .3, a column for each model."""
    shown = ("cosine", "cosine across the token", "noise removed across the token")
    figure, axes = panels(len(MODELS), len(shown), size=(10, 8), sharex=True, sharey="row")
    for column, name in enumerate(MODELS):
        for axis, quantity in zip(axes[:, column], shown, strict=True):
            for who in WHO if quantity.startswith("cosine") else ("trained", "turned", "untrained"):
                of = {"setting": f"{name}|{who}|{SHOWN}"}
                own, low, high = (
                    table[table["place"] >= 0]
                    for end in ("", ", low", ", high")
                    for table in [found.numbers(quantity + end, **of)]
                )
                band, colour = 0.2 * (who != "trained"), f"C{WHO.index(who)}"
                curve(axis, own, "o-", band, label=who, color=colour)
                if who == "trained":
                    axis.fill_between(low["place"], low["value"], high["value"], alpha=0.3)
            level(axis, 0, color="grey", lw=0.5)
            words = quantity.replace(" across", "\nacross")
            tidy(axis, legend=0, ylabel=words if column == 0 else "")
        axes[0, column].set_title(name)
        axes[-1, column].set_xlabel("layer")
    table: Any = found.table()
    control, *cosine = table[table["claim"].str.contains("across the token, MSSA points")]["ours"]
    words = {"trained": " and ".join(f"{value:.2f}" for value in cosine), "control": control}
    return titled(figure, found, axes[0, 0], shown=SHOWN, n=table["n"].max(), **words)


if __name__ == "__main__":
    main(run, draw)
