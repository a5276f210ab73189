"""Networks with random weights of other initialisations are not told from random weights."""

from dataclasses import dataclass

import pytest
import torch

import crate_interp as ci
from crate_interp.questions.untrained_twins import shuffled, twin
from crate_interp.sweeps.findings import strip

SEEDS, SHARE = 5, 0.05
RUN = {"limit": 16, "progress": False}


def small_positions(model):
    """torch's defaults, but small positions, as DeiT draws them."""
    torch.nn.init.normal_(model.pos_embed, std=0.02)
    torch.nn.init.normal_(model.cls_token, std=0.02)


def truncated(model):
    """All matrices with a standard deviation of .02, as a ViT draws them."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.trunc_normal_(weight, std=0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)


def xavier(model):
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.xavier_uniform_(weight)


@dataclass
class Counted:
    """Cells of a report that compare with random weights, and pluses, by the baselines used."""

    cells: int = 0
    drawn: int = 0
    both: int = 0
    unringed: int = 0
    of_all: int = 0


def random_network(number):
    model = twin(ci.load("crate-tiny-fashion"), 100 + number)
    torch.manual_seed(number)
    with torch.no_grad():
        (small_positions, truncated, xavier)[number % 3](model)
    return model


def counted(numbers):
    found = Counted()
    for number in numbers:
        model = random_network(number)
        own, *others = (
            ci.sweep(network, "embedded:fashion", controls=0, **RUN)
            for network in (
                model,
                *(make(model, seed) for make in (twin, shuffled) for seed in range(SEEDS)),
            )
        )
        drawn, mixed = others[:SEEDS], others[SEEDS:]
        for row in strip(own, drawn, mixed):
            found.of_all += sum(sign.mark != "." for sign in row.signs)
            found.unringed += sum(sign.mark == "+" and not sign.ringed for sign in row.signs)
            if "untrained" in row.title:
                found.cells += len(row.signs)
                found.both += sum(sign.mark == "+" for sign in row.signs)
        for row in strip(own, drawn):
            if "untrained" in row.title:
                found.drawn += sum(sign.mark == "+" for sign in row.signs)
    return found


@pytest.mark.parametrize("numbers", [range(3), pytest.param(range(10), marks=pytest.mark.slow)])
def test_another_initialisation_gets_a_plus_in_few_cells(numbers):
    """With the official initialisation as the only baseline, a third of the cells get one."""
    found = counted(numbers)
    assert found.cells == 24 * len(numbers)
    assert found.both <= SHARE * found.cells
    assert found.unringed <= SHARE * found.of_all
    assert found.drawn > 0.2 * found.cells
