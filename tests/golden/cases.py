"""What the golden table holds: each public verb on each model, with each of its options.

A case is a verb, a subject (`subjects.py`) and options; `answer` calls it. `ways` are other ways to
run a streamed verb that have to give the same numbers.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import crate_interp as ci
import foreign
from crate_interp.bridge.network_bridge import build
from crate_interp.models.sae import SAEConfig
from golden.idioms import COMMANDS, IDIOMS, exit_and_files, idiom, lines
from golden.subjects import BRIDGED, EMBEDDED, TINY, N, cached, inputs, subject

TESTS = Path(__file__).parent.parent
QUIET = {"progress": False}
SIZES = {"batch_size": 2, "chunk_size": 4}
SMALL: dict[str, dict[str, Any]] = {  # streamed verb -> what makes it small
    "sweep": {"controls": 3},
    "atoms": {"top": 3},
    "atlas": {"top": 2, "ablate": 2},
    "ablate_heads": {},
    "segment": {"untrained": 1},
    "linear_probe": {},
    "surgery": {"directions": 2, "mixes": (0.5,)},
    "audit": {"untrained": 1, "grid": False, "lasso_tokens": 2},
    "circuits.composition": {"through": "data", "draws": 100},
    "circuits.concentration": {"k": (2, 5), "rotations": 2, "untrained": 1},
    "circuits.atom_names": {},
}
AT = "blocks.1.attn.hook_pattern"
CRATE = {
    "family": "crate",
    "n_heads": 4,
    "d_model": 32,
    "n_layers": 3,
    "image_size": 32,
    "patch_size": 8,
}
FORTY = [index % 2 for index in range(40)]


@dataclass(frozen=True)
class Case:
    """One call: a verb on a subject."""

    verb: str
    subject: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[str], tuple] | None = None  # of the subject; None: its model and data
    after: Callable[[Any], Any] | None = None  # what to do with the answer

    @property
    def name(self) -> str:
        """Returns the key of the case in the table."""
        words = [f"{key}={_short(value)}" for key, value in self.options.items()]
        return " ".join([self.verb, self.subject, *words])

    def __call__(self, **more: Any) -> Any:
        """Returns what the verb gives, or the kind of error with which it refuses."""
        verb = attrgetter(self.verb)(ci)
        try:
            arguments = (self.arguments or subject)(self.subject)
            answer = verb(*arguments, **self.options, **more)
        except (ValueError, TypeError, NotImplementedError) as error:
            return np.array([f"refused: {type(error).__name__}"])
        return self.after(answer) if self.after and answer is not None else answer


def _short(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_short, value))})"
    return str(value) if isinstance(value, (int, float, str)) else type(value).__name__


def streamed(verb: str, name: str, **options: Any) -> Case:
    """Returns the small form of a streamed verb on a subject."""
    few = 60 if verb == "linear_probe" else 6 if name in ("pictures", "lm") else 8
    limit = {"limit": few} if name in EMBEDDED else {}
    return Case(verb, name, SMALL[verb] | limit | SIZES | QUIET | options)


def _graph_position(name: str) -> dict[str, Any]:
    return {"position": 12} if name == "induction" else {}


def _pair(name: str) -> tuple:
    model, x = subject(name)[0], inputs(name, 4)
    return model, x[:2], x[2:], lambda logits: logits.flatten(1)[:, 1].mean()


def _cache(name: str) -> tuple:
    return (cached(name)[1],)


def _layer(name: str) -> tuple:
    return (cached(name)[1], 1)


def _scored(name: str) -> tuple:
    model, x = subject(name)[0], inputs(name, 4)
    return model, [(0, 1), (1, 0)], x, lambda logits: logits.flatten(1)[:, 1]


def _targets(name: str) -> tuple:
    cache = cached(name)[1]
    n, count = cache["resid_pre", 0].shape[:2]
    return cache, {"all": torch.ones(n, count, count, dtype=torch.bool)}


def _both(name: str) -> tuple:
    model, data = subject(name)
    return model, model.fresh(), data["image"] if isinstance(data, dict) else data


def _swept(name: str, statistic: str = "compression.rate_mid") -> tuple:
    return ci.sweep(*subject(name), limit=4, controls=0, **QUIET), statistic


def _points(name: str) -> tuple:
    """A model, data, a hook of a middle layer to read: for stores and coders."""
    model, data = subject(name)
    return model, data["image"] if isinstance(data, dict) else data


def _coders(name: str) -> tuple:
    model, data = _points(name)
    random = torch.Generator().manual_seed(7)
    cfg = SAEConfig(hook_name="blocks.1.hook_resid_pre", d_in=model.cfg.d_model, d_sae=13)
    sae = ci.SparseAutoencoder(cfg).eval()
    for value in sae.parameters():
        value.data = 0.3 * torch.randn(value.shape, generator=random)
    return model, data, {cfg.hook_name: sae}


def _coded(name: str) -> tuple:
    model, _, saes = _coders(name)
    return model, saes


def _spliced(context: Any, name: str) -> Any:
    with context, torch.no_grad():
        return subject(name)[0](inputs(name))


def _forward(name: str) -> dict[str, Any]:
    """The logits, every activation, the gradient of the weights, and the probes on the cache."""
    model, cache, x = cached(name)
    if name == "clipa":
        return {"cache": dict(cache)}
    logits = model(x)
    answer = logits if torch.is_tensor(logits) else logits.pred
    weights = [value for value in model.parameters() if value.requires_grad]
    found = {"logits": answer, "cache": dict(cache)}
    if weights:
        mean = answer.square().mean()
        found["gradient"] = torch.autograd.grad(mean, weights, allow_unused=True)[0]
    return found


def _watch(model: Any, data: Any, **options: Any) -> Any:
    """A training of two steps, each of which shrinks the weights."""
    model = copy.deepcopy(model)
    with ci.watch(model, data, every=1, limit=2, **options) as watch:
        for _ in range(2):
            for value in model.parameters():
                value.data *= 0.9
            watch.step()
    return watch.result()


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


def _regularized(name: str) -> Any:
    model, x = copy.deepcopy(subject(name)[0]), inputs(name)
    with ci.SRRRegularizer(model, 0.01, layers=[1], penalty="l1") as penalty:
        model(x)
        return penalty.loss() if hasattr(penalty, "loss") else penalty()


def _saved(name: str) -> Any:
    """A model that was saved, loaded, converted and loaded again."""
    with tempfile.TemporaryDirectory() as place:
        subject(name)[0].save_pretrained(Path(place) / "saved")
        ci.convert(Path(place) / "saved", Path(place) / "converted")
        model = ci.load(Path(place) / "converted")
        return {"tensors": model, "config": _config(model)}


def every_case() -> Iterator[Case]:
    """Yields all cases of the table."""
    yield from _models()
    yield from _streamed_verbs()
    yield from _options()
    yield from _looks()
    yield from _edits()
    for line in lines(IDIOMS):
        yield Call("idiom", line, partial(idiom, line))
    for line in lines(COMMANDS):
        yield Call("crate-interp", line, partial(exit_and_files, line))


def _models() -> Iterator[Case]:
    for name in (*EMBEDDED, *TINY, "clipa", "crate-mae", *BRIDGED, "masks"):
        yield Call("logits, cache, gradient", name, partial(_forward, name))
    for name in ("crate", "tost", "cbt", "crate-lm", "clipa", "crate-mae"):
        yield Case("probe", name, {}, _cache)
    for name in ("crate", "crate-lm"):
        yield Call("save, load, convert", name, partial(_saved, name))
    for folder in sorted((TESTS / "fixtures").iterdir()):
        if (folder / "meta.json").exists():
            yield Call("load", folder.name, partial(_fixture, folder))
    for name, options in {
        "config": {"config": CRATE | {"n_heads": 4, "eta": 0.3}},
        "rename": {"n_heads": 4, "rename": r"s/^mine\.//"},
        "ema": {"n_heads": 4, "weights": "ema"}, "headless": {"n_heads": 4, "head": False},
        "float64": {"n_heads": 4, "dtype": torch.float64},
    }.items():  # fmt: skip
        yield Call("load with options", name, partial(_loaded, name, **options))


def _loaded(case: str, **options: Any) -> Any:
    """A published CRATE's tensors, loaded with options."""
    file = next((TESTS / "fixtures" / "crate").glob("*.pth.tar"))
    tensors = torch.load(file, weights_only=True, map_location="cpu")
    tensors = tensors.get("state_dict", tensors)
    if case == "rename":
        tensors = {f"mine.{key}": value for key, value in tensors.items()}
    if case == "ema":
        doubled = {key: 2 * value for key, value in tensors.items()}
        tensors = {"state_dict": tensors, "state_dict_ema": doubled}
    model = ci.load(tensors, **options)
    return {"tensors": model, "config": _config(model)}


