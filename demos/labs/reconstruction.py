"""CRATE as encoder and decoder: masked images, and whether the decoder's layers invert.

A tiny CRATE-MAE (arXiv 2404.02446; demos/labs/train_tiny_mae.py made it) fills in test images of
Fashion-MNIST of which three quarters of the patches are removed. Beside it: the mean of 1,000
training images, the one of them that is nearest in the visible pixels, a linear prediction from the
visible pixels that is fitted on them, and untrained networks of five seeds. Then, with all patches
visible: decoder layer j is derived as the inverse of encoder layer L - j - 1. Its stream X^{j+1} is
compared with Z^{L-j-1}, at the best scale, and so is what the layer alone makes of Z^{L-j}. As the
decoder has weights of its own, it may invert in another basis: a second comparison turns its stream
by the best rotation, which is fitted on half of the images and used on the other half.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from drawing import curve, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, mean_and_interval, result, texts
from rules import short_of
from torch import Tensor
from tqdm.auto import tqdm
from train_tiny_mae import (
    MASK_RATIO,
    held_out_images,
    load_mae,
    make_mae,
    nearest,
    noise_of,
    read_gallery,
    removed_error,
    visible_pixels,
)  # fmt: skip
from twins import UNTRAINED, spread

from crate_interp import HookedCrateMAE

N_IMAGES = 256
RATIOS = {"quick": (MASK_RATIO,), "full": (0.5, MASK_RATIO, 0.9)}
MASKS = {"quick": 1, "full": 5}  # draws of the mask of each image
RIDGE = 0.05  # of the linear prediction: times the mean variance of a pixel
RIVALS = ("mean image", "nearest image", "linear")
INVERSES = ("stream", "stream, rotated", "layer")
LINES = (  # of the figure: who, what, style
    ("trained", "stream", "o-C0"), ("untrained", "stream", "x:C0"),
    ("trained", "layer", "o-C1"), ("untrained", "layer", "x:C1"),
    ("trained", "copy", "--C2"),
    ("trained", "stream, rotated", "s-C3"), ("untrained", "stream, rotated", "+:C3"),
    ("trained", "stream, rotated, other image", "--C3"),
    ("trained", "copy, rotated", "--C4"),
)  # fmt: skip


def linear_prediction(images: Tensor, seen: Tensor, gallery: Tensor) -> Tensor:
    """Returns images whose removed pixels are predicted linearly from the visible ones.

    `m_r + C_rv (C_vv + ridge I)^{-1} (x_v - m_v)`, m and C mean and covariance of the gallery.
    images, seen `[n, 1, h, w]`, gallery `[m, 1, h, w]` -> like images.
    """
    known = gallery.flatten(1).double()
    mean = known.mean(dim=0)
    c = (known - mean).T @ (known - mean) / len(known)
    ridge = RIDGE * c.diagonal().mean()
    drawn = images.flatten(1).double().clone()
    for row, visible in zip(drawn, seen.flatten(1).bool(), strict=True):
        inside = c[visible][:, visible] + ridge * torch.eye(int(visible.sum()))
        weights = torch.linalg.solve(inside, row[visible] - mean[visible])
        row[~visible] = mean[~visible] + c[~visible][:, visible] @ weights
    return drawn.to(images.dtype).view_as(images)


@torch.no_grad()
def errors(mae: HookedCrateMAE, images: Tensor, ratio: float, seed: int) -> list[float]:
    """Returns the network's mean squared error over the removed pixels of each image."""
    given = mae(images, noise_of(len(images), seed), ratio)
    seen = visible_pixels(mae, given.mask)
    return removed_error(mae.unpatchify(given.pred), images, seen).tolist()


@torch.no_grad()
def rival_errors(images: Tensor, ratio: float, seed: int) -> dict[str, list[float]]:
    """Returns the errors of rivals that fill the images in without a network."""
    mae, gallery = load_mae(), read_gallery()
    seen = visible_pixels(mae, mae(images, noise_of(len(images), seed), ratio).mask)
    drawn = {
        "mean image": gallery.mean(dim=0, keepdim=True).expand_as(images),
        "nearest image": nearest(images, seen, gallery),
        "linear": linear_prediction(images, seen, gallery),
    }
    return {who: removed_error(given, images, seen).tolist() for who, given in drawn.items()}


def scaled_error(found: Tensor, wanted: Tensor) -> Tensor:
    """Returns `min_c |wanted - c found| / |wanted|` of each image, in [0, 1], for `[n, pos, d]`."""
    product = (found * wanted).sum(dim=(1, 2))
    energy = found.square().sum(dim=(1, 2)) * wanted.square().sum(dim=(1, 2))
    return (1 - product.square() / energy.clamp(min=1e-30)).clamp(min=0).sqrt()


