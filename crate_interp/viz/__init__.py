"""Figures and pages of results and caches. matplotlib and jinja2 load when something is drawn.

A figure is returned, neither shown nor saved. A page shows what its result holds: no function here
runs a model or opens data.
"""

from crate_interp.viz.ablated import head_ablation
from crate_interp.viz.atlas import atlas_pages
from crate_interp.viz.audit import audit_page
from crate_interp.viz.by_layer import beside, layers
from crate_interp.viz.by_step import steps
from crate_interp.viz.circuit_figure import circuit
from crate_interp.viz.compared import compare
from crate_interp.viz.comparison import compare_page
from crate_interp.viz.explorer import explore
from crate_interp.viz.grids import head_grid
from crate_interp.viz.heat import heads, heatmap
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
    "circuit",
    "compare",
    "compare_page",
    "explore",
    "head_ablation",
    "head_grid",
    "heads",
    "heatmap",
    "layers",
    "segment_page",
    "steps",
    "top_tokens",
]
