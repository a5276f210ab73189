"""Probes, which apply measures to a model. A built-in probe is a function that returns a Probe."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from crate_interp.core import checks
from crate_interp.probes.attention_probe import attention, membership, representatives
from crate_interp.probes.compression_probe import PLACES, compression, frames, objective
from crate_interp.probes.geometry_probe import alignment, drift, ranks
from crate_interp.probes.ladder_probe import ladder
from crate_interp.probes.probe import Probe
from crate_interp.probes.segmentation_probe import segmentation
from crate_interp.probes.sink_probe import sinks
from crate_interp.probes.sparsity_probe import activity, sparsity
from crate_interp.results.statistic import Statistic, described, title_of

BUILT_IN: dict[str, Callable[..., Probe]] = {
    probe.__name__: probe
    for probe in (
        compression, sparsity, attention, alignment, segmentation, objective, frames, ranks,
        activity, membership, representatives, ladder, sinks,
    )
}  # fmt: skip
DEFAULT = ("compression", "sparsity", "attention", "alignment")
# run by default too, on models that have their hook points: those of ToST and of CBT
OF_MEMBERS = ("membership", "representatives")
# statistics of `ci.linear_probe`, which fits classifiers and so is not a Probe
LINEAR, LINEAR_HEADING = "linear", "What a linear classifier reads off"
_share = partial(Statistic, unit="share right", low=0.0, high=1.0)
LINEAR_STATISTICS: dict[str, Statistic] = {
    "accuracy": _share(
        "Accuracy of a linear classifier", "higher is better",
        how="Held-out accuracy of logistic regression on the layer's stream.",
    ),
    "permuted": _share(
        "Accuracy with permuted labels", "chance, with its noise",
        how="Held-out accuracy with labels permuted among samples: there is nothing to learn.",
    ),
    "input": _share(
        "Accuracy from the input alone", "the network adds nothing to it",
        how="Held-out accuracy of the same classifier on pixels or token ids, in every layer.",
    ),
    "chance": _share(
        "Share of the commonest class", "chance",
        how="Held-out accuracy of always predicting the commonest class of the training part.",
    ),
}  # fmt: skip


def statistic(meta: Mapping[str, Any], name: str) -> Statistic:
    """Returns title, unit and reading of the statistic "probe.statistic" of a result.

    Unit, bounds and how to read it come from the result's meta. Title, direction and column come
    from the meta if it holds them, else from the built-in probe of this name. A statistic in
    neither gets a title made from its name.
    """
    facts = meta["statistics"].get(name, ("", None, None, ""))
    labels = meta.get("titles", {}).get(name) or _built_in_record(name, facts).labels
    (title, direction, column), (unit, low, high, how) = labels, facts
    return Statistic(title, direction, unit, low, high, how, column)


def heading(meta: Mapping[str, Any], probe: str) -> str:
    """Returns the heading that pages put above the statistics of a result's probe."""
    return meta.get("headings", {}).get(probe) or _known_heading(probe) or title_of(probe)


def labels_of(probes: Sequence[Probe]) -> dict[str, dict[str, Any]]:
    """Returns the texts of probes that a result must store, since they do not follow from names.

    "titles": title, direction and column of statistics; "headings": the headings of probes.
    """
    titles = {
        f"{probe.name}.{name}": list(record.labels)
        for probe in probes
        for name, record in probe.records.items()
        if record.labels != _built_in_record(f"{probe.name}.{name}", record.facts).labels
    }
    headings = {
        probe.name: probe.heading
        for probe in probes
        if probe.heading not in ("", _known_heading(probe.name))
    }
    return ({"titles": titles} if titles else {}) | ({"headings": headings} if headings else {})


def _known_heading(probe: str) -> str:
    if probe == LINEAR:
        return LINEAR_HEADING
    return BUILT_IN[probe]().heading if probe in BUILT_IN else ""


def _built_in_record(name: str, facts: Any) -> Statistic:
    """Returns the record of a built-in statistic, or a record whose title is the name."""
    probe, _, own = name.partition(".")
    if probe == LINEAR:
        known = LINEAR_STATISTICS
    elif probe == "compression":
        known = compression(at=tuple(PLACES)).records
    else:
        known = BUILT_IN[probe]().records if probe in BUILT_IN else {}
    return known.get(own) or described(name, facts)


__all__ = [
    "DEFAULT", "Probe", "Statistic", "activity", "alignment", "attention", "available",
    "compression", "drift", "frames", "ladder", "membership", "objective", "ranks",
    "representatives", "resolve", "segmentation", "sinks", "sparsity",
]  # fmt: skip


def available() -> list[str]:
    """Returns the names of the built-in probes."""
    return list(BUILT_IN)


def resolve(probes: str | Probe | Sequence[str | Probe] | None) -> list[Probe]:
    """Returns Probe objects for names, probes or both; None means the names in DEFAULT.

    Raises ValueError for unknown names, for no probe at all, and for two probes with the same name.
    """
    if not (probes is None or (isinstance(probes, (str, Probe, Sequence)) and probes)):
        known = ", ".join(DEFAULT)
        raise ValueError(f"probes={checks.quote(probes)}: give names such as {known}, or probes.")
    named = DEFAULT if probes is None else probes
    named = [named] if isinstance(named, (str, Probe)) else named
    resolved = [_named(probe) if isinstance(probe, str) else probe for probe in named]
    for probe in resolved:
        if not isinstance(probe, Probe):
            call = f": call it, {getattr(probe, '__name__', 'probe')}()" if callable(probe) else ""
            raise ValueError(f"{type(probe).__name__} is not a probe{call}. Give a ci.Probe.")
    names = [probe.name for probe in resolved]
    if len(set(names)) < len(names):
        raise ValueError(f"two probes share a name ({', '.join(names)}): give each another name=.")
    return resolved


def _named(name: str) -> Probe:
    if name not in BUILT_IN:
        of = [probe for probe, made in BUILT_IN.items() if name in made().statistics]
        hint = checks.did_you_mean(name, BUILT_IN, f"The probes are {', '.join(BUILT_IN)}.")
        hint = f"It is a statistic of {' and of '.join(of)}: give this probe." if of else hint
        raise ValueError(f"there is no probe {name!r}. {hint}")
    return BUILT_IN[name]()
