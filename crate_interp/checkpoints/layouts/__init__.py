"""The published layouts. To add a layout, add a table to a file here and a row to LAYOUTS.

A layout has a map from keys to parameters, the keys that identify it, and a function from shapes to
config fields.
"""

from statistics import fmean

from crate_interp.checkpoints.layouts import images, language, stems
from crate_interp.checkpoints.layouts.layout import Layout, Shapes, nearest, renaming
from crate_interp.core.errors import CheckpointError

LAYOUTS: tuple[Layout, ...] = (
    images.CRATE, images.DEMO_21K, images.ALPHA, images.ALPHA_VANILLA, images.ALPHA_JAX,
    images.MAE, language.OVERCOMPLETE, language.VANILLA, language.GPT, language.NANOCHAT,
    images.CLIPA, stems.TOST, language.TOST, stems.CRATE, stems.TOST_ISTA, stems.CBT,
    language.BERT,
)  # fmt: skip


def find_layout(shapes: Shapes, family: str | None, where: str) -> Layout:
    """Returns the layout of a file, from its keys and, if given, its family.

    Raises CheckpointError for an unknown family, and if no layout fits the keys.
    """
    of_family = [layout for layout in LAYOUTS if family in (None, layout.family)]
    if not of_family:
        known = ", ".join(repr(name) for name in dict.fromkeys(layout.family for layout in LAYOUTS))
        raise CheckpointError(f"family={family!r} has no known layout: give one of {known}.")
    fitting = [layout for layout in of_family if all(key in shapes for key in layout.markers)]
    if fitting:
        # some layouts have all keys of another layout, and more
        return max(fitting, key=lambda layout: len(layout.markers))
    if family is not None:
        return of_family[0]  # a later error lists the missing keys
    some = ", ".join(list(shapes)[:4])
    # the layout that shares most with the keys
    near = {marker: nearest(marker, shapes) for layout in LAYOUTS for marker in layout.markers}
    layout = max(LAYOUTS, key=lambda one: fmean(map(bool, map(near.get, one.markers))))
    absent = [one for one in layout.markers if one not in shapes]
    said = [f"{marker} (nearest here: {near[marker] or 'none'})" for marker in absent]
    raise CheckpointError(
        f"{where} has no published layout: the first of its {len(shapes)} keys are {some}; "
        f"{layout.family}, the nearest, has {' and '.join(said)}. "
        f"{renaming(near[absent[0]], absent[0])} "
        "ci.bridge.load loads ViT, DeiT, DINOv2, GPT-2 and Llama of transformers."
    )
