"""Surgery: another step in place of a layer's own, and what that does to the answers."""

from crate_interp.surgeries.replacement import replaced
from crate_interp.surgeries.result import SurgeryResult
from crate_interp.surgeries.run import surgery

__all__ = ["SurgeryResult", "replaced", "surgery"]
