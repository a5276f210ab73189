"""What does reading a text both ways change in a CRATE: its rates, its zeros, its concentration?

    python demos/labs/both_ways.py [--quick | --full] --out DIR

A CRATE-BERT that fills masked tokens is trained beside the same network with a causal mask, which
answers the next token (`attention_mask="causal"`). Equal: text (embedded:held-out-text, its last
part kept for measuring), tokenizer, sizes, start, windows, steps, AdamW, and the places that are
scored (15 % of the tokens, drawn by seed and step). Not equal: the mask; and the objective, which
changes what stands at a scored place. The masked text has [MASK] there (80 %), a random token
(10 %) or the token itself (10 %), and the causal one is unchanged.

The start was chosen by pilots (seed 0) so that the masked network learns more than how common words
are: from the library's start it had not in 800 steps. Positions are waves, three times as large, U
is twice as wide as in attending.py, and output maps are ten times as large. A network of three
layers did not in 1,000 steps, so these have two.
"""

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from drawing import curve, panels, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, result, values
from torch import Tensor

import crate_interp as ci

sys.path.append(str(Path(__file__).parent.parent))

from attending import groups, positions, self_scale  # noqa: E402
from training import draws, learning_rate, one_step  # noqa: E402

SEEDS = {"quick": (1, 2, 3), "full": (1, 2, 3, 4, 5)}
KINDS = {"causal": "causal", "both ways": "meant"}  # -> cfg.attention_mask
WIDTH, LAYERS, HEADS, N_CTX, WORDS = 64, 2, 4, 32, 1024
STEPS, BATCH, RATE, DECAY, MASKED = 1500, 64, 3e-3, 0.01, 0.15
HELD, MEASURED, NODES = 320, 64, 16  # windows; nodes to swap
FRAMES = ("stream", "read", "unit")
SHOWN = {
    "R": "R after a layer, unit scaling (nats)",
    "R^c": "R^c after a layer, unit scaling (nats)",
    "zeros": "zeros in the code (share)",
    "carried": f"{NODES} codes carry of an answer (share)",
}


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on `[n]`, and windows to measure `[window, pos]`."""
    rows = ci.load("crate-tiny-lm").windows(ci.data.embedded("held-out-text")["text"])
    whole = rows[:, 1:].flatten()
    windows = whole[: len(whole) // N_CTX * N_CTX].view(-1, N_CTX)
    return windows[:-HELD].flatten(), windows[-HELD:]


def make(kind: str, seed: int) -> ci.HookedCrateLM:
    """Returns a network before training; both kinds have the same weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        size: dict[str, Any] = dict(d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, n_ctx=N_CTX)
        cfg = ci.CrateConfig(
            family="crate-bert", attention_mask=KINDS[kind], d_vocab=WORDS + 1, **size
        )
        model = ci.HookedCrateLM(cfg)
        model.pos_embed.copy_(3 * positions(model))
        for block in model.blocks:
            block.attn.u_proj.weight.mul_(2 * self_scale(model))  # type: ignore[union-attr]
            block.attn.out_proj.weight.mul_(10)  # type: ignore[union-attr]
    return model.eval()


def loss_of(model: ci.HookedCrateLM, tokens: Tensor, draw: torch.Generator) -> Tensor:
    """Returns the loss on places that are drawn; both kinds are scored on the same places."""
    scored, kind = (torch.rand(tokens.shape, generator=draw) for _ in range(2))
    scored = scored < MASKED
    scored[:, 0] = False  # no token comes before it
    other = torch.randint(WORDS, tokens.shape, generator=draw)
    if model.cfg.causal:
        return F.cross_entropy(model(tokens)[:, :-1][scored[:, 1:]], tokens[scored])
    masked = torch.where(kind < 0.8, WORDS, torch.where(kind < 0.9, other, tokens))
    return F.cross_entropy(model(torch.where(scored, masked, tokens))[scored], tokens[scored])


def trained(kind: str, seed: int) -> ci.HookedCrateLM:
    """Returns a network after its training."""
    text, model = texts()[0], make(kind, seed).train()
    optimizer = torch.optim.AdamW(groups(model, DECAY), lr=RATE, betas=(0.9, 0.98))
    for step in range(STEPS):
        draw = draws(seed, step)
        begins = torch.randint(len(text) - N_CTX, (BATCH, 1), generator=draw)
        loss = loss_of(model, text[begins + torch.arange(N_CTX)], draw)
        one_step(model, [optimizer], loss, learning_rate(step, STEPS, RATE))
    return model.eval()


def at_unit() -> ci.Probe:
    """Returns a probe of R and R^c after a layer: tokens of unit mean square, orthonormal U."""
    rates = ci.probes.compression(at=("post",), basis="orthonormal")

    def measure(block: Any, acts: Any) -> dict[str, Tensor]:
        z = acts["hook_resid_post"]
        z = z * (z[0].numel() ** 0.5 / z.flatten(1).norm(dim=1)[:, None, None])
        found = rates.measure(block, {"hook_resid_post": z})
        return {"R": found["rate_post"], "R^c": found["subspace_rate_post"]}

    said = {name: ("nats per token", None, None, "At unit mean square.") for name in ("R", "R^c")}
    return ci.Probe("rates", ("hook_resid_post",), measure, said, subspaces=True)


