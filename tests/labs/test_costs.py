"""The lab on costs: formulas against what runs, and memory against a known amount."""

import costs
import counted
import pytest
import torch

N, D = 13, 20  # d is 4 heads of 5


@pytest.mark.parametrize("kind", counted.KINDS)
def test_the_formula_is_what_torchs_counter_sees(kind):
    assert counted.layer_operations(kind, N, D) == counted.counted_layer(kind, N, D)


@pytest.mark.parametrize("kind", counted.KINDS)
def test_the_parameters_of_a_layer(kind):
    block = counted.make_network(kind, D, 1, 17).blocks[0]
    assert sum(value.numel() for value in block.parameters()) == counted.layer_parameters(kind, D)


def test_operations_of_layers_add_up_from_their_parts():
    assert counted.layer_operations("crate", N, D) == 10 * N * D**2 + 4 * N**2 * D
    assert counted.layer_operations("vit", N, D) == 24 * N * D**2 + 4 * N**2 * D
    narrow = counted.layer_parameters("vit", 500)
    assert narrow == pytest.approx(counted.layer_parameters("crate", 1000), rel=0.01)


def test_the_published_sizes():
    for d, layers, heads, printed in costs.PUBLISHED.values():
        assert round(counted.published_parameters("crate", d, layers, heads) / 1e6, 2) == printed
    # a ViT-B has 86,567,656 with biases of q, k and v, and without the embedding's two norms
    assert counted.published_parameters("vit", 768, 12, 12) == 86_567_656 - 12 * 3 * 768 + 4 * 768


def test_peak_memory_of_a_chain():
    """Five products and sigmoids of [7, 11] floats: one is kept, two are being made."""
    x, w = torch.zeros(7, 11, requires_grad=True), torch.zeros(11, 11)
    size = 7 * 11 * 4

    def chain():
        z = x
        for _ in range(5):
            z = (z @ w).sigmoid()
        return z

    with torch.no_grad(), counted.PeakMemory() as memory:
        kept = chain()
        assert (memory.now, memory.peak) == (size, 3 * size)
        del kept
        assert memory.now == 0
    with counted.PeakMemory() as memory:
        kept = chain()
        assert (memory.now, memory.peak) == (5 * size, 6 * size)
    assert kept.shape == (7, 11)


def test_the_rule_of_a_ratio():
    def answers(own, other):
        row = {"training": own, "operations": 1, "seconds": [own, own * 1.01, own * 0.99]}
        found = {name: [row] for name in costs.NETWORKS}
        found["vit"] = [row | {"training": other, "seconds": [other, other, other]}]
        return [claim["answer"] for claim in costs.ratio_claims(found, "quick")[:2]]

    assert answers(1.0, 2.0) == ["supported"] * 2
    assert answers(2.0, 1.0) == ["not supported"] * 2
