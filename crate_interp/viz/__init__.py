"""Figures of probe results and attention maps. matplotlib loads when a figure is drawn; nothing is shown or saved here."""

from crate_interp.viz.attention import attention_on_image
from crate_interp.viz.audit import audit_page
from crate_interp.viz.layers import beside, heads, layers

__all__ = ["attention_on_image", "audit_page", "beside", "heads", "layers"]
