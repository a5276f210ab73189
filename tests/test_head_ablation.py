"""Heads: ablated against whole runs with hooks, and what they look at, against loops."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import crate_interp as ci
from conftest import CLASSES, HEADS, LAYERS, leftover_hooks, make, make_lm, refuses
from crate_hooks import edit
from crate_interp.circuits import Circuit, Edge, evaluate, head_scores, repeat_targets
from crate_interp.data import open_data
from crate_interp.questions.edited_runs import may_share
from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.intervals import max_t
from neighbours import ready

N = 7
QUIET = dict(batch_size=3, progress=False)


@pytest.fixture(scope="module")
def images():
    images = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(5))
    return dataclasses.replace(
        open_data(images, make().preprocess), labels=[place % CLASSES for place in range(N)]
    )


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 47, (N, 13), generator=torch.Generator().manual_seed(0))


def slow(model, inputs, classes, how, metric):
    """[sample, layer, head]: whole runs of all samples at once, one for each head; and the base."""
    _, cache = model.run_with_cache(inputs)

    def judged(logits):
        logits = logits.double()
        if classes is not None:
            loss = F.cross_entropy(logits, torch.tensor(classes), reduction="none")
            right = logits.argmax(-1) == torch.tensor(classes)
            return loss if metric == "loss" else right.double()
        logits, following = logits[:, :-1], inputs[:, 1:]
        if metric == "accuracy":
            return (logits.argmax(-1) == following).double().mean(-1)
        return F.cross_entropy(logits.transpose(1, 2), following, reduction="none").mean(-1)

    table = torch.zeros(N, LAYERS, HEADS, dtype=torch.float64)
    for layer in range(LAYERS):
        name = f"blocks.{layer}.attn.hook_z"
        for head in range(HEADS):
            change = edit.zero(heads=head) if how == "zero" else edit.mean(cache[name], heads=head)
            table[:, layer, head] = judged(model.run_with_hooks(inputs, fwd_hooks=[(name, change)]))
    return judged(model(inputs)).detach().numpy(), table.detach().numpy()


def same_as_slow(found, wanted, metric):
    base, table = wanted
    samples = found.table("samples").set_index(["sample", "layer", "head"])["ablated"]
    np.testing.assert_allclose(samples.to_numpy().reshape(table.shape), table, atol=2e-6)
    np.testing.assert_allclose(found.table("base")["base"], base, atol=2e-6)
    drops = (table - base[:, None, None]).reshape(N, -1) * (1 if metric == "loss" else -1)
    rows = found.heads()
    np.testing.assert_allclose(rows["drop"], drops.mean(axis=0), atol=2e-6)
    assert rows[["layer", "head"]].to_numpy().tolist() == [
        list(at) for at in np.ndindex(LAYERS, HEADS)
    ]
    return drops


@pytest.mark.parametrize(
    "how, metric",
    [
        ("mean", "loss"),
        pytest.param("mean", "accuracy", marks=pytest.mark.slow),
        pytest.param("zero", "loss", marks=pytest.mark.slow),
        pytest.param("zero", "accuracy", marks=pytest.mark.slow),
    ],
)
def test_images_agree_with_whole_runs(images, how, metric):
    model = make("crate-alpha")
    found = ci.ablate_heads(model, images, how=how, metric=metric, **QUIET)
    wanted = slow(model, images.read(0, N), images.labels, how, metric)
    drops = same_as_slow(found, wanted, metric)
    if metric == "loss":
        bootstrap = studentised(drops)
        low, high = bootstrap.interval()
        np.testing.assert_allclose(found.heads()["low"], low, atol=1e-4)
        np.testing.assert_allclose(found.heads()["high"], high, atol=1e-4)
        p = 2 * np.minimum(bootstrap.above(0.0), bootstrap.below(0.0))
        p = np.minimum(p, 1)
        np.testing.assert_allclose(found.heads()["p_alone"], p, atol=0.02)
        np.testing.assert_allclose(found.heads()["p"], max_t(drops, p), atol=0.02)
    assert leftover_hooks(model) == []


def test_screened_heads_are_those_with_the_largest_slopes(images):
    """Slopes by a small step of the whole model in float64; the chosen heads' drops are exact."""
    model = make("crate-alpha").double()
    inputs, classes = images.read(0, N).double(), torch.tensor(images.labels)
    double = (inputs, classes)
    found = ci.ablate_heads(model, double, screen=4, **QUIET)
    whole = ci.ablate_heads(model, double, **QUIET).heads()
    _, cache = model.run_with_cache(inputs)

    def loss(hooks=()):
        logits = model.run_with_hooks(inputs, fwd_hooks=list(hooks))
        return F.cross_entropy(logits, classes).item()

    rows = found.heads()
    slopes, step = [], 1e-5
    for layer, head in rows[["layer", "head"]].to_numpy():
        name = f"blocks.{layer}.attn.hook_z"
        mean = cache[name].mean(0, keepdim=True)
        towards = cache[name] + step * (mean - cache[name])
        hook = (name, edit.patch(towards, heads=int(head)))
        slopes.append((loss([hook]) - loss()) / step)
    exact = rows["exact"].to_numpy()
    assert exact.sum() == 4
    assert set(np.argsort(np.abs(slopes))[-4:]) == set(np.flatnonzero(exact))
    np.testing.assert_allclose(rows["drop"][~exact], np.array(slopes)[~exact], rtol=1e-4)
    np.testing.assert_allclose(rows["drop"][exact], whole["drop"][exact], rtol=1e-9)
    assert rows["p"][~exact].isna().all() and rows["p"][exact].notna().all()
    screened = partial(ci.ablate_heads, model, double, screen=4, metric="accuracy", **QUIET)
    refuses("accuracy has no first order", screened)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["crate-lm", "gpt-baseline", "nanochat-crate"])
