"""Tensors in, numbers out: pure functions, batched over leading axes, without model, hook, file or plot.

Tokens are rows: z `[..., pos, d_model]`, u `[head, d_model, d_head]`, codes `[..., head, pos, d_head]`, pattern
`[..., query, key]`. Words and symbols: crate_interp/config.py.
"""

from crate_interp.measures.attention import attention_entropy, effective_support, top_mass
from crate_interp.measures.rates import coding_rate, official_coding_rate, rate_reduction, subspace_coding_rate
from crate_interp.measures.sparsity import hoyer, l1_norm, zero_fraction
from crate_interp.measures.subspaces import (
    completeness_defect,
    dictionary_defect,
    head_overlap,
    orthonormality_defect,
    projection_energy,
    subspace_overlap,
)

__all__ = [
    "attention_entropy",
    "coding_rate",
    "completeness_defect",
    "dictionary_defect",
    "effective_support",
    "head_overlap",
    "hoyer",
    "l1_norm",
    "official_coding_rate",
    "orthonormality_defect",
    "projection_energy",
    "rate_reduction",
    "subspace_coding_rate",
    "subspace_overlap",
    "top_mass",
    "zero_fraction",
]
