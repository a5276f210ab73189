"""What does reading a text both ways change in a CRATE: its rates, its zeros, its concentration?

    python demos/labs/both_ways.py [--quick | --full] --out DIR

A CRATE-BERT that fills masked tokens is trained beside the same network with a causal mask, which
answers the next token (`attention_mask="causal"`). Equal: text (embedded:held-out-text, its last
part kept for measuring), tokenizer, sizes, start, windows, steps, AdamW, and the places that are
scored (15 % of the tokens, drawn by seed and step). Not equal: the mask; and the objective, which
changes what stands at a scored place. The masked text has [MASK] there (80 %), a random token
(10 %) or the token itself (10 %), and the causal one is unchanged.

The start was chosen by pilots (seed 0, which is not measured), so that the masked network learns
more than how common tokens are: from the library's start it had not in 800 steps, and with three
layers not in 1,000. Positions are waves, three times as large as in attending.py, U is twice as
wide, and output maps are ten times the library's.
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
from crate_interp.stats.verdicts import SHOWN as VERDICTS

sys.path.append(str(Path(__file__).parent.parent))

from attending import groups, positions, self_scale  # noqa: E402
from training import draws, learning_rate, one_step  # noqa: E402

SEEDS = {"quick": (1, 2, 3), "full": (1, 2, 3, 4, 5)}
KINDS = {"causal": "causal", "both ways": "meant"}  # -> cfg.attention_mask
WIDTH, LAYERS, HEADS, N_CTX, WORDS = 64, 2, 4, 32, 1024  # [MASK] is token WORDS
STEPS, BATCH, RATE, MASKED = 1800, 64, 3e-3, 0.15
HELD, MEASURED, PAIRED, NODES = 320, 64, 128, 16  # windows; nodes to swap
SHOWN = {  # rule -> quantity, what stands beside it, and what it is
    "rate": ("R", ", untrained", "R of LN(Z) after a layer (nats)"),
    "subspace_rate": ("R^c", ", untrained", "R^c of LN(Z) after it (nats)"),
    "compresses": ("change", ", untrained", "attention adds to R^c (nats)"),
    "zeros": ("zeros", ", untrained", "zeros in the code (share)"),
    "carried": ("carried", ", rotated", f"{NODES} codes carry (share)"),
}
WANTED = {"compression.rate_post": "R", "compression.subspace_rate_post": "R^c"}
WANTED |= {"frames.change_unit": "change", "sparsity.zero_fraction": "zeros"}


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on `[n]`, and windows to measure `[window, pos]`."""
    rows = ci.load("crate-tiny-lm").windows(ci.data.embedded("held-out-text")["text"])
    whole = rows[:, 1:].flatten()
    windows = whole[: len(whole) // N_CTX * N_CTX].view(-1, N_CTX)
    return windows[:-HELD].flatten(), windows[-HELD:]


@torch.no_grad()
def make(kind: str, seed: int) -> ci.HookedCrateLM:
    """Returns a network before training; both kinds have the same weights."""
    size: dict[str, Any] = dict(d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, n_ctx=N_CTX)
    more: dict[str, Any] = dict(attention_mask=KINDS[kind], d_vocab=WORDS + 1)
    torch.manual_seed(seed)
    model = ci.HookedCrateLM(ci.CrateConfig(family="crate-bert", **size, **more))
    model.pos_embed.copy_(3 * positions(model))
    blocks: Any = model.blocks
    for block in blocks:
        block.attn.u_proj.weight.mul_(2 * self_scale(model))
        block.attn.out_proj.weight.mul_(10)
    return model.eval()


def loss_of(model: ci.HookedCrateLM, tokens: Tensor, draw: torch.Generator) -> Tensor:
    """Returns the loss on places that are drawn, the same ones for both kinds."""
    scored, how = (torch.rand(tokens.shape, generator=draw) for _ in range(2))
    scored = scored < MASKED
    scored[:, 0] = False  # no token comes before it
    if model.cfg.causal:
        return F.cross_entropy(model(tokens)[:, :-1][scored[:, 1:]], tokens[scored])
    other = torch.randint(WORDS, tokens.shape, generator=draw)
    masked = torch.where(how < 0.8, WORDS, torch.where(how < 0.9, other, tokens))
    return F.cross_entropy(model(torch.where(scored, masked, tokens))[scored], tokens[scored])


def trained(kind: str, seed: int) -> ci.HookedCrateLM:
    """Returns a network after its training."""
    text, model = texts()[0], make(kind, seed).train()
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=RATE, betas=(0.9, 0.98))
    for step in range(STEPS):
        draw = draws(seed, step)
        begins = torch.randint(len(text) - N_CTX, (BATCH, 1), generator=draw)
        loss = loss_of(model, text[begins + torch.arange(N_CTX)], draw)
        one_step(model, [optimizer], loss, learning_rate(step, STEPS, RATE))
    return model.eval()