def test_windows_agree_with_whole_runs(tokens, family):
    """The layers of nanochat-crate add the embedding again, so that they cannot share a start."""
    model = make_lm(family, n_heads=HEADS)
    assert may_share(model) == (family != "nanochat-crate")
    found = ci.ablate_heads(model, tokens, **QUIET)
    same_as_slow(found, slow(model, tokens, None, "mean", "loss"), "loss")
    right = ci.ablate_heads(model, tokens, metric="accuracy", **QUIET)
    same_as_slow(right, slow(model, tokens, None, "mean", "accuracy"), "accuracy")


def test_a_head_that_writes_nothing_costs_exactly_nothing(images):
    model = make()
    with torch.no_grad():
        out = model.blocks[1].attn.state_dict()
        name = next(key for key, value in out.items() if value.shape[-1] == HEADS * 7)
        out[name][:, 2 * 7 : 3 * 7] = 0
    assert (model.W_O[1, 2] == 0).all() and (model.W_O[1, 1] != 0).any()
    rows = ci.ablate_heads(model, images, **QUIET).heads()
    silent = rows[(rows["layer"] == 1) & (rows["head"] == 2)].iloc[0]
    # the runs that begin at the layer give the very numbers of the whole one
    assert abs(silent["drop"]) < 1e-6
    others = rows[(rows["layer"] != 1) | (rows["head"] != 2)]
    assert (others["drop"].abs() > 1e-5).all()


def test_an_edited_model_is_said_to_be_one(images, tmp_path):
    model, out = make(), dict(out=tmp_path / "out", **QUIET)

    def edited(head):
        return model.hooks([("blocks.1.attn.hook_z", edit.zero(heads=head))])

    with edited(1), edit.sparse_step(model.blocks[2], lambd=0.3):
        result = ci.ablate_heads(model, images, **out)
    points = ["blocks.1.attn.hook_z", "blocks.2.mlp.lambd=0.3"]
    assert result.meta["edits"] == points
    assert f"Measured with edits: {', '.join(points)}." in result.caution()
    # a folder goes on at the same points alone
    with edited(1), edit.sparse_step(model.blocks[2], lambd=0.3):
        assert ci.ablate_heads(model, images, **out).digest() == result.digest()
    with (
        edited(1),
        pytest.raises(ValueError, match="settings.edits is .*lambd=0.3'. there and .'b"),
    ):
        ci.ablate_heads(model, images, **out)
    refuses("settings.edits is .* there and absent", lambda: ci.ablate_heads(model, images, **out))
    assert "edits" not in ci.ablate_heads(model, images, **QUIET).meta


def slow_targets(tokens, offset):
    """The same by three loops: key j is a target of query i if a copy of i stands at j - offset."""
    batch, count = tokens.shape
    found = torch.zeros(batch, count, count, dtype=torch.bool)
    for row in range(batch):
        for query in range(count):
            for copy in range(query):
                key = copy + offset
                if tokens[row, copy] == tokens[row, query] and 0 <= key <= query:
                    found[row, query, key] = True
    return found


def test_targets_equal_three_loops():
    tokens = torch.randint(5, (4, 17), generator=torch.Generator().manual_seed(0))
    found = repeat_targets(tokens, range(-20, 21))
    assert list(found)[:2] == ["previous", "copy-20"] and len(found) == 42
    for offset in range(-20, 21):
        name = f"copy{offset:+d}" if offset else "copy"
        assert torch.equal(found[name], slow_targets(tokens, offset)), offset
    query, key = found["previous"][2].nonzero().T
    assert torch.equal(key, query - 1) and len(query) == 16
    assert list(repeat_targets(tokens)) == ["previous", "copy", "copy+1"]


