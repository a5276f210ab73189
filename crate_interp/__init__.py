"""crate_interp: TransformerLens for white-box transformers (CRATE, CRATE-alpha).

Load a checkpoint as a hooked model, cache or stream its activations, measure compression, sparsity,
alignment and attention layer by layer, and look at it. Importing does nothing: every name below
loads when it is first touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a type checker takes `name as name` for public
    import crate_hooks
    from crate_interp import bridge as bridge
    from crate_interp import circuits as circuits
    from crate_interp import data as data
    from crate_interp import measures as measures
    from crate_interp import probes as probes
    from crate_interp import saes as saes
    from crate_interp import surgeries as surgeries
    from crate_interp import viz as viz
    from crate_interp.audits import AuditResult as AuditResult
    from crate_interp.audits import audit as audit
    from crate_interp.bridge import from_bridge as from_bridge
    from crate_interp.bridge import to_bridge as to_bridge
    from crate_interp.checkpoints.hub.registry import list_models as list_models
    from crate_interp.checkpoints.load import convert as convert
    from crate_interp.checkpoints.load import load as load
    from crate_interp.circuits import Atlas as Atlas
    from crate_interp.circuits import HeadAblation as HeadAblation
    from crate_interp.circuits import ablate_heads as ablate_heads
    from crate_interp.circuits import atlas as atlas
    from crate_interp.comparisons import Comparison as Comparison
    from crate_interp.comparisons import compare as compare
    from crate_interp.config import CrateConfig as CrateConfig
    from crate_interp.core.errors import CheckpointError as CheckpointError
    from crate_interp.models.autoencoder import HookedCrateMAE as HookedCrateMAE
    from crate_interp.models.clip import HookedCrateCLIP as HookedCrateCLIP
    from crate_interp.models.language import HookedCrateLM as HookedCrateLM
    from crate_interp.models.layers.context import Past as Past
    from crate_interp.models.sae import SparseAutoencoder as SparseAutoencoder
    from crate_interp.models.vision import HookedCrate as HookedCrate
    from crate_interp.probes import Probe as Probe
    from crate_interp.probes import maps as maps
    from crate_interp.reports.run import report as report
    from crate_interp.segmentation import SegmentResult as SegmentResult
    from crate_interp.segmentation import segment as segment
    from crate_interp.surgeries import SurgeryResult as SurgeryResult
    from crate_interp.surgeries import surgery as surgery
    from crate_interp.sweeps import AtomResult as AtomResult
    from crate_interp.sweeps import LinearProbeResult as LinearProbeResult
    from crate_interp.sweeps import SweepResult as SweepResult
    from crate_interp.sweeps import atoms as atoms
    from crate_interp.sweeps import linear_probe as linear_probe
    from crate_interp.sweeps import open_store as open_store
    from crate_interp.sweeps import probe as probe
    from crate_interp.sweeps import store as store
    from crate_interp.sweeps import sweep as sweep
    from crate_interp.sweeps.runs.result_merging import merge as merge
    from crate_interp.sweeps.runs.verification import verify as verify
    from crate_interp.training.regularizer import SRRRegularizer as SRRRegularizer
    from crate_interp.training.watch_result import WatchResult as WatchResult
    from crate_interp.training.watch_run import Watch as Watch
    from crate_interp.training.watch_run import watch as watch

    hooks = crate_hooks

# module -> the public names that it holds
_NAMES = {
    "crate_interp.audits": "AuditResult audit",
    "crate_interp.bridge": "from_bridge to_bridge",
    "crate_interp.checkpoints.hub.registry": "list_models",
    "crate_interp.checkpoints.load": "convert load",
    "crate_interp.circuits": "Atlas HeadAblation ablate_heads atlas",
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
    "crate_interp.sweeps.runs.result_merging": "merge",
    "crate_interp.sweeps.runs.verification": "verify",
    "crate_interp.training.regularizer": "SRRRegularizer",
    "crate_interp.training.watch_result": "WatchResult",
    "crate_interp.training.watch_run": "Watch watch",
}
# public name -> the public module that it is
_MODULES = {
    "bridge": "crate_interp.bridge",
    "circuits": "crate_interp.circuits",
    "data": "crate_interp.data",
    "hooks": "crate_hooks",
    "maps": "crate_interp.probes.maps",
    "measures": "crate_interp.measures",
    "probes": "crate_interp.probes",
    "saes": "crate_interp.saes",
    "surgeries": "crate_interp.surgeries",
    "viz": "crate_interp.viz",
}
_MODULE_OF = _MODULES | {name: module for module, names in _NAMES.items() for name in names.split()}

__version__ = "0.1.0"
if not TYPE_CHECKING:  # it reads the names above
    __all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        known = ", ".join(sorted(_MODULE_OF))
        raise AttributeError(f"module 'crate_interp' has no attribute {name!r}; it has {known}")
    import_module("crate_interp.core.progress")  # before other libraries load tqdm, which may warn
    loaded = import_module(_MODULE_OF[name])
    return loaded if name in _MODULES else getattr(loaded, name)


def __dir__() -> list[str]:
    return [*sorted(_MODULE_OF), "__version__"]
