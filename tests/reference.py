"""Second, slow implementations written from the papers: the names of ci.measures, by subject."""

# ruff: noqa: F401, F403
from forward_reference import *
from reference_rates import *
from reference_sparsity import *
from reference_steps import *
from reference_subspaces import *
