"""Surgery: replaces a layer's step by another, and measures how that changes the answers."""

from crate_interp.surgeries.result import SurgeryResult
from crate_interp.surgeries.run import surgery
from crate_interp.surgeries.steps import replaced

__all__ = ["SurgeryResult", "replaced", "surgery"]
