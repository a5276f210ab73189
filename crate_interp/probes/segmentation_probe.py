"""How well attention maps segment: each head's mask against the masks of the data."""

from collections.abc import Mapping
from itertools import product

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.measures import attention_map, jaccard, mass_mask, top_mask
from crate_interp.models.hook_points import PATTERNLESS
from crate_interp.probes.layer_reading import Block, n_special
from crate_interp.probes.probe import Acts, Probe, with_settings
from crate_interp.results.statistic import Statistic

IGNORED = 255
RULES = ("mass", "top")
RESOLUTIONS = ("token", "pixel")
# the kind of a model's attention -> the hook point of its heads' maps
_POINTS = {
    "mssa": ("attn.hook_pattern",),
    "self": ("attn.hook_pattern",),
    "tssa": ("attn.hook_pi",),
    "cbsa": ("attn.hook_contract",),
}
_RULE = {
    "mass": "of the fewest patches that hold a share `mass` of the attention",
    "top": "of the share `fraction` of the patches with the most attention",
}
# suffix: (what is measured, the words of the title, what a higher value means)
CHANCE = {
    "": ("with the mask of an object", "", "higher finds the object better"),
    "_random": (
        "put in random order, with the mask of an object: the score of a map without places",
        ", patches in random order",
        "chance",
    ),
    "_other": (
        "with the mask of the next image: the score of a map of where objects tend to be",
        ", on the mask of the next image",
        "chance",
    ),
}


_CHOICE = {  # suffix: (the words of the title, what is taken over heads or classes)
    "": ("", "Mean over the classes of an image."),
    "_best": (
        ", best head for each class",
        "Score of the best head for each class, which the mask itself chooses.",
    ),
}
STATISTICS = {
    f"{rule}_{resolution}{level}{best}": Statistic(
        f"Jaccard index, {rule} rule, in {resolution}s{where}{chosen}", way, "", 0.0, 1.0,
        f"Overlap, in {resolution}s, {_RULE[rule]}, {what}. {how}",
    )
    for rule, resolution in product(RULES, RESOLUTIONS)
    for level, (what, where, way) in CHANCE.items()
    for best, (chosen, how) in _CHOICE.items()
}  # fmt: skip


def segmentation(
    mass: float = 0.6,
    fraction: float = 0.6,
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
    kind: str = "mssa",
    name: str = "segmentation",
) -> Probe:
    """Returns a probe of the Jaccard indices of each head's attention mask with the data's masks.

    The data's masks are uint8 class maps, in which 255 is ignored. `{rule}_{resolution}` `[batch,
    head]` is the mean over the classes in the image. Rule: "mass" (`mass_mask` with the share
    `mass`) or "top" (`top_mask` with `fraction`). Resolution: "pixel" or "token". For "token" a
    patch belongs to the class that covers more than half of it; a class without such a patch gets
    the patch that it covers most. `..._best` `[batch]` scores each class by the head that is best
    for this class. The data's mask chooses this head (arXiv 2308.16271 eq. 13), so the score is
    biased upward, and more with more heads.

    Each score has two chance levels. For `..._random`, the patches of an image's maps are put in a
    random order (the same for all heads; the number of the sample is the seed). For `..._other`, an
    image's maps are judged by the mask of the next image. An image without any class has no score;
    if the next image has no class, there is no `..._other`. Patches of which more than half is 255
    are removed from the head's mask and from the data's mask, unless they belong to the class.

    The probe needs masks and so is not a default probe.

    Args:
        mass: The share of a map's mass that the rule "mass" keeps, in (0, 1].
        fraction: The share of the patches that the rule "top" keeps, in (0, 1].
        query: As in `attention_map`; the same holds for scaled and cls_key.
        scaled: If it and cls_key are True, the probe reads the pattern that the model computed,
            with the edits of hooks.
        cls_key: scaled=False, cls_key=False is eq. 10, here on codes that follow the model's
            LayerNorm.
        kind: The attention of the model. For "tssa" (ToST) a head's map is the membership of each
            patch, without a query; for "cbsa" (CBT) it is the query's row of A^T A, scaled to sum
            to 1.
        name: The name of the probe in tables.

    Raises:
        ValueError: For shares outside (0, 1], a query that is not an integer, and another kind.
    """
    checks.one_of("kind", kind, _POINTS)
    for rule, share in ((mass_mask, mass), (top_mask, fraction)):
        rule(torch.ones(2), share)  # raises for a share outside (0, 1] before work starts
    if not checks.is_int(query):
        raise ValueError(f"query={query!r}: give the number of a token, 0 for CLS.")
    maps = {"query": int(query), "scaled": scaled, "cls_key": cls_key}
    return with_settings(
        _measure,
        {"mass": mass, "fraction": fraction} | maps,
        name=name,
        heading="Segmentation: do attention maps find objects",
        points=points_of(kind, scaled and cls_key),
        statistics=STATISTICS,
        per_head=[key for key in STATISTICS if not key.endswith("_best")],
        masks=True,
        partial=True,
    )


