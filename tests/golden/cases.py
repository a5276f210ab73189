"""What the golden table holds: each public verb on each model, with each of its options.

A case is a verb, a subject (`subjects.py`) and options; `answer` calls it. `ways` are other ways to
run a streamed verb that have to give the same numbers.
"""

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import crate_interp as ci
import foreign
from crate_interp.bridge.adapter import build
from golden.case import QUIET, Call, Case, cache_of, coders, model_of
from golden.idioms import COMMANDS, IDIOMS, exit_and_files, idiom, lines
from golden.single import edits_of_a_pass, looks, two_networks, watched
from golden.subjects import BRIDGED, EMBEDDED, TINY, N, cached, inputs, subject

TESTS = Path(__file__).parent.parent
SIZES = {"batch_size": 2, "chunk_size": 4}
SMALL: dict[str, dict[str, Any]] = {  # streamed verb -> what makes it small
    "sweep": {"controls": 3},
    "atoms": {"top": 3},
    "atlas": {"top": 2, "ablate": 2},
    "ablate_heads": {},
    "segment": {"untrained": 1},
    "linear_probe": {},
    "surgery": {"directions": 2, "mixes": (0.5,)},
    "unroll": {"steps": (1, 3)},
    "audit": {"untrained": 1, "grid": False, "lasso_tokens": 2},
    "circuits.composition": {"through": "data", "draws": 100},
    "circuits.concentration": {"k": (2, 5), "rotations": 2, "untrained": 1},
    "circuits.atom_names": {},
    "circuits.head_meaning": {"untrained": 1},
}
CRATE = {
    "family": "crate",
    "n_heads": 4,
    "d_model": 32,
    "n_layers": 3,
    "image_size": 32,
    "patch_size": 8,
}
FORTY = [index % 2 for index in range(40)]


def streamed(verb: str, name: str, **options: Any) -> Case:
    """Returns the small form of a streamed verb on a subject."""
    few = 60 if verb == "linear_probe" else 6 if name in ("pictures", "lm") else 8
    limit = {"limit": few} if name in EMBEDDED else {}
    return Case(verb, name, SMALL[verb] | limit | SIZES | QUIET | options)


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
    yield from looks()
    yield from edits_of_a_pass()
    for line in lines(IDIOMS):
        yield Call("idiom", line, partial(idiom, line))
    for line in lines(COMMANDS):
        yield Call("crate-interp", line, partial(exit_and_files, line))


def _models() -> Iterator[Case]:
    for name in (*EMBEDDED, *TINY, "clipa", "crate-mae", *BRIDGED, "masks"):
        yield Call("logits, cache, gradient", name, partial(_forward, name))
    for name in ("crate", "tost", "cbt", "crate-lm", "clipa", "crate-mae"):
        yield Case("probe", name, {}, cache_of)
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
        return {"refused": np.array([type(error).__name__])}
    return {"tensors": model, "config": _config(model)}


def _streamed_verbs() -> Iterator[Case]:
    for verb in SMALL:
        for name in (*EMBEDDED, *TINY, "masks"):
            heavy = verb in ("audit", "circuits.concentration", "surgery", "atlas")
            if not heavy or name in ("fashion", "induction", *TINY):
                yield streamed(verb, name)
    for name in ("crate", "crate-lm", "tost"):
        yield Case("compare", name, {"untrained": 1, **QUIET}, two_networks)
    for name in ("crate", "crate-lm"):
        yield Case("saes.evaluate", name, SIZES | QUIET, coders)


