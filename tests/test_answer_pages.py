"""Pages and figures of answers hold the numbers of their tables."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over, low_contrast, opened, overflow  # noqa: F401
from comparing import made, numbers
from conftest import HEADS, LAYERS, make
from crate_interp.audits.claims import CLAIMS
from crate_interp.circuits.excerpts import excerpts
from crate_interp.questions.batches import samples_of
from crate_interp.stats.verdicts import SHOWN
from crate_interp.sweeps.findings import along_layers, at_attention, sentences, strip
from crate_interp.viz.atom_pages import CARDS
from texts import Page

N, DEPTH, R = 23, 4, "compression.rate_pre"


def sweeps(seeds, shift=0.0, name="made"):
    return [
        made(
            {R: numbers(seed, N, DEPTH, shift=shift), "sparsity.l1": numbers(seed + 50, N, DEPTH)},
            heads={"attention.entropy": numbers(seed + 70, N, DEPTH, 3)},
            weights={"alignment.head_overlap": [shift + 0.01 * seed] * DEPTH},
            name=f"{name} {seed}",
        )
        for seed in seeds
    ]


@pytest.fixture(scope="module")
def single():
    twins = (sweeps((1, 2, 3), name="u"), sweeps((4, 5, 6), name="v"))
    return ci.compare(*sweeps((7,), 1.0, "CRATE"), *sweeps((8,), 0.0, "ViT"), untrained=twins)


def lines_of(axes):
    return {line.get_label(): line.get_ydata() for line in axes.lines}


def test_the_figure_draws_both_sides_and_their_difference(single):
    figure = ci.viz.compare(single, R)
    above, below = figure.axes
    table = single.table().query("statistic == 'rate_pre'")
    drawn = lines_of(above)
    np.testing.assert_allclose(drawn["CRATE 7"], table["a"])
    np.testing.assert_allclose(drawn["ViT 8"], table["b"])
    dashed = [line.get_ydata() for line in above.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(dashed[:2], table[["untrained_a", "untrained_b"]].to_numpy().T)
    solid = [line for line in below.lines if line.get_linestyle() == "-"]
    (line,) = [line for line in solid if len(line.get_xdata()) == DEPTH]
    np.testing.assert_allclose(line.get_ydata(), table["difference"])
    band = below.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(table["low"].min())
    assert band[:, 1].max() == pytest.approx(table["high"].max())
    assert len(lines_of(below)["holds"]) == table["holds"].sum()
    assert " ".join(above.get_title().split()) == "Coding rate R of all tokens before attention"
    assert ci.viz.compare(single, R, title="").axes[0].get_title() == ""


def test_the_page_holds_every_number_and_the_csv_too(single, tmp_path):
    page = ci.viz.compare_page(single, tmp_path)
    text = page.read_text()
    said = ("CRATE 7 against ViT 8", "How sure?", "largest t", "would by chance", "untrained")
    assert all(words in text for words in said)
    csv = pd.read_csv(tmp_path / "differences.csv")
    pd.testing.assert_frame_equal(csv, single.table(), check_dtype=False)
    assert ci.Comparison.load(tmp_path).meta == single.meta
    for row in single.table().to_dict("records"):
        assert f">{row['a']:.4g}<" in text and f">{row['difference']:.4g}<" in text
    assert text.count("<svg") == 3 and "http" not in text.replace("http://www.w3.org", "")


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_the_page_has_a_cell_for_every_claim(images, tmp_path):
    result = ci.audit(make("crate-alpha"), images, untrained=2, progress=False)
    path = ci.viz.audit_page(result, tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    signs = [a for tag, a in page.tags if tag == "button" and "aria-label" in a]
    signs = [a for a in signs if a["aria-label"] != "close"]
    assert len(signs) == 3 * len(CLAIMS)
    cards = {a["id"] for _, a in page.tags if "popover" in a}
    assert {a["popovertarget"] for a in signs} == cards and len(cards) == len(signs)
    words = " ".join(" ".join(page.words).split())
    for verdict, count in result.claims()["verdict"].value_counts().items():
        said = SHOWN[verdict].answer or verdict
        shown = [a for a in signs if re.search(rf": {re.escape(said)}(, |$)", a["title"])]
        assert len(shown) == count, verdict
    for claim in CLAIMS.values():
        # a letter below the line is a text of its own
        says = re.sub(r"_(\w)", r" \1", claim.says.split("^")[0])
        assert says[:30] in words and claim.where in words
    assert result.headline().split("R^c")[0] in words and "lower is better" in words
    assert "untrained" in words and "overcomplete" in words
    assert "fewer than 32 samples may be too narrow: this result has 3 images." in words
    assert not any(tag == "script" for tag, _ in page.tags)
    assert not [a for _, a in page.tags if str(a.get("href", "")).startswith("http") or "src" in a]
    again = ci.AuditResult.load(tmp_path)
    assert again.table().equals(result.table()) and again.claims().equals(result.claims())


QUIET = {"progress": False}


@pytest.fixture(scope="module")
def model():
    return make(labels=[f"c{number}" for number in range(11)], n_classes=11)


@pytest.fixture(scope="module")
def pictures():
    return torch.randn(7, 3, 6, 20, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def ablated(model, pictures):
    return ci.ablate_heads(model, (pictures, torch.arange(7)), **QUIET)


def test_the_map_of_heads_has_their_drops_and_opens_them(ablated, tmp_path):
    table = ablated.heads().set_index(["layer", "head"])
    page = ci.viz.ablation_page(ablated, tmp_path / "a", explorer="explore.html")
    text = page.read_text()
    found = re.findall(r'href="explore.html#layer=(\d)&amp;head=(\d)">([-+.\de]+)<', text)
    assert [(int(layer), int(head)) for layer, head, _ in found] == list(table.index)
    for layer, head, drop in found:
        assert drop == f"{table.loc[(int(layer), int(head)), 'drop']:+.2g}"
    assert text.count("class=faint") == (~(table["p"] <= 0.05)).sum()
    assert ("A crossed-out head" in text) == ("class=faint" in text)
    assert ci.HeadAblation.load(tmp_path / "a").heads().equals(ablated.heads())
    assert (tmp_path / "a" / "heads.png").exists()
    plain = ci.viz.ablation_page(ablated, tmp_path / "b").read_text()
    assert "explore.html" not in plain and plain.count("<td style=") == LAYERS * HEADS
    for wrong in ("../explore.html", "javascript:alert(1)", "explore"):
        with pytest.raises(ValueError, match="give the name of a page beside this one"):
            ci.viz.ablation_page(ablated, tmp_path / "c", explorer=wrong)
    assert not (tmp_path / "c").exists()


def test_the_cards_are_of_the_atoms_with_most_energy(model, pictures, tmp_path):
    result = ci.atoms(model, pictures, top=5, **QUIET)
    places = result.table("top").query("rank < 4")
    shown = excerpts(places, model, samples_of(model, pictures), False)
    text = ci.viz.atoms_page(result, tmp_path, excerpts=shown).read_text()
    table = result.table()
    cards = re.findall(r'<b class="name">L(\d)A(\d+)</b><span .{13}>on at ([\d.]+)\s%', text)
    for layer in range(LAYERS):
        rows = table[table["layer"] == layer]
        rows = rows.sort_values("energy_share", ascending=False, kind="stable").groupby("state")
        best = pd.concat(
            [rows.get_group(state).head(n) for state, n in (("", CARDS), ("dense", 2))]
        )
        own = [(int(atom), rate) for at, atom, rate in cards if int(at) == layer]
        rates = [f"{100 * rate:.1f}" for rate in best["firing_rate"]]
        assert own == list(zip(best["atom"], rates, strict=True))
    assert text.count('<img src="data:image/png;base64,') > len(cards)
    assert text.count('class="octaves"') == len(cards)
    assert ci.AtomResult.load(tmp_path).table().equals(table)


NAMES = {
    "before": "compression.subspace_rate_pre",
    "after": "compression.subspace_rate_mid",
    "official": "compression.official_rate",
}


@pytest.fixture(scope="module")
def data():
    return torch.randn(6, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def result(data):
    return ci.sweep(make(), data, progress=False, controls=0)


@pytest.fixture(scope="module")
def twins(data):
    return [ci.sweep(make(seed=seed), data, progress=False, controls=0) for seed in (7, 8)]


def planted(result, **columns):
    """A result with these rates in place of its own: name -> an array `[sample, layer]`."""
    samples = result.samples()
    for name, values in columns.items():
        values = np.asarray(values, dtype=float)
        for layer, column in enumerate(values.T):
            samples.loc[samples["layer"] == layer, NAMES[name]] = column
    return ci.SweepResult({**result.stored, "samples": samples}, result.meta)


def table(result, name):
    rows = result.layers()
    rows = rows[rows["probe"] + "." + rows["statistic"] == NAMES[name]]
    return rows.set_index("layer")["mean"].dropna()


def test_changes_are_those_of_the_table_and_paired(result):
    step, samples = at_attention(result), result.samples()
    before, after = table(result, "before"), table(result, "after")
    np.testing.assert_allclose(step.before, before)
    np.testing.assert_allclose(step.after, after)
    for place, layer in enumerate(step.layers):
        rows = samples[samples["layer"] == layer]
        moved = (rows[NAMES["after"]] / rows[NAMES["before"]] - 1).to_numpy()
        error = 2.570582 * moved.std(ddof=1) / len(moved) ** 0.5  # Student's t, 5 degrees
        assert step.change[place] == pytest.approx(moved.mean())
        assert step.high[place] == pytest.approx(moved.mean() + error)
    along = along_layers(result)
    wide = samples.pivot(index="sample", columns="layer", values=NAMES["official"]).dropna(axis=1)
    steps = wide.to_numpy()[:, 1:] / wide.to_numpy()[:, :-1] - 1
    np.testing.assert_allclose(along.change, steps.mean(axis=0))
    assert along.layers.tolist() == list(range(1, LAYERS))


def test_a_change_is_that_of_an_audit(data, result):
    audit = ci.audit(make(), data, untrained=0, grid=False, progress=False).table()
    rows = audit.query("number == 'compresses' and frame == 'stream'")
    np.testing.assert_allclose(at_attention(result).change, rows["value"], rtol=2e-4)


def test_planted_changes_are_found_and_told_apart(result):
    """R^c falls in layer 0, rises in layer 1, and in layer 2 nobody can tell."""
    before = np.full((6, LAYERS), 10.0) + np.arange(6)[:, None]
    noise = np.array([1.0, -1, 1, -1, 1, -1])
    after = before + np.stack([-2 + 0.1 * noise, 3 + 0.1 * noise, noise], axis=1)
    official = np.stack([20 + noise, 19.6 + noise, 30 + noise], axis=1)
    one = planted(result, before=before, after=after, official=official)
    second, first = " ".join(sentences(one, [])).split(" With every code")
    assert "rises from 20 nats per token in layer 0 to 30 in layer 2." in first
    words = "lowers a token's cost (R^c of the stream) in 1 and raises it in 1 of 3 layers"
    assert words in second and "untrained" not in first + second
    change = 100 * (after / before - 1).mean(axis=0)
    assert f"changes by {change[0]:+.1f} to {change[1]:+.1f}\u00a0%." in second
    rows = {row.title: "".join(sign.mark for sign in row.signs) for row in strip(one, [])}
    assert rows == {
        "R^c of the stream falls at attention": "+\N{MINUS SIGN}?",
        "Authors' R^c is lower than in the layer before": ".+\N{MINUS SIGN}",
    }
    assert "19.6" not in first  # lower than both ends, by less than .05 of what lies between


def test_beyond_untrained_is_outside_the_interval_of_one_more_untrained_network(result):
    """By hand, for weights: mean of seeds ± t sd sqrt(1 + 1/s), t = 2.776 for five seeds."""
    weights = result.stored["weights"]
    overlaps = weights["statistic"] == "head_overlap"

    def moved(amount):
        value = weights["value"].where(~overlaps, weights["value"] + amount)
        return ci.SweepResult(
            {**result.stored, "weights": weights.assign(value=value)}, result.meta
        )

    seeds = np.array([-0.02, -0.01, 0.0, 0.01, 0.02])
    half = 2.776 * seeds.std(ddof=1) * (1 + 1 / 5) ** 0.5  # .0481; the largest seed is at .02
    twins = [moved(amount) for amount in seeds]
    for amount, mark in (
        (0.03, "?"), (0.99 * half, "?"), (1.01 * half, "\N{MINUS SIGN}"), (-1.01 * half, "+")
    ):  # fmt: skip
        rows = {row.title: row for row in strip(moved(amount), twins)}
        signs = rows["Heads overlap less than with random weights"].signs
        assert [sign.mark for sign in signs] == [mark] * LAYERS, amount
    one = {row.title: row for row in strip(moved(9.0), twins[:1])}
    assert {sign.mark for sign in one["Heads overlap less than with random weights"].signs} == {"?"}
