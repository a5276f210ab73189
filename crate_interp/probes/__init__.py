"""Probes, which apply measures to a model. A built-in probe is a function that returns a Probe."""

from collections.abc import Sequence

from crate_interp.core import checks
from crate_interp.probes.attention_probe import attention, membership, representatives
from crate_interp.probes.built_in import BUILT_IN, DEFAULT
from crate_interp.probes.compression_probe import compression, frames, objective
from crate_interp.probes.geometry_probe import alignment, ranks
from crate_interp.probes.probe import Probe
from crate_interp.probes.segmentation_probe import segmentation
from crate_interp.probes.sparsity_probe import activity, sparsity
from crate_interp.results.statistic import Statistic

__all__ = [
    "DEFAULT", "Probe", "Statistic", "activity", "alignment", "attention", "available",
    "compression", "frames", "membership", "objective", "ranks", "representatives", "resolve",
    "segmentation", "sparsity",
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
        raise ValueError(f"probes={checks.shown(probes)}: give names such as {known}, or probes.")
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
