"""Models under torch.compile, torch.export and torch.func: no value is read on the way."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, grad, vmap

from conftest import make, make_lm
from neighbours import LMS, VISION, ids, make_clip, pictures

TRACED = Path(__file__).parent / "traced.py"
ANY = torch.export.Dim.DYNAMIC

pytestmark = pytest.mark.usefixtures("unchecked")  # the type checks themselves cannot be traced


def exported(model, args, dynamic):
    return torch.export.export(model, args, dynamic_shapes=dynamic).module()


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


# --- torch.export ---


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


# --- torch.compile ---


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compile", "gradients", "export", "hooks"])
def test_in_a_process_without_type_checks(what):
    done = subprocess.run([sys.executable, TRACED, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
