"""What a comparison leads with: what exceeds the spread of untrained networks, and beside it."""

import numpy as np

import crate_interp as ci
from comparing import made, numbers

N, LAYERS = 41, 3
R = "compression.rate_pre"


def test_the_headline_names_the_largest_that_hold():
    values = numbers(0, N, LAYERS)
    noise = 1 + 1e-4 * numbers(1, N, LAYERS)  # equal differences would have no spread
    scale, small = noise * np.array([0.0, 1.0, 3.0]), values - 0.1 * noise * np.array([1.0, 0, 0])
    a = made({R: values + scale, "z.big": 1000 + values}, name="CRATE")
    words = ci.compare(a, made({R: values, "z.big": 1000 + small}, name="ViT")).headline()
    start = "CRATE against ViT: 3 of 3 differences hold (by chance at most 0.15); whether other "
    assert words.startswith(f"{start}seeds differ as much is unknown. The largest: ")
    mean, other = (values + scale)[:, 2].mean(), values[:, 2].mean()
    size = f"{mean - other:.3g}"
    assert f"{R}: higher in layer 2 by {size} ({size} to {size}), {mean:.4g} against " in words
    assert f" {other:.4g} nats; z.big: higher in layer 0 " in words
    assert words.endswith(".") and "layer 1" not in words


def seeds(*which, shift=0.0, count=20):
    """Networks whose layers differ from seed to seed by far more than their samples vary."""
    found = []
    for seed in which:
        random = np.random.default_rng(seed)
        values = {f"a.s{k}": random.normal(size=(N, 1)) / 9 + random.normal(size=LAYERS)
                  for k in range(count)}  # fmt: skip
        values["a.s1"] += shift
        found.append(made(values, name=f"seed {seed}"))
    return found


def test_two_untrained_networks_are_no_finding_though_they_differ():
    twins = seeds(*range(5))
    result = ci.compare(*seeds(8), *seeds(9), untrained=(twins, twins))
    table = result.table()
    assert table["holds"].sum() > 50  # of 60: about these two networks alone it is true
    assert "no evidence of a difference" in result.headline()
    assert "largest" not in result.headline()
    assert "+" not in result.text().replace(" +", "") and "ooo" in result.text()
    # beside it: what the first two untrained networks differ in, compared in the same way
    alike = ci.compare(twins[0], twins[1]).table()
    np.testing.assert_allclose(table["untrained_p"], alike["p"])
    assert f"differ in {alike['holds'].sum()}." in result.headline()


def test_what_exceeds_the_spread_of_untrained_networks_leads():
    twins = seeds(*range(5), count=3)
    result = ci.compare(
        *seeds(8, shift=99.0, count=3), *seeds(9, count=3), untrained=(twins, twins)
    )
    lead, held, beside, most = result.headline().split(". ", 3)
    assert lead.startswith("seed 8 against seed 9: 3 of 9 differences exceed")
    assert int(held.split()[0]) == result.table()["holds"].sum() > 3
    assert most.startswith("The largest: a.s1: higher") and "a.s0" not in most
    page = result._repr_html_()
    assert page.index(">s1<") < page.index(">s0<")


def test_a_result_without_untrained_networks_says_that_seeds_are_unknown():
    alone = ci.compare(*seeds(8), *seeds(9))
    assert "whether other seeds differ as much is unknown" in alone.headline()
    assert alone.table()["untrained_p"].isna().all()
    groups = ci.compare(seeds(*range(5)), seeds(*range(5, 10)))
    assert "no evidence" in groups.headline() and "unknown" not in groups.headline()
    older = ci.Comparison(
        alone.stored | {"differences": alone.table().drop(columns="untrained_p")}, alone.meta
    )
    assert older.headline() == alone.headline()
