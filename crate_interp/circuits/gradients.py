"""Attribution patching: what putting each head's output of another run in would change, estimated from gradients."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import full_name
from crate_interp import checks
from crate_interp.circuits.paths import check_runs


def attribution_patch(
    model: Any,
    source: Tensor,
    base: Tensor,
    metric: Callable[[Tensor], Any],
    *,
    steps: Any = 1,
    progress: bool = True,
) -> Float[Tensor, "layer head"]:
    """For each head, `<z_source - z_base, d metric / d z>`: what patching its output in would change, to first order.

    steps=1: the gradient of the base run (TransformerLens `attribution_patch`, nodes of heads).
    steps > 1: the mean of gradients at `steps` points, midpoints of the way from the base's
    embedding to the source's: integrated gradients (EAP-IG, arXiv 2403.17806), which
    TransformerLens 4.3 declares and does not have. One forward and backward for each step, whatever
    the number of heads; `ci.circuits.path_patch` and activation patching are the causal check of
    what is found.

    source, base: two inputs of one shape; metric(logits) -> a number with a gradient. Raises
    ValueError for inputs that differ in shape, steps below 1, and a metric that is no number or has
    no gradient.
    """
    check_runs(model, source, base)
    if not checks.is_int(steps) or steps < 1:
        raise ValueError(f"steps={steps!r}: give a whole number of at least 1.")
    names = [full_name("attn.hook_z", layer) for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        there, here = (
            model.run_with_cache(inputs, names_filter=[*names, "hook_embed"])[1]
            for inputs in (source, base)
        )
    total = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, dtype=torch.float64)
    for step in tqdm(range(steps), desc="attribution patching", disable=not progress):
        share = 0.0 if steps == 1 else (step + 0.5) / steps
        embed = here["hook_embed"] + share * (there["hook_embed"] - here["hook_embed"])
        for layer, gradient in enumerate(_gradients(model, base, metric, names, embed)):
            change = (
                there[names[layer]] - here[names[layer]]
            ) * gradient  # [batch, pos, head, d_head]
            total[layer] += change.double().sum(dim=(0, 1, 3)).cpu() / steps
    return total.float()


def _gradients(
    model: Any, inputs: Tensor, metric: Callable[[Tensor], Any], names: list[str], embed: Tensor
) -> list[Tensor]:
    """The metric's gradient at each point, with another embedding in place of the inputs' own."""
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> Tensor:
        # a leaf of the graph's own, so that weights without gradient do not matter
        seen[hook.name] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return seen[hook.name]

    with torch.enable_grad():
        hooks = [("hook_embed", lambda tensor, hook: embed), *((name, keep) for name in names)]
        value = metric(model.run_with_hooks(inputs, fwd_hooks=hooks))
        if (
            not isinstance(value, Tensor)
            or value.numel() != 1
            or not value.requires_grad
            or not value.isfinite().all()
        ):
            got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the metric returned {got}: return one finite number that depends on the logits, as a tensor."
            )
        return list(torch.autograd.grad(value.sum(), [seen[name] for name in names]))
