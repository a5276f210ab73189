"""Strings of files and of strangers where they are shown: nothing in them can be obeyed."""

import importlib
import io
import pkgutil
import re
import unicodedata
from collections import Counter
from html.parser import HTMLParser

import pandas as pd
import pytest
import torch
from hypothesis import example, given
from matplotlib.figure import Figure
from PIL import Image

import crate_interp as ci
import segments
from chromium import opened, require
from command import run
from conftest import CLASSES, PLAIN, SIZES, make
from crate_interp.core.safe_text import cell, file_name, is_plain, plain
from crate_interp.models.sae import SAEConfig
from crate_interp.results.result import Result, by
from crate_interp.viz.canvas import label
from crate_interp.viz.page import Html, _templates, inline_svg
from texts import ANY, HARMFUL, NO_TEXT, harmless

pytestmark = pytest.mark.usefixtures("unchecked")


def config(**fields):
    return ci.CrateConfig(**{"family": "crate", **SIZES, **fields})


# --- names in configs ---


@pytest.mark.parametrize("value", [*NO_TEXT, *HARMFUL])
def test_a_name_that_cannot_be_shown_is_refused(value):
    for make_one in (
        lambda: config(model_name=value),
        lambda: SAEConfig(hook_name="hook_embed", d_in=3, d_sae=5, model_name=value),
        lambda: SAEConfig(hook_name=value, d_in=3, d_sae=5),
    ):
        with pytest.raises(ValueError, match="give a text on one line") as caught:
            make_one()
        assert is_plain(str(caught.value), 500)


def test_labels_are_texts_without_controls():
    odd = ["two  spaces", " first", "nbsp\u00a0here", "全角\u3000", "x" * 1000]
    assert config(n_classes=5, labels=odd).labels == tuple(odd)
    many = [f"class {number}" for number in range(21_841)]
    assert len(config(n_classes=21_841, labels=many).labels) == 21_841
    for bad in (*NO_TEXT, "\ud800", "a\nb", "cat\n", "\x1b[31m", "a\u202eb", "x" * 1001, None):
        with pytest.raises(ValueError, match="is not a name") as caught:
            config(n_classes=2, labels=["fine", bad])
        assert is_plain(str(caught.value), 500)


# --- figures ---


@pytest.fixture(scope="module")
def swept():
    model = make(**PLAIN)
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    return ci.sweep(model, images, probes=["sparsity", "attention"], controls=0, progress=False)


ON_FIGURES = ["$\\badmacro$", "注意 👩‍👧", "\ud800", "a\nb", "x" * 20_000, "_hidden", 5, ["a"]]


@pytest.mark.parametrize("name", ON_FIGURES)
def test_figures_show_any_name_as_it_is_written(swept, name):
    """Warnings are errors here: of a letter that the font lacks none is given."""
    swept.meta["model"] = name
    figure = ci.viz.layers([swept, swept], "sparsity.zero_fraction")
    assert harmless(inline_svg(figure, str(name), "x"))
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert all(len(text) < 80 and "\n" not in text for text in texts)
    assert any(label(name or "model") in text for text in texts) or label(name)[:1] == "_"


# --- pages, tables, drawings ---


@given(ANY)
def test_a_page_shows_any_text(text):
    for page in (
        Html(text, text, text, "")._repr_html_(),
        inline_svg(Figure(figsize=(1, 1)), text, "salt"),
    ):
        assert harmless(page)


PARTS = """{% from "macros.html" import facts, table, tile %}
{{ table([v], [[v]]) }}{{ facts([(v, v)]) }}{{ tile(v, none, v, v) }}{{ v | superscripts }}
{{ "%s" | format(v) }}{{ [v] }}<a href="{{ v }}" title="{{ v }}">"""


@given(ANY)
def test_every_part_of_a_page_shows_any_text(text):
    page = _templates().from_string(PARTS).render(v=text)
    assert harmless(page) and harmless(page.replace("\n", ""))
    still = _templates().from_string(PARTS).render(v="")
    assert page.count("<") - (page.count("<sup>") + page.count("<sub>")) * 2 == still.count("<")
    assert page.count('"') == still.count('"')


HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>\u202e"
MARKUP = HOSTILE[:-1]  # without the control, which no label may have


