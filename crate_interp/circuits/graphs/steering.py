"""Steering: what the model answers if nodes are scaled, set or raised, and what was predicted."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.graphs.derivatives import CODE, Hook, pushed
from crate_interp.circuits.graphs.question import Question
from crate_interp.core import checks
from crate_interp.core.safe_text import notebook_view, table_in_html
from crate_interp.models.hooked import HookedModel

_NODE = re.compile(r"L(\d+)A(\d+)(?:@(\d+))?")
# an answer moves with the target if its logit changes at least half as much
_AS_MUCH = 0.5


@dataclass(frozen=True)
class Change:
    """An edit of one atom: at a token, or at every token if pos is None."""

    layer: int
    atom: int
    pos: int | None
    amount: float
    how: str


def changes(edits: Mapping[str, float | int], how: str, shape: Sequence[int]) -> list[Change]:
    """Returns the changes that a mapping names: {"L2A17@5": 0} or, at every token, {"L2A17": 0}.

    shape: how many layers, tokens and atoms there are. Raises ValueError for other names, for nodes
    that do not exist, and for amounts that are no finite number.
    """
    checks.one_of("how", how, ("scale", "set", "add"))
    if not isinstance(edits, Mapping) or not edits:
        raise ValueError(f'edits is {checks.shown(edits)}: give nodes, such as {{"L2A17@5": 0}}.')
    layers, tokens, atoms = shape
    found = []
    for name, amount in edits.items():
        match = _NODE.fullmatch(str(name))
        layer, atom, pos = (
            (None if n is None else int(n) for n in match.groups()) if match else [-1] * 3
        )
        if match is None or layer >= layers or atom >= atoms or (pos or 0) >= tokens:  # pyright: ignore
            raise ValueError(
                f"there is no code {checks.shown(name)} to steer: give layer (0 to {layers - 1}), "
                f"atom (0 to {atoms - 1}) and token (0 to {tokens - 1}) as "
                '"L2A17@5", or "L2A17" for every token.'
            )
        if not checks.is_number(amount):
            raise ValueError(f"{name}: {checks.shown(amount)} is no finite number to {how} it by.")
        found.append(Change(layer, atom, pos, float(amount), how))  # pyright: ignore
    return found


def edited(code: Tensor, edits: Sequence[Change]) -> Tensor:
    """Returns codes `[batch, pos, atom]` with changes made."""
    code = code.clone()
    for edit in edits:
        where = code[:, slice(None) if edit.pos is None else edit.pos, edit.atom]
        if edit.how == "scale":
            where *= edit.amount
        elif edit.how == "set":
            where.fill_(edit.amount)
        else:
            where += edit.amount
    return code


def steering_hooks(edits: Sequence[Change]) -> list[Hook]:
    """Returns hooks that make the changes, for `model.hooks(fwd_hooks=...)`."""
    return [
        (full_name(CODE, layer), lambda code, hook, own=own: edited(code, own))
        for layer, own in _by_layer(edits).items()
    ]


def predicted(model: HookedModel, sample: Tensor, edits: Sequence[Change]) -> Tensor:
    """Returns how the logits change to first order, each node counted from its value in this run.

    One forward and two backwards give the change of all answers.
    """
    shifts: list[Tensor] = []
    amounts: list[Tensor] = []

    def hook(code: Tensor, hook: Any, own: list[Change]) -> Tensor:
        amounts.append(edited(code.detach(), own) - code.detach())
        shifts.append(torch.zeros_like(code, requires_grad=True))
        return code + shifts[-1]

    hooks: list[Hook] = [
        (full_name(CODE, layer), partial(hook, own=own)) for layer, own in _by_layer(edits).items()
    ]
    with torch.enable_grad():
        logits = model.run_with_hooks(sample, fwd_hooks=hooks)
        return pushed(logits, shifts, amounts)


def _by_layer(edits: Sequence[Change]) -> dict[int, list[Change]]:
    found: dict[int, list[Change]] = {}
    for change in edits:
        found.setdefault(change.layer, []).append(change)
    return found


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
            f"({self.after - self.before:+.3g}; {self.predicted:+.3g} was predicted). Of "
            f"{len(self.table) - 1:,} other answers {self.moved:,} change at least half as much."
        )

    def __repr__(self) -> str:
        return f"Steering: {self.headline()}"

    def _repr_html_(self) -> str:
        return notebook_view(self.headline(), table_in_html(self.table.head(10)))


def steered(
    model: HookedModel,
    sample: Tensor,
    question: Question,
    edits: Sequence[Change],
    names: Sequence[str],
) -> Steering:
    """Returns what the changes do: real forwards before and after, and the prediction."""
    with torch.no_grad():
        before = model(sample)
        after = model.run_with_hooks(sample, fwd_hooks=steering_hooks(edits))
    expected = predicted(model, sample, edits)
    ends = [float(question.of(logits)[0]) for logits in (before, after, expected)]
    centred = []
    for logits in (before, after, expected):
        here = question.at(logits)[0].double().cpu()
        centred.append((here - here.mean()).numpy())
    table: Any = pd.DataFrame({"answer": range(len(names)), "name": list(names)})
    table = table.assign(before=centred[0], after=centred[1], change=centred[1] - centred[0])
    table = table.assign(predicted=centred[2])
    others = table["answer"] != question.answer
    moved = int((table["change"].abs()[others] >= _AS_MUCH * abs(ends[1] - ends[0])).sum())
    rank = table["change"].abs().where(others, float("inf"))
    table = table.loc[rank.sort_values(ascending=False, kind="stable").index]
    name = repr(names[question.answer])
    name += "" if question.versus is None else f" less {names[question.versus]!r}"
    return Steering(table.reset_index(drop=True), ends[0], ends[1], ends[2], name, moved)
