"""What `data` may be -> samples in a fixed order, with labels, masks where there are some, and a fingerprint.

Knows no model and no probe: what turns pictures, masks and texts into tensors is handed in.
"""

from crate_interp.data.named import embedded
from crate_interp.data.samples import Samples, part
from crate_interp.data.sources import open_data
from crate_interp.data.text import open_text

__all__ = ["Samples", "embedded", "open_data", "open_text", "part"]
