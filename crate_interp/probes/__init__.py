"""What a measure means on a model. The built-in probes are functions that return a Probe, as a user's own would be."""

from collections.abc import Sequence

from crate_interp import checks
from crate_interp.probes.codes import sparsity
from crate_interp.probes.masks import segmentation
from crate_interp.probes.patterns import attention
from crate_interp.probes.probe import Probe
from crate_interp.probes.rates import compression
from crate_interp.probes.weights import alignment

_BUILT_IN = {
    "compression": compression,
    "sparsity": sparsity,
    "attention": attention,
    "alignment": alignment,
    "segmentation": segmentation,
}
DEFAULT = ("compression", "sparsity", "attention", "alignment")

__all__ = [
    "DEFAULT",
    "Probe",
    "alignment",
    "attention",
    "available",
    "compression",
    "resolve",
    "segmentation",
    "sparsity",
]


def available() -> list[str]:
    """The names of the built-in probes."""
    return list(_BUILT_IN)


def resolve(probes: str | Probe | Sequence[str | Probe] | None) -> list[Probe]:
    """Probe objects for names and/or probes; None is DEFAULT. ValueError for unknown names, none, or two of a name."""
    if probes is not None and not isinstance(probes, (str, Probe, Sequence)):
        raise ValueError(
            f"cannot take probes from {type(probes).__name__}: give names such as {', '.join(DEFAULT)}."
        )
    asked = (
        DEFAULT
        if probes is None
        else [probes]
        if isinstance(probes, (str, Probe))
        else list(probes)
    )
    found = [_named(probe) if isinstance(probe, str) else probe for probe in asked]
    if not found:
        raise ValueError(
            f"there is no probe to run: give names such as {', '.join(DEFAULT)}, or None for these."
        )
    for probe in found:
        if not isinstance(probe, Probe):
            call = f": call it, {getattr(probe, '__name__', 'probe')}()" if callable(probe) else ""
            raise ValueError(
                f"{type(probe).__name__} is no probe{call}. Give a name, or ci.Probe(name, points, measure, statistics)."
            )
    names = [probe.name for probe in found]
    if len(set(names)) < len(names):
        raise ValueError(
            f"two probes share a name ({', '.join(names)}): give each its own, dataclasses.replace(probe, name=...)."
        )
    return found


def _named(name: str) -> Probe:
    if name not in _BUILT_IN:
        hint = checks.did_you_mean(name, _BUILT_IN, f"The probes are {', '.join(_BUILT_IN)}.")
        raise ValueError(f"no probe is called {name!r}. {hint}")
    return _BUILT_IN[name]()
