"""Cases that look at one cache, or change one thing in a forward pass."""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crate_interp as ci
from golden.case import QUIET, Call, Case, cache_of, coders, layer_one, model_of, one_sample
from golden.subjects import cached, inputs, subject

TESTS = Path(__file__).parent.parent
AT = "blocks.1.attn.hook_pattern"


def looks() -> Iterator[Case]:
    """What looks at one cache."""
    for name in ("crate", "tost", "cbt", "aot", "crate conv", "pictures"):
        yield Case("maps.attention", name, {}, layer_one)
        yield Case("maps.rollout", name, {}, cache_of)
        yield Case("maps.components", name, {}, layer_one)
        yield Case("maps.codes", name, {"atoms": [0, 2]}, layer_one)
    yield Case("maps.attention", "crate", {"query": [1, 2], "scaled": False}, layer_one)
    yield Case("maps.attention", "crate", {"cls_key": False, "grid": (3, 4)}, layer_one)
    yield Case("maps.contracted", "cbt", {}, layer_one)
    yield Case("maps.token_rates", "crate", {}, layer_one)
    options = {"subspaces": True, "eps": 0.3, "point": "hook_resid_pre"}
    yield Case("maps.token_rates", "crate", options, layer_one)
    yield Case("maps.memberships", "tost", {}, layer_one)
    yield Case(
        "maps.windowed", "crate", {"stride": (2, 5), "names": AT, **QUIET},
        lambda name: (subject(name)[0], torch.randn(1, 3, 8, 30, generator=_seed()), _read),
    )  # fmt: skip
    for name in ("crate", "crate-lm", "gpt-baseline", "aot", "induction"):
        yield Case("circuits.logit_lens", name, {"count": 3, "sample": 1}, cache_of)
        yield Case("circuits.head_scores", name, {}, _targets)
        yield Call("cache methods", name, partial(_methods, name))
    for name in ("crate-alpha", "gpt-baseline", "aot", "gpt-induction"):
        yield Case("circuits.logit_attribution", name, {"target": 1, "minus": 2}, cache_of)
    at = {"target": 1, "position": 3}
    yield Case("circuits.logit_attribution", "gpt-baseline", at, cache_of)
    yield Case("circuits.repeat_targets", "induction", {"offsets": (0, 1, 2)}, _inputs)
    sizes = {"layers": 5, "eta": 0.4, "eps": 0.6, "lambd": 300.0}
    samples = torch.randn(21, 7, generator=_seed()).double(), torch.arange(21) % 3
    yield Case("redunet", "samples", sizes, lambda name: samples)
    yield Case("viz.layers", "crate", {}, _swept)
    yield Case("viz.heads", "crate", {}, partial(_swept, statistic="attention.entropy"))
    yield Call("figures of results", "crate", _figures)


def edits_of_a_pass() -> Iterator[Case]:
    """What changes one thing in a forward pass."""
    for name in ("crate", "crate-lm", "gpt-baseline", "tost", "cbt", "aot", "nanochat-crate"):
        yield Case("circuits.attribution_patch", name, {"steps": 2, **QUIET}, _pair)
        yield Case("circuits.path_patch", name, QUIET, _pair)
        scored = {"random": 2, "subsets": 2, "ablation": "zero", "seed": 1, **QUIET}
        yield Case("circuits.evaluate", name, scored, _scored)
    heads = {"receivers": [(2, 0)], "senders": [(0, 0), (1, 1)], "roles": ("v",), "positions": [2]}
    yield Case("circuits.path_patch", "crate-lm", {**heads, **QUIET}, _pair)
    yield Case(
        "circuits.evaluate", "crate", {"reference": inputs("crate", 4), "groups": [0, 0, 1, 1]},
        _scored,
    )  # fmt: skip
    for folder in sorted((TESTS / "fixtures" / "sae_lens").iterdir()):
        if folder.is_dir():
            yield Case("saes.load", folder.name, {"scaling_factor": 2.0}, _sae_folder, _parts)
    for name in ("crate", "crate-lm"):
        yield Case("circuits.switched_off", name, {}, lambda n: (subject(n)[0], inputs(n, 1)))
        context = {"error": True}
        yield Case("saes.spliced", name, context, _coded, partial(_spliced, name=name))
    for attention, sparse in (("gradient", None), (None, "solution"), ("neumann", 3)):
        options = {"attention": attention, "sparse": sparse, "layers": [1], "mix": 0.5, "eps": 0.3}
        after = partial(_spliced, name="crate")
        yield Case("surgeries.replaced", "crate", options, model_of, after)
    for name, options in (
        ("induction", {"position": 12}), ("fashion", {}), ("crate-lm", {"target": (1, 2)}),
        ("tost", {"freeze": ("norm",)}), ("cbt", {"nodes": 0.5, "edges": 0.8, "seed": 1}),
        ("gpt-baseline", {"most": 9}), ("aot", {}),
    ):  # fmt: skip
        yield Case("graph", name, options, one_sample, _graph_parts)
    yield Case("graph", "fashion", {"names": None, "tests": False}, one_sample, _tables)
    for name, options in (("cbt", {"key": 3, "seed": 1}), ("induction", {}), ("crate-alpha", {})):
        place = {"layer": 1, "head": 1, "query": 4}
        yield Case("circuits.why_attends", name, place | options, one_sample, _tables)


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _read(cache: Any) -> torch.Tensor:
    return cache["pattern", 1][:, :, 0, 1:].unflatten(-1, (3, 4))


