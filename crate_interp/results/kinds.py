"""The kinds of results: where each is defined, and how the chunks of a run become a result."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pandas as pd

from crate_interp.results.result import Merge, Result

Tables = dict[str, pd.DataFrame]
Rules = Mapping[str, Merge]  # name of a table -> its merge rule


@dataclass(frozen=True)
class Kind:
    """A kind of result, and how a run becomes a result of this kind.

    result: the class. stages: the merge rules of each stage's tables, by the name of the stage;
    "untrained-0", "untrained-1", ... share the entry "untrained". finish: makes the result from the
    merged tables of each stage and the meta. A kind that is not measured in chunks has no stages
    and no finish.
    """

    result: type[Result]
    stages: Mapping[str, Rules] = field(default_factory=dict)
    finish: Callable[[Mapping[str, Tables], dict[str, Any]], Any] | None = None

    @property
    def name(self) -> str:
        """Returns the name of the kind in meta.json and run.json."""
        return self.result.KIND

    def rules_of(self, stage: object) -> Rules | None:
        """Returns the merge rules of a stage, or None if the kind has no such stage."""
        name = re.fullmatch(r"([a-z]+)(-[0-9]{1,9})?", stage) if isinstance(stage, str) else None
        return None if name is None else self.stages.get(name[1])


# kind -> (module, name in the module) of its Kind, or of its class if not measured in chunks
KINDS: dict[str, tuple[str, str]] = {
    "atlas": ("crate_interp.circuits.atlases.atlas_run", "ATLAS"),
    "atom_names": ("crate_interp.circuits.graphs.atom_names", "ATOM_NAMES"),
    "atoms": ("crate_interp.sweeps.atom_statistics", "ATOMS"),
    "audit": ("crate_interp.audits.run", "AUDIT"),
    "circuit_scores": ("crate_interp.circuits.circuit_scores", "CircuitScores"),
    "comparison": ("crate_interp.comparisons.result", "Comparison"),
    "composition": ("crate_interp.circuits.compositions", "COMPOSITION"),
    "concentration": ("crate_interp.circuits.code_swaps", "CONCENTRATION"),
    "graph": ("crate_interp.circuits.graphs.result", "AttributionGraph"),
    "head_ablation": ("crate_interp.circuits.head_ablation", "HEAD_ABLATION"),
    "linear_probe": ("crate_interp.sweeps.linear_probes", "LINEAR_PROBE"),
    "logit_attribution": ("crate_interp.circuits.attribution", "LogitAttribution"),
    "logit_lens": ("crate_interp.circuits.logit_lens_table", "LogitLens"),
    "saes": ("crate_interp.saes.run", "SAES"),
    "segmentation": ("crate_interp.segmentation.run", "SEGMENTATION"),
    "store": ("crate_interp.sweeps.stores.writing", "STORE"),
    "surgery": ("crate_interp.surgeries.run", "SURGERY"),
    "sweep": ("crate_interp.sweeps.run", "SWEEP"),
    "watch": ("crate_interp.training.watch_result", "WatchResult"),
}


def kind_of(name: str) -> Kind:
    """Returns a kind by its name, and imports its module if needed.

    Raises KeyError for a name that `KINDS` lacks.
    """
    module, attribute = KINDS[name]
    found = getattr(import_module(module), attribute)
    return found if isinstance(found, Kind) else Kind(found)
