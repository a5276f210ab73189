"""What holds for every streamed verb: no samples, one, bad ones, and half precision."""

import copy
from operator import attrgetter

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import refuses
from golden.case import QUIET
from golden.cases import SMALL
from golden.subjects import subject


def of(data, rows):
    return {key: data[key][rows] for key in data} if isinstance(data, dict) else data[rows]


@pytest.fixture(
    params=[pytest.param(verb, marks=[pytest.mark.slow] * (verb == "audit")) for verb in SMALL]
)
def verb(request):
    def asked(model, data):
        return attrgetter(request.param)(ci)(model, data, **SMALL[request.param], **QUIET)

    return asked


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_no_samples_and_bad_ones_are_refused_in_a_line(verb, name):
    model, data = subject(name)
    refuses("the data is empty|has no patches", lambda: verb(model, of(data, slice(0))))
    if name == "crate":
        data = data | {"image": data["image"].clone()}
        data["image"][3, 0, 1, 2] = torch.nan
        refuses("sample 3.* NaN", lambda: verb(model, data))
    else:
        refuses("the token 99|has no patches", lambda: verb(model, data * 0 + 99))


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
@pytest.mark.parametrize("way", ["one sample", "bfloat16"])
def test_numbers_are_finite_or_missing_or_the_verb_says_why(verb, name, way):
    model, data = subject(name)
    if way == "one sample":
        data = of(data, slice(1))
    else:
        model = copy.deepcopy(model).bfloat16()
        data = data | {"image": data["image"].bfloat16()} if name == "crate" else data
    try:
        tables = verb(model, data).stored.values()
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return
    for table in tables:
        assert not np.isinf(table.select_dtypes("number").to_numpy(float)).any()
