"""What measuring costs while streaming, as a share of the plain forward.

The authors' pair of measures, and the default suite; the suite of a language model, over a forward
that computes no logits, as in a sweep.
"""

import sys

import torch
from timing import least, settle, verdict

import crate_interp as ci
from crate_interp.data import open_data, open_text
from crate_interp.measures import official_coding_rate, zero_fraction
from crate_interp.questions.batches import Batch, Chunk
from crate_interp.sweeps.measuring import measure_batch
from crate_interp.sweeps.sweep_tables import Tally

# image side, batch (the default of ci.sweep, and as many numbers), most that the pair and the suite
# may cost
CASES = ((224, 32, 0.12, 0.85), (448, 8, 0.12, 1.0))


def authors_pair() -> ci.Probe:
    """What the authors' scripts measure: the official coding rate and the share of zeros."""

    def measure(block, acts):
        rate = official_coding_rate(acts["attn.hook_u"].transpose(1, 2)).sum(dim=-1)
        return {"rate": rate, "zeros": zero_fraction(acts["mlp.hook_post"]).mean(dim=-1)}

    words = {"rate": ("nats", 0.0, None, ""), "zeros": ("", 0.0, 1.0, "")}
    return ci.Probe(
        name="pair", points=("attn.hook_u", "mlp.hook_post"), measure=measure, statistics=words
    )


def measured(side: int, batch: int, pair_limit: float, suite_limit: float) -> bool:
    torch.manual_seed(0)
    model = ci.HookedCrate(
        ci.CrateConfig(family="crate", d_model=576, n_layers=12, n_heads=12, image_size=side)
    ).eval()
    images = torch.randn(batch, 3, side, side)
    pair, suite = [authors_pair()], ci.probes.resolve(None)
    lasting: list[dict] = [{} for _ in model.blocks]  # made once per sweep, as there
    chunk = Chunk(model, open_data(images, model.preprocess), batch)

    def measure(probes: list[ci.Probe], tally: Tally) -> None:
        tally.add(measure_batch(chunk, Batch(images, 0), probes, lasting), probes, 0)

    with torch.no_grad():
        jobs = {
            "forward": lambda: model(images),
            "pair": lambda: measure(pair, Tally(batch)),
            "suite": lambda: measure(suite, Tally(batch)),
            "forward again": lambda: model(images),
        }
        times = least(jobs, seconds=160)
        tally = Tally(batch)
        measure(suite, tally)
    keys = [*tally.samples, *(key for key, _ in tally.heads)]
    found = {(probe, statistic) for probe, statistic, _ in keys}
    forward = min(times["forward"], times["forward again"])
    size = f"{model.cfg.n_ctx} tokens, batch {batch}, 12 layers"
    print(f"CRATE-S (d=576, 12 heads), {size}: forward {forward * 1e3:.0f} ms")
    print(f"  forward over forward, the noise: {times['forward again'] / times['forward']:.3f}")
    print(f"  statistics of activations in the suite: {len(found)}")
    good = verdict("  authors' pair, share of the forward", times["pair"] / forward - 1, pair_limit)
    return (
        verdict("  default suite, share of the forward", times["suite"] / forward - 1, suite_limit)
        and good
    )


def of_text(tokens: int, batch: int, limit: float) -> bool:
    """Measures the default suite of a causal model, half of whose patterns are zeros."""
    torch.manual_seed(0)
    shape = {"d_model": 768, "n_heads": 12, "n_layers": 2}
    model = ci.HookedCrateLM(
        ci.CrateConfig(family="crate-lm", **shape, n_ctx=tokens, d_vocab=64)
    ).eval()
    windows, suite = torch.randint(0, 64, (batch, tokens)), ci.probes.resolve(None)
    lasting: list[dict] = [{} for _ in model.blocks]
    chunk = Chunk(model, open_text(windows, model.windows, None), batch)

    def measure() -> None:
        Tally(batch).add(measure_batch(chunk, Batch(windows, 0), suite, lasting), suite, 0)

    with torch.no_grad():
        forward = lambda: model.full_forward(windows)  # noqa: E731
        times = least({"forward": forward, "suite": measure, "again": forward}, seconds=60)
    best = min(times["forward"], times["again"])
    print(
        f"CRATE-LM (d=768, 12 heads), {tokens} tokens, batch {batch}, 2 layers: {best * 1e3:.0f} ms"
    )
    print(f"  forward over forward, the noise: {times['again'] / times['forward']:.3f}")
    return verdict("  default suite, share of the forward", times["suite"] / best - 1, limit)


def main() -> bool:
    settle()
    return all([*[measured(*case) for case in CASES], of_text(1024, 2, 0.45)])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
