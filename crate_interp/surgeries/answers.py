"""The answers of a model: loss and accuracy by sample, and slopes of the loss.

A slope is taken at mix 0, where a step begins to replace the layer's own step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.losses import next_token_loss
from crate_interp.questions.batches import last_point
from crate_interp.surgeries.steps import Hook, Step

_POINTS = {"hook_attn_out": 0, "mlp.hook_post": 1}  # each point's part of the seed
_TOWERS = ("clipa-visual", "clipa-text")


# loss `[batch]`: the cross-entropy in nats, in float64; for windows the mean over tokens. right
# `[batch]`: 1 or 0; for windows the share of right tokens. stream: Z^L
Answers = tuple[Float[Tensor, "batch"], Float[Tensor, "batch"], Float[Tensor, "batch pos d_model"]]


def answer(
    model: HookedModel, inputs: Tensor, classes: Tensor | None, hooks: Sequence[Hook] = ()
) -> Answers:
    """Returns loss, right and stream of a model with hooks that change it.

    classes `[batch]`: the right classes, or None for a language model, because `inputs` has its
    next tokens.
    """
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> None:
        seen["stream"] = tensor.detach()

    every: list[Any] = [*hooks, (last_point(model), keep)]
    logits: Any = model.run_with_hooks(inputs, fwd_hooks=every)
    if classes is None:
        loss = next_token_loss(logits.double(), inputs, per_token=True).mean(dim=-1)
        right = (logits[:, :-1].argmax(dim=-1) == inputs[:, 1:]).double().mean(dim=-1)
    else:
        loss = F.cross_entropy(logits.double(), classes, reduction="none")
        right = (logits.argmax(dim=-1) == classes).double()
    return loss, right, seen["stream"]


def check_answers(model: HookedModel, what: str = "surgery") -> None:
    """Raises ValueError, with `what` in its text, unless logits are for classes or next tokens."""
    if not model.has_logits or model.cfg.family in _TOWERS:
        raise ValueError(
            f"a model of family {model.cfg.family!r} returns no logits: {what} needs a "
            "classifier of images or a language model."
        )


def classes_of(model: HookedModel, samples: Samples, labels: Sequence[Any] | None) -> Tensor | None:
    """Returns the class of each sample `[n]`, or None for a language model.

    A label is the number of a class, or a name in cfg.labels. Raises ValueError if labels are
    missing or fewer than samples, if the model lacks a class, and for labels given to a language
    model.
    """
    if model.unit == "windows":
        if labels is not None:
            raise ValueError("a language model is scored on its next tokens: give no labels.")
        return None
    given: Any = samples.labels if labels is None else labels
    if given is None:
        raise ValueError("the loss needs labels: give labels=[...], one per sample.")
    if len(given) < samples.n:
        raise ValueError(f"there are {len(given)} labels for {samples.n} samples: give as many.")
    net: Any = model
    classes = []
    for number, label in enumerate(list(given)[: samples.n], samples.start):
        value = label.item() if hasattr(label, "item") else label
        value = net.to_single_token(value) if isinstance(value, str) else value
        if not checks.is_int(value) or not 0 <= value < net.cfg.n_classes:
            raise ValueError(
                f"the label {value!r} of sample {number} is not a class of this model: give "
                f"numbers from 0 to {net.cfg.n_classes - 1}, or names in model.cfg.labels."
            )
        classes.append(int(value))
    return torch.tensor(classes, device=net.cfg.device)


def unchanged(
    model: HookedModel, inputs: Tensor, classes: Tensor | None, steps: Sequence[Step]
) -> tuple[Answers, dict[str, Tensor], dict[str, Tensor]]:
    """Runs the unchanged model forward and backward: its answers, activations and gradients.

    Activations are by full point names; gradients are those of the summed losses at the points that
    steps replace.
    """
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> Tensor:
        # a leaf in the graph, so that it has a gradient even if the weights need none
        seen[hook.name] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return seen[hook.name]

    layers = range(len(model.blocks))
    targets = [full_name(point, k) for point in {step.point for step in steps} for k in layers]
    reads = {full_name(point, k) for step in steps for point in step.reads for k in layers}
    with torch.enable_grad():
        hooks = [(name, keep) for name in (*targets, *sorted(reads))]
        loss, right, stream = answer(model, inputs, classes, hooks)
        gradients = torch.autograd.grad(loss.sum(), [seen[name] for name in targets])
    acts = {name: value.detach() for name, value in seen.items()}
    return (loss.detach(), right, stream), acts, dict(zip(targets, gradients, strict=True))


def random_slopes(
    gradient: Float[Tensor, "batch pos width"],
    change: Float[Tensor, "batch pos width"],
    turns: tuple[Tensor, Tensor],
) -> Float[Tensor, "direction"]:
    """Returns the slopes along randomly permuted changes, summed over the batch, in float64.

    A random turn replaces entry j of each token's change by signs[j] times entry order[j]. With M =
    sum change^T gradient `[width, width]` the slope is `sum_j signs_j M[order_j, j]`.
    """
    order, signs = turns  # each is [direction, width]
    products = change.double().flatten(0, 1).T @ gradient.double().flatten(0, 1)
    columns = torch.arange(order.shape[1], device=order.device)
    return (signs * products[order, columns]).sum(dim=-1)


def random_turns(
    step: Step, layer: int, width: int, directions: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns random orders and signs, `[direction, width]` each.

    They depend only on the seed, the layer and the point, not on samples or the step.
    """
    drawn = [
        np.random.default_rng([seed, _POINTS[step.point], layer, direction])
        for direction in range(directions)
    ]
    order = np.stack([one.permutation(width) for one in drawn])
    signs = np.stack([one.choice([-1.0, 1.0], width) for one in drawn])
    return torch.from_numpy(order), torch.from_numpy(signs)
