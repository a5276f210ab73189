"""What statistics are called in words, and which way is which. Literal data.

A statistic that does not stand here is called by its own name.
"""

_PLACES = {"pre": "before attention", "mid": "after attention", "post": "after the layer"}
_FRAMES = {
    "stream": "stream as it is",
    "read": "stream as attention reads it",
    "unit": "stream at unit mean square",
}
_RULES = {"mass": "mass rule", "top": "top rule"}
_CHANCE = {
    "": ("", "higher finds the object better"),
    "_random": (", patches in random order", "chance"),
    "_other": (", on the mask of the next image", "chance"),
}
_COMPRESSED, _SPARSER = "lower is more compressed", "higher is sparser"
_FOCUSED, _DEFECT = "lower singles out fewer tokens", "0 is what the theory assumes"

# "probe.statistic" -> (title, which way is which)
_TITLES: dict[str, tuple[str, str]] = {
    **{
        f"compression.{name}_{place}": (f"{title} {where}", way)
        for place, where in _PLACES.items()
        for name, title, way in (
            ("rate", "Coding rate R of all tokens", "higher is more spread out"),
            ("subspace_rate", "Coding rate R^c in the subspaces", _COMPRESSED),
            ("reduction", "Rate reduction R - R^c", "higher is better by the theory"),
        )
    },
    **{
        f"compression.subspace_rate_{place}_head": (
            f"Coding rate of each head's subspace {where}",
            _COMPRESSED,
        )
        for place, where in _PLACES.items()
    },
    "compression.official_rate": ("R^c as the authors' script counts it", _COMPRESSED),
    "compression.official_rate_head": (
        "The authors' script's rate of each head",
        _COMPRESSED,
    ),
    "compression.zero_codes": ("Codes that are all zero", "0 is usual"),
    "sparsity.zero_fraction": ("Zeros in the code", _SPARSER),
    "sparsity.l1": ("Sum of the code's entries", "lower costs less of the penalty"),
    "sparsity.hoyer": ("Hoyer sparsity of the code", _SPARSER),
    "alignment.orthonormality": ("How far U is from orthonormal", _DEFECT),
    "alignment.completeness": ("How far the subspaces are from covering the space", _DEFECT),
    "alignment.head_overlap": ("Overlap of the heads' subspaces", "lower is more incoherent"),
    "alignment.dictionary_defect": ("How far D is from orthonormal", _DEFECT),
    "alignment.dictionary_shape": ("How far D is from orthonormal, whatever its scale", _DEFECT),
    "alignment.energy_head": ("Share of a token in each head's subspace", "p/d is chance"),
    "attention.entropy": ("Entropy of attention", _FOCUSED),
    "attention.entropy_uniform": ("Entropy of even attention", "the most that entropy can be"),
    "attention.entropy_cls": ("Entropy of the CLS token's attention", _FOCUSED),
    "attention.top1_cls": (
        "CLS attention on the token it attends to most",
        "higher singles out one token",
    ),
    "attention.top5_cls": (
        "CLS attention on the five tokens it attends to most",
        "higher singles out few tokens",
    ),
    "attention.support_cls": ("Tokens that the CLS token attends to", _FOCUSED),
    "attention.entropy_patches": ("Entropy of CLS attention over patches alone", _FOCUSED),
    "attention.self_cls": ("CLS attention on CLS itself", "the rest goes to patches"),
    **{
        f"frames.change_{frame}": (f"What attention adds to R^c, {words}", "below 0 by the theory")
        for frame, words in _FRAMES.items()
    },
    **{
        f"objective.{size}_{frame}": (f"Objective with {norm}, {words}", "lower is better")
        for size, norm in (("count", "the count of entries"), ("l1", "the sum of entries"))
        for frame, words in _FRAMES.items()
    },
    **{
        f"segmentation.{rule}_{place}{chance}{best}": (
            f"Jaccard index, {words}, in {place}s{level}{of}",
            way,
        )
        for rule, words in _RULES.items()
        for place in ("token", "pixel")
        for chance, (level, way) in _CHANCE.items()
        for best, of in (("", ""), ("_best", ", best head for each class"))
    },
    "ranks.stream": ("Directions that the tokens fill", "more are more spread out"),
    "ranks.code": ("Directions that the codes fill", "more are more spread out"),
    "ranks.pattern": ("Stable rank of a head's attention", "1 is the same look from everywhere"),
    "ranks.stable_u": ("Stable rank of each head's subspace map", "as wide as the head is even"),
    "ranks.stable_out": ("Stable rank of each head's output map", "as wide as the head is even"),
    "ranks.stable_in_mlp": ("Stable rank of the dictionary, or of W_in", "higher is more even"),
    "ranks.stable_out_mlp": ("Stable rank of the decoder, W_out", "higher is more even"),
    "activity.gini": ("Gini index of the code", _SPARSER),
    "activity.near_zero": ("Entries of the code near zero", _SPARSER),
    "activity.energy_support": ("Entries that hold 90 % of the energy", "lower is sparser"),
    "activity.attention_support": (
        "Share of the visible tokens that a head attends to",
        _FOCUSED,
    ),
    "linear.accuracy": ("Accuracy of a linear classifier", "higher is better"),
    "linear.permuted": ("Accuracy with permuted labels", "chance, with its noise"),
    "linear.chance": ("Share of the commonest class", "chance"),
}

SECTIONS = {
    "compression": "Compression: how many nats a token costs",
    "sparsity": "Sparsity: how few entries of the code are on",
    "attention": "Attention: how many tokens a head looks at",
    "alignment": "Geometry: are the weights what the theory assumes",
    "objective": "The objective that a layer is meant to lower",
    "segmentation": "Segmentation: do attention maps find objects",
    "ranks": "Ranks: how many directions there are",
    "activity": "Activity: sparsity at any scale, without exact zeros",
    "linear": "What a linear classifier reads off",
}


# a claim of an audit -> what it says, short enough for the first column of a map
CLAIMS = {
    "compresses": "Attention lowers R^c",
    "gradient": "Attention is a gradient step on R^c",
    "neumann": "Attention follows the Neumann form",
    "output_map": "Heads write as they read: W_O is U",
    "descends": "The sparse step lowers the lasso",
    "solves": "The sparse step solves the lasso",
    "threshold": "Zeros come from the threshold",
    "reconstructs": "D Z is what was read",
    "rate_kept": "The sparse step keeps R",
    "orthonormal": "Each U_k is orthonormal",
    "complete": "The U_k cover the space",
    "incoherent": "The U_k are incoherent",
    "dictionary": "D is orthonormal",
}


def title(statistic: str) -> str:
    """Returns what a "probe.statistic" is called in words, such as "Zeros in the code"."""
    words, _ = _TITLES.get(statistic, (_own_words(statistic), ""))
    return words


def direction(statistic: str) -> str:
    """Returns which way is which, such as "lower is more compressed", or "" if nobody said."""
    return _TITLES.get(statistic, ("", ""))[1]


def section(probe: str) -> str:
    """Returns the heading of a probe's statistics."""
    return SECTIONS.get(probe, probe[:1].upper() + probe[1:])


def _own_words(statistic: str) -> str:
    name = statistic.partition(".")[2] or statistic
    words = name.replace("_", " ").strip() or statistic
    return words[:1].upper() + words[1:]
