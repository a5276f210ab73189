"""Models and autoencoders keep no tensor of a batch after a forward, with gradients or without."""

import io

import pytest
import torch

import crate_interp as ci
from crate_interp.models.sae import NORMALIZATIONS, SAEConfig


@pytest.mark.parametrize("normalization", NORMALIZATIONS[1:])
def test_an_autoencoder_decodes_whatever_was_encoded_in_between(normalization, unchecked):
    sae = ci.SparseAutoencoder(
        SAEConfig(hook_name="hook_embed", d_in=31, d_sae=53, normalize_activations=normalization)
    )
    x, other = torch.randn(2, 7, 31), 5 + 3 * torch.randn(2, 7, 31)
    acts = sae.encode(x)
    alone = sae.decode(acts, x)
    sae.encode(other)
    assert torch.equal(sae.decode(acts, x), alone)
    assert torch.equal(sae(x), alone)
    with pytest.raises(
        ValueError, match=r"Give the activations that were encoded, of shape \[2, 7, 31\]"
    ):
        sae.decode(acts)
    with pytest.raises(ValueError, match=r"x of shape \[2, 5, 31\]"):
        sae.decode(acts, x[:, :5])


def test_a_saved_autoencoder_holds_no_activations_of_the_last_batch():
    sae = ci.SparseAutoencoder(
        SAEConfig(hook_name="hook_embed", d_in=31, d_sae=53, normalize_activations="layer_norm")
    )
    sizes = []
    for rows in (1, 1009):
        sae(torch.randn(rows, 31)).sum().backward()
        sae.zero_grad()
        file = io.BytesIO()
        torch.save(sae, file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]
