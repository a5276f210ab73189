"""The hook points of a model: their names, and which fire with the current switches.

This module also sets those fields of a model's config that can change: switches, device and dtype.
"""

import re
import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.core import checks
from crate_interp.models import hook_aliases, runtimes

# a function of a name, or a compiled regular expression that is searched for anywhere in a name
Selector = Callable[[str], bool] | re.Pattern[str]
NamesFilter = str | Sequence[str] | Set[str] | Selector | None

Hooks = Sequence[tuple[str | Selector, Callable]]

_WAYS = "the name of a hook point, names, a function of a name, or a compiled regular expression"
# The kinds of attention without a pattern -> what stands in its place.
PATTERNLESS = {"tssa": "memberships, attn.hook_pi", "cbsa": "representatives, attn.hook_contract"}

# Points that fire only while a switch of model.cfg is on.
_SPLIT = dict.fromkeys((f"attn.hook_{role}_input" for role in "qkv"), "use_split_qkv_input")
GATED = {
    "attn.hook_result": "use_attn_result", **_SPLIT, "attn.hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}  # fmt: skip


def set_runtime(cfg: CrateConfig, **values: object) -> None:
    """Sets those fields of a model's own config that may change after the model is made.

    These fields are device, dtype and TransformerLens' switches.
    """
    for name, value in values.items():
        object.__setattr__(cfg, name, value)


class Runtime:
    """The device and dtype of a model's first parameter, read from the model each time.

    They stay correct after `.to()`, `load_state_dict(assign=True)`, `to_empty` and accelerate. Both
    are None once the model no longer exists.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def _first(self) -> Any:
        model = self._model()
        return None if model is None else next(model.parameters(), None)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first parameter."""
        return getattr(self._first(), "dtype", None)

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter; if it is offloaded, the device on which it is used."""
        first, model = self._first(), self._model()
        if model is None or first is None or not first.is_meta:
            return getattr(first, "device", None)
        owner = next(part for part in model.modules() if part._parameters)
        hooks = [hook for hook in runtimes.align_hooks(owner) if hook.execution_device is not None]
        return torch.device(hooks[0].execution_device) if hooks else first.device


def without_batch(hook: Callable) -> Callable:
    """Returns a hook that sees and returns the activation of one sample without its batch axis.

    An activation of several samples is left as it is.
    """

    def one_sample(value: Any, **point: HookPoint) -> Any:
        if len(value) != 1:
            return hook(value, **point)
        out = hook(value[0], **point)
        return None if out is None else out[None]

    return one_sample


def selecting(value: object) -> Callable[[str], bool] | None:
    """Returns the function that a function or a compiled regular expression stands for, or None."""
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return lambda name: value.search(name) is not None
    select: Any = value
    return select if callable(value) else None


class PointsMixin:
    """Names and switches of hook points; the model must have `cfg` and `hook_dict`."""

    cfg: CrateConfig
    hook_dict: Any

    def matching_points(self, names_filter: NamesFilter) -> list[str]:
        """Returns the hook points that a filter selects, in the model's order.

        None and functions select among the points that fire with the current switches. If a
        function selects no name of these points, it is applied to TransformerLens' aliases. A
        compiled regular expression stands for a function that searches for it in a name. Raises
        KeyError if nothing is selected, and for a name that is not a point or cannot fire. Raises
        ValueError for a filter of another type.
        """
        firing = [name for name in self.hook_dict if self._why_silent(name) is None]
        if names_filter is None:
            return firing
        select = selecting(names_filter)
        if select is not None:
            chosen = hook_aliases.matching(firing, select)
            if not chosen:
                raise KeyError("names_filter matches none of the points in model.hook_dict.")
            return chosen
        wanted: Any = names_filter
        several = isinstance(wanted, (Sequence, Set)) and not isinstance(wanted, str)
        wanted = list(wanted) if several else [wanted]
        if not all(isinstance(name, str) for name in wanted):
            raise ValueError(f"names_filter={checks.quote(names_filter)}: give {_WAYS}, or None.")
        if not wanted:
            raise KeyError("names_filter is empty: name a hook point, or pass None for all.")
        meant = {hook_aliases.resolve(name, self.hook_dict) for name in wanted}
        for name in meant:
            self.check_point(name)
        return [name for name in self.hook_dict if name in meant]

    def check_point(self, name: str) -> None:
        """Raises KeyError if no point has this name, or if the point cannot fire as switched."""
        self._check_name(name)
        if silent := self._why_silent(name):
            raise KeyError(f"{name!r} {silent}.")

    def _check_name(self, name: str) -> None:
        names = list(self.hook_dict)  # `in self.hook_dict` would also find aliases
        if name in names:
            return
        hint = checks.did_you_mean(name, names, "See model.hook_dict.")
        if found := re.match(r"(.*blocks\.)([^.]+)\.(.+)", name, re.DOTALL):
            blocks, layer, point = found.groups()
            inside = [one[len(blocks) :].split(".", 1) for one in names if one.startswith(blocks)]
            points = [rest.replace("hook_", "") for number, rest in inside if number == layer]
            if inside and not points:
                hint = f"The model has layers 0 to {inside[-1][0]}."
            elif points and not checks.did_you_mean(point.replace("hook_", ""), points):
                hint = f"A layer has {', '.join(points)}."
        # users often try the short name of cache["pattern", 3] here
        if short := [full for full in names if full.endswith(f".hook_{name}")][:2]:
            hint = f"Did you mean {', '.join(short)}, ...?"
        instead = {"tssa": 'cache["pi", 0], memberships', "cbsa": 'cache["contract", 0]'}
        if name.endswith("attn.hook_pattern") and self.cfg.facts["attention"] in instead:
            hint = f"Its heads have no pattern, but {instead[self.cfg.facts['attention']]}."
        raise KeyError(f"there is no hook point {name!r}. {hint}")

    def _why_silent(self, name: str) -> str | None:
        """Returns why a point does not fire with the current switches, or None if it fires."""
        for point, switch in GATED.items():
            if name.endswith(point) and not getattr(self.cfg, switch):
                return f"is gated-off: it fires only after model.set_{switch}(True)"
        if name.endswith("attn.hook_u"):
            for switch in ("use_split_qkv_input", "use_attn_in"):
                if getattr(self.cfg, switch):
                    return f"does not fire with split inputs: call model.set_{switch}(False)"
        return None

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, *args: object, **kwargs: object
    ) -> None:
        """Raises ValueError for a hook that would never be called, as in TransformerLens."""
        if silent := self._why_silent(hook_point_name):
            raise ValueError(f"cannot add a hook: {hook_point_name!r} {silent}.")

    def hookable(self, name: str | Selector) -> list[str]:
        """Returns the points that will get a hook.

        A hook that is never called would look like a hook without effect, so naming a point that
        does not fire raises ValueError. If a function or a compiled regular expression selects the
        points, the points that do not fire are left out without an error, because functions often
        select all points; if no point is left, a warning says so. A CLIP's tower shares its points
        with the CLIP; a point carries the name by which it was hooked last. Raises KeyError for a
        name that is not a hook point, and ValueError for a `name` of another type.
        """
        select = selecting(name)
        if isinstance(name, str):
            chosen = [hook_aliases.resolve(name, self.hook_dict)]
            self._check_name(chosen[0])
            self.check_hooks_to_add(self.hook_dict[chosen[0]], chosen[0])
        elif select is None:
            raise ValueError(f"a hook is to be added at {checks.quote(name)}: give {_WAYS}.")
        else:
            wanted = hook_aliases.matching(self.hook_dict, select)
            chosen = [point for point in wanted if self._why_silent(point) is None]
            if wanted and not chosen:
                reason = self._why_silent(wanted[0])
                warnings.warn(f"no hook was added: {wanted[0]!r} {reason}.", stacklevel=4)
        for point in chosen:
            self.hook_dict[point].name = point
        return chosen

    def get_hook_point(self, hook_name: str) -> HookPoint | None:
        """Returns the hook point of a name or alias, or None if there is none."""
        return self.hook_dict.get(hook_aliases.resolve(hook_name, self.hook_dict))

    def set_use_attn_result(self, on: bool) -> None:
        """Sets whether `attn.hook_result` fires.

        This point holds the output of each head on its own, `[batch, pos, head, d_model]`.
        """
        self._switch("use_attn_result", on)

    def set_use_split_qkv_input(self, on: bool) -> None:
        """Sets whether `attn.hook_q_input`, `attn.hook_k_input` and `attn.hook_v_input` fire.

        These points hold the stream for each role (query, key, value) and head, `[batch, pos, head,
        d_model]`. Raises ValueError while use_attn_in is on.
        """
        self._switch("use_split_qkv_input", on, excludes="use_attn_in")

    def set_use_attn_in(self, on: bool) -> None:
        """Sets whether `attn.hook_attn_in` fires.

        This point holds the stream for each head, `[batch, pos, head, d_model]`, as queries, keys
        and values all read it. Raises ValueError while use_split_qkv_input is on.
        """
        self._switch("use_attn_in", on, excludes="use_split_qkv_input")

    def set_use_hook_mlp_in(self, on: bool) -> None:
        """Sets whether `hook_mlp_in` fires.

        This point holds a copy of the stream that only the sparse step reads, before ln2, `[batch,
        pos, d_model]`.
        """
        self._switch("use_hook_mlp_in", on)

    def _switch(self, name: str, on: bool, excludes: str | None = None) -> None:
        kind = self.cfg.facts["attention"]
        if on and excludes and kind in PATTERNLESS:
            raise ValueError(f"{name}: family {self.cfg.family!r} has one input: hook attn.hook_u.")
        if on and name == "use_hook_mlp_in":
            check_atoms(self.cfg, name)
        if on and excludes and getattr(self.cfg, excludes):
            raise ValueError(f"{name} excludes {excludes}: call model.set_{excludes}(False).")
        for cfg in self.runtime_configs():
            set_runtime(cfg, **{name: on})

    def runtime_configs(self) -> list[CrateConfig]:
        """Returns the configs of the model and its parts, which share its switches and device."""
        return [self.cfg]


def check_pattern(cfg: CrateConfig, what: str) -> None:
    """Raises ValueError if `what` needs an attention pattern, and the model's layers have none."""
    instead = PATTERNLESS.get(cfg.facts["attention"])
    if instead is not None:
        needs = f"{what} needs an attention pattern or queries and keys"
        raise ValueError(f"{needs}, but family {cfg.family!r} has none: it has {instead}.")


def check_read_out(cfg: CrateConfig, what: str) -> None:
    """Raises ValueError if `what` reads CLS in every layer, and CLS comes after the layers."""
    if getattr(cfg, "class_layers", 0):
        raise ValueError(
            f"{what} reads one token in every layer, but in family {cfg.family!r} CLS "
            "reads the patches only after all layers, in cls_blocks: use ci.circuits.path_patch or "
            "ci.linear_probe(..., pool='mean')."
        )


def check_linear(cfg: CrateConfig, what: str) -> None:
    """Raises ValueError if `what` needs logits that are linear in the normalised stream."""
    if getattr(cfg, "segments", 0):
        raise ValueError(
            f"{what} needs logits that are linear in the stream, but in family {cfg.family!r} a "
            "map and a GELU lie between: use cache.logit_lens() or ci.circuits.path_patch."
        )


def check_causal(cfg: CrateConfig, what: str) -> None:
    """Raises ValueError if `what` reads the token after a text, and the model predicts none."""
    if cfg.kind == "text" and not cfg.causal:
        words = "reads a text both ways: ask for a masked token, as ci.graph(position=...) does"
        raise ValueError(f"{what} needs the token after a text, but family {cfg.family!r} {words}.")


def check_atoms(cfg: CrateConfig, what: str) -> None:
    """Raises ValueError if `what` reads the code of a sparse step, and the layers have no step."""
    if cfg.attn_only:
        raise ValueError(f"{what} reads atoms, but family {cfg.family!r} has attention alone.")
