"""The coding rate by Cholesky of the small Gram, against the n x n logdet of the authors."""

import sys

import torch
from timing import least, settle, verdict
from torch.testing import assert_close

from crate_interp.measures import coding_rate, official_coding_rate


def n_by_n(x: torch.Tensor, eps_squared: float) -> torch.Tensor:
    """1/2 logdet(I_n + p / (n eps^2) X X^T), as the script computes it."""
    n, p = x.shape[-2:]
    return 0.5 * torch.logdet(torch.eye(n) + p / (n * eps_squared) * x @ x.transpose(-1, -2))


def main() -> bool:
    settle()
    good = True
    for tokens, wanted in ((197, 4), (785, 40)):
        codes = torch.randn(4, 12, tokens, 64, generator=torch.Generator().manual_seed(0))
        unit = codes / codes.norm(dim=-1, keepdim=True)
        assert_close(coding_rate(unit, 0.1), n_by_n(unit, 0.01), rtol=1e-4, atol=0)
        assert_close(official_coding_rate(codes), n_by_n(unit, 0.01), rtol=1e-4, atol=0)
        jobs = {"ours": lambda x=unit: coding_rate(x, 0.1), "n x n": lambda x=unit: n_by_n(x, 0.01)}
        times = least(jobs | {"ours again": jobs["ours"]}, seconds=10)
        print(f"batch 4, 12 heads, d_head 64, {tokens} tokens: n x n {times['n x n'] * 1e3:.1f} ms")
        print(f"  ours over ours, the noise: {times['ours again'] / times['ours']:.3f}")
        good &= verdict("  n x n over ours", times["n x n"] / times["ours"], wanted, at_least=True)
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
