"""Mutations of valid files in every published layout.

Each loads, or is refused with CheckpointError, and none executes anything.

    python tests/fuzz.py 10000

runs that many for each layout in one process and prints the counts; tests/test_hostile.py runs 30
and 500, among the slow tests. A mutation flips bits, cuts, repeats, swaps or drops stretches, or
overwrites a number in a header; half of them aim at the first kilobytes, where headers and pickles
are. Torch files are compared with torch's own restricted reader too (tests/fuzz_torch.py).
"""

import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

import crate_interp as ci
import fuzz_torch
from conftest import HEADS, make, without_digests
from crate_interp.checkpoints.layouts import cbsa, tost
from published import GIVEN, SIZES, published
from reference import published_layout

HERE = Path(__file__).parent / "fixtures"
BYTES = 2**30  # a file of kilobytes may not make the reader ask for so much
TIMES, LEAST = 1000, 0.005  # of the processor time that the whole file takes, or of 5 ms
WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "os.remove",
    "pty.spawn",
)
_EXTREME = (0, 1, 255, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


def _family(folder, shape):
    """Returns the same of CBT and ToST, whose keys are those that their layouts list."""
    found = {}
    for name, layout in (("cbt", cbsa.CBT), ("tost", tost.VISION)):
        size = shape | dict(image_size=(8, 8), patch_size=(2, 2))
        model, path = make(name, **size), folder / f"{name}.pth"
        filled, keys = model.state_dict(), layout.key_map({"n_layers": 1, "class_layers": 2})
        weights = {key: filled[each] for key, each in keys.items() if each in filled}
        for key in ("pos_embeder.token_projection.weight",):
            weights |= {key: weights[key][..., None, None]} if key in weights else {}
        torch.save({"model": weights, "epoch": 3}, path)
        found[name] = (path, path, dict(n_heads=HEADS, image_size=(8, 8)))
    return found


def originals(folder):
    """Returns layout -> (file to mutate, what to load, fields to give)."""
    found = {}
    shape = dict(d_model=10, n_heads=5, d_head=2, n_layers=1, n_classes=3)
    for name, family, over in (
        ("crate", "crate", {}),
        ("crate demo", "crate", {"d_features": 4}),
        ("crate-alpha", "crate-alpha", {}),
    ):
        path = folder / f"{name}.pth"
        weights = published_layout(make(family, **shape, **over))
        torch.save(
            {"state_dict": {f"module.{key}": value for key, value in weights.items()}, "epoch": 3}
            if name == "crate"
            else weights,
            path,
        )
        found[name] = (
            path,
            path,
            dict(n_heads=HEADS, image_size=(6, 20))
            | (dict(patch_size=(2, 5)) if family == "crate" else {}),
        )
    for name in ("crate-mae", "crate-lm", "crate-lm-vanilla", "gpt-baseline", "clipa"):
        path = folder / f"{name}.pt"
        torch.save({"model": published(name, n_layers=1, m=11, **SIZES.get(name, {}))}, path)
        found[name] = (path, path, GIVEN[name])
    found |= _family(folder, shape)
    path = folder / "model.safetensors"
    save_file(published("nanochat-crate", n_layers=1, m=11, p=6), path)
    found["nanochat-crate"] = (path, path, GIVEN["nanochat-crate"])
    found["crate-alpha npz"] = _npz(folder)
    sae = folder / "0.pt"
    torch.save(
        {
            "W_enc": torch.randn(5, 7),
            "b_enc": torch.randn(7),
            "W_dec": torch.randn(7, 5),
            "b_dec": torch.randn(5),
        },
        sae,
    )
    found["sae"] = (sae, sae, dict(hook_name="blocks.0.mlp.hook_post"))
    own = make("crate-alpha", **shape).save_pretrained(folder / "own")
    found["own weights"] = (own / "model.safetensors", own, {})
    config = make("crate", **shape).save_pretrained(folder / "own2")
    found["own config"] = (config / "config.json", config, {})
    for file in ("config.json", "tokenizer.pkl"):
        chat = shutil.copytree(HERE / "nanochat_crate_alpha", folder / f"chat {file}")
        found[f"nanochat {file}"] = (chat / file, chat, {})
    saved = ci.load(HERE / "nanochat_crate_alpha").save_pretrained(folder / "saved chat")
    for written in (own, saved):  # digests would refuse every mutation before it is read
        without_digests(written)
    found["tokenizer.json"] = (saved / "tokenizer.json", saved, {})
    old = folder / "legacy.pth"
    torch.save(
        published_layout(make("crate-alpha", **shape)), old, _use_new_zipfile_serialization=False
    )
    found["crate-alpha legacy"] = (old, old, found["crate-alpha"][2])
    return found


def _npz(folder):
    layer, attention = "Transformer/encoderblock_0/", "MultiHeadDotProductSubspaceAttention_0/"
    d, m = 10, 13
    shapes = {
        "pos_embedding": (1, 13, d), "cls": (1, 1, d), "embedding/kernel": (2, 5, 3, d),
        "embedding/bias": (d,), "encoder_norm/scale": (d,), "encoder_norm/bias": (d,),
        "head/kernel": (d, 3), "head/bias": (3,),
        **{f"{layer}LayerNorm_{n}/{leaf}": (d,) for n in (0, 1) for leaf in ("scale", "bias")},
        f"{layer}{attention}proj/kernel": (d, 5, 2), f"{layer}{attention}out/kernel": (5, 2, d),
        f"{layer}OvercompleteISTABlock_0/D": (d, m), f"{layer}OvercompleteISTABlock_0/D1": (d, m),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = {
        f"params/{key}": rng.standard_normal(shape).astype(np.float32)
        for key, shape in shapes.items()
    }
    arrays |= {f"opt/{key}": value * 0 for key, value in arrays.items()}
    path = folder / "crate_alpha.npz"
    np.savez(path, **arrays)
    return path, path, dict(image_size=(6, 20))


def mutated(content, rng, suffix):
    """Returns one mutation of the bytes.

    Of JSON, of the pickle and of arrays, it is sometimes one that a reader may not mind.
    """
    data = bytearray(content)
    place = rng.randrange(min(len(data), 4096) if rng.random() < 0.5 else len(data))
    kind = rng.randrange({".json": 11, ".pkl": 11, ".npz": 8}.get(suffix, 7))
    if kind == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        return bytes(data[: rng.randrange(len(data))])
    elif kind == 3:
        size = rng.choice((1, 2, 4, 8))
        value = rng.choice(_EXTREME) & (256**size - 1)
        data[place : place + size] = value.to_bytes(size, rng.choice(("little", "big")))
    elif kind == 4:
        length = rng.randrange(1, 200)
        data[place:place] = data[place : place + length]
    elif kind == 5:
        del data[place : place + rng.randrange(1, 50)]
    elif kind == 6:
        end = len(data) - 1 - rng.randrange(min(len(data), 2000))  # a zip is read from its end
        data[end] = rng.randrange(256)
    elif suffix == ".npz":  # what lies beside the weights
        data[rng.randrange(content.index(b"opt/"), content.index(b"PK\1\2"))] = rng.randrange(256)
    elif suffix == ".pkl":  # the name of a special token
        letters = [
            index
            for index in range(content.rindex(b"<|bos|>"), len(data))
            if chr(data[index]) in "aestu"
        ]
        data[rng.choice(letters)] = ord("x")
    elif kind < 10:
        data[place:place] = b" "
    else:
        digits = [index for index, byte in enumerate(data) if 48 <= byte <= 57]
        data[rng.choice(digits)] = rng.randrange(48, 58)
    return bytes(data)


def high_water():
    """Returns the most memory this process has held, in kB.

    Not ru_maxrss, which begins at what the parent had when it forked.
    """
    return int(
        next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    )


def load(source, given):
    """Loads the model; if a tokenizer lies beside it, writes a text as tokens and back too."""
    model = ci.load(source, **given)
    if model.cfg.family == "nanochat-crate" and source.is_dir():
        model.to_string(model.to_tokens("the theory", prepend_bos=False))


def timed(source, given):
    """Returns the processor seconds of one load, and whether the file was taken."""
    began, taken = time.process_time(), True
    try:
        load(source, given)
    except ci.CheckpointError as error:
        assert "\n" not in str(error), error
        taken = False
    return time.process_time() - began, taken


def run(name, path, source, given, count, seed=0):
    """Returns how many mutations loaded and were refused, and the seconds of the slowest.

    Raises AssertionError if anything else happens, or if time or memory get out of hand.
    """
    content = path.read_bytes()
    load(source, given)  # the original does; the first call also imports
    own, _ = timed(source, given)
    rng, counts = random.Random(f"{name} {seed}"), Counter()
    slowest = 0.0
    before = high_water()
    for _ in range(count):
        path.write_bytes(mutated(content, rng, path.suffix))
        seconds, taken = timed(source, given)
        counts["loaded" if taken else "refused"] += 1
        slowest = max(slowest, seconds)
    path.write_bytes(content)
    grown = 1024 * (high_water() - before)
    assert slowest < TIMES * max(own, LEAST), f"{name}: {slowest:.1f} s, the file {own:.3f} s"
    assert grown < BYTES, f"{name}: memory grew by {grown} bytes"
    return counts, slowest


def fuzz(count, seed=0, names=None):
    """Returns the counts of every layout, those beside torch, and what was executed (nothing)."""
    executed = []
    watching = [True]
    sys.addaudithook(
        lambda event, args: (
            executed.append(event) if watching and watching[0] and event in WATCHED else None
        )
    )
    results, beside = {}, {}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layouts = originals(Path(place))
        for name, (path, source, given) in layouts.items():
            if names is None or name in names:
                results[name] = run(name, path, source, given, count, seed)
        if names is None:
            beside = fuzz_torch.every_layout(Path(place), layouts, mutated, count, seed)
    watching[0] = False
    return results, beside, [event for event in executed if event != "os.remove"]


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    table, torch_too, ran = fuzz(number, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for layout, (seen, longest) in table.items():
        counted = f"{seen['loaded']} loaded, {seen['refused']} refused, slowest {longest:.2f} s"
        print(f"{layout:20} {number} mutations: {counted}")
    wrong = []
    for layout, kinds in torch_too.items():
        for kind, seen in kinds.items():
            wrong += [
                f"{layout}, {kind}: {what}" for what in seen if what not in ("both", "refused")
            ]
            alone = number - seen["both"] - seen["refused"]
            counted = (
                f"{seen['both']} as torch reads them, {seen['refused']} refused, {alone} wrong"
            )
            print(f"{layout:20} {number} mutations of {kind}: {counted}")
    print(f"executed: {len(ran)}")
    assert not wrong, wrong
    assert not ran and all(seen["loaded"] >= number / 10 for seen, _ in table.values())