def _inputs(name: str) -> tuple:
    return (inputs(name),)


def _methods(name: str) -> dict[str, Any]:
    """TransformerLens' own methods of a cache."""
    calls = {
        "accumulated": lambda cache: cache.accumulated_resid(),
        "decomposed": lambda cache: cache.decompose_resid(),
        "heads": lambda cache: cache.stack_head_results(),
        "neurons": lambda cache: cache.stack_neuron_results(2),
        "lens": lambda cache: cache.logit_lens(),
        "full": lambda cache: cache.get_full_resid_decomposition(),
    }
    found: dict[str, Any] = {}
    for key, call in calls.items():
        try:
            found[key] = call(cached(name)[1])
        except (ValueError, TypeError, NotImplementedError) as error:
            found[key] = np.array([f"refused: {type(error).__name__}"])
    return found


def _figures() -> dict[str, Any]:
    model, data = subject("crate")
    ablated = ci.ablate_heads(model, data, **QUIET)
    compared = ci.compare(*two_networks("crate"), untrained=0, **QUIET)
    swaps = ci.circuits.concentration(model, data, k=(2,), rotations=2, untrained=0, **QUIET)
    return {
        "ablation": ci.viz.head_ablation(ablated),
        "compared": ci.viz.compare(compared, "compression.rate_mid"),
        "concentration": ci.viz.concentration(swaps),
        "map": ci.viz.attention_on_image(cached("crate")[1], 1, cached("crate")[2]),
        "heatmap": ci.viz.heatmap(torch.arange(6.0).view(2, 3), signed=True, unit="nats"),
        "steps": ci.viz.steps(watched(model, data), "compression.rate_mid"),
    }


def _targets(name: str) -> tuple:
    cache = cached(name)[1]
    n, count = cache["resid_pre", 0].shape[:2]
    return cache, {"all": torch.ones(n, count, count, dtype=torch.bool)}


def _pair(name: str) -> tuple:
    model, x = subject(name)[0], inputs(name, 4)
    return model, x[:2], x[2:], lambda logits: logits.flatten(1)[:, 1].mean()


def _scored(name: str) -> tuple:
    model, x = subject(name)[0], inputs(name, 4)
    return model, [(0, 1), (1, 0)], x, lambda logits: logits.flatten(1)[:, 1]


def _swept(name: str, statistic: str = "compression.rate_mid") -> tuple:
    return ci.sweep(*subject(name), limit=4, controls=0, **QUIET), statistic


def _graph_parts(graph: Any) -> dict[str, Any]:
    """The tables of a graph, a steering of its largest node, and its figure."""
    nodes = graph.table("nodes").query("atom >= 0")
    edits = {f"L{node.layer}A{node.atom}@{node.pos}": 0.0 for node in nodes.head(1).itertuples()}
    if not edits:
        return {"graph": graph}
    steering = graph.steer(edits)
    return {
        "graph": graph,
        "steering": steering.table,
        "after": steering.after,
        "drawn": ci.viz.graph_figure(graph),
    }


def _sae_folder(name: str) -> tuple:
    return (TESTS / "fixtures" / "sae_lens" / name,)


def _parts(model: Any) -> Any:
    return dict(model.state_dict())


def _tables(result: Any) -> Any:
    return result.tables


def _coded(name: str) -> tuple:
    model, _, saes = coders(name)
    return model, saes


def _spliced(context: Any, name: str) -> Any:
    with context, torch.no_grad():
        return subject(name)[0](inputs(name))


def two_networks(name: str) -> tuple:
    model, data = subject(name)
    return model, model.fresh(), data["image"] if isinstance(data, dict) else data


def watched(model: Any, data: Any, **options: Any) -> Any:
    """A training of two steps, each of which shrinks the weights."""
    model = copy.deepcopy(model)
    with ci.watch(model, data, every=1, limit=2, **options) as watch:
        for _ in range(2):
            for value in model.parameters():
                value.data *= 0.9
            watch.step()
    return watch.result()
