"""What people type: TransformerLens' idioms, the README's lines, and command lines."""

import contextlib
import copy
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformer_lens import ActivationCache, patching
from transformer_lens import utilities as utils

import command
import crate_interp as ci
from golden.subjects import cached, inputs, subject

# expressions in the names of `_names`
IDIOMS = """
model(x)
model(x, stop_at_layer=1)
model(model(x, stop_at_layer=1), start_at_layer=1)
lm(tokens, return_type="loss")
lm(tokens, return_type="both")
lm(tokens, return_type="loss", loss_per_token=True)
model.run_with_cache(x, names_filter="blocks.1.attn.hook_z")[1]["z", 1]
model.run_with_cache(x, names_filter=lambda name: name.endswith("hook_post"))[1]
model.run_with_cache(x, stop_at_layer=2)[0]
model.run_with_cache(x, return_cache_object=False)[1]["blocks.0.hook_resid_pre"]
model.run_with_cache(x, pos_slice=0)[1]["resid_post", 1]
lm.run_with_cache("Tom", return_type="loss")[0] if lm.tokenizer else 0
model.run_with_hooks(x, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z * 0)])
model.run_with_hooks(x, fwd_hooks=[(lambda name: "mlp.hook_post" in name, halve)])
model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_z", ci.hooks.edit.zero(heads=2))])
hooked(model, x)
added(model, x)
cache["pattern", 0]
cache["blocks.2.hook_resid_post"]
cache["embed"]
cache["resid_mid", -1]
cache["post", 1, "mlp"]
cache.stack_activation("resid_pre")
cache.accumulated_resid(layer=-1, incl_mid=True, return_labels=True)[0]
cache.accumulated_resid(layer=-1, apply_ln=True, pos_slice=-1)
cache.apply_ln_to_stack(cache.accumulated_resid(), layer=-1)
alpha_cache.decompose_resid(layer=-1, return_labels=True)[0]
alpha_cache.stack_head_results(layer=2, pos_slice=0)
alpha_cache.logit_attrs(alpha_cache.decompose_resid(layer=-1), tokens=torch.tensor([1, 2, 3]))
alpha_cache.get_full_resid_decomposition(expand_neurons=False)
alpha_cache.compute_head_results()
gpt_cache.stack_neuron_results(2)
cache.remove_batch_dim()["resid_pre", 0] if len(cache["resid_pre", 0]) == 1 else 0
cache.apply_slice_to_batch_dim(1)["resid_pre", 0]
len(cache), sorted(cache)[:3]
cache.to("cpu")["resid_pre", 0]
ActivationCache(dict(cache), model)["resid_pre", 0]
utils.get_act_name("pattern", 1)
model.W_U
model.b_U
lm.W_E
lm.W_pos
lm.W_Q
lm.W_O
model.blocks[0].attn.U
model.blocks[0].mlp.D
lm.to_tokens("ROMEO: to be")
lm.to_string(tokens[0])
lm.to_str_tokens("ROMEO: to be")
lm.to_single_token("a")
lm.generate(tokens[:1, :5], max_new_tokens=4, do_sample=False, verbose=False)
lm.generate(tokens[:1, :5], max_new_tokens=4, temperature=0.7, top_k=5, verbose=False)
lm.generate(tokens[:1, :5], max_new_tokens=4, top_p=0.9, use_past_kv_cache=False, verbose=False)
lm.loss_fn(lm(tokens), tokens)
lm.tokens_to_residual_directions(torch.tensor([1, 2]))
model.tokens_to_residual_directions(torch.tensor([1, 2]))
patching.get_act_patch_resid_pre(gpt, gpt_tokens, gpt_cache, metric)
patching.get_act_patch_attn_head_out_all_pos(gpt, gpt_tokens, gpt_cache, metric)
ci.hooks.every_layer(model, "attn.hook_z")
read(model, x)
ci.load("crate-tiny-pictures").preprocess(np.full((2, 3, 64, 64), 100, dtype=np.uint8))
model.cfg.to_dict()
ci.CrateConfig.from_dict(model.cfg.to_dict()) == model.cfg
ci.list_models()[["name", "family", "sha256"]]
ci.load("crate-tiny-fashion", revision="step-0").W_U
ci.load(dict(model.state_dict()), config=model.cfg)(x)
copy.deepcopy(model).double()(x.double())
swept.headline()
swept.samples()
swept.heads()
swept.table("weights")
swept.merge(part(swept, x)).layers()
swept.to_csv()
swept.to_markdown()
swept.to_latex()
swept.digest().partition(":")[0]
type(swept).load(saved(swept)).layers()
replayed(model, x)
"""

