"""ci.watch and SRRRegularizer: what they measure and add, and what they leave as it is."""

import copy
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import crate_interp as ci
from conftest import make, refuses
from crate_interp.measures import l1_norm, layer_objectives

LABELS = torch.arange(7)


@pytest.fixture
def images():
    return torch.randn(7, 3, 6, 20, generator=torch.Generator().manual_seed(1))


def updates(model, images, rate=1e-2):
    """Yields after each update; the loss has dropout, so torch's random numbers matter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    while True:
        loss = F.cross_entropy(F.dropout(model(images)), LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def trained(images, count, watch=None, model=None):
    torch.manual_seed(3)
    model = make() if model is None else model
    model.train()
    for _, _ in zip(range(count), updates(model, images), strict=False):
        if watch is not None:
            watch.step()
    return model


def run(images, count=7, **options):
    model = make()
    with ci.watch(model, images, **{"every": 3, "limit": 5, **options}) as watch:
        trained(images, count, watch, model)
    return model, watch


def test_each_step_is_a_sweep_of_the_model_at_that_step(images):
    result = run(images)[1].result()
    assert result.steps == [0, 3, 6, 7]  # the last one too
    for step in (0, 3, 7):
        model = trained(images, step)
        wanted = ci.sweep(model.eval(), images, limit=5, controls=0, progress=False)
        got = result.at(step)
        for name in ("layers", "heads", "samples"):
            pd.testing.assert_frame_equal(got.table(name), wanted.table(name))
        assert got.meta["step"] == step and got.meta["data"] == wanted.meta["data"]
    assert set(result.layers()["step"]) == {0, 3, 6, 7}
    every = result.layers().query("step == 6").drop(columns="step").reset_index(drop=True)
    pd.testing.assert_frame_equal(every, result.at(6).table("layers"))


def test_a_training_has_the_same_bits_with_and_without_it(images):
    model, _ = run(images)
    after = torch.rand(3)
    plain = trained(images, 7)
    assert torch.equal(torch.rand(3), after)  # torch's random numbers go on as without it
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_modes_are_as_they_were(images):
    model = make()
    model.train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    seen = []
    handle = model.blocks[0].register_forward_hook(lambda block, *rest: seen.append(block.training))
    with ci.watch(model, images) as watch:
        assert [module.training for module in model.modules()] == before
    handle.remove()
    assert seen == [False] and watch.result().steps == [0]


def test_a_step_that_cannot_be_measured_is_told_and_the_training_goes_on(images):
    model = make()
    with ci.watch(model, images, every=1) as watch:
        good = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.blocks[1].attn.U.fill_(torch.nan)
        with pytest.warns(UserWarning, match="step 1 was not measured"):
            watch.step()
        model.load_state_dict(good)
        watch.step()
    result = watch.result()
    assert result.steps == [0, 2] and list(result.meta["not_measured"]) == ["1"]
    assert "Not measured: step 1." in result.headline()


@pytest.mark.slow
def test_the_folder_keeps_what_was_measured(images, tmp_path):
    out = tmp_path / "out"
    model = make()
    with (
        pytest.raises(KeyboardInterrupt),
        ci.watch(model, images, every=2, limit=5, out=out) as watch,
    ):
        trained(images, 5, watch, model)
        raise KeyboardInterrupt
    assert ci.WatchResult.load(out).steps == [0, 2, 4]
    # from a checkpoint at step 3: 4 is measured anew
    model = trained(images, 3)
    with ci.watch(model, images, every=2, limit=5, out=out, start=3) as watch:
        assert watch.result().steps == [0, 2]
        for _ in range(2):
            watch.step()
    result = ci.WatchResult.load(out)
    assert result.steps == [0, 2, 4, 5] and result.digest() == watch.result().digest()
    assert result.at(5).layers().equals(result.at(4).layers())  # nothing was trained in between
    assert ci.WatchResult.load(out).digest() == result.digest()


@pytest.mark.slow
def test_a_folder_of_another_training_is_refused(images, tmp_path):
    run(images, out=tmp_path, every=2)
    other = make()
    with torch.no_grad():
        other.pos_embed.mul_(2)
    again = ci.watch(other, images, every=2, limit=5, out=tmp_path)
    kept = ci.WatchResult.load(tmp_path).digest()
    refuses("holds another training: at step 0 its", lambda: again.__enter__())
    refuses("use `with ci.watch", lambda: again.step(), RuntimeError)
    assert ci.WatchResult.load(tmp_path).digest() == kept
    with ci.watch(trained(images, 4), images, every=2, limit=5, out=tmp_path, start=4) as watch:
        assert watch.result().steps == [0, 2, 4]


def test_events_of_a_trainer(images):
    """The callback counts what the trainer says, and the first process alone measures."""
    model = make()
    watch = ci.watch(model, images, every=2, callback="transformers")
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    watch.on_train_begin(None, state, None, model=model)
    for step in (1, 2, 3):
        state.global_step = step
        watch.on_step_end(None, state, None)
    watch.on_train_end(None, state, None)
    assert watch.result().steps == [0, 2, 3]
    other = ci.watch(model, images, callback="transformers")
    other.on_train_begin(None, SimpleNamespace(is_world_process_zero=False), None)
    refuses("nothing was measured", lambda: other.result())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning about itself
def test_lightning(images, tmp_path):
    import pytorch_lightning as pl

    class Tuned(pl.LightningModule):
        def __init__(self, hooked):
            super().__init__()
            self.hooked = hooked

        def training_step(self, batch, index):
            return self.hooked(batch[0], labels=batch[1]).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    model = make()
    watch = ci.watch(model, images, every=2, limit=5, out=tmp_path / "out", callback="lightning")
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, LABELS), batch_size=2
    )
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(
        max_steps=5, accelerator="cpu", default_root_dir=tmp_path, accumulate_grad_batches=2,
        callbacks=[watch], **quiet,
    )  # fmt: skip
    trainer.fit(Tuned(model), loader)
    result = ci.WatchResult.load(tmp_path / "out")
    assert result.steps == [0, 2, 4, 5]
    wanted = ci.sweep(model.eval(), images, limit=5, controls=0, progress=False)
    pd.testing.assert_frame_equal(result.at(5).layers(), wanted.layers())


@pytest.mark.parametrize("reused", ["before it is open", "between steps"])
def test_the_samples_are_a_copy(images, reused):
    model, buffer = make(), images.clone()
    watch = ci.watch(model, {"image": buffer, "label": LABELS}, every=1, probes="sparsity")
    if reused == "before it is open":
        buffer.zero_()
    with watch:
        buffer.zero_()
        watch.step()
    wanted = ci.sweep(model, images, probes="sparsity", controls=0, progress=False).layers()
    for step in (0, 1):
        pd.testing.assert_frame_equal(watch.result().at(step).layers(), wanted)


def regularised(images, weight, steps=3, **more):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ci.SRRRegularizer(model, weight, **more) as penalty:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), LABELS) + penalty()
            loss.backward()
            optimizer.step()
    return model


def gradients(model):
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("layers, chosen", [("last", [2]), ([0, 2], [0, 2])])
def test_it_is_the_objective_of_the_layers_with_their_inputs_detached(images, layers, chosen):
    model = make()
    z = [model.run_with_cache(images)[1]["resid_pre", layer].detach() for layer in range(3)]
    with ci.SRRRegularizer(model, 0.5, layers=layers, eps=0.3, lambd=0.2) as penalty:
        model(images)
        value = penalty()
    terms = {
        layer: layer_objectives(
            [model.blocks[layer]], [model.blocks[layer].attn.U], z[layer], 0.3, 0.2
        )
        .mean()
        .detach()
        for layer in chosen
    }
    torch.testing.assert_close(value, 0.5 * sum(terms.values()))
    assert penalty.last == pytest.approx({layer: float(term) for layer, term in terms.items()})


def test_the_gradient_stays_in_the_layer(images):
    model = make()
    with ci.SRRRegularizer(model, layers=[1]) as penalty:
        model(images)
        penalty().backward()
    reached = {name for name, grad in gradients(model).items() if grad is not None and grad.any()}
    assert reached and all(name.startswith("blocks.1.") for name in reached)


def test_the_gradient_is_that_of_finite_differences(images):
    model = make().double()
    x, block = images.double()[:2], model.blocks[1]
    z = model.run_with_cache(x)[1]["resid_pre", 1].detach()
    weight = next(value for name, value in block.named_parameters() if "ln" not in name)

    def term(values):
        with torch.no_grad():
            weight.copy_(values)
            (own,) = layer_objectives([block], [block.attn.U], z, 0.5, 0.1, l1_norm)
        return own.mean()

    with ci.SRRRegularizer(model, 1.0, layers=[1], eps=0.5, penalty="l1") as penalty:
        model(x)
        penalty().backward()
    start, along = weight.detach().clone(), torch.randn_like(weight)
    step = 1e-6
    slope = (term(start + step * along) - term(start - step * along)) / (2 * step)
    assert float(slope) == pytest.approx(float((weight.grad * along).sum()), rel=1e-4)


def test_weight_zero_trains_the_same_bits(images):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images), LABELS).backward()
        optimizer.step()
    for name, value in regularised(images, 0.0).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    other = regularised(images, 0.1).state_dict()
    assert not torch.equal(other["blocks.2.mlp.D"], model.state_dict()["blocks.2.mlp.D"])


def test_a_random_layer_leaves_torchs_generator_alone(images):
    model = make()

    def drawn(seed):
        with ci.SRRRegularizer(model, layers="random", seed=seed) as penalty:
            for _ in range(11):
                model(images)
                penalty()
                yield from penalty.last

    state = torch.random.get_rng_state()
    first = list(drawn(0))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first == list(drawn(0)) != list(drawn(1)) and set(first) == {0, 1, 2}


def test_hooks_come_off_and_a_caller_is_told(images):
    model = make()
    penalty = ci.SRRRegularizer(model)
    refuses("use `with", penalty, RuntimeError)
    with pytest.raises(KeyError), penalty:
        with torch.no_grad():
            model(images)
        refuses("no forward with gradients", penalty, RuntimeError)
        with pytest.raises(RuntimeError, match="open already"), penalty:
            pass
        raise KeyError
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert "layers=[2], eps=0.1, lambd=0.1, penalty='l0'" in repr(penalty)
