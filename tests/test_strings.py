"""Strings of files where they are shown: configs, figures, pages, tables, drawings, errors."""

import importlib
import io
import json
import pkgutil
import re
import string
from html.parser import HTMLParser

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

import crate_interp as ci
from chromium import opened, require
from command import run
from conftest import CLASSES, PLAIN, SIZES, make
from crate_interp.config.families import FIELD_ORDER
from crate_interp.core.safe_text import is_plain, markdown, plain, visible
from crate_interp.data import open_text
from crate_interp.models.sae import SAEConfig
from crate_interp.results.result import Result, as_text, by
from crate_interp.viz.figures.canvas import as_written, label
from crate_interp.viz.pages.page import Html, _templates, figure_uri, inline_svg, render
from texts import ANY, GOOD, HARMFUL, JSON, NO_TEXT, deep, harmless

FAMILIES = st.sampled_from(["crate", "crate-lm", "clipa", "crate-mae"])

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


@pytest.mark.parametrize("value", GOOD)
def test_a_name_in_any_script_is_kept(value):
    assert config(model_name=value).model_name == value
    labels = [value] * CLASSES
    assert config(labels=labels).labels == tuple(labels)


@given(ANY)
def test_every_name(value):
    try:
        assert config(model_name=value).model_name == value and harmless(value)
    except ValueError as error:
        assert not is_plain(value) and is_plain(str(error), 500)


def test_labels_are_texts_without_controls():
    odd = ["two  spaces", " first", "nbsp\u00a0here", "全角\u3000", "x" * 1000]
    assert config(n_classes=5, labels=odd).labels == tuple(odd)
    many = [f"class {number}" for number in range(21_841)]
    assert len(config(n_classes=21_841, labels=many).labels) == 21_841
    for bad in (*NO_TEXT, "\ud800", "a\nb", "cat\n", "\x1b[31m", "a\u202eb", "x" * 1001, None):
        with pytest.raises(ValueError, match="number 1 is") as caught:
            config(n_classes=2, labels=["fine", bad])
        assert is_plain(str(caught.value), 500)


@given(FAMILIES, st.sampled_from(FIELD_ORDER[1:]), JSON | st.just(deep(700)))
def test_every_field_takes_what_it_can_use_or_says_why_not(family, field, value):
    sizes = dict(d_model=12, n_layers=2, n_heads=3, n_ctx=7, d_vocab=11)
    try:
        ci.CrateConfig(**{"family": family, **sizes, field: value})
    except ValueError as error:
        assert is_plain(str(error), 1000), error


@pytest.mark.parametrize(
    "fields",
    [
        dict(n_heads=10**5000),
        dict(mean=[10**400] * 3, std=[1.0] * 3),
        dict(mean=deep(400)),
        dict(interpolation="x" * 10**6),
        dict(image_size=[1] * 10**5),
        {"x" * 10**6: 1},
        {"\x1b]0;owned\x07": 1},
        dict(family="\u202e" * 1000),
    ],
)
def test_an_error_about_a_field_is_short(fields):
    with pytest.raises(ValueError) as caught:
        config(**fields)
    assert is_plain(str(caught.value), 1000)


@pytest.mark.parametrize("value", [[1], "\ud800", "x" * 20_000, "a\n---\nb"])
def test_a_folder_with_such_a_name_does_not_load(value, tmp_path):
    folder = make().save_pretrained(tmp_path / "m")
    content = json.loads((folder / "config.json").read_text())
    content["config"]["model_name"] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ci.CheckpointError, match="model_name=.*give a text on one line"):
        ci.load(folder)


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


def test_names_units_and_titles_of_a_strangers_result(swept):
    swept.meta["model"] = "m"
    facts = swept.meta["statistics"]["attention.entropy"]
    evil = "$\\nonsense$\n\x1b[31m" + "x" * 5000
    facts[0], unit = evil, facts[0]
    try:
        for figure in (
            ci.viz.layers(swept, "attention.entropy", labels=[evil]),
            ci.viz.heads(swept, "attention.entropy"),
            ci.viz.beside(swept, "sparsity.zero_fraction", swept, "attention.entropy"),
        ):
            figure_uri(figure, dpi=20)
    finally:
        facts[0] = unit


def test_latex_gets_no_word_of_a_stranger():
    import matplotlib

    with matplotlib.rc_context({"text.usetex": True}):
        figure = Figure()
        axes = figure.add_subplot()
        axes.set_title("\\input{/etc/passwd}")
        axes.plot([0, 1], label="$x$")
        figure.legend()
        as_written(figure)
    words = [axes.title, *figure.legends[0].get_texts()]
    assert not any(text.get_usetex() or text.get_parse_math() for text in words)


# --- pages, tables, drawings ---


@given(ANY)
def test_a_page_shows_any_text(text):
    for page in (
        render("notebook.html", title=text, document=text),
        Html(text, text)._repr_html_(),
        inline_svg(Figure(figsize=(1, 1)), text, "salt"),
    ):
        assert harmless(page)


