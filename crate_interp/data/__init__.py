"""Data sets as samples in a fixed order, with a fingerprint, and labels and masks if there are any.

Nothing here depends on models or probes: the functions that turn pictures, masks and texts into
tensors are passed as arguments.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from crate_interp.data.samples import Samples, part
from crate_interp.data.sources import forms, open_data, open_text
from crate_interp.data.tables import embedded

# what may be given as data; see `open_data` and `open_text`
Array = Tensor | np.ndarray
Data = str | Path | Image.Image | Array | Samples | Dataset | Mapping[str, Any] | Iterable[Any]

__all__ = ["Data", "Samples", "embedded", "forms", "open_data", "open_text", "part"]