def _measure(
    block: Block, acts: Acts, mass: float, fraction: float, query: int, scaled: bool, cls_key: bool
) -> dict[str, Tensor]:
    if not hasattr(block.attn.cfg, "n_special"):
        raise ValueError("the model reads text, which has no patches: give a model of images.")
    maps = head_maps(acts, n_special(block), query, scaled, cls_key)  # [batch, head, patch]
    orders = [random_order(maps.shape[-1], int(sample)) for sample in acts["sample"]]
    order = torch.stack(orders)[:, None].to(maps.device)
    patch = block.attn.cfg.patch_size
    own, others = Targets(acts["masks"], patch), Targets(acts["other_masks"], patch)
    masks = {"mass": mass_mask(maps, mass), "top": top_mask(maps, fraction)}
    # except for ties, the mask of the shuffled map is the shuffled mask
    shuffled = {rule: mask.gather(2, order.expand_as(mask)) for rule, mask in masks.items()}
    answer: dict[str, Tensor] = {}
    levels = (("", masks, own), ("_random", shuffled, own), ("_other", masks, others))
    for (suffix, drawn, targets), rule, resolution in product(levels, RULES, RESOLUTIONS):
        name = f"{rule}_{resolution}{suffix}"
        # [pair, head]; a pair is an image and a class
        scores = targets.jaccard(drawn[rule], resolution)
        answer[name] = targets.mean(scores)
        answer[f"{name}_best"] = targets.mean(scores.amax(dim=1, keepdim=True))[:, 0]
    for value in answer.values():
        value[~own.any()] = torch.nan  # images without an object of their own have no score
    return answer


def points_of(kind: str, whole: bool) -> tuple[str, ...]:
    """Returns the hook points that `head_maps` reads for a kind of attention.

    whole: whether the pattern is read as the model computed it, not made from queries and keys.
    Raises ValueError if `whole` is False and the attention has no pattern.
    """
    if not whole and kind in PATTERNLESS:
        raise ValueError(f"scaled and cls_key are of attention patterns, but {kind!r} has none.")
    return _POINTS[kind] if whole else ("attn.hook_q", "attn.hook_k")


def head_maps(
    acts: Mapping[str, Tensor], special: int, query: int, scaled: bool, cls_key: bool
) -> Float[Tensor, "batch head patch"]:
    """Returns the map of each head over the patches, from activations at `points_of`.

    special: how many tokens, CLS first, come before the patches; their weights are left out
    and the others stay as they are. cls_key=False leaves them out before the softmax instead.
    Raises ValueError for a query that does not exist.
    """
    if "attn.hook_pi" in acts:
        return acts["attn.hook_pi"][..., special:]
    pattern, contract = acts.get("attn.hook_pattern"), acts.get("attn.hook_contract")
    if contract is not None:  # [batch, head, rep, pos]
        row = (contract[..., _checked(query, contract.shape[-1]), None].mT @ contract)[:, :, 0]
        return (row / row.sum(dim=-1, keepdim=True))[..., special:]
    if pattern is not None:
        return pattern[:, :, _checked(query, pattern.shape[-2]), special:]
    q, k = (acts[point].transpose(1, 2) for point in ("attn.hook_q", "attn.hook_k"))
    return attention_map(q, k, query, scaled, cls_key, special)


