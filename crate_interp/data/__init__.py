"""Data sets as samples in a fixed order, with labels, masks where there are some, a fingerprint.

Nothing here knows a model or a probe: what turns pictures, masks and texts into tensors is
passed in.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from crate_interp.data.named_data import embedded
from crate_interp.data.samples import Samples, part
from crate_interp.data.sources import forms, open_data, open_text
from crate_interp.data.tables import Table

# what may be given as data; `open_data` and `open_text` say what becomes of it
Data = str | Sequence[str] | Tensor | np.ndarray | Table | Samples

__all__ = ["Data", "Samples", "embedded", "forms", "open_data", "open_text", "part"]