def _config(model: Any) -> dict[str, Any]:
    return {key: str(value) for key, value in model.cfg.to_dict().items()}


def _fixture(folder: Path) -> dict[str, Any]:
    """What a fixture's file becomes: its tensors and its config."""
    config = json.loads((folder / "meta.json").read_text())["config"]
    beside = ("meta.json", "io.safetensors", "0_cfg.json")
    files = [path for path in sorted(folder.iterdir()) if path.name not in beside]
    heads = config.get("heads") or config.get("n_head") or config.get("num_heads")
    fields = {"n_heads": heads} if heads else {}
    try:
        model = ci.load(files[0] if len(files) == 1 else folder, **fields)
    except ci.CheckpointError as error:  # what is missing is part of the table
        return {"refused": np.array([str(error)[:20]])}
    return {"tensors": model, "config": _config(model)}


def _streamed_verbs() -> Iterator[Case]:
    for verb in SMALL:
        for name in (*EMBEDDED, *TINY, "masks"):
            heavy = verb in ("audit", "circuits.concentration", "surgery", "atlas")
            if not heavy or name in ("fashion", "induction", *TINY):
                yield streamed(verb, name)
    for name in ("crate", "crate-lm", "tost"):
        yield Case("compare", name, {"untrained": 1, **QUIET}, _both)
    for name in ("crate", "crate-lm"):
        yield Case("saes.evaluate", name, SIZES | QUIET, _coders)


