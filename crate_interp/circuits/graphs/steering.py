"""Steering: what the model answers if nodes are scaled, set or raised, and what was predicted."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.graphs.derivatives import CODE
from crate_interp.circuits.graphs.question import Question
from crate_interp.core import checks
from crate_interp.core.safe_text import notebook_view, table_in_html
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.edited_runs import Hook, pushed

_NODE = re.compile(r"L(\d+)A(\d+)(?:@(\d+))?")
_WAYS = {"scale": torch.mul, "set": torch.full_like, "add": torch.add}  # (code, amount) -> code


def steering_hooks(edits: Mapping[str, float | int], how: str, shape: Sequence[int]) -> list[Hook]:
    """Returns hooks that make the edits {"L2A17@5": 0} or, at every token, {"L2A17": 0}.

    shape: how many layers, tokens and atoms there are. Raises ValueError for other names, for nodes
    that do not exist, and for amounts that are not finite numbers.
    """
    checks.one_of("how", how, tuple(_WAYS))
    if not isinstance(edits, Mapping) or not edits:
        raise ValueError(f'edits is {checks.quote(edits)}: give nodes, such as {{"L2A17@5": 0}}.')
    layers, tokens, atoms = shape
    places: dict[int, list[tuple[int | slice, int, float]]] = {}
    for name, amount in edits.items():
        match = _NODE.fullmatch(str(name))
        layer, atom, pos = (int(number or 0) for number in match.groups()) if match else shape
        if match is None or layer >= layers or atom >= atoms or pos >= tokens:
            raise ValueError(
                f"there is no code {checks.quote(name)} to steer: give a layer below {layers}, an "
                f'atom below {atoms} and a token below {tokens}, such as "L2A17@5" or "L2A17".'
            )
        if not checks.is_number(amount):
            raise ValueError(
                f"{name}: {checks.quote(amount)} is not a finite number to {how} it by."
            )
        where = slice(None) if match[3] is None else pos
        places.setdefault(layer, []).append((where, atom, float(amount)))

    def edit(code: Tensor, hook: Any, places: list[tuple[int | slice, int, float]]) -> Tensor:
        code = code.clone()
        for pos, atom, amount in places:
            code[:, pos, atom] = _WAYS[how](code[:, pos, atom], amount)
        return code

    return [(full_name(CODE, layer), partial(edit, places=own)) for layer, own in places.items()]


def predicted(model: HookedModel, sample: Tensor, edits: Sequence[Hook]) -> Tensor:
    """Returns how the logits change to first order, each node counted from its value in this run.

    One forward and two backwards give the change of all answers.
    """
    shifts: list[Tensor] = []
    amounts: list[Tensor] = []

    def shift(code: Tensor, hook: Any, edit: Callable[..., Tensor]) -> Tensor:
        amounts.append(edit(code.detach(), hook) - code.detach())
        shifts.append(torch.zeros_like(code, requires_grad=True))
        return code + shifts[-1]

    hooks = [(name, partial(shift, edit=edit)) for name, edit in edits]
    with torch.enable_grad():
        return pushed(model.run_with_hooks(sample, fwd_hooks=hooks), shifts, amounts)[0]


@dataclass(frozen=True)
class Steering:
    """What steering did to the answers.

    table: a row per answer, the target first, then those that changed most: answer, name, before,
    after, change, predicted. Logits are less their mean over all answers. predicted: the change to
    first order. target: before, after and predicted change of the graph's target. moved: how many
    other answers changed at least half as much as the target did.
    """

    table: pd.DataFrame
    before: float
    after: float
    predicted: float
    answer: str
    moved: int

    def headline(self) -> str:
        """Returns the change of the target, what was predicted, and how many answers moved too."""
        return (
            f"{self.answer} changes from {self.before:.3g} to {self.after:.3g} "
            f"({self.after - self.before:+.3g}; {self.predicted:+.3g} was predicted). "
            f"{self.moved:,} of {len(self.table) - 1:,} other answers change at least half as much."
        )

    def __repr__(self) -> str:
        return f"Steering: {self.headline()}"

    def _repr_html_(self) -> str:
        return notebook_view(self.headline(), table_in_html(self.table.head(10)))


def steered(
    model: HookedModel,
    sample: Tensor,
    question: Question,
    edits: Sequence[Hook],
    names: Sequence[str],
) -> Steering:
    """Returns what the edits do: real forwards before and after, and the prediction."""
    with torch.no_grad():
        before = model(sample)
        after = model.run_with_hooks(sample, fwd_hooks=[*edits])
    runs = {"before": before, "after": after, "predicted": predicted(model, sample, edits)}
    ends = {name: float(question.of(logits)[0]) for name, logits in runs.items()}
    here = {name: question.at(logits)[0].double().cpu() for name, logits in runs.items()}
    columns = {name: (logits - logits.mean()).numpy() for name, logits in here.items()}
    table: Any = pd.DataFrame({"answer": range(len(names)), "name": list(names)} | columns)
    table.insert(4, "change", columns["after"] - columns["before"])
    others = table["answer"] != question.answer
    # an answer moves with the target if its logit changes at least half as much
    as_much = 0.5 * abs(ends["after"] - ends["before"])
    moved = int((table["change"].abs()[others] >= as_much).sum())
    rank = table["change"].abs().where(others, float("inf"))
    table = table.loc[rank.sort_values(ascending=False, kind="stable").index]
    name = repr(names[question.answer])
    name += "" if question.versus is None else f" less {names[question.versus]!r}"
    return Steering(table.reset_index(drop=True), **ends, answer=name, moved=moved)
