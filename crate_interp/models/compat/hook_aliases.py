"""TransformerLens 4.3's names of hook points, as aliases of the older names that our models use.

An alias is a second name of an existing point: nothing is computed or cached twice.
"""

import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

# the part of a name after `blocks.{l}.`: in a TransformerBridge -> in our models
IN_BLOCK: dict[str, str] = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "ln1.hook_out": "ln1.hook_normalized",
    "hook_attn_in": "attn.hook_attn_in",
    "hook_q_input": "attn.hook_q_input",
    "hook_k_input": "attn.hook_k_input",
    "hook_v_input": "attn.hook_v_input",
    "attn.hook_in": "ln1.hook_normalized",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "attn.o.hook_out": "hook_attn_out",
    "attn.hook_out": "hook_attn_out",
    "ln2.hook_in": "hook_resid_mid",
    "ln2.hook_out": "ln2.hook_normalized",
    "mlp.hook_in": "ln2.hook_normalized",
    "mlp.in.hook_out": "mlp.hook_pre",
    "mlp.out.hook_in": "mlp.hook_post",
    "mlp.out.hook_out": "hook_mlp_out",
    "mlp.hook_out": "hook_mlp_out",
}
# names outside the blocks: in a TransformerBridge -> in our models; of several names of ours, the
# first that a model has is used
IN_MODEL: dict[str, tuple[str, ...]] = {
    "embed.hook_out": ("hook_embed",),
    "pos_embed.hook_out": ("hook_pos_embed",),
    "ln_final.hook_out": ("ln_final.hook_normalized",),
    "unembed.hook_in": ("hook_features", "hook_pooled", "ln_final.hook_normalized"),
}
Value = TypeVar("Value")
_PARTS = re.compile(r"((?:visual\.|text\.)?)((?:decoder_)?blocks\.\d+\.)?(.+)", re.DOTALL)


def candidates(name: str) -> list[str]:
    """Returns our names that an alias may stand for; an empty list if the name is not an alias."""
    found = _PARTS.fullmatch(name)
    if found is None:
        return []
    tower, block, rest = found.group(1), found.group(2) or "", found.group(3)
    suffix = "_grad" if rest.endswith("_grad") else ""
    rest = rest.removesuffix("_grad")
    one = IN_BLOCK.get(rest)
    names = ((one,) if one else ()) if block else IN_MODEL.get(rest, ())
    return [tower + block + each + suffix for each in names]


def resolve(name: str, names: Collection[str]) -> str:
    """Returns the name in `names` that `name` stands for, or `name` itself if it is unknown."""
    known = names.keys() if isinstance(names, dict) else names  # a Named also contains aliases
    if not isinstance(name, str) or name in known:
        return name
    return next((each for each in candidates(name) if each in known), name)


def aliases_of(names: Collection[str]) -> dict[str, str]:
    """Returns a dict `alias -> name` with every alias of these names."""
    found: dict[str, str] = {}
    for name in names:
        parts = _PARTS.fullmatch(name)
        if parts is None:
            continue
        tower, block = parts.group(1), parts.group(2) or ""
        for alias in IN_BLOCK if block else IN_MODEL:
            if resolve(tower + block + alias, names) == name:
                found[tower + block + alias] = name
    return found


def matching(names: Collection[str], wanted: Callable[[str], bool]) -> list[str]:
    """Returns the names that the function `wanted` selects.

    If it selects none of the names, it is applied to their aliases instead.
    """
    chosen = [name for name in names if wanted(name)]
    if chosen:
        return chosen
    meant = {name for alias, name in aliases_of(names).items() if wanted(alias)}
    return [name for name in names if name in meant]


class Named(dict[str, Value]):
    """A dict whose keys are names of hook points; an alias finds the value of its point.

    mark: of activations, tells the model that made them from others.
    """

    mark: Any = None

    def __missing__(self, name: str) -> Value:
        meant = resolve(name, self)
        if meant not in self.keys():
            raise KeyError(name)
        return self[meant]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and resolve(name, self) in self.keys()
