"""What heads look at, by hand and on planted patterns; intervals of a circuit's scores."""

from functools import partial

import numpy as np
import pytest
import torch

import crate_interp as ci
from answering import ready
from conftest import refuses
from crate_interp.circuits import Circuit, Edge, evaluate, head_scores, repeat_targets


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


def test_a_metric_of_each_input_gives_intervals_and_the_same_scores():
    _, _, single = scored(lambda logits: logits[:, 2].mean())
    _, _, many = scored(lambda logits: logits[:, 2])
    columns = ["value", "random_mean", "random_low", "random_high", "share_as_good"]
    np.testing.assert_allclose(
        many.table()[columns], single.table()[columns], rtol=1e-9, atol=1e-12
    )
    assert single.table()["low"].isna().all() and single.table("heads")["low"].isna().all()
    assert (many.table()["low"] < many.table()["high"]).all()
    assert " to " in many.headline() and " to " not in single.headline()


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
