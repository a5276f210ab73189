"""Pure functions from tensors to numbers, without a model, a hook, a file or a plot.

They are batched over leading axes. Tokens are rows: z `[..., pos, d_model]`, u `[head, d_model,
d_head]`, codes `[..., head, pos, d_head]`, pattern `[..., query, key]`. crate_interp/config/
explains the words and symbols; README.md in this folder has a line for each measure.
"""

from types import FunctionType

from crate_interp.measures.attention import *
from crate_interp.measures.cuts import *
from crate_interp.measures.gradients import *
from crate_interp.measures.ladder import *
from crate_interp.measures.lasso import *
from crate_interp.measures.maps import *
from crate_interp.measures.masks import *
from crate_interp.measures.objective import *
from crate_interp.measures.patternless import *
from crate_interp.measures.rates import *
from crate_interp.measures.sparsity import *
from crate_interp.measures.spectra import *
from crate_interp.measures.subspaces import *

__all__: list[str] = [  # what the modules list  # pyright: ignore
    name for name, value in globals().items() if isinstance(value, FunctionType)
]
