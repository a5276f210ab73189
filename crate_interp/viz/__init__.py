"""Figures of probe results and attention maps. matplotlib loads when a figure is drawn; nothing is shown or saved here."""

from crate_interp.viz.atlas import atlas_pages
from crate_interp.viz.attention import attention_on_image
from crate_interp.viz.audit import audit_page
from crate_interp.viz.head_grid import head_grid
from crate_interp.viz.layers import beside, heads, layers
from crate_interp.viz.segment import segment_page

__all__ = ["atlas_pages", "attention_on_image", "audit_page", "beside", "head_grid", "heads", "layers", "segment_page"]
