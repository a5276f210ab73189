"""What is compared: statistics that both sides have, and layers of the same relative depth."""

from collections.abc import Mapping, Sequence
from typing import Any

from crate_interp.comparisons.sample_statistics import Statistic

# the setting that says what is measured in place of U, which each side chooses for itself
_CHOSEN = "subspaces"
Statistics = Mapping[str, Statistic]  # "probe.statistic" -> its values in one network


def layer_pairs(a: int, b: int) -> list[tuple[int, int]]:
    """Returns which layers of two networks are compared.

    The networks have a and b layers. If a = b, layers of the same number are compared. Otherwise
    let n be the smaller number and m the larger: layer l of n is compared with layer l (m - 1) / (n
    - 1) of m, rounded, halves upwards, so that first and last layers match. The stream after the
    last layer, layer n, is compared with layer m.
    """
    few, many = min(a, b), max(a, b)
    steps = max(few - 1, 1)
    pairs = [(l, (2 * l * (many - 1) + steps) // (2 * steps)) for l in range(few)]  # noqa: E741
    if few == 1:
        pairs = [(0, many - 1)] if many > 1 else [(0, 0)]
    pairs.append((few, many))
    return pairs if a <= b else [(other, own) for own, other in pairs]


def shared(
    a: Sequence[Statistics],
    b: Sequence[Statistics],
    metas: tuple[Mapping[str, Any], Mapping[str, Any]],
    paired: bool,
) -> tuple[list[str], dict[str, str]]:
    """Returns the statistics to compare, and for others why not, "probe.statistic" -> reason.

    a, b: the statistics of each network of a side. metas: the meta of the first network of each
    side. paired: whether numbers of single samples are needed.
    """
    chosen: list[str] = []
    left: dict[str, str] = {}
    for name in dict.fromkeys(key for one in (*a, *b) for key in one):
        reason = _why_not(name, a, b, metas, paired)
        if reason:
            left[name] = reason
        else:
            chosen.append(name)
    return chosen, left


def _why_not(
    name: str,
    a: Sequence[Statistics],
    b: Sequence[Statistics],
    metas: tuple[Mapping[str, Any], Mapping[str, Any]],
    paired: bool,
) -> str:
    for side, networks in (("a", a), ("b", b)):
        lacking = sum(name not in one for one in networks)
        if lacking:
            some = "" if lacking == len(networks) else f" in {lacking} of its networks"
            return f"{side} does not have it{some}"
    units = [meta["statistics"][name][0] for meta in metas]
    if units[0] != units[1]:
        return f"a has it in {units[0] or 'no unit'}, b in {units[1] or 'no unit'}"
    probe = name.partition(".")[0]
    settings = [meta["probes"][probe]["settings"] for meta in metas]
    for key, value in settings[0].items():
        other = settings[1].get(key, value)
        if value != other and key != _CHOSEN:
            return f"the settings of its probe differ: {key} = {value} and {other}"
    every = [one[name] for one in (*a, *b)]
    if len({one.of_weights for one in every}) > 1:
        return "it is of the weights in one and of samples in the other"
    if paired and not every[0].of_weights and any(one.values is None for one in every):
        return (
            "it is per head, and the sweep kept only the means of heads: compare the models, "
            "whose heads are then averaged for each sample"
        )
    return ""


def noted(metas: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, str]:
    """Returns harmless differences in the settings of probes: "probe.setting" -> how they differ.

    These are the choice of what is measured in place of U, and settings that only one side has.
    """
    found: dict[str, str] = {}
    chosen = [str(meta["config"].get(_CHOSEN) or "its own U") for meta in metas]
    if chosen[0] != chosen[1]:
        found[_CHOSEN] = f"{chosen[0]} in a, {chosen[1]} in b"
    for probe in metas[0]["probes"]:
        if probe not in metas[1]["probes"]:
            continue
        one, other = (meta["probes"][probe]["settings"] for meta in metas)
        for key in dict.fromkeys((*one, *other)):
            words = [str(each.get(key, "not set")) for each in (one, other)]
            if words[0] != words[1] and key != _CHOSEN:
                found[f"{probe}.{key}"] = f"{words[0]} in a, {words[1]} in b"
    return found