def rotated(found: Tensor, wanted: Tensor) -> Tensor:
    """Returns `found` turned by the orthogonal matrix that brings its first half nearest to wanted.

    found, wanted `[n, pos, d]`: the first n // 2 images are fitted, the others are returned,
    `[n - n // 2, pos, d]`.
    """
    half = len(found) // 2
    u, _, v = torch.linalg.svd(torch.einsum("npd,npe->de", found[:half], wanted[:half]))
    return found[half:] @ u @ v


@torch.no_grad()
def inverses(mae: HookedCrateMAE, images: Tensor) -> dict[str, list[Tensor]]:
    """Returns the error of the inverse for each layer of the decoder, `[n]` each.

    stream: X^{j+1} against Z^{L-j-1}. layer: decoder layer j, given Z^{L-j}, against Z^{L-j-1}.
    Each also against that of the next image ("other image"), which knows all that images share;
    copy: Z^{L-j} itself against Z^{L-j-1}. "stream, rotated" and "copy, rotated": the same after
    the best rotation, of the images on which it was not fitted. As in the network, decoder layer 0
    reads LN(Z^L).
    """
    count = mae.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(count)]
    names += [f"blocks.{count - 1}.hook_resid_post"]
    names += [f"decoder_blocks.{layer}.hook_resid_post" for layer in range(count)]
    _, cache = mae.run_with_cache(images, names_filter=names, mask_ratio=0.0)
    z = [cache[name] for name in names[: count + 1]]
    found: dict[str, list[Tensor]] = {}
    for layer, block in enumerate(mae.decoder_blocks):
        wanted = z[count - layer - 1]
        before = z[count - layer]
        given = {
            "stream": cache[names[count + 1 + layer]],
            "layer": block(before if layer else mae.ln_final(before)),
            "copy": before,
        }
        given |= {f"{what}, rotated": rotated(given[what], wanted) for what in ("stream", "copy")}
        for what, value in given.items():
            right = wanted[-len(value) :]
            found.setdefault(what, []).append(scaled_error(value, right))
            other = scaled_error(value, right.roll(1, dims=0))
            found.setdefault(f"{what}, other image", []).append(other)
    return found


def inverse_spreads(mae: HookedCrateMAE, images: Tensor) -> dict[str, list[dict]]:
    """Returns `inverses` as mean and interval over images, by layer."""
    return {what: [spread(v) for v in by] for what, by in inverses(mae, images).items()}


def picture_claim(own: list[float], rival: list[float], who: str, random: float) -> dict:
    """Returns the claim that the network is better than a rival."""
    apart = [a - b for a, b in zip(own, rival, strict=True)]
    return claim(
        f"reconstruction.{who}", own, cases={"difference": apart}, random=random,
        baseline=sum(rival) / len(rival), difference=sum(apart) / len(apart), ends=ends_of(apart),
        images=N_IMAGES, ratio=MASK_RATIO,
    )  # fmt: skip


def inverse_claim(what: str, own: dict, twins: list[dict]) -> dict:
    """Returns a claim on the inverse, with a case for each layer: below every baseline?"""
    cases, floors, copy = {}, [], "copy, rotated" if "rotated" in what else "copy"
    for layer, place in enumerate(own[what]):
        rivals = [own[f"{what}, other image"][layer], own[copy][layer]]
        ends = [(rival["low"], rival["high"]) for rival in rivals]
        ends.append(mean_and_interval([twin[what][layer]["mean"] for twin in twins])[1])
        floors.append(min(low for low, _ in ends))
        cases[f"layer {layer}"] = short_of((place["low"], place["high"]), *ends)
    mean, low, high = (
        sum(place[end] for place in own[what]) / len(cases) for end in ("mean", "low", "high")
    )
    return claim(
        f"reconstruction.{what}", mean, interval=(low, high), cases=cases, count=len(cases),
        kept=sum(high < 0 for _, high in cases.values()), baseline=sum(floors) / len(floors),
        n=N_IMAGES // 2 if "rotated" in what else N_IMAGES, images=N_IMAGES,
        **texts("reconstruction")["inverse"],
    )  # fmt: skip


