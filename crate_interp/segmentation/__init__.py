"""Do attention maps segment? Scores of every head, compared with chance."""

from crate_interp.segmentation.result import SegmentResult
from crate_interp.segmentation.run import segment

__all__ = ["SegmentResult", "segment"]
