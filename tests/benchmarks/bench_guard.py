"""Which float32 coding rates are computed again in float64, and how wrong those are that are not.

Cholesky of A = I + c G in float32 has an error of about u |A_ii A_jj|^(1/2) in each entry, so that
of logdet A grows with the diagonal of the inverse of A scaled to a unit diagonal, of which
A_ii / L_ii^2 is a lower bound for each i and the value for the last. The guard takes the largest.
Beside it the guard of max_i A_ii / min_i L_ii^2, which is larger where tokens differ in length.

Each table row is one guard over every rate of a source, with its limit and the relative error that
it allows for a small rate: the share that is computed again, and the largest relative error of the
rest against singular values in float64. The word `small`: fewer samples.
"""

import sys
from collections.abc import Iterator

import torch
from timing import verdict
from torch import Tensor

import crate_interp as ci
from crate_interp.core.run_options import RunOptions
from crate_interp.measures import rates
from crate_interp.measures.rates import head_codes
from crate_interp.sweeps.runs.batches import samples_of

EPS = 0.1
GUARDS = [("extremes", 1e3, 5e-5)] + [
    ("index", limit, relative) for limit in (3e2, 1e3, 3e3) for relative in (1e-5, 2e-5, 3e-5, 5e-5)
]
EMBEDDED = {
    "crate-tiny-fashion": "embedded:fashion",
    "crate-tiny-pictures": "embedded:pictures",
    "crate-tiny-lm": "embedded:held-out-text",
}


def rates_of(x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the float32 rate, the two ratios by which it may be doubted, and the exact rate."""
    gram = x.mT @ x if x.shape[-2] >= x.shape[-1] else x @ x.mT
    matrix = gram * scale + torch.eye(gram.shape[-1])
    factor, failed = torch.linalg.cholesky_ex(matrix)
    diagonal, pivots = matrix.diagonal(dim1=-2, dim2=-1), factor.diagonal(dim1=-2, dim2=-1)
    by_index = (diagonal / pivots**2).amax(dim=-1)
    by_extremes = diagonal.amax(dim=-1) / pivots.amin(dim=-1) ** 2
    bad = failed > 0
    values = torch.linalg.svdvals(x.double())
    exact = 0.5 * torch.log1p(scale * values**2).sum(dim=-1)
    ratios = [ratio.masked_fill(bad, torch.inf) for ratio in (by_index, by_extremes)]
    return pivots.log().sum(dim=-1), ratios[0], ratios[1], exact


def streams(n: int) -> Iterator[tuple[str, Tensor, float]]:
    """Yields Z^l and the codes of every layer of the embedded models, with the scale of a rate."""
    for name, data in EMBEDDED.items():
        model = ci.load(name)
        samples = samples_of(model, data, RunOptions(limit=n))
        with torch.no_grad():
            _, cache = model.run_with_cache(samples.read(samples.start, samples.start + n))
        for layer, block in enumerate(model.blocks):
            for point in ("resid_pre", "resid_mid"):
                z = cache[point, layer]
                pos, width = z.shape[-2:]
                yield f"{name}: R", z, width / (pos * EPS**2)
                codes = head_codes(z, block.attn.U.detach())
                p = codes.shape[-1]
                yield f"{name}: R^c", codes.flatten(0, 1), p / (pos * EPS**2)


def made(n: int) -> Iterator[tuple[str, Tensor, float]]:
    """Yields matrices made to be hard: decaying spectra, equal tokens, tokens of unequal length."""
    generator = torch.Generator().manual_seed(0)
    for pos, width in ((13, 31), (31, 13), (197, 48), (65, 192)):
        noise = torch.randn(n, pos, width, generator=generator, dtype=torch.float64)
        short = min(pos, width)
        u, _, v = torch.linalg.svd(noise, full_matrices=False)
        for power in (1.0, 3.0, 6.0):
            decay = 10 ** -torch.linspace(0, power, short, dtype=torch.float64)
            for size in (1.0, 1e2):
                yield (
                    "decaying",
                    (size * pos**0.5 * (u * decay) @ v).float(),
                    width / (pos * EPS**2),
                )
        for spread in (1e-1, 1e-3, 1e-5):
            yield "equal", (noise[:, :1] + spread * noise).float(), width / (pos * EPS**2)
        lengths = 10 ** (2 * torch.randn(n, pos, 1, generator=generator, dtype=torch.float64))
        yield "unequal", (noise * lengths).float(), width / (pos * EPS**2)


def main(small: bool) -> bool:
    n, found = (4, {}) if small else (32, {})
    with torch.no_grad():
        for source in (streams, made):
            for name, x, scale in source(n):
                rate, index, extremes, exact = rates_of(x.float(), scale)
                error = (rate - exact).abs() / exact
                small = exact / (min(x.shape[-2:]) * 2**-23)
                found.setdefault(name, []).append(torch.stack([index, extremes, error, small]))
    header = ("source", "guard", "limit", "allows", "again", "largest error of the rest")
    print("{:24} {:9} {:>7} {:>7} {:>7} {:>26}".format(*header))
    worst = 0.0
    for name, parts in found.items():
        index, extremes, error, small = torch.cat([part.double() for part in parts], dim=1)
        for guard, limit, relative in GUARDS:
            ratio = index if guard == "index" else extremes
            trusted = ratio <= (relative * small).clamp(max=limit)
            again = 1 - trusted.double().mean()
            rest = float(error[trusted].max()) if trusted.any() else 0.0
            print(f"{name:24} {guard:9} {limit:7g} {relative:7g} {again:7.3f} {rest:26.1e}")
            if (guard, limit, relative) == ("index", rates.FLOAT32_LIMIT, rates.RELATIVE_ERROR):
                worst = max(worst, rest)
    print(f"largest error of a rate that is kept: {worst:.1e}")
    return verdict("  over what a rate may be off by", worst / rates.RELATIVE_ERROR, 1.0)


if __name__ == "__main__":
    sys.exit(0 if main("small" in sys.argv[1:]) else 1)