def measured(kind: str, seed: int) -> list[list]:
    """Returns the numbers of a network, trained and untrained, on windows it was not trained on."""
    windows, rows = texts()[1], []
    less: dict[str, Any] = dict(limit=MEASURED, progress=False)
    rates = ci.probes.compression(at=("post",), norm=True, basis="orthonormal")
    probes: Any = [rates, "frames", "sparsity"]
    for words, model in ((", untrained", make(kind, seed)), ("", trained(kind, seed))):
        key = (f"{kind}{words}", seed)
        swept: Any = ci.sweep(model, windows, probes=probes, controls=0, **less).layers()
        for row in swept[(swept["probe"] + "." + swept["statistic"]).isin(WANTED)].itertuples():
            rows.append([WANTED[f"{row.probe}.{row.statistic}"], *key, row.layer, row.mean])
    with torch.no_grad():
        rows.append(["loss", kind, seed, 0, float(loss_of(model, windows, draws(0, 0)))])
    audit: Any = ci.audit(model, windows, untrained=1, grid=False, **less).claims()
    for row in audit.itertuples():
        rows.append([f"audit, {row.claim}", kind, seed, row.layer, [*VERDICTS].index(row.verdict)])
    data: Any = windows
    if not model.cfg.causal:  # one masked token half-way, instead of the next token
        hidden = torch.arange(N_CTX) == N_CTX // 2
        data = (windows.where(~hidden, WORDS), windows.where(hidden, -100))
    less |= dict(limit=PAIRED, untrained=0)
    found: Any = ci.circuits.concentration(model, data, k=[NODES], **less)
    names = {"native": kind, "rotated": f"{kind}, rotated", "pca": f"{kind}, principal"}
    for row in found.table("shares").itertuples():
        rows.append(["carried", names[row.basis], seed, row.layer, row.carried])
    return rows


def gap(rows: list[list], name: str, beside: str = "") -> np.ndarray:
    """Returns what both ways has more than causal, a mean over layers, by seed."""
    causal, both = (values(rows, name, f"{kind}{beside}") for kind in KINDS)
    return (both - causal).reshape(-1, LAYERS).mean(axis=1)


def agreement(rows: list[list]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the share of the audit's verdicts in which the two kinds agree, by seed.

    Then the share in which a kind agrees with the next seed of its own, a mean over kinds.
    """
    names = sorted({row[0] for row in rows if row[0].startswith("audit")})
    both = np.array([[values(rows, name, kind).reshape(-1, LAYERS) for name in names]
                     for kind in KINDS])  # [kind, claim, seed, layer]  # fmt: skip
    return (both[0] == both[1]).mean((0, 2)), (both == np.roll(both, -1, 2)).mean((0, 1, 3))


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims on what reading both ways changes."""
    pairs = [(kind, seed) for seed in SEEDS[form] for kind in KINDS]
    jobs = {f"{kind}-{seed}": partial(measured, kind, seed) for kind, seed in pairs}
    rows, claims = steps.rows(jobs, "networks"), []
    for rule, (name, beside, _) in SHOWN.items():
        found, other = gap(rows, name), gap(rows, name, beside)
        cases = {"difference": ends_of(found), f"beyond{beside[1:]}": ends_of(found - other)}
        claims.append(claim(f"both_ways.{rule}", found, cases=cases, baseline=other.mean()))
    across, within = agreement(rows)
    claims.append(claim("both_ways.audit", across - within, baseline=0.0))
    return result("both_ways", form, claims, rows)


def draw(found: LabResult) -> Any:
    """Draws each quantity by layer, of both kinds, and what stands beside it."""
    figure, axes = panels(len(SHOWN), size=(14, 3.6))
    for axis, (name, beside, words) in zip(axes, SHOWN.values(), strict=True):
        for at, kind in enumerate(KINDS):
            for more, style, label in (("", "o-", kind), (beside, "--", None)):
                rows = found.numbers(name, setting=f"{kind}{more}")
                curve(axis, rows, style, label=label, color=f"C{at}")
        tidy(axis, legend=0, xlabel="layer", title=words, xticks=range(LAYERS))
    return titled(figure, found, below=axes[0])


if __name__ == "__main__":
    main(run, draw)
