"""ci.atlas, its pages and the effects of atoms: slow forms, finite differences, the data."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over, opened  # noqa: F401
from conftest import LAYERS, make, make_lm
from crate_interp.data import Samples, part
from crate_interp.questions.answers import loss_on
from crate_interp.viz.atom_pages import SHOWN
from selection import few

LOOK = dict(
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.25),
    labels=[f"<kind {number}>" for number in range(11)],
)
MODELS = ["crate", "crate-alpha", "crate-lm", "crate-lm vanilla", "nanochat-crate"]


def ready(name):
    if name.startswith(("crate-lm", "nanochat")):
        return make_lm(name), torch.randint(47, (5, 11), generator=torch.Generator().manual_seed(1))
    return make(name, **LOOK), torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", few(MODELS, 2))
def test_statistics_and_neighbours_against_a_slow_form(name):
    model, data = ready(name)
    found = ci.atlas(model, data, top=3, ablate=0, batch_size=2, progress=False)
    width = model.cfg.d_mlp
    assert len(found.table()) == LAYERS * width
    _, cache = model.run_with_cache(data)
    for layer, atom in [(layer, atom) for layer in range(LAYERS) for atom in (0, 4, width - 1)]:
        row, code = found.row(layer, atom), cache["post", layer][..., atom]
        assert row["firing_rate"] == pytest.approx((code > 0).float().mean().item())
        cosines = {
            (other, place): torch.cosine_similarity(
                model.blocks[layer].mlp.D[:, atom], model.blocks[other].mlp.D[:, place], dim=0
            ).item()
            for other in range(LAYERS)
            if other != layer
            for place in range(width)
        }
        best = max(cosines, key=cosines.get)
        assert row["nearest"].startswith(f"L{best[0]}A{best[1]} ")
        assert row["nearest_cosine"] == pytest.approx(cosines[best], abs=1e-5)
        top = found.top(layer, atom)
        largest = code.flatten().sort(descending=True).values[: len(top)].tolist()
        assert top["value"].tolist() == pytest.approx(largest, rel=1e-6)
    assert "atoms" in repr(found) and "<table" in found._repr_html_()


def carried(page, name):
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def atoms_of(folder, layer):
    """All atoms of a layer: those in its page, and those in the file beside it."""
    names = "atom fires effect low high ablated state raises lowers near tokens heights".split()
    data = carried((folder / f"layer-{layer}.html").read_text(), "data")
    script = (folder / "layers" / f"layer-{layer}.js").read_text()
    rest = json.loads(script.removeprefix("more(").removesuffix(");"))
    assert len(data["atoms"]) == min(SHOWN, data["count"])
    assert len(data["atoms"]) + len(rest) == data["count"]
    return [dict(zip(names, row, strict=True)) for row in data["atoms"] + rest]


def test_pages_of_images(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, data, top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path / "out")
    names = {"index.html", "atoms.csv", "images", "layers"}
    names |= {f"layer-{n}.html" for n in range(LAYERS)}
    names |= {"meta.json", *(f"{name}.parquet" for name in found.tables)}
    assert {path.name for path in index.parent.iterdir()} == names
    for page in index.parent.glob("*.html"):
        content = page.read_text()
        assert "http" not in content and "<kind" not in content, page.name
        assert "content-visibility: auto" not in content  # nothing waits to be scrolled to
        for target in re.findall(r'href="([^"#]+)[^"]*"', content):
            assert (index.parent / target).is_file(), (page.name, target)
    for layer in range(LAYERS):
        atoms = atoms_of(index.parent, layer)
        assert sorted(atom["atom"] for atom in atoms) == list(range(model.cfg.d_mlp))
        for atom in atoms:
            top = found.top(layer, atom["atom"])
            places = top[["sample", "token"]].to_numpy().tolist()
            assert [token[:2] for token in atom["tokens"]] == places
            values = [token[2] for token in atom["tokens"]]
            assert values == pytest.approx(top["value"].tolist(), rel=6e-3)
            for sample, _ in places:
                assert (index.parent / "images" / f"{sample}.webp").is_file()
        assert any("<kind" in atom["raises"] for atom in atoms)


def test_atoms_come_in_the_order_of_their_measured_effects_and_cls_is_said(tmp_path):
    model, data = ready("crate")
    found = ci.atlas(model, torch.cat([data, data.flip(-1)]), top=3, progress=False)
    folder = ci.viz.atlas_pages(found, tmp_path).parent
    rows = carried((folder / "index.html").read_text(), "data")["atoms"]
    table = found.table().set_index(["layer", "atom"])
    assert len(rows) == len(table)
    assert tuple(rows[0][:2]) == found.lead()
    # lead, card and table have one number, of the samples that did not choose the atom
    for layer in (None, *range(LAYERS)):
        place = found.lead(layer)
        tried = found.table("ablations").set_index(["layer", "atom"]).loc[place]
        judges = tried.sort_values("sample")["ablation"].iloc[1::2]
        row = table.loc[place]
        assert row["ablation"] == pytest.approx(judges.mean()) and row["ablated"] == len(judges)
        assert f"the loss by {row['ablation']:+.2g} nats" in found.largest(layer)
        card = next(one for one in rows if tuple(one[:2]) == place)
        assert card[3] == pytest.approx(row["ablation"], rel=6e-3)
    whole = found.table("ablations").groupby(["layer", "atom"])["ablation"].agg(["mean", "size"])
    others = whole.index.difference([found.lead(layer) for layer in range(LAYERS)])
    for name, column in (("ablation", "mean"), ("ablated", "size")):
        wanted = whole.loc[others, column].to_numpy(float)
        assert table.loc[others, name].to_numpy(float) == pytest.approx(wanted)
    kinds = [(row[7] == "dense", not row[6]) for row in rows[1:]]
    assert kinds == sorted(kinds) and len(set(kinds)) == 4
    for dense, exact in sorted(set(kinds)):
        group = [row for row in rows[1:] if (row[7] == "dense", not row[6]) == (dense, exact)]
        column = "first_order" if exact else "ablation"
        sizes = [abs(table.loc[(row[0], row[1]), column]) for row in group]
        assert sizes == sorted(sizes, reverse=True)
        for row in group[:9]:
            wanted = table.loc[(row[0], row[1]), [column, f"{column}_low", f"{column}_high"]]
            wanted = [end if np.isfinite(end) else np.nan for end in wanted.to_numpy(float)]
            shown = np.array(row[3:6], dtype=float)  # None becomes NaN
            assert shown == pytest.approx(wanted, rel=6e-3, nan_ok=True)
    for row in rows[:20]:
        top = found.top(row[0], row[1])
        assert row[10] == top[["sample", "token"]].to_numpy().tolist()


@pytest.mark.slow
def test_atoms_are_sorted_filtered_and_reached_by_keys(driven, tmp_path):  # noqa: F811
    model, data = ready("crate")
    found = ci.atlas(model, torch.cat([data, data.flip(-1)]), top=3, progress=False)
    index = ci.viz.atlas_pages(found, tmp_path)
    table = found.table()
    with opened(driven, index) as shown:
        page, names = shown.page, shown.page.locator(".card .name")
        rows = carried(index.read_text(), "data")["atoms"]
        page.select_option("#order", "effect")
        assert names.all_inner_texts() == [f"L{row[0]}A{row[1]}" for row in rows[:SHOWN]]
        page.select_option("#order", "often")
        rates = table.sort_values("firing_rate", ascending=False, kind="stable")["firing_rate"]
        best = names.first.inner_text()[1:].split("A")
        assert found.row(int(best[0]), int(best[1]))["firing_rate"] == rates.iloc[0]
        page.select_option("#layer", "1")
        assert all(name.startswith("L1A") for name in names.all_inner_texts())
        assert f"of {model.cfg.d_mlp} atoms" in page.locator("#count").inner_text()
        page.keyboard.press("/")
        page.keyboard.type("L1A7")
        assert names.first.inner_text() == "L1A7"
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/layer-1.html#a7")
        page.keyboard.press("j")
        page.wait_for_url(lambda url: not url.endswith("#a7"))
        assert page.locator("#whole img").get_attribute("src").startswith("images/")
        page.keyboard.press("/")  # an atom that is in the other file
        last = atoms_of(index.parent, 1)[-1]["atom"]
        page.keyboard.type(f"L1A{last}")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/layer-1.html#a{last}")
        assert page.locator("article").count() == model.cfg.d_mlp
        assert not shown.asked and not shown.wrong


def without(model, data, layer, atom, wanted):
    """Returns the loss of each sample in a run with one atom at 0; None: with all of them."""
    point = f"blocks.{layer}.mlp.hook_post"
    hooks = [] if atom is None else [(point, ci.hooks.edit.zero(atoms=atom))]
    with torch.no_grad():
        logits = model.run_with_hooks(data, fwd_hooks=hooks)
    return by_hand(logits, data, wanted)


def scaled(model, data, layer, atom, factor):
    scale = torch.ones(model.cfg.d_mlp, dtype=torch.float64)
    scale[atom] = factor
    point = f"blocks.{layer}.mlp.hook_post"
    with torch.no_grad():
        return model.run_with_hooks(data, fwd_hooks=[(point, lambda z, hook: z * scale)])


def by_hand(logits, data, wanted):
    if logits.ndim == 2:
        return -logits.log_softmax(dim=-1)[torch.arange(len(data)), wanted]
    chance = logits[:, :-1].log_softmax(dim=-1).gather(2, data[:, 1:, None])
    return -chance[..., 0].mean(dim=1)


@pytest.mark.parametrize("name", few(MODELS, 2))
def test_effects_against_finite_differences_and_a_run_without_the_atom(name):
    model, data = ready(name)
    model = model.double()
    data = data.double() if data.is_floating_point() else data
    found = ci.atlas(model, data, ablate=2, batch_size=2, progress=False)
    logits, cache = model.run_with_cache(data)
    wanted = logits.argmax(dim=-1)  # the data has no labels: the model's own answers
    before = by_hand(logits, data, wanted)
    assert found.table("effects")["loss"].iloc[0] == pytest.approx(before.sum().item(), rel=1e-6)
    tried = found.table("ablations")
    assert sorted(set(tried["sample"])) == [0, 2]
    per_layer = tried.drop_duplicates(["layer", "atom"]).groupby("layer").size()
    assert set(per_layer) == {6}
    on = int((cache["post", 1] > 0).flatten(0, 1).sum(0).argmax())
    for layer, atom in [
        (1, on),
        *tried[["layer", "atom"]].drop_duplicates().to_numpy().tolist()[::13],
    ]:
        h, moved = 1e-6, []
        for sign in (1, -1):
            moved.append(by_hand(scaled(model, data, layer, atom, 1 - sign * h), data, wanted))
        slope = (moved[0] - moved[1]) / (2 * h)
        row = found.row(layer, atom)
        assert row["first_order"] == pytest.approx(slope.mean().item(), rel=1e-4, abs=1e-7)
        half = 2.7764451051977987 * slope.std().item() / 5**0.5  # Student's t, 4 degrees
        assert row["first_order_high"] - row["first_order"] == pytest.approx(half, rel=1e-4)
        own = tried[(tried["layer"] == layer) & (tried["atom"] == atom)]
        if len(own):
            exact = (without(model, data, layer, atom, wanted) - before)[[0, 2]]
            assert own["ablation"].tolist() == pytest.approx(exact.tolist(), rel=1e-6, abs=1e-9)
            assert own["first_order"].tolist() == pytest.approx(
                slope[[0, 2]].tolist(), rel=1e-4, abs=1e-7
            )
            # one atom of a layer was chosen on the first sample, and has the number of the second
            judged = exact[2 - int(row["ablated"]) :]
            assert row["ablation"] == pytest.approx(judged.mean().item(), rel=1e-6, abs=1e-9)
            if len(judged) == 2:
                assert row["ablation_low"] <= row["ablation"] <= row["ablation_high"]


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_logits_to_first_order_where_steps_re_code_the_stream(name):
    model, data = ready(name)
    model = model.double()
    data = data.double() if data.is_floating_point() else data
    found = ci.atlas(model, data, ablate=2, progress=False)
    table, few = found.table("logits"), data[[0, 2]]
    with torch.no_grad():
        answers = model(few).argmax(dim=-1).flatten().bincount(minlength=model.W_U.shape[1])
    followed = table["logit"].unique()
    if name == "crate":
        assert followed.tolist() == list(range(11))
    else:  # 8 of 47 tokens: those that are answered most
        assert len(followed) == 8 and answers[followed].sum() == answers.topk(8).values.sum()
    for layer, atom in [(0, 4), (2, 7)]:
        h, moved = 1e-4, []
        for sign in (1, -1):
            out = scaled(model, few, layer, atom, 1 + sign * h)
            out = out - out.mean(dim=-1, keepdim=True)
            moved.append(out if out.ndim == 2 else out.mean(dim=1))
        slopes = ((moved[0] - moved[1]) / (2 * h))[:, followed]
        own = table[(table["layer"] == layer) & (table["atom"] == atom)]
        assert own["total"].tolist() == pytest.approx(slopes.sum(0).tolist(), rel=1e-3, abs=1e-3)
        squares = slopes.square().sum(0).tolist()
        assert own["squares"].tolist() == pytest.approx(squares, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("name", ["crate-alpha", "nanochat-crate"])
def test_logits_of_the_direct_path_where_the_stream_is_a_sum(name):
    model, data = ready(name)
    found = ci.atlas(model, data, ablate=2, progress=False)
    assert not len(found.table("logits"))
    names = getattr(model.cfg, "labels", None) or [str(token) for token in range(47)]
    for layer, atom in [(0, 4), (LAYERS - 1, 7)]:
        direction = model.blocks[layer].mlp.W_out[atom]
        gain = 1.0
        for later in getattr(model, "resid_lambdas", torch.ones(LAYERS))[layer + 1 :]:
            gain = gain * later
        weight = getattr(model.ln_final, "weight", None)
        moved = direction if weight is None else weight * (direction - direction.mean())
        moved = gain * (moved @ model.W_U)
        moved = moved - moved.mean()
        row = found.row(layer, atom)
        said = re.findall(r"'([^']*)' ([+-][\d.e-]+)", row["raises"])
        assert len(said) == 3 and said[0][0] == names[int(moved.argmax())]
        assert float(said[0][1]) == pytest.approx(moved.max().item(), rel=0.06)
        assert row["lowers"].startswith(f"'{names[int(moved.argmin())]}' -")


@pytest.mark.parametrize(
    "labels, names, known, kind",
    [
        (["b", "a", "b", "c", "k"], None, "abcdefghijk", "labels"),
        ([1, 0, 1, 2, 10], "abcdefghijk", "kjihgfedcba", "labels"),
        ([1, 0, 1, 0, 1], "ab", "abcdefghijk", "labels"),
        ([1, 0, 1, 0, 1], "ab", None, "answers"),  # two classes, the model has 11
        ([0, None, 3, 4, 5], None, None, "answers"),
    ],
)
def test_labels_are_used_where_they_are_classes_of_the_model(labels, names, known, kind):
    model, data = make("crate", labels=list(known) if known else None), ready("crate")[1]
    samples = Samples(5, labels, "x", lambda start, stop: data[start:stop])
    samples = dataclasses.replace(samples, names=tuple(names) if names else None)
    loss = loss_on(model, samples)
    assert loss.kind == kind
    logits = model(data)
    if kind == "answers":
        assert torch.equal(loss.right_answers(logits, data, range(5)), logits.argmax(dim=-1))
        return
    words = labels if known is None else [names[one] for one in labels] if names else labels
    classes = [one if known is None else known.index(one) for one in words]
    assert loss.right_answers(logits, data, range(5)).tolist() == classes
    later = loss_on(model, part(samples, 2, 5))
    assert later.right_answers(logits[3:], data[3:], [3, 4]).tolist() == classes[3:]
    found = ci.atlas(model, samples, ablate=2, progress=False)
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(classes), reduction="sum")
    assert found.table("effects")["loss"].iloc[0] == pytest.approx(wanted.item(), rel=1e-5)
    assert found.meta["loss"] == kind
