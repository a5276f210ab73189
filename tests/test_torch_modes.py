"""Autocast, inference mode and another default dtype: the same numbers, or a sentence."""

import contextlib
import functools
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm
from test_run_state import IMAGES, LABELLED, MASKS, PICTURES, RUN

CIRCUITS = ci.circuits
TEXTS = make_lm("nanochat-crate")
TOKENS = torch.randint(47, (5, 7), generator=torch.Generator().manual_seed(1))
CACHE, TEXT_CACHE = IMAGES.run_with_cache(PICTURES)[1], TEXTS.run_with_cache(TOKENS)[1]
ONE_CACHE = TEXTS.run_with_cache(TOKENS[1:2])[1]
FOUR = torch.rand(20, *PICTURES.shape[1:], generator=torch.Generator().manual_seed(1))
OTHER = make(family="crate", n_classes=3, seed=1)
SHALLOW = make(family="crate", n_layers=1)
HEADS = {"before": torch.ones(5, 7, 7).tril() > 0}
QUIET = {"progress": False}
GRAPH = functools.partial(CIRCUITS.graph, IMAGES, PICTURES[:1], most=8)
NODE = "L0A0@1"
STATE = SimpleNamespace()


def first_logit(logits):
    return logits[..., 0].mean()


# the model runs as the caller wants, and meta says so; probes measure without autocast
NOTED = {
    "sweep": lambda out: ci.sweep(IMAGES, PICTURES, controls=2, **RUN),
    "probe": lambda out: ci.probe(CACHE),
    "atoms": lambda out: ci.atoms(IMAGES, PICTURES, **RUN),
    "segment": lambda out: ci.segment(
        IMAGES, {"image": PICTURES, "mask": MASKS}, untrained=1, **RUN
    ),
    "linear_probe": lambda out: ci.linear_probe(IMAGES, (FOUR, LABELLED[1].repeat(4)), **RUN),
}
MEASURED = {
    "audit": lambda out: ci.audit(
        SHALLOW, PICTURES[:2], untrained=0, grid=False, lasso_tokens=3, **RUN
    ),
    "compare": lambda out: ci.compare(
        IMAGES, OTHER, PICTURES, probes=["sparsity"], untrained=1, **RUN
    ),
    "surgery": lambda out: ci.surgeries.surgery(SHALLOW, LABELLED, mixes=[1.0], **RUN),
    "atlas": lambda out: CIRCUITS.atlas(IMAGES, LABELLED, ablate=2, **RUN),
    "ablate_heads": lambda out: CIRCUITS.ablate_heads(IMAGES, LABELLED, **RUN),
    "atom_names": lambda out: CIRCUITS.atom_names(IMAGES, PICTURES, **RUN),
    "graph": lambda out: GRAPH(),
    "steer": lambda out: STATE.graph.steer({NODE: 2.0}).table,
    "attribution_patch": lambda out: CIRCUITS.attribution_patch(
        IMAGES, PICTURES[:1], PICTURES[1:2], first_logit, **QUIET
    ),
    "composition": lambda out: CIRCUITS.composition(TEXTS, TOKENS, through="data", **RUN),
    "concentration": lambda out: CIRCUITS.concentration(TEXTS, TOKENS, k=[2], untrained=0, **RUN),
    "evaluate": lambda out: CIRCUITS.evaluate(
        IMAGES, [(0, 0)], PICTURES, lambda logits: logits[:, 0], random=2, subsets=2, **QUIET
    ),
    "head_scores": lambda out: CIRCUITS.head_scores(TEXT_CACHE, HEADS),
    "logit_attribution": lambda out: CIRCUITS.logit_attribution(TEXT_CACHE, 0),
    "logit_lens": lambda out: CIRCUITS.logit_lens(CACHE),
    "path_patch": lambda out: CIRCUITS.path_patch(
        TEXTS, TOKENS[:1], TOKENS[1:2], first_logit, receivers=[(1, 0)], **QUIET
    ),
    "patching": lambda out: CIRCUITS.patching.get_act_patch_resid_pre(
        TEXTS, TOKENS[:1], ONE_CACHE, first_logit, positions=[3]
    ),
    "switched_off": lambda out: CIRCUITS.switched_off(IMAGES, PICTURES[0]),
}


@contextlib.contextmanager
def default_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def frames(result):
    if isinstance(result, torch.Tensor):
        result = pd.DataFrame(result.detach().reshape(len(result), -1).numpy())
    return {"": result} if isinstance(result, pd.DataFrame) else result.tables


def same(one, other):
    for name, table in frames(one).items():
        columns = [column for column in table if column != "webp"]
        again = frames(other)[name][columns]
        pd.testing.assert_frame_equal(again, table[columns], rtol=1e-6, check_dtype=False, obj=name)


def test_every_circuit_is_in_the_table():
    functions = {name for name in CIRCUITS.__all__ if name.islower()} - {"repeat_targets"}
    assert functions <= set(MEASURED)


@pytest.mark.parametrize("verb", [*NOTED, *MEASURED])
def test_modes_of_torch_change_no_number_without_a_word(verb, tmp_path):
    if verb == "steer":
        STATE.graph = GRAPH()
    run = functools.partial((NOTED | MEASURED)[verb], tmp_path)
    plain = run()
    with default_float64():
        same(plain, run())
    with torch.inference_mode():
        try:
            same(plain, run())
        except ValueError as error:
            assert "inference mode is on" in str(error)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run()
    if verb in NOTED:
        assert cast.meta["torch_settings"] == {"autocast cpu": "bfloat16"}
    else:
        same(plain, cast)
        assert "torch_settings" not in getattr(cast, "meta", {})
