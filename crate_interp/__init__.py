"""crate_interp: TransformerLens for white-box transformers (CRATE, CRATE-alpha).

Load a checkpoint as a hooked model, cache or stream its activations, measure compression, sparsity,
alignment and attention layer by layer, and look at it. Importing the package loads nothing else:
every name below loads when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import crate_hooks as hooks
    from crate_interp import bridge, circuits, data, measures, probes, saes, surgeries, viz
    from crate_interp.audits import AuditResult, audit
    from crate_interp.bridge import from_bridge, to_bridge
    from crate_interp.checkpoints.hub import list_models
    from crate_interp.checkpoints.load import convert, load
    from crate_interp.circuits import (
        Atlas,
        AttributionGraph,
        HeadAblation,
        ablate_heads,
        atlas,
        graph,
    )
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
    from crate_interp.training.regularizer import SRRRegularizer
    from crate_interp.training.watch_result import WatchResult
    from crate_interp.training.watch_run import Watch, watch

__all__ = [
    "Atlas", "AtomResult", "AttributionGraph", "AuditResult", "CheckpointError", "Comparison",
    "CrateConfig",
    "HeadAblation", "HookedCrate", "HookedCrateCLIP", "HookedCrateLM", "HookedCrateMAE",
    "LinearProbeResult", "Past", "Probe", "SRRRegularizer", "SegmentResult", "SparseAutoencoder",
    "SurgeryResult", "SweepResult", "Watch", "WatchResult", "ablate_heads", "atlas", "atoms",
    "audit", "bridge", "circuits", "compare", "convert", "data", "from_bridge", "graph", "hooks",
    "linear_probe", "list_models", "load", "maps", "measures", "open_store", "probe",
    "probes", "report", "saes", "segment", "store", "surgeries", "surgery", "sweep", "to_bridge",
    "viz", "watch",
]  # fmt: skip

# module -> the public names that it holds
_NAMES = {
    "crate_interp.audits": "AuditResult audit",
    "crate_interp.bridge": "from_bridge to_bridge",
    "crate_interp.checkpoints.hub": "list_models",
    "crate_interp.checkpoints.load": "convert load",
    "crate_interp.circuits": "Atlas AttributionGraph HeadAblation ablate_heads atlas graph",
    "crate_interp.comparisons": "Comparison compare",
    "crate_interp.config": "CrateConfig",
    "crate_interp.core.errors": "CheckpointError",
    "crate_interp.models.autoencoder": "HookedCrateMAE",
    "crate_interp.models.clip": "HookedCrateCLIP",
    "crate_interp.models.language": "HookedCrateLM",
    "crate_interp.models.layers.context": "Past",
    "crate_interp.models.sae": "SparseAutoencoder",
    "crate_interp.models.vision": "HookedCrate",
    "crate_interp.probes": "Probe",
    "crate_interp.reports.run": "report",
    "crate_interp.segmentation": "SegmentResult segment",
    "crate_interp.surgeries": "SurgeryResult surgery",
    "crate_interp.sweeps": "AtomResult LinearProbeResult SweepResult atoms linear_probe open_store "
    "probe store sweep",
    "crate_interp.training.regularizer": "SRRRegularizer",
    "crate_interp.training.watch_result": "WatchResult",
    "crate_interp.training.watch_run": "Watch watch",
}
# public name -> the public module that it is
_ROOMS = "bridge circuits data measures probes saes surgeries viz"
_MODULES = {name: f"crate_interp.{name}" for name in _ROOMS.split()}
_MODULES |= {"hooks": "crate_hooks", "maps": "crate_interp.probes.maps"}
_MODULE_OF = _MODULES | {name: module for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'crate_interp' has no attribute {name!r}; it has {known}")
    import_module("crate_interp.core.progress")  # before other libraries load tqdm, which may warn
    loaded = import_module(_MODULE_OF[name])
    return loaded if name in _MODULES else getattr(loaded, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
