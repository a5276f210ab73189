"""Between hooked models and TransformerLens' bridge, in both directions."""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    from crate_interp.bridge.adapter import to_bridge
    from crate_interp.bridge.bridge_to_hooked import from_bridge
    from crate_interp.bridge.loading import load
    from crate_interp.bridge.transformers_models import register

__all__ = ["from_bridge", "load", "register", "to_bridge"]

_MODULE_OF, __getattr__, __dir__ = lazy(__name__, __file__)
