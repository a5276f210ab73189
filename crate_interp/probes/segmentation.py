"""How well attention maps segment: each head's mask against the masks of the data."""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from crate_interp.measures import attention_map, jaccard, mass_mask, top_mask
from crate_interp.probes.probe import Acts, Probe
from crate_interp.probes.shared import has_cls

IGNORED = 255
RULES = ("mass", "top")
RESOLUTIONS = ("token", "pixel")
_RULE = {"mass": "the fewest patches that hold the share of the map", "top": "the share of patches attended to most"}
_J = "Jaccard index with the data's mask"


def _statistics() -> dict[str, tuple[str, float, float, str]]:
    """A head's own score and the best head's, for each rule and resolution; the same with the map's patches in random order."""
    found: dict[str, tuple[str, float, float, str]] = {}
    for rule in RULES:
        for resolution in RESOLUTIONS:
            for chance, words in (("", ""), ("_random", ", patches of the map in random order: the chance level")):
                name = f"{rule}_{resolution}{chance}"
                told = f"{_J} in {resolution}s, {_RULE[rule]}{words}"
                found[name] = ("", 0.0, 1.0, f"{told}; mean over the classes of an image.")
                best = f"{told}; best head for each class, chosen by the mask itself."
                found[f"{name}_best"] = ("", 0.0, 1.0, best)
    return found


STATISTICS = _statistics()


def segmentation(
    mass: float = 0.6,
    fraction: float = 0.6,
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
    name: str = "segmentation",
) -> Probe:
    """Jaccard indices of each head's attention mask with the data's masks (uint8 class maps; 255 is not judged).

    `{rule}_{resolution}` `[batch, head]`: rule "mass" (`mass_mask`) or "top" (`top_mask`), resolution "token" (a patch has the class
    that more than half of it has; a class without such a patch has the one with most of it) or "pixel"; the mean over the classes in
    the image. `..._best` `[batch]`: the best head for each class, which the mask itself chooses, arXiv 2308.16271 eq. 13: biased upward
    with the number of heads. `..._random`: the same with the patches of each map in one random order, the chance level of
    both. An image without any class has no score. query, scaled, cls_key: as in `attention_map`; eq. 10 is scaled=False,
    cls_key=False, on codes of the model's LayerNorm here. Not among the default probes: it needs masks.
    """
    settings = dict(mass=mass, fraction=fraction, query=query, scaled=scaled, cls_key=cls_key)
    return Probe(
        name=name,
        points=("attn.hook_q", "attn.hook_k"),
        measure=partial(_measure, **settings),
        statistics=STATISTICS,
        settings=settings,
        per_head=[key for key in STATISTICS if not key.endswith("_best")],
        masks=True,
        partial=True,
    )


def _measure(
    block: Any, acts: Acts, mass: float, fraction: float, query: int, scaled: bool, cls_key: bool
) -> dict[str, Tensor]:
    if not has_cls(block):
        raise ValueError("maps of attention are read from a model of images with a CLS token.")
    cfg, codes = block.attn.cfg, [acts[point].transpose(1, 2) for point in ("attn.hook_q", "attn.hook_k")]
    maps = attention_map(*codes, query=query, scaled=scaled, cls_key=cls_key)  # [batch, head, patch]
    shuffled = maps[..., random_order(maps.shape[-1]).to(maps.device)]
    targets = Targets(acts["masks"], cfg.patch_size)
    answer: dict[str, Tensor] = {}
    for suffix, drawn in (("", maps), ("_random", shuffled)):
        for rule, masks in (("mass", mass_mask(drawn, mass)), ("top", top_mask(drawn, fraction))):
            for resolution in RESOLUTIONS:
                scores = targets.jaccard(masks, resolution)  # [pair, head], pairs of an image and a class
                answer[f"{rule}_{resolution}{suffix}"] = targets.mean(scores)
                answer[f"{rule}_{resolution}{suffix}_best"] = targets.mean(scores.amax(dim=1, keepdim=True))[:, 0]
    return answer


def random_order(count: int) -> Tensor:
    """The random order of `count` patches that chance levels use, the same everywhere."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


class Targets:
    """The classes of a batch's masks, a row for each pair of an image and a class in it."""

    def __init__(self, masks: Tensor, patch_size: tuple[int, int]) -> None:
        classes = [(i, int(c)) for i, mask in enumerate(masks) for c in mask.unique() if c not in (0, IGNORED)]
        self.n, self.size = len(masks), patch_size[0] * patch_size[1]
        self.image = torch.tensor([i for i, _ in classes], dtype=torch.long, device=masks.device)  # of each pair
        which = torch.tensor([c for _, c in classes], dtype=masks.dtype, device=masks.device)
        self.pixels = _per_patch(masks[self.image] == which[:, None, None], patch_size)  # of the class [pair, patch]
        self.judged = _per_patch(masks != IGNORED, patch_size)  # [batch, patch]

    def tokens(self) -> Tensor:
        """Bool `[pair, patch]`: the patches of each pair's class, one at least."""
        tokens = 2 * self.pixels > self.size
        if not len(tokens):
            return tokens
        most = torch.nn.functional.one_hot(self.pixels.argmax(dim=1), tokens.shape[1]).bool()
        return torch.where(tokens.any(dim=1, keepdim=True), tokens, most)

    def jaccard(self, masks: Tensor, resolution: str) -> Tensor:
        """Scores `[pair, head]` of masks of patches `[batch, head, patch]`; what is not judged belongs to neither side."""
        if resolution == "token":
            target = self.tokens()
            kept = (2 * self.judged[self.image] >= self.size) | target
            return jaccard(masks[self.image] & kept[:, None], target[:, None])
        # each pixel has what its patch has, so that counts of pixels in each patch are enough
        taken = masks[self.image].double()  # [pair, head, patch]
        both = torch.einsum("ihp,ip->ih", taken, self.pixels.double())
        size = torch.einsum("ihp,ip->ih", taken, self.judged[self.image].double())
        return both / (size + self.pixels.sum(dim=1, keepdim=True) - both)

    def mean(self, scores: Tensor) -> Tensor:
        """Means `[batch, head]` over the classes of each image; NaN for an image without any."""
        total = scores.new_zeros(self.n, scores.shape[1]).index_add_(0, self.image, scores)
        count = torch.bincount(self.image, minlength=self.n).to(scores)
        return (total / count[:, None]).float()


def _per_patch(pixels: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """How many pixels of each patch are on, `[n, patch]`, of bool `[n, height, width]`."""
    pattern = "n (h p1) (w p2) -> n (h w) (p1 p2)"
    return rearrange(pixels, pattern, p1=patch_size[0], p2=patch_size[1]).sum(dim=-1)
