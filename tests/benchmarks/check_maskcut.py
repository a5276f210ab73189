"""maskcut against the dense eigensolver on random grids, from clean blobs to noise alone.

Counts how often they agree. Arguments are sizes (`check_maskcut.py 14 28`); all three take about an
hour, nearly all of it LAPACK at 60 x 60.
"""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from timing import verdict

from crate_interp.measures.cuts import maskcut
from maskcut_reference import NOISES, iou, planted, reference_masks

GRIDS, N_MASKS = 100, 3


def agreement(side: int) -> bool:
    agree, unique, found = 0, 0, 0
    for seed in range(GRIDS):
        grid, noise = (side, side), NOISES[seed % len(NOISES)]
        features = planted(seed, grid, noise)
        wanted, gap = reference_masks(features, grid, N_MASKS)
        got = maskcut(torch.from_numpy(features), grid, N_MASKS).numpy()
        least = min(iou(*pair) for pair in zip(got, wanted, strict=True))
        agree += least >= 0.99
        unique += gap > 1e-9
        found += int(wanted.any(axis=(1, 2)).sum())
        if least < 0.99:
            print(f"  seed {seed}, noise {noise}: least IoU {least:.3f}, relative gap {gap:.1e}")
    print(f"{side} x {side} tokens: {found} masks in {GRIDS} grids")
    print(f"  {unique} grids with a unique second eigenvector")
    return verdict("  grids where all masks agree (IoU >= 0.99)", agree, 99, at_least=True)


def main() -> bool:
    return all([agreement(int(side)) for side in sys.argv[1:] or (14, 28, 60)])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