def masked(form: str, steps: Steps, images: Tensor) -> dict[tuple, list[float]]:
    """Returns errors by image, the mean over masks: keys are (who, seed, ratio)."""
    networks = {("trained", 0): load_mae()}
    networks |= {("untrained", seed): make_mae(seed) for seed in UNTRAINED}
    found: dict[tuple, list] = {}
    for ratio, mask in product(RATIOS[form], range(MASKS[form])):
        for (who, seed), mae in tqdm(networks.items(), desc=f"mask ratio {ratio}"):
            make = partial(errors, mae, images, ratio, mask)
            kept = steps.do(f"{who}-{seed}-{ratio}-{mask}", make)
            found.setdefault((who, seed, ratio), []).append(kept)
        make = partial(rival_errors, images, ratio, mask)
        for who, kept in steps.do(f"rivals-{ratio}-{mask}", make).items():
            found.setdefault((who, 0, ratio), []).append(kept)
    return {key: torch.tensor(rows).mean(dim=0).tolist() for key, rows in found.items()}


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and the numbers by who, ratio and layer."""
    images = held_out_images(N_IMAGES)
    found = masked(form, steps, images)
    own = found["trained", 0, MASK_RATIO]
    at_random = [sum(found["untrained", seed, MASK_RATIO]) / len(own) for seed in UNTRAINED]
    random = sum(at_random) / len(at_random)
    claims = [picture_claim(own, found[who, 0, MASK_RATIO], who, random) for who in RIVALS]
    numbers: list[tuple] = []
    for (who, seed, ratio), values in found.items():
        for end, value in spread(torch.tensor(values)).items():
            numbers.append((f"error, {end}", f"{who}|{ratio}", seed, 0, value))
    trained = steps.do("inverse", partial(inverse_spreads, load_mae(), images))
    twins = [
        steps.do(f"inverse-{seed}", partial(inverse_spreads, make_mae(seed), images))
        for seed in UNTRAINED
    ]
    claims += [inverse_claim(what, trained, twins) for what in INVERSES]
    tables = [("trained", 0, trained)]
    tables += [("untrained", seed, twin) for seed, twin in enumerate(twins)]
    for who, seed, table in tables:
        for what, places in table.items():
            for layer, place in enumerate(places):
                for end, value in place.items():
                    numbers.append((f"inverse, {end}", f"{who}|{what}", seed, layer, value))
    errors_of = ", ".join(f"{row['baseline_is']} {row['baseline']:.2f}" for row in claims[:3])
    return result("reconstruction", form, claims, numbers, errors_of=errors_of)


def draw(found: LabResult) -> Any:
    """Returns a figure: pictures on the left, errors of the inverse by layer on the right."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 5.4), layout="constrained")
    sides: Any = figure.subfigures(1, 2, width_ratios=(1.1, 1))
    left, right = sides
    draw_pictures(left)
    axis = right.subplots()
    for who, what, style in LINES:
        rows = found.numbers("inverse, mean", setting=f"{who}|{what}")
        curve(axis, rows, style, 0, label=f"{what}, {who}")
    axis.set_xticks(range(4))
    words = "does the decoder invert the encoder? (0 it does, 1 no relation)"
    tidy(axis, legend=0, xlabel="layer j of the decoder, against Z^{L-j-1}", ylim=(0, 1.05),
         ylabel="relative error at the best scale")  # fmt: skip
    axis.set_title(words, fontsize=9)
    axis.legend(fontsize=7, loc="lower right", ncols=2)
    rows: Any = found.table()
    rivals = ", ".join(f"{who} {rows['baseline'].iloc[row]:.2f}" for row, who in enumerate(RIVALS))
    return titled(figure, found, rivals=rivals, images=N_IMAGES, ratio=MASK_RATIO)


@torch.no_grad()
def draw_pictures(figure: Any, n: int = 5) -> None:
    """Draws n test images: what is visible, the network's answer, the rivals', the image."""
    images, gallery, mae = held_out_images(n), read_gallery(), load_mae()
    given = mae(images, noise_of(n, 0), MASK_RATIO)
    seen = visible_pixels(mae, given.mask)

    def filled(pictures: Tensor) -> Tensor:
        return seen * images + (1 - seen) * pictures

    rows = {
        "visible": torch.where(seen.bool(), images, images.min()),
        "CRATE-MAE": filled(mae.unpatchify(given.pred)),
        "linear": filled(linear_prediction(images, seen, gallery)),
        "nearest": filled(nearest(images, seen, gallery)),
        "image": images,
    }
    axes = figure.subplots(n, len(rows))
    for column, (title, pictures) in enumerate(rows.items()):
        axes[0, column].set_title(title, fontsize=9)
        for axis, picture in zip(axes[:, column], pictures, strict=True):
            axis.imshow(picture[0], cmap="gray", vmin=images.min(), vmax=images.max())
            axis.axis("off")


if __name__ == "__main__":
    main(run, draw)