def measured(kind: str, seed: int) -> list[list]:
    """Returns the rows of numbers of a network, trained and untrained, on unmasked windows."""
    windows, rows = texts()[1], []
    for words, model in (("", trained(kind, seed)), (", untrained", make(kind, seed))):
        setting = f"{kind}{words}"
        with torch.no_grad():
            rows.append(["loss", setting, seed, 0, float(loss_of(model, windows, draws(0, 0)))])
        probes = [at_unit(), "frames", "sparsity"]
        swept = ci.sweep(model, windows[:MEASURED], probes=probes, controls=0, progress=False)
        wanted = {"rates.R": "R", "rates.R^c": "R^c", "sparsity.zero_fraction": "zeros"}
        wanted |= {f"frames.change_{frame}": frame for frame in FRAMES}
        for row in swept.layers().to_dict("records"):
            name = wanted.get(f"{row['probe']}.{row['statistic']}")
            rows += [[name, setting, seed, row["layer"], row["mean"]]] if name else []
        audit = ci.audit(model, windows[:MEASURED], untrained=1, grid=False, progress=False)
        rows += [[row["claim"], f"{setting}: {row['verdict']}", seed, row["layer"], 1.0]
                 for row in audit.claims().to_dict("records")]  # fmt: skip
        rows += [] if words else swapped(model, windows, setting, seed)
    return rows


def swapped(model: ci.HookedCrateLM, windows: Tensor, setting: str, seed: int) -> list[list]:
    """Returns the rows of what codes carry of an answer: the next token, or one masked token."""
    data: Any = windows
    if not model.cfg.causal:
        hidden = torch.arange(N_CTX) == N_CTX // 2
        data = (windows.where(~hidden, WORDS), windows.where(hidden, -100))
    how: dict[str, Any] = dict(k=[NODES], untrained=0, limit=MEASURED, progress=False)
    shares = ci.circuits.concentration(model, data, **how).table("shares")
    names = {"native": "carried", "rotated": "carried, rotated"}
    return [
        [names[row["basis"]], setting, seed, row["layer"], row["carried"]]
        for row in shares.to_dict("records") if row["basis"] in names
    ]  # fmt: skip


def mean_of(rows: list[list], name: str, setting: str) -> np.ndarray:
    """Returns the mean over layers of a quantity, by seed."""
    return values(rows, name, setting).reshape(-1, LAYERS).mean(axis=1)


def gap(rows: list[list], name: str, words: str = "") -> np.ndarray:
    """Returns what both ways has more than causal, a mean over layers, by seed."""
    both, causal = (mean_of(rows, name, f"{kind}{words}") for kind in ("both ways", "causal"))
    return both - causal


def apart(rows: list[list], seeds: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the share of the audit's verdicts in which the two kinds agree, by seed.

    Then the share in which two seeds of one kind agree, a mean over the other seeds and kinds.
    """
    said: dict[Any, dict] = {(kind, seed): {} for kind in KINDS for seed in seeds}
    for name, setting, seed, layer, _ in rows:
        kind, _, verdict = setting.partition(": ")
        if verdict and kind in KINDS:
            said[kind, seed][name, layer] = verdict

    def agree(a: Any, b: Any) -> float:
        return float(np.mean([said[a][key] == said[b][key] for key in said[a]]))

    across = [agree(("causal", seed), ("both ways", seed)) for seed in seeds]
    within = [
        np.mean([agree((kind, a), (kind, b)) for kind in KINDS for b in seeds if b != a])
        for a in seeds
    ]
    return np.array(across), np.array(within)


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims on what reading both ways changes."""
    seeds = SEEDS[form]
    jobs = {f"{kind}-{seed}": partial(measured, kind, seed) for seed in seeds for kind in KINDS}
    rows, claims = steps.rows(jobs, "trainings"), []
    for rule, name in (("rate", "R"), ("subspace_rate", "R^c"), ("zeros", "zeros")):
        found, begun = gap(rows, name), gap(rows, name, ", untrained")
        cases = {"trained": ends_of(found), "beyond untrained": ends_of(found - begun)}
        causal = mean_of(rows, name, "causal").mean()
        claims.append(
            claim(f"both_ways.{rule}", found, cases=cases, baseline=begun.mean(), causal=causal)
        )
    by_frame = {frame: gap(rows, frame) for frame in FRAMES}
    begun, causal = gap(rows, "read", ", untrained").mean(), mean_of(rows, "read", "causal").mean()
    cases = {frame: ends_of(each) for frame, each in by_frame.items()}
    claims.append(claim("both_ways.compresses", by_frame["read"], cases=cases, baseline=begun,
                        causal=causal))  # fmt: skip
    found, turned = gap(rows, "carried"), gap(rows, "carried, rotated")
    cases = {"native": ends_of(found), "beyond rotated": ends_of(found - turned)}
    claims.append(claim("both_ways.carried", found, cases=cases, baseline=turned.mean(),
                        causal=mean_of(rows, "carried", "causal").mean()))  # fmt: skip
    across, within = apart(rows, seeds)
    claims.append(claim("both_ways.audit", across - within, baseline=0.0, causal=within.mean(),
                        across=across.mean()))  # fmt: skip
    loss = {kind: values(rows, "loss", kind).mean() for kind in KINDS}
    return result("both_ways", form, claims, rows, loss=loss, across=across.mean())


def draw(found: LabResult) -> Any:
    """Draws each quantity by layer, both kinds, trained and untrained."""
    figure, axes = panels(len(SHOWN), size=(14, 3.6))
    for axis, (name, words) in zip(axes, SHOWN.items(), strict=True):
        for at, kind in enumerate(KINDS):
            for more, style in (("", "o-"), (", untrained", "--")):
                table = found.numbers(name, setting=f"{kind}{more}")
                if len(table):
                    curve(axis, table, style, label=f"{kind}{more}", color=f"C{at}")
        tidy(axis, legend=8 * (axis is axes[0]), xlabel="layer", title=words)
        axis.set_xticks(range(LAYERS))
    return titled(figure, found, seeds=found.numbers("loss")["seed"].nunique())


if __name__ == "__main__":
    main(run, draw)
