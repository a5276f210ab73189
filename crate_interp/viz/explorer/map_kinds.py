"""What a head's map is, by the kind of attention: where it is cached, and the page's words for it.

A head of ToST has no attention pattern, but memberships; one of CBT has representatives.
"""

from dataclasses import asdict, dataclass

from crate_interp.models.hooked import HookedModel

ALIKE = "has %s like"  # %s: the page's word for the vectors that it compares


@dataclass(frozen=True)
class MapKind:
    """The kind of the heads' maps.

    name: "attention", "membership" or "shared". point: the hook point of the maps. codes: the
    points of the codes of queries and keys. verbs: mode of the page -> what the token that is asked
    about does. legends: mode -> the line below the heads; # is the number of tokens that are seen.
    """

    name: str
    point: str
    codes: tuple[str, ...]
    verbs: dict[str, str]
    legends: dict[str, str]

    def words(self, alike: str | None) -> dict[str, object]:
        """Returns the words as the page's script reads them; alike: "codes", "queries" or None."""
        kept = asdict(self)
        if alike is not None:
            kept["verbs"] |= {"alike": ALIKE % alike}
        return {"map": self.name, "verbs": kept["verbs"], "legends": self.legends | _ALIKE}


def map_kind(model: HookedModel) -> MapKind:
    """Returns what the maps of a model's heads are."""
    return KINDS[model.cfg.facts["attention"]]


_ALIKE = {"alike": "Below each head: the largest cosine to another token."}
_SHARES = "Below each head: the largest share \u00b7 the effective number of tokens, at most #."
_ATTENTION = MapKind(
    "attention",
    "attn.hook_pattern",
    ("attn.hook_q", "attn.hook_k"),
    {"to": "attends to", "from": "is attended by"},
    {
        "to": _SHARES,
        "from": "Below each head: the largest share \u00b7 the sum \u03a3, on average 1.",
    },
)
KINDS = {
    "mssa": _ATTENTION,
    "self": _ATTENTION,
    "tssa": MapKind(
        "membership",
        "attn.hook_pi",
        ("attn.hook_u",),
        {"to": "belongs to"},
        {"to": "Below each head: the largest membership \u00b7 the sum \u03a3 over all tokens. The "
               "maps are the same whatever you point at."},
    ),
    "cbsa": MapKind(
        "shared",
        "attn.hook_contract",
        ("attn.hook_u",),
        {"to": "shares representatives with", "reads": "has a representative that reads"},
        {"to": _SHARES, "reads": _SHARES},
    ),
}  # fmt: skip
