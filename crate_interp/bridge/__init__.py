"""Between hooked models and TransformerLens' bridge, in both directions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crate_interp.bridge.bridge_to_hooked import from_bridge
    from crate_interp.bridge.hooked_to_bridge import to_bridge
    from crate_interp.bridge.loading import load
    from crate_interp.bridge.transformers_models import register

# public name -> module; each is imported when first used, since importing TransformerLens' bridge
# takes seconds
_PUBLIC = {
    "from_bridge": "crate_interp.bridge.bridge_to_hooked",
    "load": "crate_interp.bridge.loading",
    "register": "crate_interp.bridge.transformers_models",
    "to_bridge": "crate_interp.bridge.hooked_to_bridge",
}

__all__ = ["from_bridge", "load", "register", "to_bridge"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'crate_interp.bridge' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
