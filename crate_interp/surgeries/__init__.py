"""Surgery: another step in place of a layer's own, and how that changes the answers."""

from crate_interp.surgeries.replacement import replaced
from crate_interp.surgeries.result import SurgeryResult
from crate_interp.surgeries.run import surgery

__all__ = ["SurgeryResult", "replaced", "surgery"]
