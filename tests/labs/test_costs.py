"""The lab on costs: formulas against what runs, and memory against a known amount."""

import costs
import pytest
import torch

N, D = 13, 20  # d is 4 heads of 5


@pytest.mark.parametrize("kind", costs.KINDS)
def test_the_formula_is_what_torchs_counter_sees(kind):
    assert costs.layer_operations(kind, N, D) == costs.counted_layer(kind, N, D)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("crate", 3 * D**2 + 5 * D), ("vit", 12 * D**2 + 10 * D)]
)
def test_the_parameters_of_a_layer(kind, wanted):
    """CRATE: U and W with its bias, D, two norms. ViT: q, k, v, output, MLP, two norms."""
    block = costs.make_network(kind, D, 1, 17).blocks[0]
    assert sum(value.numel() for value in block.parameters()) == wanted


def test_the_published_sizes():
    for d, layers, heads, printed in costs.PUBLISHED.values():
        assert round(costs.published_parameters("crate", d, layers, heads) / 1e6, 2) == printed
    # a ViT-B has 86,567,656 with biases of q, k and v, and without the embedding's two norms
    assert costs.published_parameters("vit", 768, 12, 12) == 86_567_656 - 12 * 3 * 768 + 4 * 768


def test_peak_memory_of_a_chain():
    """Five products and sigmoids of [7, 11] floats: one is kept, two are being made."""
    x, w = torch.zeros(7, 11, requires_grad=True), torch.zeros(11, 11)
    size = 7 * 11 * 4

    def chain():
        z = x
        for _ in range(5):
            z = (z @ w).sigmoid()
        return z

    with torch.no_grad(), costs.PeakMemory() as memory:
        kept = chain()
        assert (memory.now, memory.peak) == (size, 3 * size)
        del kept
        assert memory.now == 0
    with costs.PeakMemory() as memory:
        kept = chain()
        assert (memory.now, memory.peak) == (5 * size, 6 * size)
    assert kept.shape == (7, 11)
