"""Pure functions from tensors to numbers, without a model, a hook, a file or a plot.

They are batched over leading axes. Tokens are rows: z `[..., pos, d_model]`, u
`[head, d_model, d_head]`, codes `[..., head, pos, d_head]`, pattern `[..., query, key]`.
crate_interp/config.py explains the words and symbols; README.md beside this file has a line for
each measure.
"""

from crate_interp.measures.attention import (
    attention_entropy,
    causal_uniform_entropy,
    effective_support,
    mass_cover,
    official_attention_entropy,
    top_mass,
)
from crate_interp.measures.cuts import maskcut, normalised_cut
from crate_interp.measures.denoising import paper_posterior_mean, posterior_mean
from crate_interp.measures.gradients import (
    coding_rate_gradient,
    neumann_gradient,
    neumann_invalid,
    subspace_coding_rate_gradient,
)
from crate_interp.measures.lasso import lasso_kkt_residual, lasso_objective, lasso_solution
from crate_interp.measures.maps import attention_map, attention_rollout, pca_map, pca_mask
from crate_interp.measures.masks import (
    jaccard,
    mass_mask,
    pixel_mask,
    random_jaccard,
    token_mask,
    top_mask,
)
from crate_interp.measures.objective import layer_objectives, sparse_rate_reduction
from crate_interp.measures.ranks import effective_rank, stable_rank
from crate_interp.measures.rates import (
    coding_length,
    coding_rate,
    dictionary_rate_change,
    mcr2_coding_rate,
    official_coding_rate,
    rate_reduction,
    subspace_coding_rate,
)
from crate_interp.measures.sparsity import (
    firing_rate,
    gini,
    hoyer,
    l0_norm,
    l1_l2_ratio,
    l1_norm,
    mean_magnitude,
    support_for_energy,
    zero_fraction,
)
from crate_interp.measures.spectra import rate_of_spectrum, spectrum, subspace_spectrum
from crate_interp.measures.steps import (
    attention_step,
    first_order_step,
    gradient_step,
    ista_step,
    neumann_step,
    paper_mssa,
    subspace_attention,
    third_order_step,
)
from crate_interp.measures.subspaces import (
    column_cosines,
    completeness_defect,
    condition_number,
    dictionary_defect,
    head_overlap,
    incoherence,
    membership_entropy,
    mutual_coherence,
    orthonormality_defect,
    principal_angles,
    projection_energy,
    subspace_overlap,
    subspace_snr,
)

__all__ = [
    "attention_entropy",
    "attention_map",
    "attention_rollout",
    "attention_step",
    "causal_uniform_entropy",
    "coding_length",
    "coding_rate",
    "coding_rate_gradient",
    "column_cosines",
    "completeness_defect",
    "condition_number",
    "dictionary_defect",
    "dictionary_rate_change",
    "effective_rank",
    "effective_support",
    "firing_rate",
    "first_order_step",
    "gini",
    "gradient_step",
    "head_overlap",
    "hoyer",
    "incoherence",
    "ista_step",
    "jaccard",
    "l0_norm",
    "l1_l2_ratio",
    "l1_norm",
    "lasso_kkt_residual",
    "lasso_objective",
    "lasso_solution",
    "layer_objectives",
    "maskcut",
    "mass_cover",
    "mass_mask",
    "mcr2_coding_rate",
    "mean_magnitude",
    "membership_entropy",
    "mutual_coherence",
    "neumann_gradient",
    "neumann_invalid",
    "neumann_step",
    "normalised_cut",
    "official_attention_entropy",
    "official_coding_rate",
    "orthonormality_defect",
    "paper_mssa",
    "paper_posterior_mean",
    "pca_map",
    "pca_mask",
    "pixel_mask",
    "posterior_mean",
    "principal_angles",
    "projection_energy",
    "random_jaccard",
    "rate_of_spectrum",
    "rate_reduction",
    "sparse_rate_reduction",
    "spectrum",
    "stable_rank",
    "subspace_attention",
    "subspace_coding_rate",
    "subspace_coding_rate_gradient",
    "subspace_overlap",
    "subspace_snr",
    "subspace_spectrum",
    "support_for_energy",
    "third_order_step",
    "token_mask",
    "top_mask",
    "top_mass",
    "zero_fraction",
]