def _checked(query: int, count: int) -> int:
    if not -count <= query < count:
        raise ValueError(f"query={query}: there are {count} tokens, 0 (CLS) to {count - 1}.")
    return query


def random_order(count: int, sample: int) -> Tensor:
    """Returns the random order of `count` patches for the chance level of a sample.

    The order is the same in every layer and model.
    """
    return torch.randperm(count, generator=torch.Generator().manual_seed(sample))


class Targets:
    """The classes of a batch's masks: a row for each pair of an image and a class in it."""

    def __init__(self, masks: Tensor, patch_size: tuple[int, int]) -> None:
        classes = [
            (i, int(c))
            for i, mask in enumerate(masks)
            for c in mask.unique()
            if c not in (0, IGNORED)
        ]
        self.n, self.size = len(masks), patch_size[0] * patch_size[1]
        images, which = [i for i, _ in classes], [c for _, c in classes]
        self.image = torch.tensor(images, dtype=torch.long, device=masks.device)  # [pair]
        ids = torch.tensor(which, dtype=masks.dtype, device=masks.device)
        own = masks[self.image] == ids[:, None, None]
        self.pixels = _per_patch(own, patch_size)  # pixels of the class, [pair, patch]
        self.judged = _per_patch(masks != IGNORED, patch_size)  # pixels not ignored, [batch, patch]

    def any(self) -> Tensor:
        """Returns which images have a class, bool `[batch]`."""
        return torch.bincount(self.image, minlength=self.n) > 0

    def tokens(self) -> Tensor:
        """Returns which patches belong to each pair's class, at least one, bool `[pair, patch]`."""
        tokens = 2 * self.pixels > self.size
        most = torch.nn.functional.one_hot(self.pixels.argmax(dim=1), tokens.shape[1]).bool()
        return torch.where(tokens.any(dim=1, keepdim=True), tokens, most)

    def jaccard(self, masks: Tensor, resolution: str) -> Tensor:
        """Returns the scores `[pair, head]` of masks of patches `[batch, head, patch]`.

        Ignored patches or pixels are removed from the heads' masks and from the data's.
        """
        if resolution == "token":
            target = self.tokens()
            kept = (2 * self.judged[self.image] >= self.size) | target
            return jaccard(masks[self.image] & kept[:, None], target[:, None])
        # a mask of patches is constant within a patch, so counts of pixels per patch are enough
        taken = masks[self.image].double()  # [pair, head, patch]
        both = torch.einsum("ihp,ip->ih", taken, self.pixels.double())
        size = torch.einsum("ihp,ip->ih", taken, self.judged[self.image].double())
        return both / (size + self.pixels.sum(dim=1, keepdim=True) - both)

    def mean(self, scores: Tensor) -> Tensor:
        """Returns means `[batch, head]` over the classes of each image; NaN without a class."""
        total = scores.new_zeros(self.n, scores.shape[1]).index_add_(0, self.image, scores)
        count = torch.bincount(self.image, minlength=self.n).to(scores)
        return total / count[:, None]


def _per_patch(pixels: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Returns how many pixels of each patch are True, `[n, patch]`, for `[n, height, width]`."""
    pattern = "n (h p1) (w p2) -> n (h w) (p1 p2)"
    return rearrange(pixels, pattern, p1=patch_size[0], p2=patch_size[1]).sum(dim=-1)
