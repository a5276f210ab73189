"""What each sparse step says of itself, against its forward; and a step of one's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformer_lens.hook_points import HookPoint

import crate_interp as ci
from conftest import BATCH, D_MODEL, make, make_lm
from crate_interp.circuits import composition
from crate_interp.models.layers.sparse_steps import Lasso, SparseStep

STEPS = {
    "ista": lambda: make("crate"),
    "odl": lambda: make("crate-alpha"),
    "tied-odl": lambda: make_lm("crate-lm"),
    "threshold": lambda: make_lm("nanochat-crate"),
    "mlp-relu": lambda: make_lm("gpt-baseline"),
}


@pytest.fixture(params=STEPS)
def step(request):
    model = STEPS[request.param]().double()
    assert model.cfg.sparse_step == request.param
    return model.blocks[1].mlp


@pytest.fixture
def y(rng):
    return torch.randn(BATCH, 7, D_MODEL, generator=rng, dtype=torch.float64)


def captured(step, y, point):
    kept = []
    with torch.no_grad():
        step.get_submodule(point).add_hook(lambda tensor, hook: kept.append(tensor))
        step(y)
        step.get_submodule(point).remove_hooks()
    return kept[0]


def test_the_lasso_is_what_the_layer_solves(step, y):
    if hasattr(step, "threshold"):
        assert step.lasso() == "some learned thresholds are negative, but no penalty is negative"
        step.threshold.data.abs_()
    lasso = step.lasso()
    if isinstance(lasso, str):
        assert lasso == "the layer has an MLP, no dictionary"
        return
    torch.testing.assert_close(lasso.run(y, lasso.lambd), captured(step, y, "hook_post"))
    assert not lasso.d.requires_grad and (lasso.start(y) >= 0).all()


def test_the_linear_form_is_the_forward_with_every_atom_on(step, y, monkeypatch):
    monkeypatch.setattr(F, "relu", lambda x: x)  # the forward is affine then
    with torch.no_grad():
        torch.testing.assert_close(step.linear(y), step(y) - step(torch.zeros_like(y)))


def test_an_atom_writes_its_direction(step, y):
    code = captured(step, y, "hook_post")
    constant = getattr(step, "b_out", 0)
    with torch.no_grad():
        torch.testing.assert_close(code @ step.written() + constant, step(y))


class Shrinkage(SparseStep):
    """One step from zero with a bias in place of a threshold, decoded by the dictionary itself."""

    def __init__(self, width):
        super().__init__()
        self.D = nn.Parameter(0.3 * torch.eye(width))
        self.hook_post = HookPoint()

    @property
    def W_out(self):
        return self.D.T

    def forward(self, y):
        return self.hook_post(F.relu(0.5 * (y @ self.D) - 0.05)) @ self.D.T

    def lasso(self):
        return Lasso(self.D.detach(), 0.5, self.D.new_tensor(0.1), warm=False, count=1)

    def linear(self, y):
        return 0.5 * (y @ self.D) @ self.D.T


@pytest.mark.slow
def test_a_step_of_ones_own_can_be_audited_and_carries_compositions(images):
    model = make("crate-alpha", d_mlp=D_MODEL)
    for block in model.blocks:
        block.mlp = Shrinkage(D_MODEL)
    model.setup()
    table = ci.audit(model, images, untrained=0, progress=False).table()
    row = table.set_index(["layer", "number"]).loc[(0, "descends")]
    assert row["value"] < 0 and row["verdict"] != "not applicable"
    assert composition(model, through="linear").table()["score"].between(0, 1).all()