FILE = Path(__file__).parent.parent / "fixtures" / "crate" / "model_best.pth.tar"
# {f} is a published file, {out} is a folder; what is written there is part of the answer
COMMANDS = """
models --json
sweep {m} --data {d} --limit 8 --probes sparsity --controls 2 --batch-size 3 --chunk-size 4 \
--format csv
sweep {m} --data {d} --limit 4 --out {out} --threads 1 --verbose --format markdown
sweep {m} --data {d} --limit 4 --out {out} --restart --tag x --precision bfloat16 --quiet
sweep {m} --data {d} --limit 8 --chunk-size 4 --shard 0/2 --out {out}
sweep {m} --data {d} --limit 4 --workers 1 --skip-bad --revision step-0
sweep {m} --data {d} --limit 4 --groups label
sweep {m} --data {d} --limit 4 --blocks blocks --probes sparsity,attention --controls 0 --out {out}
audit {m} --data {d} --limit 4 --untrained 0 --no-grid --lasso-tokens 2 --out {out}
atoms {m} --data {d} --limit 4 --layers 1 --layers 3 --dense 0.3 --out {out}
segment crate-tiny-pictures --data embedded:pictures --limit 4 --query 2 --untrained 0 --out {out}
graph {m} --data {d} --nodes 0.5 --edges 0.8 --most 20 --threads 1 --out {out}
sweep {m} --data {d} --limit 4 --dry-run --out {out}
audit {m} --data {d} --limit 4 --untrained 1 --no-grid --eps 0.2 --seed 1 --format csv --out {out}
compare {m} {m}@step-0 --data {d} --limit 4 --untrained 0 --probes sparsity --out {out}
segment crate-tiny-pictures --data embedded:pictures --limit 4 --mass 0.5 --fraction 0.4 \
--unscaled --size 64 --untrained 0 --out {out}
atoms {m} --data {d} --limit 4 --top 2 --coactivation --out {out}
atlas {m} --data {d} --limit 4 --top 2 --ablate 2 --out {out}
ablate {m} --data {d} --limit 4 --how zero --metric accuracy --head L1H0 --out {out}
ablate {m} --data {d} --limit 4 --screen 3 --address runs/mine --out {out}
concentration {m} --data {d} --limit 12 --k 2 --k 4 --point stream --rotations 2 --untrained 0 \
--out {out}
explore {m} --image {picture} --out {out}
explore crate-tiny-lm --text girl --out {out}
explore {m} --data {d} --sample 3 --size 40 --out {out}
explore {m} --data {d} --sample 1 --without --circuit {circuit} --out {out}
graph {m} --data {d} --sample 2 --target 1 --freeze norm --most 20 --seed 1 --out {out}
graph crate-tiny-induction --data embedded:repeats --position 12 --no-tests --out {out}
why {m} --data {d} --head L1H0 --query 0 --key 3 --sample 1 --out {out}
report {m} --data {d} --limit 4 --untrained 1 --probes sparsity --audit --out {out}
convert {m} --config eta=0.2 --out {out}/converted
convert {m} --out {out}/converted --debug
convert {f} --family crate --config n_heads=4 --rename s/^mine// --out {out}/converted
inspect {f} --family crate --config n_heads=4 --rename s/^mine// --file x --revision main
inspect {f} --config n_heads=4
convert {f} --weights ema --file weights.pt --revision main --out {out}/converted
sweep {m} --data {d} --limit 4 --dtype float64 --controls 0 --engine local --out {out}
sweep {m} --data {d} --probes sparcity
sweep nothing --data {d}
sweep {m} --data embedded:nothing
sweep {m} --data {d} --limit 0
sweep {m}
sweep {m} --data {d} --device nowhere
graph {m} --data {d} --sample 999 --out {out}
nothing
"""


