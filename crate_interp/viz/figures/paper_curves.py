"""Published curves by layer to compare with, and the models that they describe."""

from typing import Any

# CRATE-S on ImageNet validation, arXiv 2306.01129 figure 3, read off the figure: no table was
# published. Layer l = 1..12 there is 0..11 here. The figure shows the fraction of non-zeros; here
# it is the fraction of zeros, as in `sparsity.zero_fraction`.
# statistic: (values, how far the reading may be off)
PUBLISHED: dict[str, tuple[tuple[float, ...], float]] = {
    "compression.official_rate": (
        (1101, 1028, 1093, 1063, 916, 933, 1002, 945, 856, 833, 754, 667), 3.0,
    ),
    "sparsity.zero_fraction": (
        (0.588, 0.534, 0.565, 0.624, 0.587, 0.608, 0.650, 0.670, 0.722, 0.737, 0.795, 0.665), 0.01,
    ),
}  # fmt: skip


def is_crate_s(config: dict[str, Any]) -> bool:
    """Tells whether a config is that of CRATE-S, the only model with published numbers by layer."""
    wanted = {"family": "crate", "d_model": 576, "n_layers": 12, "n_heads": 12}
    return all(config.get(name) == value for name, value in wanted.items())
