"""Figures and pages of results and caches. matplotlib loads with the first of them that is used.

A function for figures returns the figure, and neither shows nor saves it. A page shows only what
its result or cache holds: no function here runs a model or opens data.
"""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    from crate_interp.viz.atom_pages import atlas_pages, atoms_page
    from crate_interp.viz.attention_images import attention_on_image, head_grid
    from crate_interp.viz.audit_pages import audit_page
    from crate_interp.viz.by_layer import beside, layers, steps
    from crate_interp.viz.cache_views import activations, attention, top_tokens
    from crate_interp.viz.circuit_figures import circuit, graph_figure, why_figure
    from crate_interp.viz.compared_curves import compare, concentration
    from crate_interp.viz.comparison_pages import (
        ablation_page,
        compare_page,
        concentration_page,
        why_page,
    )
    from crate_interp.viz.explorer_page import explore
    from crate_interp.viz.graph_pages import graph
    from crate_interp.viz.heatmaps import head_ablation, heads, heatmap
    from crate_interp.viz.ladder_figures import norm_ladder
    from crate_interp.viz.segment_pages import segment_page

__all__ = [
    "ablation_page", "activations", "atlas_pages", "atoms_page", "attention",
    "attention_on_image", "audit_page", "beside", "circuit", "compare", "compare_page",
    "concentration", "concentration_page", "explore", "graph", "graph_figure", "head_ablation",
    "head_grid", "heads", "heatmap", "layers", "norm_ladder", "segment_page", "steps",
    "top_tokens", "why_figure", "why_page",
]  # fmt: skip

_MODULE_OF, __getattr__, __dir__ = lazy(__name__, __file__)
