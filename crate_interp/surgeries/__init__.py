"""Surgery: replaces a layer's step by another, and measures how that changes the answers."""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    from crate_interp.surgeries.result import SurgeryResult
    from crate_interp.surgeries.run import surgery
    from crate_interp.surgeries.steps import replaced
    from crate_interp.surgeries.unrolling import Unrolling, unroll

__all__ = ["SurgeryResult", "Unrolling", "replaced", "surgery", "unroll"]

_MODULE_OF, __getattr__, __dir__ = lazy(__name__, __file__)
