"""Names of CRATE's hook points, and functions that read and edit the activations there.

The package needs only torch and knows no model by name. It works on any TransformerLens-style
model, whose hook points are modules called `blocks.{layer}.{point}`.
"""

from crate_hooks import edit
from crate_hooks.reading import ATTENTION, CODES, PATTERN, RESID, every_layer, full_name, read

__all__ = ["ATTENTION", "CODES", "PATTERN", "RESID", "edit", "every_layer", "full_name", "read"]