def lines(text: str) -> list[str]:
    """Returns the lines of a table."""
    return [line for line in text.replace("\\\n", "").strip().splitlines() if line]


@cache
def _names() -> dict[str, Any]:
    model, cache, x = cached("crate")
    lm = subject("lm")[0]
    tokens = inputs("lm")
    gpt = subject("gpt-baseline")[0]
    gpt_tokens = inputs("gpt-baseline")
    swept = ci.sweep(model, x, controls=0, progress=False)
    return {
        "ci": ci, "copy": copy, "np": np, "torch": torch, "utils": utils, "patching": patching,
        "ActivationCache": ActivationCache, "model": model, "x": x, "cache": cache,
        "lm": lm, "tokens": tokens, "gpt": gpt, "gpt_tokens": gpt_tokens, "swept": swept,
        "alpha_cache": cached("crate-alpha")[1], "gpt_cache": cached("gpt-baseline")[1],
        "halve": lambda tensor, hook: tensor / 2, "metric": lambda logits: logits[:, -1, 3].mean(),
        "hooked": _hooked, "added": _added, "read": _read, "part": _part, "saved": _saved,
        "replayed": _replayed,
    }  # fmt: skip


def _hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
    with model.hooks(fwd_hooks=[("hook_embed", lambda tensor, hook: tensor + 1)]):
        return model(x)


def _added(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.add_hook("hook_embed", lambda tensor, hook: tensor - 1)
    try:
        return model(x)
    finally:
        model.reset_hooks()


def _read(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with ci.hooks.read(model, ["attn.hook_z"], lambda layer, acts: acts["attn.hook_z"]) as found:
        model(x)
    return {str(layer): tensor for layer, tensor in found.items()}


def _part(swept: Any, x: torch.Tensor) -> Any:
    model = subject("crate")[0]
    return ci.sweep(model, x + 1, controls=0, progress=False)


def _saved(result: Any) -> Path:
    place = Path(tempfile.mkdtemp())
    result.save(place)
    return place


def _replayed(model: Any, x: torch.Tensor) -> Any:
    """Probes on activations that were stored."""
    with tempfile.TemporaryDirectory() as place:
        points = [f"blocks.{layer}.mlp.hook_post" for layer in range(3)]
        ci.store(model, x, points=points, out=place, dtype=torch.float32, progress=False)
        store = ci.open_store(place)
        return ci.sweep(model, store, probes="sparsity", controls=0, progress=False)


def idiom(line: str) -> Any:
    """Returns what an expression gives, or the kind of its error."""
    torch.manual_seed(0)
    try:
        return eval(line, dict(_names()))
    except Exception as error:
        return np.array([f"{type(error).__name__}"])


def exit_and_files(line: str) -> dict[str, Any]:
    """Returns the exit code of a command, the numbers of its table, and the tables it wrote."""
    with tempfile.TemporaryDirectory() as place:
        out, circuit = Path(place) / "out", Path(place) / "circuit.json"
        ci.circuits.Circuit([ci.circuits.Edge("L0H1", "L1H0", 0.5)]).save(circuit)
        picture = Path(place) / "1.png"
        Image.new("L", (28, 28), 99).save(picture)
        fields = {
            "picture": picture,
            "m": "crate-tiny-fashion",
            "d": "embedded:fashion",
            "f": FILE,
            "out": out,
        }
        with contextlib.chdir(place):  # a command without --out writes there
            done = command.run(*line.format(circuit=circuit, **fields).split())
        cut = r"(?:\||,(?! ))"  # between the cells of a row; a comma in a sentence has a space
        rows = re.findall(rf"^.*{cut}.*{cut}.*{cut}.*$", done.stdout, flags=re.MULTILINE)
        table = [float(number) for row in rows for number in re.findall(r"-?\d+\.\d+", row)]
        files = sorted(path.name for path in out.rglob("*") if path.suffix in (".html", ".png"))
        words = {"exit": np.array([str(done.returncode)]), "files": np.array(files)}
        return words | {"table": np.array(table), "out": out}
