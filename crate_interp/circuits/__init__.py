"""Circuits: what heads read from each other, their share in a logit, and which heads matter."""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    from crate_interp.circuits import patching
    from crate_interp.circuits.atlas_run import Atlas, atlas
    from crate_interp.circuits.attention_reasons import why_attends
    from crate_interp.circuits.attention_reasons_result import AttentionReason
    from crate_interp.circuits.attention_targets import head_scores, repeat_targets
    from crate_interp.circuits.attribution import LogitAttribution, logit_attribution
    from crate_interp.circuits.circuit import Circuit, Edge
    from crate_interp.circuits.circuit_scores import CircuitScores, evaluate
    from crate_interp.circuits.code_swaps import concentration
    from crate_interp.circuits.code_swaps_result import Concentration
    from crate_interp.circuits.compositions import Composition, composition
    from crate_interp.circuits.graphs.atom_names import AtomNames, atom_names
    from crate_interp.circuits.graphs.result import AttributionGraph
    from crate_interp.circuits.graphs.run import graph
    from crate_interp.circuits.graphs.steering import Steering
    from crate_interp.circuits.head_ablation import HeadAblation, ablate_heads, switched_off
    from crate_interp.circuits.head_places import HeadMeaning, head_meaning
    from crate_interp.circuits.logits import LogitLens, logit_lens
    from crate_interp.circuits.patching import attribution_patch, path_patch

__all__ = [
    "Atlas", "AtomNames", "AttentionReason", "AttributionGraph", "Circuit", "CircuitScores",
    "Composition", "Concentration", "Edge", "HeadAblation", "HeadMeaning", "LogitAttribution",
    "LogitLens", "Steering", "ablate_heads", "atlas", "atom_names", "attribution_patch",
    "composition", "concentration", "evaluate", "graph", "head_meaning", "head_scores",
    "logit_attribution", "logit_lens", "patching", "path_patch", "repeat_targets",
    "switched_off", "why_attends",
]  # fmt: skip

_MODULE_OF, __getattr__, __dir__ = lazy(__name__, __file__)
