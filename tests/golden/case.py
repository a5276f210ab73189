"""A case of the golden table: a call of a verb on a subject."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch

import crate_interp as ci
from crate_interp.models.sae import SAEConfig
from golden.subjects import cached, inputs, subject

QUIET = {"progress": False}


@dataclass(frozen=True)
class Case:
    """One call: a verb on a subject."""

    verb: str
    subject: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[str], tuple] | None = None  # of the subject; None: its model and data
    after: Callable[[Any], Any] | None = None  # what to do with the answer

    @property
    def name(self) -> str:
        """Returns the key of the case in the table."""
        words = [f"{key}={_short(value)}" for key, value in self.options.items()]
        return " ".join([self.verb, self.subject, *words])

    def __call__(self, **more: Any) -> Any:
        """Returns what the verb gives, or the kind of error with which it refuses."""
        verb = attrgetter(self.verb)(ci)
        try:
            arguments = (self.arguments or subject)(self.subject)
            answer = verb(*arguments, **self.options, **more)
        except (ValueError, TypeError, NotImplementedError) as error:
            return np.array([f"refused: {type(error).__name__}"])
        return self.after(answer) if self.after and answer is not None else answer


class Call(Case):
    """A case that is a call of its own; verb: its name."""

    def __init__(self, verb: str, name: str, call: Callable[[], Any]) -> None:
        super().__init__(verb, name, {}, None, None)
        object.__setattr__(self, "call", call)

    def __call__(self, **more: Any) -> Any:
        """Returns what the call gives."""
        return self.call()


def _short(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_short, value))})"
    return str(value) if isinstance(value, (int, float, str)) else type(value).__name__


def model_of(name: str) -> tuple:
    return (subject(name)[0],)


def cache_of(name: str) -> tuple:
    return (cached(name)[1],)


def layer_one(name: str) -> tuple:
    return (cached(name)[1], 1)


def one_sample(name: str) -> tuple:
    return subject(name)[0], inputs(name, 1)


def model_and_inputs(name: str) -> tuple:
    """A model, data, a hook of a middle layer to read: for stores and coders."""
    model, data = subject(name)
    return model, data["image"] if isinstance(data, dict) else data


def coders(name: str) -> tuple:
    model, data = model_and_inputs(name)
    random = torch.Generator().manual_seed(7)
    cfg = SAEConfig(hook_name="blocks.1.hook_resid_pre", d_in=model.cfg.d_model, d_sae=13)
    sae = ci.SparseAutoencoder(cfg).eval()
    for value in sae.parameters():
        value.data = 0.3 * torch.randn(value.shape, generator=random)
    return model, data, {cfg.hook_name: sae}
