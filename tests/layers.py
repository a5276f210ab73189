"""Layers of models with given weights, in float64."""

import crate_interp as ci
from crate_interp.models.layers.sparse_steps import ISTA


def ista(d, **over):
    """Returns the step of a dictionary D [d_model, d_model], on tokens without a batch."""
    layer = ISTA(
        ci.CrateConfig(family="crate", d_model=len(d), n_layers=1, n_heads=1, image_size=32, **over)
    ).double()
    layer.D.data = d.clone()
    return lambda y: layer(y[None])[0].detach()
