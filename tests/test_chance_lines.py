"""The dotted line of a figure: what a statistic would be by chance, or at its most even."""

import numpy as np
import torch

import crate_interp as ci
from conftest import LAYERS


def test_chance_is_dotted(model):
    """Thirteen tokens of which twelve are patches."""
    images = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(3))
    result, cfg = ci.sweep(model, images, progress=False), model.cfg
    levels = {
        "attention.entropy": np.log(13),
        "attention.entropy_cls": np.log(13),
        "attention.entropy_patches": np.log(12),
        "attention.support_cls": 13,
        "alignment.head_overlap": cfg.d_head / cfg.d_model,
        "alignment.dictionary_shape": (min(cfg.d_model, cfg.d_mlp) / max(cfg.d_model, cfg.d_mlp))
        ** 0.5,
        "sparsity.zero_fraction": 0.5,
    }
    for name, level in levels.items():
        (dotted,) = [
            line
            for line in ci.viz.layers(result, name).axes[0].lines
            if line.get_linestyle() == ":"
        ]
        np.testing.assert_allclose(dotted.get_ydata(), [level] * LAYERS, rtol=1e-6)
    assert "(even attention: 2.565 nats)" in result.sharpest().splitlines()[0]