def test_scores_equal_a_slow_form():
    model, _ = ready("crate-lm")
    tokens = torch.randint(6, (5, 11), generator=torch.Generator().manual_seed(1))
    tokens[3] = torch.arange(11)  # nothing repeats in it
    _, cache = model.run_with_cache(tokens)
    targets = repeat_targets(tokens, (1,))
    table = head_scores(cache, targets)
    assert len(table) == 2 * model.cfg.n_layers * model.cfg.n_heads
    for row in table.sample(8, random_state=0).itertuples():
        scores, evens = [], []
        for sample in range(len(tokens)):
            own, even = [], []
            for query in range(11):
                keys = targets[row.target][sample, query].nonzero().flatten().tolist()
                if keys:
                    pattern = cache["pattern", row.layer][sample, row.head, query]
                    own.append(sum(pattern[key].item() for key in keys))
                    even.append(len(keys) / (query + 1))
            if own:
                scores.append(np.mean(own))
                evens.append(np.mean(even))
        assert row.samples == len(scores) == (5 if row.target == "previous" else 4)
        assert row.score == pytest.approx(np.mean(scores), rel=1e-5)
        assert row.even == pytest.approx(np.mean(evens), rel=1e-5)
        assert row.low <= row.score <= row.high


def test_a_head_that_looks_only_there_has_all_and_an_even_one_has_the_even_share():
    model, _ = ready("crate-lm")
    tokens = torch.arange(4).repeat(3, 3)
    _, cache = model.run_with_cache(tokens)
    pattern = cache["pattern", 1]
    pattern.zero_()
    pattern[:, 0].diagonal(-3, dim1=-2, dim2=-1)[:] = 1  # the token after the last copy
    pattern[:, 1] = torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]
    table = head_scores(cache, repeat_targets(tokens)).set_index(["target", "layer", "head"])
    planted, even = table.loc[("copy+1", 1, 0)], table.loc[("copy+1", 1, 1)]
    assert planted["score"] == pytest.approx(1) and even["score"] == pytest.approx(even["even"])
    assert table.loc[("copy", 1, 0), "score"] == 0


def test_some_positions_of_text_are_refused_and_of_an_image_scored():
    """Which keys a query of a text may see depends on where it stands: the cache does not say."""
    model, tokens = ready("crate-lm")
    previous = repeat_targets(tokens)["previous"]
    for places in (-1, slice(2, 5), [3, 1]):
        _, cache = model.run_with_cache(tokens, pos_slice=places)
        kept = previous[:, [places] if places == -1 else places]
        refuses("run without pos_slice", partial(head_scores, cache, {"x": kept}))
    model, images = ready("crate")
    _, whole = model.run_with_cache(images)
    _, cache = model.run_with_cache(images, pos_slice=[0])
    first = torch.zeros_like(whole["pattern", 0][:, 0], dtype=torch.bool)
    first[:, 0, 3] = True
    own = head_scores(cache, {"x": first[:, :1]})["score"]
    np.testing.assert_allclose(own, head_scores(whole, {"x": first})["score"], rtol=1e-5)


def scored(metric, **options):
    model, images = ready("crate-alpha")
    model, images = model.double(), images.double()  # batches of other sizes round otherwise
    inputs = torch.cat([images, images.flip(-1), images * 0.7, images + 0.2])
    circuit = Circuit((Edge("L0H1", "L2H3", 1.0), Edge("L1H0", "L2H3", 0.5)))
    options = dict(random=3, subsets=2, progress=False) | options
    return model, inputs, evaluate(model, circuit, inputs, metric, **options)


def test_the_interval_is_the_bootstrap_t_of_resampled_inputs():
    """Of faithfulness, by a loop over resamples of the three runs, each with its own error."""
    model, inputs, found = scored(lambda logits: logits[:, 2], ablation="zero", random=0)
    heads = {(0, 1), (1, 0), (2, 3)}

    def values(kept):
        hooks = []
        for layer in range(model.cfg.n_layers):
            gone = [head for head in range(model.cfg.n_heads) if (layer, head) not in kept]
            if gone:
                hooks.append((f"blocks.{layer}.attn.hook_z", ci.hooks.edit.zero(heads=gone)))
        return model.run_with_hooks(inputs, fwd_hooks=hooks)[:, 2].detach().double().numpy()

    every = {(a, b) for a in range(model.cfg.n_layers) for b in range(model.cfg.n_heads)}
    whole, none, own = values(every), values(set()), values(heads)
    kept, span = own - none, whole - none
    ratio = kept.mean() / span.mean()
    rng, count, shifts = np.random.default_rng(5), len(inputs), []
    each = (kept - ratio * span) / span.mean()  # to first order, what each input adds
    for _ in range(4000):
        rows = each[rng.integers(count, size=count)]
        shifts.append(rows.mean() / (rows.std(ddof=1) / count**0.5))
    error = each.std(ddof=1) / count**0.5
    high, low = ratio - np.quantile(shifts, [0.025, 0.975]) * error
    row = found.table().set_index("measure").loc["faithfulness"]
    assert row["value"] == pytest.approx(ratio)
    assert row["low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert row["high"] == pytest.approx(high, abs=0.1 * (high - low))
