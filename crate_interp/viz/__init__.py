"""Figures and pages of results and caches. matplotlib loads with the first of them that is used.

A function for figures returns the figure, and neither shows nor saves it. A page shows only what
its result or cache holds: no function here runs a model or opens data.
"""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    from crate_interp.viz.explorer.explorer_page import explore
    from crate_interp.viz.figures.attention_images import attention_on_image, head_grid
    from crate_interp.viz.figures.by_layer import beside, layers, steps
    from crate_interp.viz.figures.circuit_figures import circuit, graph_figure
    from crate_interp.viz.figures.compared_curves import compare, concentration
    from crate_interp.viz.figures.heatmaps import head_ablation, heads, heatmap
    from crate_interp.viz.pages.ablation_page import ablation_page, concentration_page
    from crate_interp.viz.pages.atom_pages import atlas_pages, atoms_page
    from crate_interp.viz.pages.audit_page import audit_page
    from crate_interp.viz.pages.cache_views import activations, attention, top_tokens
    from crate_interp.viz.pages.comparison_page import compare_page
    from crate_interp.viz.pages.graph_page import graph
    from crate_interp.viz.pages.segment_page import segment_page

__all__ = [
    "ablation_page", "activations", "atlas_pages", "atoms_page", "attention",
    "attention_on_image", "audit_page", "beside", "circuit", "compare", "compare_page",
    "concentration", "concentration_page", "explore", "graph", "graph_figure", "head_ablation",
    "head_grid", "heads", "heatmap", "layers", "segment_page", "steps", "top_tokens",
]  # fmt: skip

_MODULE_OF, __getattr__, __dir__ = lazy(__name__, __file__)
