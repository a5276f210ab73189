"""Attribution and patching against slow forms; circuits in files, drawings and strangers' words."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch

import crate_interp as ci
from conftest import BATCH, CLASSES, HEADS, LAYERS, leftover_hooks
from crate_interp.circuits import (
    Circuit,
    Edge,
    attribution_patch,
    logit_attribution,
    patching,
    path_patch,
)
from crate_interp.core.safe_text import is_plain
from neighbours import VISION, ready
from texts import JSON, deep, harmless


@pytest.mark.parametrize("name", ["crate-alpha", "nanochat-crate", "gpt-baseline"])
@pytest.mark.parametrize("minus", [None, 3])
def test_attributions_add_up_to_the_logit(name, minus):
    model, inputs = ready(name)
    logits, cache = model.run_with_cache(inputs)
    wanted = (
        logits if name == "crate-alpha" else (cache["ln_final.hook_normalized"] @ model.W_U)[:, -1]
    )  # before the softcap
    targets = torch.tensor([7, 2])
    found = logit_attribution(cache, targets, minus=minus)
    right = wanted[torch.arange(BATCH), targets] - (0 if minus is None else wanted[:, minus])
    torch.testing.assert_close(found.total(), right, atol=1e-4, rtol=1e-4)
    assert found.heads.shape == (BATCH, LAYERS, HEADS)
    assert found.atoms.shape == (BATCH, LAYERS, model.cfg.d_mlp)
    table = found.table()
    assert table["mean"].sum() == pytest.approx(right.mean().item(), abs=1e-3)
    assert len(table) == 3 + LAYERS * (HEADS + model.cfg.d_mlp + 1)
    assert table["mean"].abs().is_monotonic_decreasing
    one = table.query("part == 'head' and layer == 1 and number == 2")["mean"].item()
    assert one == pytest.approx(found.heads[:, 1, 2].mean().item(), rel=1e-6)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize("name", ["crate-alpha", "nanochat-crate"])
def test_an_attribution_is_what_the_logit_loses_with_the_part_where_the_scale_is_held(name):
    model, inputs = ready(name)
    logits, cache = model.run_with_cache(inputs)

    def read(out):
        return out[:, 5] if name == "crate-alpha" else 15 * torch.atanh(out[:, -1, 5] / 15)

    found = logit_attribution(cache, 5)
    scale = cache["ln_final.hook_scale"]
    last = LAYERS - 1  # nothing reads the last layer but the unembedding
    without_head = [
        (f"blocks.{last}.attn.hook_z", ci.hooks.edit.zero(heads=1)),
        ("ln_final.hook_scale", lambda s, hook: scale),
    ]
    # the sparse step reads the head too: its change is put back
    without_head.append(
        (f"blocks.{last}.hook_mlp_out", ci.hooks.edit.patch(cache[f"blocks.{last}.hook_mlp_out"]))
    )
    without_atom = [
        (f"blocks.{last}.mlp.hook_post", ci.hooks.edit.zero(atoms=4)),
        ("ln_final.hook_scale", lambda s, hook: scale),
    ]
    for hooks, part in (
        (without_head, found.heads[:, last, 1]),
        (without_atom, found.atoms[:, last, 4]),
    ):
        changed = model.run_with_hooks(inputs, fwd_hooks=hooks)
        torch.testing.assert_close(part, read(logits) - read(changed), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_path_patching_equals_a_slow_form(name):
    model, source = ready(name)
    base = source.flip(0).contiguous()
    metric = (lambda out: out[:, 2].sum()) if name == "crate" else (lambda out: out[:, -1, 2].sum())
    found = path_patch(
        model,
        source,
        base,
        metric,
        receivers=[(2, 1), (1, 3)],
        senders=[(0, 2), (1, 0)],
        roles=("k",),
        progress=False,
    )
    assert found.isnan().sum() == LAYERS * HEADS - 2
    _, there = model.run_with_cache(source)
    _, here = model.run_with_cache(base)
    for layer, head in ((0, 2), (1, 0)):
        held = []
        for other in range(LAYERS):
            z = here["z", other].clone()
            if other == layer:
                z[:, :, head] = there["z", other][:, :, head]
            held.append((f"blocks.{other}.attn.hook_z", lambda out, hook, z=z: z))
        with model.hooks(held):
            _, cache = model.run_with_cache(base)
        hooks = []
        for other, reader in ((2, 1), (1, 3)):

            def put(out, hook, other=other, reader=reader, cache=cache):
                out = out.clone()
                out[:, :, reader] = cache["k", other][:, :, reader]
                return out

            hooks.append((f"blocks.{other}.attn.hook_k", put))
        wanted = metric(model.run_with_hooks(base, fwd_hooks=hooks)).item()
        assert found[layer, head].item() == pytest.approx(wanted, rel=1e-5)
    same = path_patch(model, base, base, metric, progress=False)
    torch.testing.assert_close(same, torch.full_like(same, metric(model(base)).item()))
    assert not leftover_hooks(model)


def test_sweeps_over_the_tokens_of_images():
    model, clean = ready("crate")
    corrupted, metric = clean.flip(0).contiguous(), lambda logits: logits[0, 3]
    _, cache = model.run_with_cache(clean)
    found = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
    assert found.shape == (LAYERS, 13)
    head = patching.get_act_patch_attn_head_out_by_pos(
        model, corrupted, cache, metric, layers=[1], positions=[0, 5]
    )
    assert head.shape == (1, 2, HEADS)
    for layer, position in ((0, 0), (2, 7)):
        change = ci.hooks.edit.patch(cache["resid_pre", layer], positions=position)
        out = model.run_with_hooks(
            corrupted, fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", change)]
        )
        assert found[layer, position].item() == pytest.approx(metric(out).item(), rel=1e-6)
    change = ci.hooks.edit.patch(cache["z", 1], positions=5, heads=3)
    out = model.run_with_hooks(corrupted, fwd_hooks=[("blocks.1.attn.hook_z", change)])
    assert head[0, 1, 3].item() == pytest.approx(metric(out).item(), rel=1e-6)
    pairs = patching.get_act_patch_attn_head_pattern_dest_src_pos(
        model, corrupted, cache, metric, layers=[0], positions=[0]
    )
    assert pairs.shape == (1, HEADS, 1, 13)
    result = patching.get_act_patch_mlp_out(
        model, corrupted, cache, lambda logits: logits[:, 3], layers=0, positions=1, reduce="none"
    )
    assert result.values.shape[-1] == BATCH


@pytest.mark.parametrize("name", ["crate", "crate-alpha", "crate-lm", "nanochat-crate"])
@pytest.mark.parametrize("steps", [1, 3])
def test_attribution_patching_equals_its_formula(name, steps):
    """By differences of the metric in float64: each head moves a little towards its patch."""
    model, base = ready(name)
    model, base = model.double(), base.double() if base.is_floating_point() else base
    source = base.flip(0).contiguous()
    metric = (
        (lambda out: out[:, 2].sin().sum())
        if name in VISION
        else (lambda out: out[:, -1, 2].sin().sum())
    )
    found = attribution_patch(model, source, base, metric, steps=steps, progress=False)
    (_, there), (_, here) = model.run_with_cache(source), model.run_with_cache(base)
    points = [0.0] if steps == 1 else [(k + 0.5) / steps for k in range(steps)]
    for layer, head in ((0, 1), (2, 4)):
        wanted = 0.0
        for share in points:
            embed = here["embed"] + share * (there["embed"] - here["embed"])
            ends = []
            for sign in (1, -1):

                def move(z, hook, sign=sign, layer=layer, head=head):
                    z = z.clone()
                    z[:, :, head] += (
                        sign * 1e-5 * (there["z", layer] - here["z", layer])[:, :, head]
                    )
                    return z

                hooks = [
                    ("hook_embed", lambda e, hook, embed=embed: embed),
                    (f"blocks.{layer}.attn.hook_z", move),
                ]
                ends.append(metric(model.run_with_hooks(base, fwd_hooks=hooks)).item())
            wanted += (ends[0] - ends[1]) / 2e-5 / steps
        assert found[layer, head].item() == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    assert not leftover_hooks(model) and all(value.grad is None for value in model.parameters())


def test_targets_are_numbers_names_lists_of_them_and_tensors():
    names = [f"class {number}" for number in range(CLASSES)]
    model, images = ready("crate-alpha", labels=names)
    cache = model.run_with_cache(images)[1]
    stack = cache.decompose_resid(pos_slice=0)
    right, wrong = [3, 4], [1, 0]
    wanted = cache.logit_attrs(stack, torch.tensor(right), torch.tensor(wrong), pos_slice=0)
    result = logit_attribution(cache, torch.tensor(right), minus=torch.tensor(wrong))
    for a, b in (
        (right, wrong),
        ([names[one] for one in right], wrong),
        (right, [names[one] for one in wrong]),
        ([right[0], names[right[1]]], torch.tensor(wrong)),
    ):
        assert torch.equal(cache.logit_attrs(stack, a, b, pos_slice=0), wanted)
        found = logit_attribution(cache, a, minus=b)
        assert torch.equal(found.total(), result.total())
        assert found.meta["settings"]["minus"] == "each sample's target"


pytestmark = pytest.mark.usefixtures("unchecked")

NODES = [["embed", "L0H1", 0.5], ["L0H1", "logits", -1.0]]


def write(path, text=None, **over):
    content = {"format": "crate_interp circuit 1", "note": "", "edges": NODES, "meta": {}} | over
    path.write_text(json.dumps(content) if text is None else text)
    return path


@pytest.mark.parametrize(
    "over",
    [
        dict(edges=[["embed", "L0H1", float("nan")]]),
        dict(edges=[["embed", "L0H1", 10**400]]),
        dict(edges=[["embed", "L" + "9" * 5000 + "H0", 1]]),
        dict(edges=[["embed", "L٣H1", 1]]),
        dict(edges=[["embed", "L0H1\n", 1]]),
        dict(edges=[[deep(300), "L0H1", 1]]),
        dict(edges=NODES * 2),
        dict(edges=[1]),
        dict(note=["a"]),
        dict(format=["crate_interp circuit 1"]),
        dict(text="[" * 10**5),
        dict(text=""),
        dict(text='{"format": 1' + "0" * 5000 + "}"),
    ],
)
def test_a_file_that_no_circuit_wrote_is_refused(over, tmp_path):
    with pytest.raises(ValueError, match="holds no circuit: ") as caught:
        ci.circuits.Circuit.load(write(tmp_path / "c.json", **over))
    assert is_plain(str(caught.value), 1000)


@given(JSON, st.sampled_from(["edges", "note", "meta", "format"]))
def test_every_circuit_file(tmp_path_factory, value, field):
    path = write(tmp_path_factory.getbasetemp() / "any.json", **{field: value})
    try:
        circuit = ci.circuits.Circuit.load(path)
    except ValueError as error:
        assert is_plain(str(error), 1000)
    else:
        assert harmless(circuit._repr_html_() or "") and circuit.save(path) == path
        assert ci.circuits.Circuit.load(path) == circuit


def test_a_drawing_of_many_edges_shows_the_largest(tmp_path):
    edges = [[f"L{layer}A{layer}", "logits", layer] for layer in range(2000)]
    note = "</title><script>\x1b\ud800"
    circuit = ci.circuits.Circuit.load(write(tmp_path / "c.json", edges=edges, note=note))
    svg = circuit.svg()
    assert svg.count("var(--accent, ") == 1000 and "L1999A1999" in svg and ">L5A5<" not in svg
    assert "the 1,000 largest of 2,000 edges: &lt;/title&gt;" in svg and harmless(svg)


EDGES = (
    Edge("embed", "L0H1", 0.5),
    Edge("L0H1", "L0A12", -0.25),
    Edge("L0H1", "logits", 2.0),
    Edge("L0A12", "L1H0", 1.0),
    Edge("L1H0", "logits", 0.4),
)


def parts(figure):
    (axes,) = figure.axes
    edges = [one for one in axes.patches if isinstance(one, PathPatch)]
    boxes = [one for one in axes.patches if isinstance(one, FancyBboxPatch)]
    return axes, edges, boxes, [text.get_text() for text in axes.texts]


def test_a_figure_has_every_node_and_edge_by_its_weight():
    figure = ci.viz.circuit(Circuit(EDGES, note="paths of $x"), dpi=50.0)
    axes, edges, boxes, words = parts(figure)
    assert figure.dpi == 50 and axes.get_title() == "paths of $x"
    assert len(edges) == len(EDGES) and len(boxes) == 5
    assert {"embed", "L0H1", "L0A12", "L1H0", "logits"} < set(words)
    assert {"layer 0", "atoms of layer 0", "layer 1"} < set(words)
    assert "widest edge: 2; dashed: below 0" in words
    widths = [one.get_linewidth() for one in edges]  # from the smallest weight to the largest
    assert widths == sorted(widths) and widths[-1] == 3.5
    dashed = [one.get_linestyle() == "--" for one in edges]
    assert dashed == [True, False, False, False, False]
    assert edges[0].get_edgecolor()[:3] != edges[1].get_edgecolor()[:3]


def test_words_of_strangers_stay_inside_and_the_formulas_of_others_stay_formulas():
    """A title is plain, on lines that fit; what else a caller's figure has is left alone."""
    for words in ("word " * 60, "e" * 300, "$\\nonsense$ \x1b[31m\x00 <b>"):
        for drawn in (
            ci.viz.circuit(Circuit(EDGES[:1]), title=words),
            ci.viz.circuit(Circuit(EDGES[:1], note=words)),
        ):
            drawn.canvas.draw()  # a formula or a missing letter would raise
            box = drawn.axes[0].title.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1
    figure = Figure()
    left, right = figure.subplots(1, 2)
    figure.suptitle("$x^2$")
    left.set_title("$x^2$")
    ci.viz.circuit(Circuit(EDGES[:1]), ax=right, title="$x^2$")
    texts = (left.title, *figure.texts, right.title)
    assert [text.get_parse_math() for text in texts] == [True, True, False]


def test_colours_of_an_svg_follow_the_page():
    """Every colour is a property of pages/colours.css, with a fallback that no scheme needs."""
    svg = Circuit(EDGES).svg()
    colours = re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)
    assert {"none", "currentColor"} < set(colours)
    assert all(re.match(r"none|currentColor|var\(--\w+, .+\)$", one) for one in colours)
    css = Path(ci.__file__).parent / "viz" / "templates" / "styles" / "colours.css"
    known = set(re.findall(r"(--\w+):", css.read_text(encoding="utf-8")))
    assert set(re.findall(r"var\((--\w+)", svg)) <= known
