"""crate_interp: TransformerLens for white-box transformers (CRATE, CRATE-alpha).

Load a checkpoint as a hooked model, cache or stream its activations, measure compression, sparsity,
alignment and attention layer by layer, and look at it. Importing does nothing: every name below
loads when it is first touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import crate_hooks as hooks
    from crate_interp import bridge, circuits, data, measures, probes, saes, surgeries, viz
    from crate_interp.audits import AuditResult, audit
    from crate_interp.bridge import from_bridge, to_bridge
    from crate_interp.checkpoints.hub.registry import list_models
    from crate_interp.checkpoints.load import convert, load
    from crate_interp.circuits import Atlas, HeadAblation, ablate_heads, atlas
    from crate_interp.comparisons import Comparison, compare
    from crate_interp.config import CrateConfig
    from crate_interp.core.errors import CheckpointError
    from crate_interp.models.autoencoder import HookedCrateMAE
    from crate_interp.models.clip import HookedCrateCLIP
    from crate_interp.models.language import HookedCrateLM
    from crate_interp.models.layers.context import Past
    from crate_interp.models.sae import SparseAutoencoder
    from crate_interp.models.vision import HookedCrate
    from crate_interp.probes import Probe, maps
    from crate_interp.reports.run import report
    from crate_interp.segmentation import SegmentResult, segment
    from crate_interp.surgeries import SurgeryResult, surgery
    from crate_interp.sweeps import (
        AtomResult,
        LinearProbeResult,
        SweepResult,
        atoms,
        linear_probe,
        open_store,
        probe,
        store,
        sweep,
    )
    from crate_interp.sweeps.runs.result_merging import merge
    from crate_interp.sweeps.runs.verification import verify
    from crate_interp.training.regularizer import SRRRegularizer
    from crate_interp.training.watch_result import WatchResult
    from crate_interp.training.watch_run import Watch, watch

# public name -> module and name there; None: the module itself
_PUBLIC: dict[str, tuple[str, str | None]] = {
    "Atlas": ("crate_interp.circuits", "Atlas"),
    "AtomResult": ("crate_interp.sweeps", "AtomResult"),
    "AuditResult": ("crate_interp.audits", "AuditResult"),
    "CheckpointError": ("crate_interp.core.errors", "CheckpointError"),
    "Comparison": ("crate_interp.comparisons", "Comparison"),
    "CrateConfig": ("crate_interp.config", "CrateConfig"),
    "HeadAblation": ("crate_interp.circuits", "HeadAblation"),
    "HookedCrate": ("crate_interp.models.vision", "HookedCrate"),
    "HookedCrateCLIP": ("crate_interp.models.clip", "HookedCrateCLIP"),
    "HookedCrateLM": ("crate_interp.models.language", "HookedCrateLM"),
    "HookedCrateMAE": ("crate_interp.models.autoencoder", "HookedCrateMAE"),
    "LinearProbeResult": ("crate_interp.sweeps", "LinearProbeResult"),
    "Past": ("crate_interp.models.layers.context", "Past"),
    "Probe": ("crate_interp.probes", "Probe"),
    "SRRRegularizer": ("crate_interp.training.regularizer", "SRRRegularizer"),
    "SegmentResult": ("crate_interp.segmentation", "SegmentResult"),
    "SparseAutoencoder": ("crate_interp.models.sae", "SparseAutoencoder"),
    "SurgeryResult": ("crate_interp.surgeries", "SurgeryResult"),
    "SweepResult": ("crate_interp.sweeps", "SweepResult"),
    "Watch": ("crate_interp.training.watch_run", "Watch"),
    "WatchResult": ("crate_interp.training.watch_result", "WatchResult"),
    "ablate_heads": ("crate_interp.circuits", "ablate_heads"),
    "atlas": ("crate_interp.circuits", "atlas"),
    "atoms": ("crate_interp.sweeps", "atoms"),
    "audit": ("crate_interp.audits", "audit"),
    "bridge": ("crate_interp.bridge", None),
    "circuits": ("crate_interp.circuits", None),
    "compare": ("crate_interp.comparisons", "compare"),
    "convert": ("crate_interp.checkpoints.load", "convert"),
    "data": ("crate_interp.data", None),
    "from_bridge": ("crate_interp.bridge", "from_bridge"),
    "hooks": ("crate_hooks", None),
    "linear_probe": ("crate_interp.sweeps", "linear_probe"),
    "list_models": ("crate_interp.checkpoints.hub.registry", "list_models"),
    "load": ("crate_interp.checkpoints.load", "load"),
    "maps": ("crate_interp.probes.maps", None),
    "measures": ("crate_interp.measures", None),
    "merge": ("crate_interp.sweeps.runs.result_merging", "merge"),
    "open_store": ("crate_interp.sweeps", "open_store"),
    "probe": ("crate_interp.sweeps", "probe"),
    "probes": ("crate_interp.probes", None),
    "report": ("crate_interp.reports.run", "report"),
    "saes": ("crate_interp.saes", None),
    "segment": ("crate_interp.segmentation", "segment"),
    "store": ("crate_interp.sweeps", "store"),
    "surgeries": ("crate_interp.surgeries", None),
    "surgery": ("crate_interp.surgeries", "surgery"),
    "sweep": ("crate_interp.sweeps", "sweep"),
    "to_bridge": ("crate_interp.bridge", "to_bridge"),
    "verify": ("crate_interp.sweeps.runs.verification", "verify"),
    "viz": ("crate_interp.viz", None),
    "watch": ("crate_interp.training.watch_run", "watch"),
}

__version__ = "0.1.0"
__all__ = [
    "Atlas",
    "AtomResult",
    "AuditResult",
    "CheckpointError",
    "Comparison",
    "CrateConfig",
    "HeadAblation",
    "HookedCrate",
    "HookedCrateCLIP",
    "HookedCrateLM",
    "HookedCrateMAE",
    "LinearProbeResult",
    "Past",
    "Probe",
    "SRRRegularizer",
    "SegmentResult",
    "SparseAutoencoder",
    "SurgeryResult",
    "SweepResult",
    "Watch",
    "WatchResult",
    "ablate_heads",
    "atlas",
    "atoms",
    "audit",
    "bridge",
    "circuits",
    "compare",
    "convert",
    "data",
    "from_bridge",
    "hooks",
    "linear_probe",
    "list_models",
    "load",
    "maps",
    "measures",
    "merge",
    "open_store",
    "probe",
    "probes",
    "report",
    "saes",
    "segment",
    "store",
    "surgeries",
    "surgery",
    "sweep",
    "to_bridge",
    "verify",
    "viz",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'crate_interp' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    import_module("crate_interp.core.progress")  # before other libraries load tqdm, which may warn
    module, attribute = _PUBLIC[name]
    loaded = import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
