"""The question that a graph answers: one sample, and the answer that is asked about."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.files import digest_of_bytes
from crate_interp.models.hook_points import check_atoms, check_causal
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.answers import check_logits
from crate_interp.questions.batches import check_model as check_hooked_model

Target = int | str | tuple[int | str, int | str] | None


@dataclass(frozen=True)
class Question:
    """An answer at a position: a class or token, or the difference between two.

    answer: the number of the logit. versus: the number of another logit, or None; without it the
    target is the logit minus the mean of all logits. position: the token whose logits are read;
    None for a classifier of images, whose logits belong to the image.
    """

    answer: int
    versus: int | None
    position: int | None

    def of(self, logits: Float[Tensor, "batch *pos answers"]) -> Float[Tensor, "batch"]:
        """Returns the target of each sample: a centred logit, or a difference of two logits."""
        here = self.at(logits)
        less = here.mean(dim=-1) if self.versus is None else here[:, self.versus]
        return here[:, self.answer] - less

    def at(self, logits: Float[Tensor, "batch *pos answers"]) -> Float[Tensor, "batch answers"]:
        """Returns the logits that the question reads."""
        return logits if self.position is None else logits[:, self.position]


def check_model(model: HookedModel, what: str = "a graph") -> None:
    """Raises ValueError for a model whose answers have no graph, or no other `what`."""
    check_hooked_model(model)
    check_logits(model, what)
    check_atoms(model.cfg, what)
    if model.cfg.dtype not in (torch.float32, torch.float64):
        raise ValueError("the effect of one code is lost in rounding: give model.float().")
    if model.cfg.facts.get("bridged"):
        raise ValueError(f"{what} needs a network without a bridge: give one that ci.load returns.")


def one_sample(model: HookedModel, inputs: object) -> Tensor:
    """Returns the inputs as a batch of one sample on the model's device.

    inputs: a float image, token ids, a text for a language model, or a picture. Raises ValueError
    for several samples, and for what the model does not take.
    """
    net: Any = model
    given: Any = inputs
    text = model.cfg.kind == "text"
    if text and isinstance(given, str):
        given = net.to_tokens(given)
    elif not text and not isinstance(given, (Tensor, str, bytes)):
        given = net.preprocess(given if isinstance(given, list) else [given])
    elif not text and isinstance(given, Tensor) and not given.is_floating_point():
        given = net.preprocess(given if given.ndim == 4 else given[None])
    axes, shape = (2 if text else 4), tuple(getattr(given, "shape", ()))
    batch: Any = given
    batch = batch[None] if len(shape) == axes - 1 else batch
    if len(shape) not in (axes - 1, axes) or len(batch) != 1:
        wanted = "a text or token ids [pos]" if text else "a picture or [channels, height, width]"
        got = f"of shape {shape}" if shape else checks.quote(inputs)
        raise ValueError(f"inputs is {got}: give one sample, {wanted}.")
    if batch.is_floating_point() and not bool(batch.isfinite().all()):
        raise ValueError("the sample holds NaN or Inf: repair it, or give another sample.")
    return batch.to(model.cfg.device, model.cfg.dtype if batch.is_floating_point() else None)


def read_part(model: HookedModel, sample: Tensor, question: Question) -> Tensor:
    """Returns a copy of the part of a sample that the answer can depend on.

    In a causal model, tokens after the answer cannot have made it, and are not a baseline for those
    that did.
    """
    if model.cfg.causal and question.position is not None:
        sample = sample[:, : question.position + 1]
    return sample.clone()


def sample_digest(sample: Tensor) -> str:
    """Returns the SHA-256 of a sample's shape and values."""
    values = sample if sample.is_floating_point() else sample.long()
    content = values.detach().cpu().contiguous().numpy().tobytes()
    return digest_of_bytes(f"{list(sample.shape)}".encode() + content)


def ask_answer(
    model: HookedModel,
    logits: Float[Tensor, "one *pos answers"],
    target: Target,
    position: int | None,
) -> Question:
    """Returns the question. target: None stands for the answer with the largest logit."""
    place, count = None, logits.shape[1]
    if logits.ndim == 3:
        if position is None:
            check_causal(model.cfg, "a graph without position=")
        number: Any = count - 1 if position is None else position
        if not checks.is_int(number) or not -count <= number < count:
            raise ValueError(f"position={checks.quote(position)}: give tokens 0 to {count - 1}.")
        place = int(number) % count
    elif position is not None:
        raise ValueError(
            "position is for texts, and this model answers for the whole image: leave out position."
        )
    here = logits[0] if place is None else logits[0, place]
    if target is None:
        return Question(int(here.argmax()), None, place)
    pair = target if isinstance(target, (tuple, list)) else (target,)
    numbers = [int(model.answer_ids(one, "target")) for one in pair]
    if len(numbers) not in (1, 2) or len(set(numbers)) < len(numbers):
        raise ValueError(f"target={checks.quote(target)}: give one answer, or two different ones.")
    return Question(numbers[0], numbers[1] if len(numbers) == 2 else None, place)