def hostile_pages(out):
    """Pages of every kind, with markup where strangers write: labels, tokens, names of networks."""
    model = make(labels=[f"{number}{MARKUP}" for number in range(CLASSES)], **PLAIN)
    images = torch.rand(2, 3, 6, 20)
    _, cache = model.run_with_cache(images)
    yield ci.viz.explore(cache, images, name=HOSTILE).html()
    yield ci.viz.attention(cache, 0, tokens=[HOSTILE] * 13).html()
    yield ci.viz.activations(cache, 0, tokens=[HOSTILE] * 13).html()
    yield ci.viz.graph(ci.graph(model, images[:1], target=0, most=30)).html()
    few = dict(probes="sparsity", controls=0, progress=False)
    swept = [ci.sweep(make(seed=seed), images, **few) for seed in (0, 1)]
    compared = ci.compare(*swept, names=(HOSTILE, "$x_1$"))
    yield ci.viz.compare_page(compared, out / "compare").read_text()
    data = segments.dataset(6).remove_columns("label").add_column("label", [[HOSTILE], None] * 3)
    found = ci.segment(segments.model(), data, untrained=0, progress=False)
    yield ci.viz.segment_page(found, out / "segment").read_text()


def test_no_markup_of_strangers_is_obeyed_by_a_page(tmp_path):
    for page in hostile_pages(tmp_path):
        assert "alert(1)" in page and "\u202e" not in page
        assert "<img src=x" not in page and "<script>alert" not in page


# --- the command line ---


def test_errors_of_the_command_line_are_plain():
    for source in ("\x1b[31mred\x1b[0m", "a\u202eb", "x\ud800y", "line\nend", "x" * 20_000):
        done = run("report", source, "--data", "embedded:fashion", "--out", "/dev/null/o")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        error = run("inspect", source).stderr
        assert error.startswith("crate-interp: ") and harmless(error) and len(error) < 1600
        error = run("convert", source, "--out", "/tmp/never").stderr
        assert error.startswith("crate-interp: ") and harmless(error) and len(error) < 1600


# --- notebook views ---

ROWS = pd.DataFrame({HOSTILE: [HOSTILE, 0.5]})
WORDS = dict(headline=lambda self: HOSTILE, caution=lambda self: HOSTILE)
LENS = pd.DataFrame(
    [(0, 0, 0, HOSTILE, 0.5)], columns=["sample", "layer", "rank", "answer", "probability"]
)
LAYERS = pd.DataFrame(dict(layer=[0], probe=HOSTILE, statistic=HOSTILE, mean=0.5))
CASES = {
    "Html": lambda kind: kind(HOSTILE, HOSTILE, HOSTILE, ""),
    "CrateConfig": lambda kind: config(n_classes=1, labels=[MARKUP], model_name=MARKUP),
    "CrateCache": lambda kind: kind({HOSTILE: torch.zeros(1)}, None),
    "Circuit": lambda kind: kind([ci.circuits.Edge("embed", "logits", 1.0)], HOSTILE),
    "Steering": lambda kind: kind(ROWS, 0.5, 0.5, 0.5, HOSTILE, 0),
    "Result": lambda kind: stub(kind, _notebook_table=lambda self: ROWS),
    "AuditResult": lambda kind: stub(kind, text=lambda self: HOSTILE),
    "SegmentResult": lambda kind: stub(kind, cells=lambda self: ([HOSTILE], [[HOSTILE]])),
    "SweepResult": lambda kind: stub(kind, _table=lambda self, name: LAYERS),
    "LogitLens": lambda kind: stub(
        kind, _table=lambda self, name: LENS, meta={"model": HOSTILE, "settings": {"position": 0}}
    ),
}


def stub(kind, **members):
    return object.__new__(type(kind.__name__, (kind,), {**WORDS, **members}))


def views():
    """Every class of the package that says how a notebook shows it, with the method's name."""
    for module in pkgutil.walk_packages(ci.__path__, "crate_interp."):
        if module.name.endswith("__main__"):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and kind.__module__ == module.name:
                for name in vars(kind):
                    if re.fullmatch(r"_repr_\w+_|_ipython_display_", name):
                        yield kind, name


# a figure is drawn by matplotlib, as an image: nothing in it is HTML
VIEWS = [(kind, method) for kind, method in views() if method != "_repr_png_"]


