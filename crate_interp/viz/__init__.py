"""Figures of probe results and attention maps. matplotlib loads when a figure is drawn; nothing is shown or saved here."""

from crate_interp.viz.atlas import atlas_pages
from crate_interp.viz.audit import audit_page
from crate_interp.viz.by_layer import beside, heads, layers
from crate_interp.viz.grids import head_grid
from crate_interp.viz.interactive import activations, attention, top_tokens
from crate_interp.viz.on_image import attention_on_image
from crate_interp.viz.segment import segment_page

__all__ = [
    "activations",
    "atlas_pages",
    "attention",
    "attention_on_image",
    "audit_page",
    "beside",
    "head_grid",
    "heads",
    "layers",
    "segment_page",
    "top_tokens",
]
