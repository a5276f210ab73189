"""What a graph asks, and what its words and colours say of the answer."""

from html import unescape

import numpy as np
import pytest

import crate_interp as ci
from test_graph_results import graph, network

assert graph  # the fixture


def test_a_target_that_is_not_the_answer_is_not_called_one(graph):  # noqa: F811
    model, sample = network("crate")
    names = graph.table("answers")["name"].tolist()
    first, second, third = model(sample)[0].argsort(descending=True)[:3].tolist()
    assert graph.question == f"why {graph.answer}" and "answers" in graph.finding()
    other = ci.graph(model, sample, target=third, most=20)
    words = f"how much speaks for {names[third]!r} (it answers {names[first]!r})"
    logit = other.meta["target"]["logit"]
    assert other.question == words and words in ci.viz.graph(other).title
    assert words in other.headline() and words in unescape(other._repr_html_())
    assert f": {abs(logit):.2f} {'above' if logit > 0 else 'below'} the mean" in other.finding()
    assert other.rival_rank == "the model's answer"
    for pair, rival, question in (
        ((third, first), "the next answer", f"{names[third]!r} over {names[first]!r}"),
        ((first, second), "the likeliest other answer", None),
    ):
        target = {"answer": pair[0], "versus": pair[1], "versus_name": names[pair[1]]}
        left = next(one for one in (first, second, third) if one not in pair)
        meta = {"rival": graph.meta["rival"] | {"answer": left}}
        meta["target"] = other.meta["target"] | target | {"name": names[pair[0]]}
        both = ci.AttributionGraph(graph.stored, graph.meta | meta)
        assert both.rival_rank == rival
        if question is None:
            assert both.question == f"why {both.answer}"
        else:
            assert both.question == f"how much speaks for {question} (it answers {names[first]!r})"


def test_slopes_that_do_not_agree_with_effects_are_said_first(graph):  # noqa: F811
    nodes = graph.table("nodes")
    codes = nodes[nodes["atom"] >= 0]
    wanted = np.corrcoef(codes["attribution"], codes["effect"])[0, 1]
    assert graph.slope_agreement == pytest.approx(wanted) and wanted > 0.5
    turned = nodes.assign(effect=-nodes["effect"])
    bad = ci.AttributionGraph({**graph.stored, "nodes": turned}, graph.meta)
    assert bad.slope_agreement == pytest.approx(-wanted) and not bad.faithful()
    assert "Go by effects" in bad.headline() and f"r = {-wanted:.2f}" in bad.warning()
    few = ci.AttributionGraph({**graph.stored, "nodes": nodes.assign(effect=np.nan)}, graph.meta)
    assert np.isnan(few.slope_agreement) and few.warning() == graph.warning()


def test_colours_are_effects_and_slopes_only_where_none_was_measured(graph):  # noqa: F811
    nodes = graph.table("nodes")
    codes = nodes["atom"] >= 0
    some = nodes["effect"].where(~codes, -nodes["attribution"])
    some[codes[codes].index[::2]] = np.nan
    mixed = ci.AttributionGraph({**graph.stored, "nodes": nodes.assign(effect=some)}, graph.meta)
    sign = np.sign(mixed.amounts[codes] / nodes["attribution"][codes])
    assert (sign.to_numpy() == np.where(some[codes].isna(), 1, -1)).all()
    figure = ci.viz.graph_figure(mixed, most=13)
    marks = [one for one in figure.axes[0].collections if len(one.get_offsets()) == 1]
    hollow = sum(len(mark.get_facecolor()) == 0 for mark in marks)
    drawn = {tuple(one.get_edgecolor()[0]) for one in marks}
    assert 0 < hollow < len(marks) and len(drawn) == 3  # above, below, and the answer's ink
