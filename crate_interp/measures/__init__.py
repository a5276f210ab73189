"""Pure functions from tensors to numbers, without a model, a hook, a file or a plot.

They are batched over leading axes. Tokens are rows: z `[..., pos, d_model]`, u
`[head, d_model, d_head]`, codes `[..., head, pos, d_head]`, pattern `[..., query, key]`.
crate_interp/config/ explains the words and symbols; README.md beside this file has a line for each
measure.
"""

from crate_interp.measures import (
    attention,
    ceilings,
    cuts,
    denoising,
    gradients,
    lasso,
    maps,
    masks,
    objective,
    ranks,
    rates,
    sparsity,
    spectra,
    steps,
    subspaces,
)
from crate_interp.measures.attention import *
from crate_interp.measures.ceilings import *
from crate_interp.measures.cuts import *
from crate_interp.measures.denoising import *
from crate_interp.measures.gradients import *
from crate_interp.measures.lasso import *
from crate_interp.measures.maps import *
from crate_interp.measures.masks import *
from crate_interp.measures.objective import *
from crate_interp.measures.ranks import *
from crate_interp.measures.rates import *
from crate_interp.measures.sparsity import *
from crate_interp.measures.spectra import *
from crate_interp.measures.steps import *
from crate_interp.measures.subspaces import *

__all__: list[str] = []
__all__ += attention.__all__
__all__ += ceilings.__all__
__all__ += cuts.__all__
__all__ += denoising.__all__
__all__ += gradients.__all__
__all__ += lasso.__all__
__all__ += maps.__all__
__all__ += masks.__all__
__all__ += objective.__all__
__all__ += ranks.__all__
__all__ += rates.__all__
__all__ += sparsity.__all__
__all__ += spectra.__all__
__all__ += steps.__all__
__all__ += subspaces.__all__
