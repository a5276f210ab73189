"""crate_interp: TransformerLens for white-box transformers (CRATE, CRATE-alpha).

Load a checkpoint as a hooked model, cache or stream its activations, measure compression, sparsity,
alignment and attention layer by layer, and look at it. Importing the package loads nothing else:
every name below loads when it is first used.
"""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    import crate_hooks as hooks
    import crate_interp.probes.maps as maps
    from crate_interp import bridge, circuits, data, measures, probes, saes, surgeries, viz
    from crate_interp.audits.result import AuditResult
    from crate_interp.audits.run import audit
    from crate_interp.bridge.adapter import to_bridge
    from crate_interp.bridge.bridge_to_hooked import from_bridge
    from crate_interp.checkpoints.hub import list_models
    from crate_interp.checkpoints.load import convert, load
    from crate_interp.circuits.atlas_run import Atlas, atlas
    from crate_interp.circuits.graphs.result import AttributionGraph
    from crate_interp.circuits.graphs.run import graph
    from crate_interp.circuits.head_ablation import HeadAblation, ablate_heads
    from crate_interp.comparisons.result import Comparison
    from crate_interp.comparisons.run import compare
    from crate_interp.config import CrateConfig
    from crate_interp.core.errors import CheckpointError
    from crate_interp.models.autoencoder import HookedCrateMAE
    from crate_interp.models.clip import HookedCrateCLIP
    from crate_interp.models.language import HookedCrateLM
    from crate_interp.models.layers.context import Past
    from crate_interp.models.redunet import ReduNet, redunet
    from crate_interp.models.sae import SparseAutoencoder
    from crate_interp.models.vision import HookedCrate
    from crate_interp.probes import Probe
    from crate_interp.reports import report
    from crate_interp.segmentation.result import SegmentResult
    from crate_interp.segmentation.run import segment
    from crate_interp.surgeries.result import SurgeryResult
    from crate_interp.surgeries.run import surgery
    from crate_interp.surgeries.unrolling import Unrolling, unroll
    from crate_interp.sweeps.atom_statistics import AtomResult, atoms
    from crate_interp.sweeps.linear_probes import linear_probe
    from crate_interp.sweeps.result import LinearProbeResult, SweepResult
    from crate_interp.sweeps.run import probe, sweep
    from crate_interp.sweeps.store_reading import open_store
    from crate_interp.sweeps.store_writing import store
    from crate_interp.training.regularizer import SRRRegularizer
    from crate_interp.training.watch_result import WatchResult
    from crate_interp.training.watch_run import Watch, watch

__all__ = [
    "Atlas", "AtomResult", "AttributionGraph", "AuditResult", "CheckpointError", "Comparison",
    "CrateConfig",
    "HeadAblation", "HookedCrate", "HookedCrateCLIP", "HookedCrateLM", "HookedCrateMAE",
    "LinearProbeResult", "Past", "Probe", "ReduNet", "SRRRegularizer", "SegmentResult",
    "SparseAutoencoder", "SurgeryResult", "SweepResult", "Unrolling", "Watch", "WatchResult",
    "ablate_heads", "atlas", "atoms",
    "audit", "bridge", "circuits", "compare", "convert", "data", "from_bridge", "graph", "hooks",
    "linear_probe", "list_models", "load", "maps", "measures", "open_store", "probe",
    "probes", "redunet", "report", "saes", "segment", "store", "surgeries", "surgery", "sweep",
    "to_bridge", "unroll", "viz", "watch",
]  # fmt: skip

__version__ = "0.1.0"

_MODULE_OF, __getattr__, _names = lazy(__name__, __file__)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
