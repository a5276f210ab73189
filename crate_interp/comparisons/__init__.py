"""Comparison of two models, or of two results."""

from crate_interp.comparisons.result import Comparison
from crate_interp.comparisons.run import compare

__all__ = ["Comparison", "compare"]