def _options() -> Iterator[Case]:
    """Each option that no other case has."""
    sweep = partial(streamed, "sweep")
    yield sweep("crate-mae", blocks="decoder_blocks")
    yield sweep("crate", forward=_twice)
    yield sweep("crate", precision="bfloat16")
    yield sweep("crate", probes=["objective", "ranks", "frames", "activity"])
    yield sweep("crate", probes=["ladder", "sinks"])
    yield streamed("circuits.head_meaning", "masks", parts={"object": 1}, query=2, seed=1)
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
    yield streamed("ablate_heads", "crate", screen=4)
    yield streamed("surgery", "crate", replacements=["gradient", 1], seed=1, eps=0.3)
    yield streamed("surgery", "crate", labels=FORTY[:N])
    yield streamed("unroll", "crate-lm", eta=0.2, lambd=0.3)
    yield streamed("unroll", "crate", of="attention", eps=0.3, seed=1, labels=FORTY[:N])
    yield streamed("surgery", "crate-lm", replacements=["flat_norms", "ladder_only"], seed=1)
    yield streamed("surgery", "crate", replacements=["permuted_norms", "masked_diagonal"])
    yield streamed("circuits.composition", "crate", role="k", seed=1)
    yield streamed("circuits.concentration", "crate-lm", point="stream", rotations=3)
    yield streamed("circuits.atom_names", "fashion", seed=1)
    yield Case("circuits.composition", "crate", {"draws": 100}, lambda name: (subject(name)[0],))
    yield Case(
        "compare", "crate", {"names": ("a", "b"), "probes": "sparsity", **QUIET}, two_networks
    )
    yield Case("saes.evaluate", "crate", {"labels": FORTY[:N], "seed": 2} | SIZES | QUIET, coders)
    mask = torch.ones(N, 11, dtype=torch.long)
    mask[::2, 8:] = 0
    yield Case("saes.evaluate", "crate-lm", {"attention_mask": mask} | SIZES | QUIET, coders)
    for name in ("crate", "crate-lm"):
        yield Call("watch", name, partial(watched, *subject(name)))
    options = {"start": 5, "batch_size": 2, "probes": "sparsity", "callback": None}
    yield Call("watch from step 5", "crate", partial(watched, *subject("crate"), **options))
    yield Call("SRRRegularizer", "crate", partial(_regularized, "crate"))
    for subspaces in ("value", "key"):
        yield Case("from_bridge", "gpt2", {"subspaces": subspaces}, _bridge, _logits)
    yield Case("to_bridge", "crate", {}, model_of, _logits)


def _bridge(name: str) -> tuple:
    return (build(foreign.network(name)),)


def _logits(model: Any) -> Any:
    name = "gpt2" if hasattr(model, "cfg") and model.cfg.d_model == foreign.D else "crate"
    return model(inputs(name)), ci.probe(
        model.run_with_cache(inputs(name))[1]
    ) if name != "crate" else None


def _twice(model: Any, batch: torch.Tensor) -> None:
    model(batch * 2)


def _probe() -> ci.Probe:
    def mean(block: Any, acts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"mean": acts["hook_resid_pre"].mean(dim=(1, 2))}

    return ci.Probe("mine", ("hook_resid_pre",), mean, {"mean": ("", None, None, "a mean")})


def every_way() -> Iterator[tuple[Case, str]]:
    """Yields streamed cases, each with another way to run it that gives the same numbers."""
    for name in ("crate", "crate-lm"):
        for verb in SMALL:
            for way in ("resumed", "shards", "sizes", "ray"):
                # ties in a list of largest values are broken batch by batch
                tied = verb == "circuits.atom_names" and way == "sizes"
                if not tied and (verb not in ("segment", "linear_probe") or name == "crate"):
                    yield streamed(verb, name), way


def in_double(name: str) -> tuple[Any, Any]:
    """The subject, its model in float64; no two texts begin alike, whose codes would be ties."""
    model, data = subject(name)
    if torch.is_tensor(data) and not data.is_floating_point():
        data = torch.cat([torch.arange(len(data))[:, None], data[:, 1:]], dim=1)
    return copy.deepcopy(model).double(), data


def in_another_way(case: Case, way: str, folder: Path) -> Any:
    """Returns what a streamed case gives in another way.

    resumed: stopped at its fourth forward and called again. shards: two processes in turn, until
    one of them returns the result. ray: on a Ray cluster. double: in float64. sizes: the same in
    other batches and chunks, whose float32 rounds in other places.
    """
    if way in ("double", "sizes"):
        other = {"batch_size": 3, "chunk_size": 5} if way == "sizes" else {}
        return replace(case, options=case.options | other, arguments=in_double)()
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
