"""QishuaiWen/CBSA `CBSA_image_classification/models.py`: three attentions behind one stem.

The keys tell the attention apart: `step_x` is CBSA's, `temp` is ToST's, and neither is CRATE's.
"""

from dataclasses import replace

from crate_interp.checkpoints.layouts.crate import LAYER, TOP
from crate_interp.checkpoints.layouts.layout import Layout, Stack
from crate_interp.checkpoints.layouts.tost import stem, stem_sizes

_STEM, _FIRST = "to_patch_embedding.", LAYER.format(l=0)
_BLOCK = {
    "0.norm.*": "ln1.*",
    "0.fn.to_out.*": "attn.out_proj.*",
    "1.norm.*": "ln2.*",
    "1.fn.weight": "mlp.D",
}


def _sizes(codes: str) -> dict[str, tuple[str | None, ...]]:
    return {
        f"{_FIRST}0.fn.{codes}.weight": ("inner", "d_model"),
        _FIRST + "1.fn.weight": (None, "d_mlp"),
        "mlp_head.1.weight": ("n_classes", None),
    }


CRATE = Layout(
    family="crate",
    markers=(_STEM + "proj.0.0.weight", _FIRST + "0.fn.qkv.weight"),
    top=TOP | stem(_STEM),
    stacks=(Stack(LAYER, _BLOCK | {"0.fn.qkv.weight": "attn.u_proj.weight"}),),
    sizes=_sizes("qkv"),
    positions=("pos_embedding", 3),
    infer=lambda shapes, given: stem_sizes(shapes, _STEM),
    defaults={"stem": "conv"},
)

TOST_ISTA = replace(
    CRATE,
    family="tost-ista",
    markers=(*CRATE.markers, _FIRST + "0.fn.temp"),
    stacks=(
        Stack(
            LAYER,
            _BLOCK | {"0.fn.qkv.weight": "attn.u_proj.weight", "0.fn.temp": "attn.temp"},
        ),
    ),
)

CBT = replace(
    CRATE,
    family="cbt",
    markers=(_STEM + "proj.0.0.weight", _FIRST + "0.fn.step_x", _FIRST + "0.fn.proj.weight"),
    sizes=_sizes("proj"),
    stacks=(
        Stack(
            LAYER,
            _BLOCK
            | {
                "0.fn.proj.weight": "attn.u_proj.weight",
                "0.fn.step_x": "attn.step_x",
                "0.fn.step_rep": "attn.step_rep",
            },
        ),
    ),
)
