"""Models under torch.compile, torch.export and torch.func: no value is read on the way."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap

from conftest import make, make_lm
from crate_interp.models.compat.torch_compile import readable
from neighbours import LMS, VISION, ids, make_clip, make_mae, pictures

TRACED = Path(__file__).parent / "traced.py"
ANY = torch.export.Dim.DYNAMIC

pytestmark = pytest.mark.usefixtures("unchecked")  # the type checks themselves cannot be traced


def exported(model, args, dynamic):
    return torch.export.export(model, args, dynamic_shapes=dynamic).module()


# --- values ---


def test_values_are_readable_outside_of_tracing_only():
    x = torch.arange(6.0)
    assert readable(x) and readable(torch.nn.Parameter(x)) and readable(ids(2, 3))
    assert not readable(x.to("meta"))
    seen = []
    vmap(lambda row: seen.append(readable(row)) or row)(x)
    grad(lambda row: seen.append(readable(row)) or row.sum())(x)
    with FakeTensorMode():
        seen.append(readable(torch.zeros(3)))
    assert seen == [False, False, False] and readable(x)


@pytest.mark.parametrize("family", LMS)
def test_bad_ids_are_refused_as_before(family):
    model = make_lm(family)
    with pytest.raises(
        ValueError, match="tokens range from 3 to 47, but the vocabulary has ids from 0 to 46"
    ):
        model(torch.tensor([[3, 47]]))
    with pytest.raises(ValueError, match="tokens range from -1 to 3"):
        model(torch.tensor([[-1, 3]]))


# --- torch.func ---


@pytest.mark.parametrize("family", LMS)
def test_vmap_over_a_language_model(family):
    model, tokens = make_lm(family), ids(3, 7)
    rows = vmap(lambda row: model(row[None])[0])(tokens)
    torch.testing.assert_close(rows, model(tokens), atol=1e-5, rtol=1e-5)


def test_gradients_per_sample_are_those_of_one_sample_at_a_time():
    model, tokens = make_lm("crate-lm").double(), ids(3, 7)
    weights = dict(model.named_parameters())

    def loss(weights, row):
        return functional_call(model, weights, (row[None],), {"return_type": "loss"})

    per_sample = vmap(grad(loss), (None, 0))(weights, tokens)
    for index, row in enumerate(tokens):
        model.zero_grad()
        model(row[None], return_type="loss").backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close(per_sample[name][index], value.grad, atol=1e-9, rtol=1e-7)


def test_the_jacobian_of_a_vision_model_is_that_of_autograd():
    model, images = make().double(), pictures(1).double()
    whole = jacrev(model)(images)[0]  # [class, 1, channels, height, width]
    images.requires_grad_()
    for index in (0, 5):
        (alone,) = torch.autograd.grad(model(images)[0, index], images)
        torch.testing.assert_close(whole[index], alone, atol=1e-10, rtol=1e-8)


def test_vmap_over_a_masked_autoencoder_and_a_clip():
    mae, images, noise = make_mae(), pictures(3), torch.rand(3, 12)
    losses = vmap(lambda x, n: mae(x[None], n[None]).loss)(images, noise)
    torch.testing.assert_close(losses.mean(), mae(images, noise).loss)
    clip, tokens = make_clip(), ids(3, 7)
    rows = vmap(lambda x, t: clip(x[None], t[None])[0, 0])(images, tokens)
    torch.testing.assert_close(rows, clip(images, tokens).diagonal(), atol=1e-4, rtol=1e-5)


def test_hooks_run_under_vmap():
    model, tokens = make_lm("crate-lm"), ids(2, 7)

    def halve(tensor, hook):
        return tensor / 2

    points = [(f"blocks.1.{name}", halve) for name in ("ln1.hook_scale", "hook_attn_out")]
    with model.hooks(fwd_hooks=points):
        rows = vmap(lambda row: model(row[None])[0])(tokens)
        wanted = model(tokens)
    torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(rows, model(tokens), atol=1e-3)


# --- torch.export ---


@pytest.mark.slow
def test_an_exported_vision_model_takes_any_batch():
    model = make()
    program = exported(model, (pictures(3),), ({0: ANY},))
    for batch in (1, 2, 5):
        images = pictures(batch, seed=batch)
        assert torch.equal(program(images), model(images))


@pytest.mark.slow
def test_an_exported_language_model_takes_any_batch_and_length():
    model = make_lm("crate-lm")
    program = exported(model, (ids(3, 7),), ({0: ANY, 1: ANY},))
    for shape in ((1, 13), (2, 5), (5, 2)):
        assert torch.equal(program(ids(*shape)), model(ids(*shape)))


@pytest.mark.slow
def test_every_family_is_exported():
    for over in VISION:
        model = make(**over)
        program = exported(model, (pictures(3),), ({0: ANY},))
        assert torch.equal(program(pictures(5)), model(pictures(5)))
    for family in LMS:
        model = make_lm(family)
        program = exported(model, (ids(3, 7),), ({0: ANY, 1: ANY},))
        assert torch.equal(program(ids(2, 11)), model(ids(2, 11)))
    clip = make_clip()
    program = exported(clip, (pictures(3), ids(4, 7)), ({0: ANY}, {0: ANY}))
    assert torch.equal(program(pictures(2), ids(5, 7)), clip(pictures(2), ids(5, 7)))


class Parts(torch.nn.Module):
    """A masked autoencoder that returns tensors, as torch.export wants them."""

    def __init__(self, mae):
        super().__init__()
        self.mae = mae

    def forward(self, images, noise):
        out = self.mae(images, noise)
        return out.pred, out.mask, out.loss


@pytest.mark.slow
def test_a_masked_autoencoder_is_exported():
    model = Parts(make_mae())
    program = exported(model, (pictures(3), torch.rand(3, 12)), ({0: ANY}, {0: ANY}))
    images, noise = pictures(5), torch.rand(5, 12)
    for got, wanted in zip(program(images, noise), model(images, noise), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.slow
def test_a_saved_program_runs_without_the_library(tmp_path):
    model = make()
    program = torch.export.export(model, (pictures(3),), dynamic_shapes=({0: ANY},))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(again(pictures(4)), model(pictures(4)))


# --- torch.compile ---


@pytest.mark.slow
def test_a_vision_model_is_compiled_whole():
    torch._dynamo.reset()
    model = make(n_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for batch in (3, 5):
        assert torch.equal(compiled(pictures(batch)), model(pictures(batch)))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compile", "gradients", "export", "hooks"])
def test_in_a_process_without_type_checks(what):
    done = subprocess.run([sys.executable, TRACED, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