def test_words_stay_words_on_a_page():
    page = render("notebook.html", title="a\u202eb <i>", document="x\ud800\x1b\ty\n\0")
    assert "a\\u202eb &lt;i&gt;" in page and "x\\ud800\\x1b\ty\n\\x00" in page


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


@given(st.lists(ANY, min_size=2, max_size=2), st.lists(ANY, min_size=2, max_size=2))
def test_a_table_of_any_words_is_lines_of_equal_length(header, row):
    lines = as_text(header, [row]).split("\n")
    assert len(lines) == 2 and len(lines[0]) == len(lines[1]) and harmless("".join(lines), "")


@given(ANY)
def test_visible_text_keeps_its_spaces(text):
    shown = visible(text)
    assert harmless(shown) and visible(shown) == shown
    if harmless(text):
        assert shown == text
    assert visible(text, 5) == visible(text[:5]) + " ..." * (len(text) > 5)


@given(ANY)
def test_markdown_of_a_name_is_its_words(text):
    shown = markdown(text)
    assert re.sub(r"\\(.)", r"\1", shown) == plain(text)
    assert not set(re.sub(r"\\.", "", shown)) & set(string.punctuation)


def test_tokens_of_a_view_are_cut_and_visible():
    model = make()
    _, cache = model.run_with_cache(torch.randn(1, 3, 6, 20))
    tokens = ["x" * 10**5, "a\u202e", "\ud800", "\x1b[31m", *"abcdefghi"]
    html = ci.viz.activations(cache, 0, tokens=tokens).html()
    assert "x" * 300 not in html and '"a\\\\u202e"' in html and '"\\\\x1b[31m"' in html
    html.encode()


@pytest.mark.slow
def test_a_report_of_a_model_with_any_name(tmp_path):
    """Pages, figures and tables; what the font lacks is a warning, and so an error here."""
    name = "$\\badmacro$ 注意 می‌خواهم <script>=1+1"
    labels = [f"{number} <b>$\\x$ 犬" for number in range(CLASSES)]
    model = make(model_name=name, labels=labels, **PLAIN)
    images = torch.rand(3, 3, 6, 20)
    few = dict(probes=["sparsity"], untrained=0, progress=False)
    page = ci.report(model, images, tmp_path / "o", **few).read_text(encoding="utf-8")
    assert "$\\badmacro$ 注意 می‌خواهم &lt;script&gt;=1+1" in page and "<script" not in page
    model.save_pretrained(tmp_path / "m")
    assert ci.load(tmp_path / "m").cfg.model_name == name


# --- the command line ---


def test_errors_of_the_command_line_are_plain():
    for source in ("\x1b[31mred\x1b[0m", "a\u202eb", "x\ud800y", "line\nend", "x" * 20_000):
        done = run("report", source, "--data", "embedded:fashion", "--out", "/dev/null/o")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        error = run("inspect", source).stderr
        assert error.startswith("crate-interp: ") and harmless(error) and len(error) < 1600
        error = run("convert", source, "--out", "/tmp/never").stderr
        assert error.startswith("crate-interp: ") and harmless(error) and len(error) < 1600


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["fine", "a\ud800b"], "text 1 holds half of a surrogate pair, at character 1"),
        (["fine", 5], "entry 1 of the data is of type int: give only strings"),
        (torch.zeros(2, 3, dtype=torch.complex64), "whole numbers"),
    ],
)
def test_texts_that_no_tokenizer_takes_are_refused_before_work_starts(texts, words):
    def windows(_):
        raise AssertionError("work has started")

    with pytest.raises(ValueError, match=words):
        open_text(texts, windows)


# --- notebook views ---

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>\u202e"
ROWS = pd.DataFrame({HOSTILE: [HOSTILE, 0.5]})
WORDS = dict(headline=lambda self: HOSTILE, caution=lambda self: HOSTILE)
LENS = pd.DataFrame(
    [(0, 0, 0, HOSTILE, 0.5)], columns=["sample", "layer", "rank", "answer", "probability"]
)
LAYERS = pd.DataFrame(dict(layer=[0], probe=HOSTILE, statistic=HOSTILE, mean=0.5))
CASES = {
    "Html": lambda kind: kind(HOSTILE, HOSTILE),
    "Circuit": lambda kind: kind([ci.circuits.Edge("embed", "logits", 1.0)], HOSTILE),
    "Steering": lambda kind: kind(ROWS, 0.5, 0.5, 0.5, HOSTILE, 0),
    "Result": lambda kind: stub(kind, _shown=lambda self: ROWS),
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
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(shown)
    assert tags and harmless(shown) and "alert(1)" in shown
    for tag, attributes in tags:
        assert tag not in ("img", "script") and not any(name[:2] == "on" for name in attributes)


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
    cell = Html("t", "<script>parent.document.title = 'owned'</script>")._repr_html_()
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
