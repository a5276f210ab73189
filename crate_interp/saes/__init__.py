"""Sparse autoencoders on hook points: loading, splicing and evaluation.

sae = ci.saes.load("folder")
with ci.saes.spliced(model, {sae.cfg.hook_name: sae}, error=True):
    ...
ci.saes.evaluate(model, data, {sae.cfg.hook_name: sae})
"""

from typing import TYPE_CHECKING

from crate_interp.core.lazy_names import lazy

if TYPE_CHECKING:
    from crate_interp.saes.coders import Coder, load, spliced
    from crate_interp.saes.result import SaeResult
    from crate_interp.saes.run import evaluate

__all__ = ["Coder", "SaeResult", "evaluate", "load", "spliced"]

_MODULE_OF, __getattr__, __dir__ = lazy(__name__, __file__)
