"""A model that keeps every claim of the audit, and ways to break it."""

from contextlib import ExitStack, contextmanager

import torch

import crate_interp as ci
from crate_interp.audits.claims import CLAIMS
from crate_interp.measures import subspace_coding_rate_gradient

HEADS, P = 3, 5
D = HEADS * P  # pos is 13
EPS = 10.0  # so large that alpha lambda stays below 1
IMAGES = torch.randn(4, 1, 6, 20, generator=torch.Generator().manual_seed(3))


def orthogonal(n, seed):
    return torch.linalg.qr(
        torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )[0]


def ideal(eta=1.0, lambd=1.0, scale=1.0, square=False, spread=0.5):
    """Returns a model with complete orthonormal U, orthonormal D times `scale`, positive codes.

    With `square` D is a multiple of I. One step of eta = 1 / scale^2 is the exact solution, and its
    zeros are made by the threshold.
    """
    size = dict(d_model=D, n_layers=2, n_heads=HEADS, n_classes=3, channels=1)
    look = dict(image_size=(6, 20), patch_size=(2, 5))
    cfg = ci.CrateConfig(family="crate", eta=eta, lambd=lambd, **size, **look)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ci.HookedCrate(cfg).eval()
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.attn.u_proj.weight.copy_(orthogonal(D, layer))
            block.mlp.D.copy_(scale * (torch.eye(D) if square else orthogonal(D, 10 + layer)))
            block.ln2.weight.fill_(spread)
            block.ln2.bias.copy_(block.mlp.D.sum(dim=1) / scale**2)  # D^T y is 1 on average
    return model


def descent(z, u, eps, kappa):
    """The exact gradient step, kappa in units of 1 / L."""
    alpha = P / (z.shape[1] * eps**2)
    largest = torch.linalg.matrix_norm(u.transpose(0, 1).flatten(1), ord=2) ** 2
    return -kappa / (9 * alpha / 4 * largest) * subspace_coding_rate_gradient(z, u, eps)


@contextmanager
def attention_replaced(model, update):
    """`update(z, u)` `[batch, pos, d_model]` in place of what attention adds."""
    kept = {}

    def keep(z, hook):
        kept[hook.layer()] = z

    def replace(out, hook):
        return update(kept[hook.layer()], model.blocks[hook.layer()].attn.U.detach())

    pair = (("hook_resid_pre", keep), ("hook_attn_out", replace))
    with model.hooks(
        [(f"blocks.{layer}.{name}", hook) for layer in range(2) for name, hook in pair]
    ):
        yield


def words(model, update=None, eps=EPS, more=()):
    """The verdict of each claim, the same in both layers or a dict of sets."""
    update = update or (lambda z, u: descent(z, u, eps, 1.0))
    with ExitStack() as stack:
        stack.enter_context(attention_replaced(model, update))
        if more:
            stack.enter_context(model.hooks(list(more)))
        table = ci.audit(
            model, IMAGES, eps=eps, untrained=0, progress=False, lasso_tokens=13
        ).table()
    assert len(table) == 2 * len(CLAIMS)
    return {claim: set(table[table["claim"] == claim]["verdict"]) for claim in CLAIMS}


def broken(found):
    """The claims that are broken in every layer; every other one must be kept in every layer."""
    assert all(verdicts in ({"kept"}, {"broken"}) for verdicts in found.values()), found
    return {claim for claim, verdicts in found.items() if verdicts == {"broken"}}