@pytest.mark.parametrize(("kind", "method"), VIEWS, ids=[kind.__name__ for kind, _ in VIEWS])
def test_no_text_is_obeyed_in_a_notebook_view(kind, method):
    assert method == "_repr_html_"
    shown = CASES[kind.__name__](kind)._repr_html_()
    tags, ends = [], []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.handle_endtag = ends.append
    parser.feed(shown)
    names = Counter(tag for tag, _ in tags)
    assert tags and names == Counter(ends) and harmless(shown) and "alert(1)" in shown
    assert names["script"] <= 1 and not names["img"]  # the script is ours
    assert not any(name[:2] == "on" for _, attributes in tags for name in attributes)


def test_markdown_and_csv_of_a_result_are_no_markup_and_no_formula():
    class Small(Result):
        KIND, MAIN, STORED = "small", "rows", {"rows": by("label")}

    labels = [HOSTILE, "[a](javascript:alert(1))", "a|b\\|c", "`d`", " the", "=cmd()", "-1"]
    found = Small({"rows": pd.DataFrame({"label": labels, "value": -0.5})}, {})
    cells = [re.findall(r"(?:\\.|[^|\\])+", line) for line in found.to_markdown().splitlines()]
    assert all(len(row) == 2 for row in cells)
    words = [re.sub(r"\\.", "", row[0]) for row in cells[2:]]
    assert not any(set(text) & set("<>[]`|") for text in words)
    rows = pd.read_csv(io.StringIO(found.to_csv()), dtype=str)
    assert list(rows["label"][3:]) == ["`d`", " the", "'=cmd()", "'-1"]
    assert list(rows["value"]) == ["-0.5"] * len(labels) and harmless(found.to_csv())


# --- frames in notebooks ---


@pytest.mark.slow
def test_a_notebook_shows_a_page_in_a_sandbox(tmp_path):
    """Its scripts run, and reach nothing of the notebook."""
    cell = Html("t", "<script>parent.document.title = 'owned'</script>", "", "")._repr_html_()
    assert 'sandbox="allow-scripts"' in cell and "allow-same-origin" not in cell
    require()
    (tmp_path / "owned.html").write_text(f"<title>notebook</title>{cell}")
    assert "<title>notebook</title>" in opened(tmp_path / "owned.html")[0]
    _, cache = make().run_with_cache(torch.randn(1, 3, 6, 20))
    (tmp_path / "in.html").write_text(ci.viz.attention(cache, 0)._repr_html_())
    assert opened(tmp_path / "in.html", picture=tmp_path / "in.png")[1] == []
    with Image.open(tmp_path / "in.png") as shot:
        colours = shot.convert("RGB").getcolors(10**6)
    assert colours is not None and len(colours) > 100  # the heads are drawn


@given(ANY)
def test_what_is_shown_is_one_line_that_nothing_obeys(text):
    shown = plain(text)
    assert "\n" not in shown and len(shown) <= 204
    kinds = {unicodedata.category(sign) for sign in shown if sign not in "\u200c\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode("utf-8")  # no lone surrogate
    assert plain(shown) == shown or len(shown) > 200


def test_plain_text_stays_and_the_rest_is_readable():
    for text in ("crate-tiny", "naïve 注意", "می‌خواهم", "👩‍👧", "a 'b' \"c\" <d>"):
        assert plain(text) == text and is_plain(text)
    assert plain("a\x1b[31mred\x1b[0m") == "a\\x1b[31mred\\x1b[0m"
    assert plain("abc\u202egnp") == "abc\\u202egnp"
    assert plain("x\ud800y") == "x\\ud800y" and not is_plain("x\ud800y")
    assert plain(" a\n\t b\u2028c ") == "a b c"
    assert plain("x" * 5000) == "x" * 200 + " ..." and plain("\x1b" * 900, 8) == "\\x1b\\x1b ..."
    assert plain(" " * 10_000 + "end") == " ..."


@given(ANY)
@example(" =1")
@example("\n=HYPERLINK(1)")
def test_every_cell(text):
    shown = cell(text)
    assert shown[:1] not in ("=", "+", "-", "@", "\t", "\r")
    shown.encode("utf-8")


@given(ANY)
def test_a_file_name_stays_in_its_folder(text):
    name = file_name(text)
    assert name and not name.startswith(".") and not {"/", "\\", "\0"} & set(name)
    assert len(name) <= 100 and name.isascii()


def test_an_error_is_one_plain_line():
    error = ci.CheckpointError("key \x1b]0;owned\x07 of\n\n a\u202efile " + "x" * 5000)
    assert str(error).startswith("key \\x1b]0;owned\\x07 of a\\u202efile xxx")
    assert len(str(error)) <= 1504