def _options() -> Iterator[Case]:
    """Each option that no other case has."""
    sweep = partial(streamed, "sweep")
    yield sweep("crate-mae", blocks="decoder_blocks")
    yield sweep("crate", forward=_twice)
    yield sweep("crate", precision="bfloat16")
    yield sweep("crate", probes=["objective", "ranks", "frames", "activity"])
    yield sweep("crate", probes=[ci.probes.compression(eps=0.3, norm=True), _probe()])
    yield sweep("crate", groups=[index // 2 for index in range(N)])
    yield sweep("crate", workers=1, skip_bad=True, tag="golden", limit=7)
    yield sweep("masks", probes="segmentation")
    yield streamed("audit", "crate", lasso_tokens=3, seed=1, eps=0.3, grid=True)
    yield streamed("audit", "cbt", grid=True)
    for options in ({"mass": 0.4}, {"fraction": 0.3}, {"query": 2}, {"scaled": False}):
        yield streamed("segment", "masks", **options)
    yield streamed("segment", "masks", cls_key=False)
    yield streamed("segment", "pictures", size=64, untrained=0)
    yield streamed("atoms", "crate", coactivation=True, layers=[1], dense=0.3)
    yield streamed("atlas", "crate", ablate=0, top=4)
    yield streamed("linear_probe", "crate", pool="mean", test=0.4, seed=3)
    yield streamed("linear_probe", "crate", labels=FORTY[:N], test=0.4)
    yield streamed("ablate_heads", "crate", how="zero", metric="accuracy")
    yield streamed("surgery", "crate", replacements=["gradient", 1], seed=1, eps=0.3)
    yield streamed("surgery", "crate", labels=FORTY[:N])
    yield streamed("circuits.composition", "crate", role="k", seed=1)
    yield streamed("circuits.concentration", "crate-lm", point="stream", rotations=3)
    yield streamed("circuits.atom_names", "fashion", seed=1)
    yield Case("circuits.composition", "crate", {"draws": 100}, lambda name: (subject(name)[0],))
    yield Case("compare", "crate", {"names": ("a", "b"), "probes": "sparsity", **QUIET}, _both)
    yield Case("saes.evaluate", "crate", {"labels": FORTY[:N], "seed": 2} | SIZES | QUIET, _coders)
    mask = torch.ones(N, 11, dtype=torch.long)
    mask[::2, 8:] = 0
    yield Case("saes.evaluate", "crate-lm", {"attention_mask": mask} | SIZES | QUIET, _coders)
    for name in ("crate", "crate-lm"):
        yield Call("watch", name, partial(_watch, *subject(name)))
    options = {"start": 5, "batch_size": 2, "probes": "sparsity", "callback": None}
    yield Call("watch from step 5", "crate", partial(_watch, *subject("crate"), **options))
    yield Call("SRRRegularizer", "crate", partial(_regularized, "crate"))
    for subspaces in ("value", "key"):
        yield Case("from_bridge", "gpt2", {"subspaces": subspaces}, _bridge, _logits)
    yield Case("to_bridge", "crate", {}, _model, _logits)


def _bridge(name: str) -> tuple:
    return (build(foreign.network(name)),)


def _logits(model: Any) -> Any:
    name = "gpt2" if hasattr(model, "cfg") and model.cfg.d_model == foreign.D else "crate"
    return model(inputs(name)), ci.probe(
        model.run_with_cache(inputs(name))[1]
    ) if name != "crate" else None


def _looks() -> Iterator[Case]:
    """What looks at one cache."""
    for name in ("crate", "tost", "cbt", "aot", "crate conv", "pictures"):
        yield Case("maps.attention", name, {}, _layer)
        yield Case("maps.rollout", name, {}, _cache)
        yield Case("maps.components", name, {}, _layer)
        yield Case("maps.codes", name, {"atoms": [0, 2]}, _layer)
    yield Case("maps.attention", "crate", {"query": [1, 2], "scaled": False}, _layer)
    yield Case("maps.attention", "crate", {"cls_key": False, "grid": (3, 4)}, _layer)
    yield Case("maps.contracted", "cbt", {}, _layer)
    yield Case("maps.memberships", "tost", {}, _layer)
    yield Case(
        "maps.windowed", "crate", {"stride": (2, 5), "names": AT, **QUIET},
        lambda name: (subject(name)[0], torch.randn(1, 3, 8, 30, generator=_seed()), _read),
    )  # fmt: skip
    for name in ("crate", "crate-lm", "gpt-baseline", "aot", "induction"):
        yield Case("circuits.logit_lens", name, {"count": 3, "sample": 1}, _cache)
        yield Case("circuits.head_scores", name, {}, _targets)
        yield Call("cache methods", name, partial(_methods, name))
    for name in ("crate-alpha", "gpt-baseline", "aot", "gpt-induction"):
        yield Case("circuits.logit_attribution", name, {"target": 1, "minus": 2}, _cache)
    at = {"target": 1, "position": 3}
    yield Case("circuits.logit_attribution", "gpt-baseline", at, _cache)
    yield Case("circuits.repeat_targets", "induction", {"offsets": (0, 1, 2)}, _inputs)
    yield Case("viz.layers", "crate", {}, _swept)
    yield Case("viz.heads", "crate", {}, partial(_swept, statistic="attention.entropy"))
    yield Call("figures of results", "crate", _figures)


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
    compared = ci.compare(*_both("crate"), untrained=0, **QUIET)
    swaps = ci.circuits.concentration(model, data, k=(2,), rotations=2, untrained=0, **QUIET)
    return {
        "ablation": ci.viz.head_ablation(ablated),
        "compared": ci.viz.compare(compared, "compression.rate_mid"),
        "concentration": ci.viz.concentration(swaps),
        "map": ci.viz.attention_on_image(cached("crate")[1], 1, cached("crate")[2]),
        "heatmap": ci.viz.heatmap(torch.arange(6.0).view(2, 3), signed=True, unit="nats"),
        "steps": ci.viz.steps(_watch(model, data), "compression.rate_mid"),
    }


def _edits() -> Iterator[Case]:
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
        yield Case("surgeries.replaced", "crate", options, _model, after)
    for name, options in (
        ("induction", {"position": 12}), ("fashion", {}), ("crate-lm", {"target": (1, 2)}),
        ("tost", {"freeze": ("norm",)}), ("cbt", {"nodes": 0.5, "edges": 0.8, "seed": 1}),
        ("gpt-baseline", {"most": 9}), ("aot", {}),
    ):  # fmt: skip
        yield Case("graph", name, options, _one, _graph_parts)
    yield Case("graph", "fashion", {"names": None}, _one_named, _tables)


def _sae_folder(name: str) -> tuple:
    return (TESTS / "fixtures" / "sae_lens" / name,)


def _parts(model: Any) -> Any:
    return dict(model.state_dict())


def _model(name: str) -> tuple:
    return (subject(name)[0],)


def _one(name: str) -> tuple:
    return subject(name)[0], inputs(name, 1)


def _one_named(name: str) -> tuple:
    return _one(name)


def _tables(result: Any) -> Any:
    return result.tables


def _twice(model: Any, batch: torch.Tensor) -> None:
    model(batch * 2)


def _probe() -> ci.Probe:
    def mean(block: Any, acts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"mean": acts["hook_resid_pre"].mean(dim=(1, 2))}

    return ci.Probe("mine", ("hook_resid_pre",), mean, {"mean": ("", None, None, "a mean")})


class Call(Case):
    """A case that is a call of its own; verb: its name."""

    def __init__(self, verb: str, name: str, call: Callable[[], Any]) -> None:
        super().__init__(verb, name, {}, None, None)
        object.__setattr__(self, "call", call)

    def __call__(self, **more: Any) -> Any:
        """Returns what the call gives."""
        return self.call()


def every_way() -> Iterator[tuple[Case, str]]:
    """Yields streamed cases, each with another way to run it that gives the same numbers."""
    for name in ("crate", "crate-lm"):
        for verb in SMALL:
            for way in ("resumed", "shards", "sizes", "ray"):
                # ties in a list of largest values are broken batch by batch
                tied = verb == "circuits.atom_names" and way == "sizes"
                if not tied and (verb not in ("segment", "linear_probe") or name == "crate"):
                    yield streamed(verb, name), way


def in_another_way(case: Case, way: str, folder: Path) -> Any:
    """Returns what a streamed case gives in another way.

    resumed: stopped at its fourth forward and called again. shards: two processes in turn, until
    one of them returns the result. ray: on a Ray cluster. sizes: other batches and chunks.
    """
    if way == "sizes":
        return replace(case, options=case.options | {"batch_size": 3, "chunk_size": 5})()
    if way == "ray":
        return case(out=folder, engine="ray")
    if way == "shards":
        answers = (case(out=folder, shard=f"{turn % 2}/2") for turn in range(12))
        return next(answer for answer in answers if answer is not None)
    kind, forwards = type(subject(case.subject)[0]), iter(range(4))
    forward = kind.forward

    def stopping(*args: Any, **kwargs: Any) -> Any:
        if next(forwards, None) is None:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with patch.object(kind, "forward", stopping), suppress(KeyboardInterrupt):
        case(out=folder)
    return case(out=folder)
